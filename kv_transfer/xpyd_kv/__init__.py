"""Moves KV cache from prefill to decode instances.

    connector   engine-facing: which blocks of which request, when to wait, what if they do not come
    session     the transfer's state machine: deadlines, grants, cancel, retry            (pure)
    plan        which bytes of which blocks go where                                      (pure)
    store       D's landings: own blocks, device buffer, host pool (buddy allocator)
    transport   connections and the I/O thread: tcp
    wire        frames, schema, handshake: bytes in, events out                           (pure)
    device      paged KV memory and pool memory as bytes; the only place that knows torch

Only the worker imports this package; it knows no engine, no HTTP and no Kubernetes.
"""
