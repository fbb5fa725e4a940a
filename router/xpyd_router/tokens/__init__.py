"""Token counts and block hashes of requests, as the engine will have them.

`service` is what the rest of the router calls. It keeps a child process (`process`, `child`) that
parses tokenizers, renders chat templates and encodes; `wanted_files` says which files it must have
and `service` fetches them from engines. Why a process: reading a tokenizer.json of 5 MB holds
Python's lock for 0.7 s, rendering takes it from the event loop 5 ms at a time, and a template is a
foreign program, which may loop for ever or take all memory. A process can be killed.
"""
