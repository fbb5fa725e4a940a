"""Who serves a request. Pure."""
