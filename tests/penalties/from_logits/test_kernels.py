"""The kernels: on a GPU if there is one, else Triton's through its interpreter.

On GPUs that have clusters every test runs with both kernels.
"""

from __future__ import annotations

from itertools import combinations_with_replacement
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard.penalties.from_logits import (
    _torch_operators,
    _triton_sweep,
    compose_linear,
    compose_logits,
    cross_entropy,
    entropy,
    kl,
    target_logprobs,
)
from steelyard.penalties.from_logits._components import (
    components_of,
    needs_reference,
    needs_targets,
    parse_terms,
)
from steelyard.penalties.from_logits._formulas import Wants
from steelyard.penalties.from_logits.cluster import launch as cluster
from tests.penalties.from_logits.cases import TERMS, by_autograd, inputs, written

REAL = torch.cuda.is_available()
DEVICE = "cuda" if REAL else "cpu"
EVERY = ["entropy", "forward", "reverse", "js", "z_loss", "cross_entropy"]
FOUR = ["cross_entropy", "entropy", "z_loss", "reverse"]

# By how much a gradient may be off in bfloat16; the interpreter rounds towards 0.
ROUGH = 2e-3 if REAL else 8e-3

# The interpreter is slow, and all six together have every pair: there one stands for the rest.
PAIRS = [*map(list, combinations_with_replacement(EVERY, 2))] if REAL else [["entropy", "js"]]

# The interpreter computes masked lanes, infinities and all, with NumPy.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


HAS_CLUSTERS = REAL and torch.cuda.get_device_capability() >= (9, 0)


