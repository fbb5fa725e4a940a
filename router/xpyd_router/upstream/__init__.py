"""Calls to engines: a keep-alive HTTP/1.1 client whose answers go to a consumer as they come.
See journey 1 of docs/architecture.md."""
