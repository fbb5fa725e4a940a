"""HTTP: the app and its server, routes, admission, bodies and request ids.
See journey 4 of docs/architecture.md."""
