"""The client's side: the uvicorn server, its connections, inference routes and Quart's routes."""
