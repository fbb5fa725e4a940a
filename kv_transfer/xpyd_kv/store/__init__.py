"""Where bytes land on D: own blocks, device buffer, host pool. `api` is the seam."""
