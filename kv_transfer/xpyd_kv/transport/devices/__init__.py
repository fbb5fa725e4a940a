"""What moves DATA of GPU memory: staging, CUDA IPC, NCCL, NIXL. CPU engines need none of it."""
