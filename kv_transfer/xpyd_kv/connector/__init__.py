"""The engine-facing side of the transfer: `producer` is P's half, `consumer` D's.

The engine gives a BlockPool (its block manager) and a KvMemory (its paged cache as bytes). What it
calls of the halves runs on the engine's thread unless a method says otherwise, and does not block.
Times are seconds of one monotonic clock. `wake` wakes an idle engine loop from the I/O thread.
See journey 2 of docs/architecture.md.
"""
