"""The executor of one rank: paged KV cache, forward, sampling; and the tokenizer's wrapper."""
