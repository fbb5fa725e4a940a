"""How many requests the router works on at once, and who waits: limits, the line, refusals."""
