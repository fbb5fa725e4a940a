"""Which part of a prompt's KV goes from which rank to which, and in which frame. Pure."""
