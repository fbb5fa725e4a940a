"""The engine inside a Python program, without HTTP: `LLM(model).generate(prompts, params)`.

    llm (the user's thread)  ->  session (a thread with an event loop)  ->  requests  ->  engine

Requests go the server's way from the checked call on (jobs, generation, output_text), so that the
same prompt, parameters and seed give the same text here and over HTTP.
"""
