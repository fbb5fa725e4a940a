"""The data path `nccl`: grouped sends and receives between two GPUs, over 2-rank communicators."""
