"""OpenAI HTTP in front of the engine: validation, text, formats, metrics, heartbeat. No torch.
See journey 4 of docs/architecture.md."""
