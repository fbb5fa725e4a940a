"""Which bytes of which blocks travel in which frame. Pure."""
