"""From a checkpoint folder to an engine that is ready to start.

    main, offline  ->  engine  ->  one_rank, or ranks (in processes of their own)  ->  ready_model

Slow and blocking; main runs it on a thread while HTTP answers 503.
"""
