"""The groups that the ranks of an engine are in, and what moves between them."""
