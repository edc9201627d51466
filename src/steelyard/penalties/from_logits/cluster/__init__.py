"""The CUDA kernel for Hopper and newer GPUs: a row in the shared memory of a cluster of blocks.

* `sweep.cu`, with `components.cuh` and `primitives.cuh`: the kernel
* `compiler`: compile it at run time through NVRTC, with a cache on disk
* `driver`: load and launch it through the CUDA driver
* `shape`: division of a row among the blocks of a cluster
* `launch`: the inputs that it supports, and its launch
* `finish`, with `finish.cu`: what remains after it, sums over rows, norms and cosines

It computes what the Triton kernels of `_kernels` compute, which remain for other GPUs and inputs.
"""

from __future__ import annotations

__all__: list[str] = []  # nothing for users: `_operators` launches it
