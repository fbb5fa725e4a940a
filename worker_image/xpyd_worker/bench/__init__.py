"""`xpyd bench`: how fast an engine (latency, throughput) or a server (serve) answers.

    command (flags)  ->  serve: client  ->  any server of OpenAI's completions, over HTTP
                     ->  offline: LLM, in this process
    arrivals, figures, prompts, events, tables: pure; what is sent when, and what the times say

serve's client runs beside the server that it measures, often on the same cores: it imports neither
torch nor an HTTP library, and does per token what it must.
"""
