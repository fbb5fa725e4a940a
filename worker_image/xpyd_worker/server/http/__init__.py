"""HTTP: the app and its server, routes, admission, bodies and request ids."""
