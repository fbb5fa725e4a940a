"""Calls to engines: a keep-alive HTTP/1.1 client whose answers go to a consumer as they come."""
