"""The engine: one instance of a fleet, from a checkpoint folder to OpenAI HTTP.

    server (asyncio thread)  ->  engine (a thread: schedule, execute, update)  ->  runner, model
                                   |
                                 xpyd_kv (KV from and to other instances; its own I/O thread)

`engine` is pure Python without torch; torch lives in `runner` and `model`, behind the Executor
seam.
"""
