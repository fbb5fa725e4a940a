"""OpenAI's API: parameters in, engine requests, and the members of answers out. No HTTP."""
