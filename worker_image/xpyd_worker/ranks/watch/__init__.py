"""Signs of life of ranks (beats) and the judge, a pure function of them and of what ranks report:
which rank was lost first. docs/parallel.md.
"""
