"""Which instances serve a request. Pure. See journey 1 of docs/architecture.md."""
