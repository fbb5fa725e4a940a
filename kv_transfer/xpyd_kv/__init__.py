"""Moves KV cache from prefill instances (P) to decode instances (D).

Layers, each of which imports only what is below it:

    vllm        the connector that `vllm serve` loads: the engine is vLLM, not ours
    connector   engine-facing: which blocks of which request, when to wait, what if they do not come
    ranks       what each rank of an engine sends and receives, and the channel to its engine
    session     the transfer's state machines: deadlines, grants, cancel, retry            (pure)
    transport   connections and the I/O thread, and what moves DATA beside a socket
    memory      the paged cache and the memory beside it; its caches alone know torch
    wire        frames, messages, handshake: bytes in, events out                          (pure)
    plan        which bytes of which blocks go where                                       (pure)
    values, spans, metrics                                                                 (pure)

Only the worker imports this package, and vLLM its `vllm`; the rest knows no engine, no HTTP and no
Kubernetes.
docs/architecture.md shows the way of one KV block through it.
"""
