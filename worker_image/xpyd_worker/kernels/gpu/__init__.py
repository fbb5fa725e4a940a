"""The operators of a forward and of sampling in Triton, for CUDA devices.

`kernels.TritonKernels` implements the seam (`xpyd_worker.kernels.api`); the other modules hold a
few kernels each with one typed wrapper. All compute in float32, whatever the dtype of the tensors;
only products of matrices take inputs of 16 bits as they are. Imported only when an engine runs on a
GPU: Triton is not everywhere where torch is.
"""
