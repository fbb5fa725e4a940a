"""`xpyd bench`: how fast an engine (latency, throughput) or a server (serve) answers.

command (flags)  ->  client  ->  any server of OpenAI's completions, over HTTP
                 ->  engine  ->  xpyd_worker.LLM, in this process
load, summary: what is sent when, and what the times say
"""
