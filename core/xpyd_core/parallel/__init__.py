"""How a model is divided over ranks, as numbers: axes and groups, stages, what cannot work."""
