"""The small kernels after a sweep, against the same operations of torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from array_api_compat import torch as xp

from steelyard.penalties.from_logits import compose
from steelyard.penalties.from_logits.cluster import cuda_kernel, launch

HAS_CLUSTERS = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
on_clusters = pytest.mark.skipif(not HAS_CLUSTERS, reason="needs a GPU with clusters")


def test_the_limits_are_those_of_the_source() -> None:
    source = cuda_kernel._source(cuda_kernel.FINISH)
    limits = f"MAX_TERMS = {launch.MAX_TERMS}, MAX_COMPONENTS = {launch.MAX_COMPONENTS};"
    assert f"constexpr int {limits}" in source
    assert len(launch.KERNEL_KINDS) <= launch.MAX_COMPONENTS
    assert all(f"\n{name}(" in source or f" {name}(" in source for name in launch._THREADS)


@on_clusters
@pytest.mark.parametrize("rows", [1, 31, 4096, 70001])
@pytest.mark.parametrize("count", [1, 4, 6])
def test_sums_over_rows(rows: int, count: int) -> None:
    made = torch.Generator("cuda").manual_seed(rows)
    values = torch.randn(count + 1, rows, device="cuda", generator=made)
    parts = torch.randn(
        count * (count + 1) // 2, 777, device="cuda", generator=made, dtype=torch.float64
    )
    found = launch.reduce_rows(values, parts, 0.25)
    assert found is not None
    total, reduced, products = found
    sums = values.double().sum(1)
    torch.testing.assert_close(total, sums[-1].float(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(reduced, (0.25 * sums[:-1]).float(), rtol=1e-6, atol=1e-5)
    wanted = launch.symmetric(parts.sum(1), count) / 16
    torch.testing.assert_close(products, wanted, rtol=1e-12, atol=1e-12)
    plain = launch.reduce_rows(values, None, 0.25)
    assert plain is not None
    assert torch.equal(plain[0], total)
    assert plain[2] is None


@on_clusters
@pytest.mark.parametrize(("terms", "components"), [(1, 1), (4, 4), (3, 6), (15, 6)])
def test_norms_and_cosines(terms: int, components: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.Generator("cuda").manual_seed(terms)
    gradients = torch.randn(components, 50, device="cuda", generator=made, dtype=torch.float64)
    names = [f"term {i}" for i in range(terms)]
    shares = torch.randn(terms + 1, components, generator=torch.Generator().manual_seed(1))
    shares[0, 1:] = 0.0
    products = gradients @ gradients.T
    found = compose.grad_norms_and_cosines(xp, names, shares.tolist(), products)
    assert launch.compare_gradients(products, shares.tolist()) is not None
    monkeypatch.setattr(launch, "ENABLED", False)
    wanted = compose.grad_norms_and_cosines(xp, names, shares.tolist(), products)
    assert list(found[0]) == [*names, "total"]
    assert list(found[1]) == list(itertools.combinations(names, 2))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@on_clusters
def test_norms_beside_an_infinite_gradient_and_of_none() -> None:
    nan, inf = torch.nan, torch.inf
    products = torch.tensor([[0.0, nan, 0], [nan, inf, nan], [0, nan, 4]], device="cuda").double()
    shares = [[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [1.0, 0, 1.0]]
    found = launch.compare_gradients(products, shares)
    assert found is not None
    assert torch.stack(found[:4]).tolist() == [0, inf, 2, 2]
    assert found[4].isnan()
    assert found[5] == 0


@on_clusters
def test_more_terms_than_the_kernel_takes() -> None:
    products = torch.eye(2, device="cuda", dtype=torch.float64)
    assert launch.compare_gradients(products, [[1.0, 0.0]] * 17) is None


@on_clusters
@pytest.mark.parametrize("dtype", launch.DTYPES)
@pytest.mark.parametrize("size", [1, 7, 8, 1000003])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_the_upstream_factor(dtype: torch.dtype, size: int, factor: float) -> None:
    x = torch.randn(size, device="cuda").to(dtype)
    wanted = (x.float() * torch.tensor(factor)).to(dtype)
    assert launch.multiply(x, torch.tensor(factor, device="cuda"))
    assert torch.equal(x, wanted)


@on_clusters
def test_a_factor_or_a_place_that_the_kernel_does_not_take() -> None:
    x = torch.ones(9, device="cuda")
    assert not launch.multiply(x[1:], torch.tensor(2.0, device="cuda"))
    assert not launch.multiply(x, torch.tensor(2.0, device="cuda", dtype=torch.float64))
    assert torch.equal(x, torch.ones_like(x))
