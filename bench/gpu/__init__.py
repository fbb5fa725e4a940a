"""The GPU path's kernels beside torch's own and beside the speed of the device's memory."""
