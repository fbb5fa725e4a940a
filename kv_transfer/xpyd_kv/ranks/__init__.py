"""KV of an engine with several ranks: the engine's process decides, each rank moves its own."""
