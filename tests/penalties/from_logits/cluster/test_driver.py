"""The CUDA driver: errors. `test_launch.py` and `test_kernels.py` load and launch."""

from __future__ import annotations

import pytest
import torch

from steelyard.penalties.from_logits.cluster.cuda_kernel import (
    SWEEP,
    DriverError,
    Kernel,
    Variant,
    cubin,
)

HAS_CLUSTERS = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@pytest.mark.skipif(not HAS_CLUSTERS, reason="needs a GPU with clusters")
def test_a_kernel_that_cannot_be_loaded_or_does_not_fit() -> None:
    torch.zeros(1, device="cuda")
    with pytest.raises(DriverError):
        Kernel(b"no machine code", "sweep", 0, threads=64)
    code = cubin(SWEEP, Variant(1, 0, True, False, False, True, 1, 1, 64, 3, 1).macros(), (9, 0))
    with pytest.raises(DriverError):
        Kernel(code, "sweep", 0, threads=64, shared=10**6)  # more shared memory than there is
    assert Kernel(code, "sweep", 0, threads=64, shared=3072).clusters > 0