@pytest.fixture(autouse=True, params=["triton", "cluster"] if HAS_CLUSTERS else ["triton"])
def launch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that launches the kernel.

    Triton's has a small shape: several pieces in a row, several tiles in a piece.
    """
    monkeypatch.setattr(_torch_operators, "_has_kernels", lambda x: True)
    if request.param == "cluster":
        monkeypatch.setattr(cluster, "ENABLED", True)
        return cluster
    monkeypatch.setattr(cluster, "fits", lambda *inputs: False)
    monkeypatch.setattr(_triton_sweep, "shape_for", lambda kinds, wants: _triton_sweep.Shape(2, 2))
    return _triton_sweep


def relative(found: Tensor, wanted: Tensor) -> float:
    size = wanted.norm()
    return float((found.double().cpu() - wanted).norm() / (size or 1))


def run_sweep(
    launch: ModuleType,
    names: list[str],
    tensors: tuple[Tensor, Tensor, Tensor],
    scale: Tensor | None,
    *,
    limit: float | None = 100.0,
    temperature: float = 1.0,
    **wants: bool,
) -> Any:
    """Sweep into memory that is filled with NaN."""
    logits, reference, targets = (x.to(DEVICE) for x in tensors)
    options: dict[str, Any] = {"temperature": temperature}
    terms = parse_terms(
        [
            (kind, {**own, **options, **({"max_log_ratio": limit} if kind == "kl" else {})})
            for kind, own in written(names)
        ],
        logits.shape[1],
    )
    components = components_of(terms)
    weights = [
        sum(t.weight * s for t in terms for c, s in t.components if c == k) for k in components
    ]
    assert launch.fits(logits, reference, components)
    found = launch.sweep(
        logits,
        reference if needs_reference(components) else None,
        targets if needs_targets(components) else None,
        None if scale is None else scale.to(DEVICE),
        components,
        weights,
        Wants(**wants),
        into=torch.full_like(logits, torch.nan) if wants.get("logits") else None,
    )
    assert found is not None
    return found


def check(
    launch: ModuleType,
    names: list[str],
    tensors: tuple[Tensor, Tensor, Tensor],
    scale: Tensor | None = None,
    tolerance: float = 1e-5,
    **options: Any,
) -> None:
    rows = len(tensors[0])
    compares = any(name in ("forward", "reverse", "js", "symmetric") for name in names)
    found = run_sweep(
        launch, names, tensors, scale, logits=True, reference=compares, gram=True, **options
    )
    share = torch.ones(rows) if scale is None else scale
    given = {key: value for key, value in options.items() if key == "temperature"}
    values: dict[str, Tensor] = {}
    gradients: dict[str, list[Tensor]] = {}
    for name in names:
        own = dict(given)
        if name in ("forward", "reverse"):
            own["max_log_ratio"] = options.get("limit", 100.0)
        value, gradient = by_autograd([name], *tensors, share.double(), **own)
        values |= value
        gradients |= gradient
    weights = {name: TERMS[name]["weight"] for name in names}
    total = sum(weights[name] * values[name] for name in names)
    sums = found.values.double().sum(1).cpu()
    torch.testing.assert_close(sums[len(names) :].sum(), total, rtol=1e-5, atol=1e-6)
    for i, side in enumerate(("logits", "reference")[: 1 + compares]):
        wanted = torch.as_tensor(sum(weights[n] * gradients[n][i] for n in names))
        # A few large numbers may be rounded by more than that, and then no more than rounded.
        rounded = 1.02 * relative(wanted.to(tensors[i].dtype), wanted)
        assert relative(getattr(found, side), wanted) < max(tolerance, rounded), side
    kinds = sorted(names, key=EVERY.index)
    sign = torch.tensor([-1.0 if name == "entropy" else 1.0 for name in kinds]).double()
    torch.testing.assert_close(
        sums[: len(kinds)] * sign, torch.stack([values[n] for n in kinds]), rtol=1e-5, atol=1e-6
    )
    alone = run_sweep(launch, names, tensors, scale, logits=True, **options).logits
    wanted = torch.as_tensor(sum(weights[n] * gradients[n][0] for n in names))
    rounded = 1.02 * relative(wanted.to(alone.dtype), wanted)
    assert relative(alone, wanted) < max(tolerance, rounded), "without inner products"
    each = torch.stack([gradients[n][0].flatten() for n in kinds]) * sign[:, None]
    assert relative(found.gram, each @ each.T) < 1e-5


@pytest.mark.parametrize("names", [[name] for name in EVERY] + [FOUR, EVERY])
@pytest.mark.parametrize(("rows", "classes"), [(1, 37), (5, 50257)] if REAL else [(2, 530)])
def test_against_autograd_in_float64(
    launch: ModuleType, names: list[str], rows: int, classes: int
) -> None:
    if not REAL and len(names) == 1:  # in the interpreter all six together have the second row
        rows = 1
    check(launch, names, inputs(rows + classes, rows, classes, torch.float32))


@pytest.mark.parametrize("names", PAIRS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, ROUGH)])
def test_every_pair(
    launch: ModuleType, names: list[str], dtype: torch.dtype, tolerance: float
) -> None:
    rows, classes = (8, 4098) if REAL else (2, 46)
    tensors = inputs(21, rows, classes, dtype)
    check(launch, list(dict.fromkeys(names)), tensors, tolerance=tolerance, temperature=1.5)


@pytest.mark.parametrize("limit", [100.0, 2.0])
def test_hard_rows_and_scales(launch: ModuleType, limit: float) -> None:
    tensors = inputs(22, 7, 300 if REAL else 100, torch.float32, hard=True)
    tensors[0][6] = torch.nan
    scale = torch.tensor([1.0, 0.5, 2.0, 0.3, 0.7, 1.0, 0.0])
    check(launch, ["entropy", "forward", "reverse", "js"], tensors, scale, limit=limit)
    check(launch, ["reverse"], tensors, scale, limit=limit)
    if limit == 2:
        return  # what follows has no limit
    check(launch, ["entropy"], tensors, scale)
    found = run_sweep(launch, ["z_loss", "cross_entropy"], tensors, scale, logits=True)
    assert torch.all(found.logits[6] == 0)
    assert torch.all(found.values[:, 6] == 0)


def test_kl_without_limit_may_be_infinite(launch: ModuleType) -> None:
    tensors = inputs(23, 6, 40, torch.float32, hard=True)
    found = run_sweep(launch, ["forward", "reverse"], tensors, None, limit=None)
    infinite = found.values[:2].cpu().isinf()
    assert infinite.tolist() == [
        [False, False, True, False, False, False],
        [False, True, False, False, False, True],
    ]


def test_a_row_of_minus_infinity(launch: ModuleType) -> None:
    z = torch.full((1, 20), -torch.inf)
    tensors = (z, z.clone(), torch.zeros(1, dtype=torch.int64))
    found = run_sweep(launch, ["entropy", "forward", "js", "z_loss"], tensors, None, logits=True)
    assert found.values[:4, 0].tolist() == [0, 0, 0, torch.inf]
    assert torch.all(found.logits == 0)


def test_nan_propagates(launch: ModuleType) -> None:
    for place in (0, 1):
        tensors = inputs(24, 2, 300, torch.float32)
        tensors[place][1, 250] = torch.nan
        found = run_sweep(launch, ["forward", "reverse", "js"], tensors, None, logits=True)
        assert found.values.isnan().any(0).tolist() == [False, True]
        assert found.logits.isnan().any(1).tolist() == [False, True]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, ROUGH), (torch.float16, 1e-3)])
@pytest.mark.parametrize("classes", [258, 259])
def test_narrow_floats(
    launch: ModuleType, dtype: torch.dtype, tolerance: float, classes: int
) -> None:
    """Two to a word, and an odd number of classes, which cannot be packed."""
    check(launch, FOUR, inputs(25, 2, classes, dtype), tolerance=tolerance)


@pytest.mark.parametrize("names", [FOUR, ["forward"], ["js"], ["entropy", "z_loss"]])
def test_the_default_shape(
    launch: ModuleType, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    monkeypatch.undo()
    rows, classes = (64, 128256) if REAL else (1, 600)
    check(launch, names, inputs(31, rows, classes, torch.bfloat16), tolerance=ROUGH)


def test_strided_targets(launch: ModuleType) -> None:
    """A column of a matrix, and one target for all rows."""
    logits, reference, targets = inputs(34, 3, 40, torch.float32)
    column = torch.stack([targets, 39 - targets], 1).to(DEVICE)[:, 0]
    for each in (column, targets[:1].to(DEVICE).expand(3)):
        found = run_sweep(launch, ["cross_entropy"], (logits, reference, each), None, logits=True)
        wanted = torch.nn.functional.cross_entropy(logits, each.cpu(), reduction="none")
        torch.testing.assert_close(found.values[0].cpu(), wanted, rtol=1e-5, atol=1e-6)
        assert (found.logits.cpu() < 0).long().argmax(1).tolist() == each.tolist()


def test_mixed_floats() -> None:
    logits, _, targets = inputs(26, 2, 64, torch.float32)
    reference = inputs(27, 2, 64, torch.bfloat16)[1]
    assert not cluster.fits(logits.to(DEVICE), reference.to(DEVICE), [])
    check(_triton_sweep, ["forward"], (logits, reference, targets), tolerance=2e-3)


# Through the front door.


def test_functions_and_backward() -> None:
    logits, reference, targets = (x.to(DEVICE) for x in inputs(28, 4, 50, torch.float32))
    z, r = logits.clone().requires_grad_(), reference.clone().requires_grad_()
    mask = torch.tensor([True, True, False, True], device=DEVICE)
    loss = 2 * kl(z, r, mask=mask, direction="symmetric") + entropy(z)
    loss = loss + target_logprobs(z, targets)[0] + cross_entropy(z, targets, reduction="none")[1]
    loss.backward()
    zz, rr = logits.double().requires_grad_(), reference.double().requires_grad_()
    exact = 2 * kl(zz, rr, mask=mask, direction="symmetric") + entropy(zz)
    exact = exact + target_logprobs(zz, targets)[0]
    exact = exact + cross_entropy(zz, targets, reduction="none")[1]
    exact.backward()
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-6)
    for a, b in ((z, zz), (r, rr)):
        assert a.grad is not None
        assert b.grad is not None
        assert relative(a.grad, b.grad.cpu()) < 1e-5


def test_backward_twice() -> None:
    """`CompositeLoss` does this to track the norms of its terms."""
    logits, reference, _ = (x.to(DEVICE) for x in inputs(32, 3, 40, torch.bfloat16))
    z = logits.requires_grad_()
    total = compose_logits(z, written(["reverse", "z_loss"]), reference=reference).total
    [whole] = torch.autograd.grad(total, z, retain_graph=True)
    [half] = torch.autograd.grad(0.5 * total, z, retain_graph=True)
    total.backward()
    torch.testing.assert_close(half, 0.5 * whole)
    torch.testing.assert_close(z.grad, whole)


@pytest.mark.parametrize("masked", [False, True])
def test_an_expanded_upstream_gradient(masked: bool) -> None:
    """The upstream gradient of a sum over rows is one number, expanded with stride 0."""
    z, _, targets = (x.to(DEVICE) for x in inputs(33, 6, 40, torch.float32))
    mask = torch.tensor([True, False, True, True, True, False], device=DEVICE) if masked else None
    z.requires_grad_()
    exact = z.detach().double().requires_grad_()
    for logits in (z, exact):
        cross_entropy(logits, targets, reduction="none", mask=mask).sum().backward()
    assert z.grad is not None
    assert exact.grad is not None
    assert relative(z.grad, exact.grad.cpu()) < 1e-5


@pytest.mark.parametrize("features", [1, 5])  # many rows for each of them, and few
def test_composition_and_linear(features: int) -> None:
    _, reference, targets = (x.to(DEVICE) for x in inputs(29, 6, 40, torch.float32))
    made = torch.Generator().manual_seed(30)
    hidden = torch.randn(6, features, generator=made).to(DEVICE).requires_grad_()
    weight = torch.randn(40, features, generator=made).to(DEVICE).requires_grad_()
    found = compose_linear(
        hidden, weight, written(FOUR), reference=reference, targets=targets, chunk=4,
        track_grad_norms=True,
    )  # fmt: skip
    exact = compose_logits(
        (hidden @ weight.T).double(), written(FOUR), reference=reference.double(),
        targets=targets, track_grad_norms=True,
    )  # fmt: skip
    torch.testing.assert_close(found.total.double(), exact.total, rtol=1e-5, atol=1e-6)
    for name, norm in exact.grad_norms.items():
        torch.testing.assert_close(found.grad_norms[name], norm, rtol=1e-5, atol=1e-7)
    gradients = torch.autograd.grad(found.total, (hidden, weight))
    wanted = torch.autograd.grad(exact.total, (hidden, weight))
    for a, b in zip(gradients, wanted, strict=True):
        assert relative(a, b.double().cpu()) < 1e-5


def test_a_target_that_is_no_class_is_nan() -> None:
    z = torch.zeros(2, 3, device=DEVICE)
    rows = cross_entropy(z, torch.tensor([0, 3], device=DEVICE), reduction="none")
    assert rows.isnan().tolist() == [False, True]
