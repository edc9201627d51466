"""The CUDA kernel for Hopper and newer GPUs: a row in the shared memory of a cluster of blocks.

* `sweep.cu`, with `components.cuh` and `primitives.cuh`: the kernel
* `finish.cu`: what remains after it, sums over rows, norms and cosines
* `cuda_kernel`: compiles them at run time through NVRTC, with a cache on disk, and loads them
* `launch`: the inputs that it supports, the division of a row among blocks, and its launch

It computes what the Triton kernels compute, which remain for other GPUs and inputs.
"""
