"""OpenAI's API: parameters in, engine requests, and the members of answers out. No HTTP.
See journey 4 of docs/architecture.md."""
