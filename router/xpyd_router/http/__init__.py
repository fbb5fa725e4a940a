"""The client's side: the uvicorn server, its connections, inference routes and Quart's routes.
See journey 1 of docs/architecture.md."""
