"""Which part of a prompt's KV goes from which rank to which, and in which frame. Pure.
See journey 2 of docs/architecture.md."""
