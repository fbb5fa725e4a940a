"""The executor of one rank: paged KV cache, forward, sampling; and the tokenizer's wrapper.
See journey 4 of docs/architecture.md."""
