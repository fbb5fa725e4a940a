"""OpenAI's API: bodies to engine requests, and their outputs to the members of answers. No HTTP.
See journey 4 of docs/architecture.md."""
