"""From a checkpoint folder to an engine that is ready to start.

    main, offline  ->  engine (with ranks in processes of their own)  ->  one_rank  ->  ready_model

Slow and blocking; main runs it on a thread while HTTP answers 503.
"""
