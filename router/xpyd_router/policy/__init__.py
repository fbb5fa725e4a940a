"""Which instances serve a request. Pure."""
