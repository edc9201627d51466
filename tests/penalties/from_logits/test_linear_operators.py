"""Torch operators over a projection, against torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard.errors import GradientError
from steelyard.penalties.from_logits import (
    Projection,
    _linear_operators,
    compose_linear,
    compose_logits,
    cross_entropy,
    entropy,
    kl,
    target_logprobs,
    z_loss,
)
from tests.penalties.from_logits.cases import TERMS
from tests.penalties.from_logits.projection_cases import (
    CLASSES,
    SHAPE,
    Case,
    call,
    gradients,
)
from tests.seeing import Seen


@pytest.mark.usefixtures("chunks_of_four")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", list(TERMS))
def test_every_term_against_torch_in_float64(name: str, reduction: Any) -> None:
    case = Case(21)
    options = {"temperature": 0.7}
    rows = case.rows(name, **options)[case.mask]
    if reduction == "none":
        upstream = torch.linspace(-1, 2, 15, dtype=torch.float64).reshape(SHAPE)
        wanted = (rows * upstream[case.mask]).sum()
        found = call(name, case.projection, case, reduction="none", mask=case.mask, **options)
        torch.testing.assert_close(found[case.mask], rows)
        assert not found[~case.mask].any()
        value = (found * upstream).sum()
    else:
        wanted = 3 * (rows.mean() if reduction == "mean" else rows.sum())
        value = 3 * call(
            name, case.projection, case, reduction=reduction, mask=case.mask, **options
        )
    torch.testing.assert_close(value, wanted)
    pairs = zip(gradients(value, case), gradients(wanted, case), strict=True)
    for ours, theirs in pairs:
        assert theirs.abs().max() > 1e-3
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_rows_are_processed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[int] = []
    sweep = _linear_operators._Problem.sweep

    def counted(problem: Any, at: slice, rows: Tensor, *rest: Any) -> Any:
        chunks.append(len(rows))
        return sweep(problem, at, rows, *rest)

    monkeypatch.setattr(_linear_operators._Problem, "sweep", counted)
    case = Case(20)
    projection = Projection(*case.leaves[:2], chunk=6)
    torch.testing.assert_close(entropy(projection), entropy(projection.logits()))
    assert chunks == [6, 6, 3]
    assert projection[1:].chunk == next(iter(projection)).chunk == 6


@pytest.mark.usefixtures("chunks_of_four")
def test_log_probs_of_targets() -> None:
    case = Case(22)
    found = target_logprobs(case.projection, case.targets)
    wanted = case.projection.logits().log_softmax(-1).gather(-1, case.targets[..., None])[..., 0]
    torch.testing.assert_close(found, wanted)
    for ours, theirs in zip(
        gradients(found.square().sum(), case), gradients(wanted.square().sum(), case), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_tied_weight_accumulates_both_gradients() -> None:
    case = Case(25)
    weight, tokens = case.leaves[1], case.targets
    ours = cross_entropy(Projection(weight[tokens], weight), tokens)
    theirs = torch.nn.functional.cross_entropy(
        (weight[tokens] @ weight.T).flatten(0, 1), tokens.flatten()
    )
    torch.testing.assert_close(
        torch.autograd.grad(ours, weight), torch.autograd.grad(theirs, weight)
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_gradient_alone(which: int, reduction: Any) -> None:
    case = Case(26)
    for i, leaf in enumerate(case.leaves):
        leaf.requires_grad_(i == which)
    value = entropy(case.projection, reduction=reduction).mean()
    (found,) = torch.autograd.grad(value, case.leaves[which])
    (wanted,) = torch.autograd.grad(entropy(case.projection.logits()), case.leaves[which])
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_masked_row_is_not_read(reduction: Any) -> None:
    case = Case(27)
    hidden = case.leaves[0].detach().clone()
    hidden[~case.mask] = torch.nan
    kept = z_loss(case.projection[case.mask])
    wanted = torch.autograd.grad(kept, case.leaves[1:])
    hidden.requires_grad_()
    value = z_loss(Projection(hidden, *case.leaves[1:]), mask=case.mask, reduction=reduction)
    value = value if reduction == "mean" else value.sum() / case.mask.sum()
    torch.testing.assert_close(value, kept)
    by_hidden, *found = torch.autograd.grad(value, [hidden, *case.leaves[1:]])
    torch.testing.assert_close(found, list(wanted))
    assert not by_hidden[~case.mask].any()


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_float16_gradients_wait_for_the_loss_scale(tracked: bool, masked: bool) -> None:
    """4096 rows and a weight of 2**-10: computed in the forward pass, the gradient would be 0."""
    made = torch.Generator().manual_seed(28)
    shapes = ((4096, 4), (64, 4), (64,))
    leaves = [torch.randn(s, generator=made).half().requires_grad_() for s in shapes]
    hidden, weight, bias = leaves
    mask = torch.arange(4096) % 2 == 0 if masked else torch.ones(4096, dtype=torch.bool)
    found = compose_linear(
        hidden,
        weight,
        [("entropy", {"weight": 2.0**-10}), ("z_loss", {"weight": 2.0**-11})],
        bias=bias,
        mask=mask if masked else None,
        track_grad_norms=tracked,
    )
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    z = torch.nn.functional.linear(*exact)[mask]
    spread = torch.special.entr(z.softmax(-1)).sum(-1).mean()
    level = z.logsumexp(-1).square().mean()
    torch.testing.assert_close(found.values["entropy"].double(), spread, rtol=1e-3, atol=0)
    torch.testing.assert_close(found.values["z_loss"].double(), level, rtol=1e-3, atol=0)
    total = 2.0**-10 * spread + 2.0**-11 * level
    torch.testing.assert_close(found.total.double(), total, rtol=1e-3, atol=0)
    scale = 2.0**22
    ours = torch.autograd.grad(scale * found.total, leaves)
    theirs = torch.autograd.grad(scale * total, exact)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float16
        assert (a.double() - b).norm() < 2e-3 * b.norm()


@pytest.mark.parametrize("tracked", [False, True])
def test_few_rows_store_no_gradient_of_the_weight(tracked: bool) -> None:
    """Datum by datum: tensors saved for the backward pass are no larger than the inputs."""
    made = torch.Generator().manual_seed(33)
    data = [torch.randn(n, 16, generator=made, requires_grad=True) for n in (5, 15)]
    weight = torch.randn(40, 16, generator=made, requires_grad=True)
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(0 if tensor is weight else tensor.numel())
        return tensor

    terms = ["entropy", "z_loss"]
    options: dict[str, Any] = {"track_grad_norms": tracked}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        found = [compose_logits(Projection(x, weight), terms, **options) for x in data]
    assert max(kept) <= 15 * 16 < weight.numel()
    wanted = [compose_logits(x @ weight.T, terms, **options) for x in data]
    for ours, theirs in zip(found, wanted, strict=True):
        for each in ("values", "grad_norms", "cosines"):
            torch.testing.assert_close(dict(getattr(ours, each)), dict(getattr(theirs, each)))
    both = (found[0].total + 3 * found[1].total, wanted[0].total + 3 * wanted[1].total)
    gradients_of_both = [torch.autograd.grad(each, [*data, weight]) for each in both]
    torch.testing.assert_close(*gradients_of_both)


@pytest.mark.usefixtures("chunks_of_four")
@pytest.mark.parametrize(
    "value",
    [
        entropy,
        lambda z: entropy(z, reduction="none").square().sum(),
        lambda z: compose_logits(z, ["entropy", "z_loss"], track_grad_norms=True).total,
    ],
)
def test_all_logits_never_exist_at_once(value: Callable[[Any], Tensor]) -> None:
    hidden = torch.randn(40, 3, requires_grad=True)
    weight = torch.randn(CLASSES, 3, requires_grad=True)
    with Seen() as seen:
        value(Projection(hidden, weight)).backward()  # type: ignore[no-untyped-call]
    assert seen.elements <= 40 * 3
    with Seen() as seen:
        value(Projection(hidden, weight).logits()).backward()  # type: ignore[no-untyped-call]
    assert seen.elements >= 40 * CLASSES


@pytest.mark.usefixtures("chunks_of_four")
def test_compiled_without_a_graph_break() -> None:
    case = Case(31, torch.float32)

    def step(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        z = Projection(hidden, weight, bias)
        rows = kl(z, case.reference, reduction="none").square().mean()
        half = z_loss(Projection(hidden.half(), weight.half(), bias.half()))
        total: Tensor = 2 * compose_logits(z, ["entropy"]).total + rows + half
        return total

    value = step(*case.leaves)
    wanted = torch.autograd.grad(value, case.leaves)
    again = torch.compile(step, fullgraph=True, backend="aot_eager")(*case.leaves)
    torch.testing.assert_close(again, value)
    torch.testing.assert_close(torch.autograd.grad(again, case.leaves), wanted)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_is_refused(reduction: Any) -> None:
    case = Case(32)
    value = entropy(case.projection, reduction=reduction).sum()
    with pytest.raises(GradientError, match="must be differentiated once"):
        torch.autograd.grad(value, case.leaves[0], create_graph=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_does_not_round_a_projection(reduction: Any) -> None:
    """Nor do the forward and the backward pass disagree about the dtype of the logits."""
    case = Case(34, torch.float32)
    wanted = call("reverse", case.projection, case, reduction=reduction).sum()
    with torch.autocast("cpu", torch.bfloat16):
        found = call("reverse", case.projection, case, reduction=reduction).sum()
        ours = gradients(found, case)
    assert found == wanted
    torch.testing.assert_close(ours, gradients(wanted, case), rtol=0, atol=0)
