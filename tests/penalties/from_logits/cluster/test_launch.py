"""Launch of the cluster kernel: supported inputs, alignment, and what only a GPU shows.

`test_kernels.py` has the numbers: on GPUs that have clusters it runs with this kernel too.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from steelyard.penalties.from_logits import compose_logits
from steelyard.penalties.from_logits._components import ENTROPY, FORWARD, Component
from steelyard.penalties.from_logits._formulas import Wants
from steelyard.penalties.from_logits.cluster import cuda_kernel, launch
from tests.penalties.from_logits.cases import by_autograd, inputs, written

HAS_CLUSTERS = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
on_clusters = pytest.mark.skipif(not HAS_CLUSTERS, reason="needs a GPU with clusters")
FOUR = ["cross_entropy", "entropy", "z_loss", "reverse"]


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "ENABLED", True)


def test_inputs_elsewhere_do_not_fit() -> None:
    z = torch.zeros(2, 3)
    assert not launch.fits(z, None, [Component(ENTROPY, 1.0)])


def test_the_numbers_of_the_kinds_are_those_of_the_source() -> None:
    names = ("ENTROPY", "FORWARD", "REVERSE", "JS", "Z_LOSS", "CROSS_ENTROPY")
    listed = ", ".join(
        f"{name} = {kind}" for name, kind in zip(names, launch.KERNEL_KINDS, strict=True)
    )
    assert f"constexpr int {listed};" in cuda_kernel._source(cuda_kernel.SWEEP)


@pytest.mark.parametrize(
    ("classes", "dtype", "aligned"),
    [(8, torch.bfloat16, True), (4, torch.float32, True), (12, torch.bfloat16, False)],
)
def test_rows_that_divide_into_vectors(classes: int, dtype: torch.dtype, aligned: bool) -> None:
    x = torch.zeros(3, classes, dtype=dtype)
    assert launch.is_aligned(x, None) == aligned
    wider = torch.zeros(3, 2 * classes + 1, dtype=dtype)
    assert not launch.is_aligned(x, wider[:, :classes])  # every other row begins between vectors
    assert not launch.is_aligned(torch.zeros(3 * classes + 1, dtype=dtype)[1:].view(3, classes))


def test_the_symmetric_matrix_of_the_pairs() -> None:
    pairs = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert launch.symmetric(pairs, 3).tolist() == [[1, 2, 3], [2, 4, 5], [3, 5, 6]]


def test_inner_products_from_their_parts() -> None:
    values, parts = torch.zeros(3, 5), torch.tensor([[1.0, 1.0], [0.5, 1.5], [3.0, 1.0]])
    found = launch.ClusterResult(values, None, None, parts)
    assert found.gram is not None
    assert found.gram.tolist() == [[2, 2], [2, 4]]
    assert launch.ClusterResult(values, None, None, None).gram is None


def test_a_failure_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    launch.log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        launch.log_once("no compiler.")
        launch.log_once("no compiler.")
    assert caplog.messages == [
        "Triton's kernel is used in place of the cluster kernel: no compiler."
    ]


# On a GPU.


@on_clusters
def test_a_gpu_without_the_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*variant: Any) -> bytes:
        raise cuda_kernel.CompilerError("no compiler.")

    monkeypatch.setattr(launch, "cubin", fails)
    launch.log_once.cache_clear()
    launch._sweep_kernel.cache_clear()
    launch._plan.cache_clear()
    z = torch.randn(4, 100, device="cuda", requires_grad=True)
    with caplog.at_level(logging.WARNING):
        compose_logits(z, ["entropy"]).total.backward()
    launch._sweep_kernel.cache_clear()
    launch._plan.cache_clear()
    assert "no compiler." in caplog.text
    assert z.grad is not None
    assert z.grad.norm() > 0


@on_clusters
def test_rows_that_no_cluster_holds() -> None:
    z = torch.randn(2, 10**6, device="cuda")
    assert launch.sweep(z, z, None, None, [Component(FORWARD, 1.0)], [1.0], Wants()) is None


def placed(x: torch.Tensor, before: int, width: int) -> torch.Tensor:
    """The same numbers in rows of another width, amid NaN."""
    wide = x.new_full((len(x), width), torch.nan)
    wide[:, before : before + x.shape[1]] = x
    return wide[:, before : before + x.shape[1]]


@on_clusters
@pytest.mark.parametrize("classes", [1, 7, 8, 9, 33, 1000, 3001, 50257])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("before", "more"), [(0, 0), (3, 8), (0, 5)])
def test_rows_at_any_address(classes: int, dtype: torch.dtype, before: int, more: int) -> None:
    """Aligned or not, with the gradient in an array of its own, and over the logits."""
    z, r, t = (x.cuda() for x in inputs(classes, 9, classes, dtype))
    z, other = placed(z, before, classes + before + more), placed(r, 1, classes + 2)
    terms = written(FOUR)
    found = compose_logits(z.requires_grad_(), terms, reference=r, targets=t, track_grad_norms=True)
    apart = compose_logits(z, terms, reference=other, targets=t, track_grad_norms=True)
    exact = compose_logits(
        z.double(), terms, reference=r.double(), targets=t, track_grad_norms=True
    )
    for each in (found, apart):
        torch.testing.assert_close(each.total.double(), exact.total, rtol=1e-5, atol=1e-6)
        for name, norm in exact.grad_norms.items():
            torch.testing.assert_close(each.grad_norms[name], norm, rtol=1e-4, atol=1e-6)
    exact_gradient = torch.autograd.grad(exact.total, z)[0].double()
    [gradient] = torch.autograd.grad(found.total, z)
    rough = 1e-5 if dtype == torch.float32 else 4e-3
    assert (gradient.double() - exact_gradient).norm() <= rough * exact_gradient.norm() + 1e-6
    assert z._base is not None
    assert z._base.isnan().sum() == (before + more) * 9  # nothing is written beside the rows


@on_clusters
def test_the_gradient_over_the_logits() -> None:
    tensors = inputs(5, 300, 4000, torch.bfloat16)
    z, r, t = (x.cuda() for x in tensors)
    kinds = [Component(0, 1.0), Component(2, 1.0, 100.0), Component(5, 1.0)]

    def run(into: torch.Tensor) -> launch.ClusterResult:
        found = launch.sweep(z, r, t, None, kinds, [1.0, 2.0, 3.0], Wants(logits=True), into=into)
        assert found is not None
        return found

    apart = run(torch.full_like(z, torch.nan))
    assert apart.logits is not None
    gradient, values = apart.logits.clone(), apart.values.clone()
    over = run(z)
    torch.testing.assert_close(over.values, values, rtol=0, atol=0)
    torch.testing.assert_close(z, gradient, rtol=0, atol=0)


@on_clusters
def test_the_same_numbers_every_time() -> None:
    z, r, t = (x.cuda() for x in inputs(6, 500, 20000, torch.bfloat16))
    runs = [
        compose_logits(z, written([*FOUR, "js"]), reference=r, targets=t, track_grad_norms=True)
        for _ in range(5)
    ]
    for each in runs[1:]:
        torch.testing.assert_close(each.gradient, runs[0].gradient, rtol=0, atol=0)
        assert all(torch.equal(each.values[name], runs[0].values[name]) for name in each.values)
        assert torch.equal(each.grad_norms["total"], runs[0].grad_norms["total"])


@on_clusters
@pytest.mark.parametrize("names", [FOUR, ["js", "entropy"]])
def test_masked_rows_are_not_read(names: list[str]) -> None:
    z, r, t = inputs(7, 700, 3000, torch.float32)
    counts = torch.rand(700, generator=torch.Generator().manual_seed(1)) < 0.4
    poisoned = [torch.where(counts[:, None], x, torch.nan).cuda() for x in (z, r)]
    targets = torch.where(counts, t, 10**9).cuda()
    found = compose_logits(
        poisoned[0].requires_grad_(), written(names), reference=poisoned[1], targets=targets,
        mask=counts.cuda(),
    )  # fmt: skip
    found.total.backward()
    scale = (counts.double() / counts.sum()).double()
    values, gradients = by_autograd(names, z, r, t, scale)
    for name in names:
        torch.testing.assert_close(
            found.values[name].double().cpu(), values[name], rtol=1e-5, atol=1e-7
        )
    weights = {options["name"]: options["weight"] for _, options in written(names)}
    wanted = torch.stack([weights[name] * gradients[name][0] for name in names]).sum(0)
    assert poisoned[0].grad is not None
    difference = (poisoned[0].grad.double().cpu() - wanted).norm()
    assert difference < 1e-5 * wanted.norm()


@on_clusters
def test_capture_in_a_cuda_graph() -> None:
    z, r, t = (x.cuda() for x in inputs(8, 64, 5000, torch.bfloat16))
    z.requires_grad_()

    def step() -> torch.Tensor:
        found = compose_logits(z, written(FOUR), reference=r, targets=t, track_grad_norms=True)
        [gradient] = torch.autograd.grad(found.total, z)
        return torch.cat([found.grad_norms["total"].reshape(1), gradient.double().flatten()])

    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    with torch.no_grad():
        z.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured, step(), rtol=0, atol=0)


@on_clusters
def test_under_torch_compile() -> None:
    z, r, t = (x.cuda() for x in inputs(9, 32, 5000, torch.bfloat16))

    def loss(z: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = compose_logits(z, written(FOUR), reference=r, targets=t).total
        return 2 * total

    gradients = []
    for each in (loss, torch.compile(loss, fullgraph=True)):
        leaf = z.clone().requires_grad_()
        torch.autograd.backward(each(leaf))
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@on_clusters
def test_from_a_thread_that_has_not_used_the_gpu() -> None:
    z = torch.randn(8, 3000, device="cuda")
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(lambda: compose_logits(z, ["entropy"]).total).result()
    assert torch.equal(elsewhere, compose_logits(z, ["entropy"]).total)
