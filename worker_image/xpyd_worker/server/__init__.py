"""OpenAI HTTP in front of the engine: validation, text, formats, metrics, heartbeat. No torch."""
