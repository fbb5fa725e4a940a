"""One file per model family: what its config.json means and what its checkpoints call things.

`registry` lists them. They are read before torch is imported and must not know it: what a model
computes is in `decoder` and its parts.
"""
