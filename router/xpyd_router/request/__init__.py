"""One inference request from its parsed body to its last byte: attempts, relay, answers.

`flow` drives: it begins an attempt (`attempt`), has P prefill and D decode, and after a failure
(`failures`) tries again. `state` is what the request keeps over its attempts.
See journey 1 of docs/architecture.md.
"""
