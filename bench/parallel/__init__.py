"""What dividing a model over ranks costs and brings: `make bench-parallel`."""
