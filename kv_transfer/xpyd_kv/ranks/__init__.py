"""KV of an engine with several ranks: the engine's process decides, each rank moves its own.
See journey 2 of docs/architecture.md."""
