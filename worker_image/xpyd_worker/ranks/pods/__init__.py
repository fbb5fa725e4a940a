"""The ranks of one pod, and the other pods of an instance as the first pod has them.
It must not know the engine. docs/parallel.md.
"""
