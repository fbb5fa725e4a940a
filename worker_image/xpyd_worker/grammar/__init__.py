"""Structured output: what an answer must look like (spec), as JSON schemas say (schema), compiled
(compiler), and followed token by token (matcher).

It must not know requests, queues, HTTP or tensors.
"""
