"""Attaching transforms to an optimizer: when they run, on which parameters, their state."""

from __future__ import annotations

import copy
import gc
import io
import re
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.nn import Parameter

from steelyard import schedules
from steelyard.errors import InputError, SpecError, StateError
from steelyard.integrations.optim import (
    Transform,
    attach,
    centralize,
    clip_by_global_norm,
    elastic_net_decay,
    gradient_noise,
    l1_decay,
    l2_decay,
)


def ones(*shape: int, gradient: bool = True) -> Parameter:
    made = Parameter(torch.ones(shape))
    made.grad = torch.ones(shape) if gradient else None
    return made


# Attaching and removing.


def test_removed_transforms_are_not_applied() -> None:
    weights = ones(2)
    optimizer = torch.optim.SGD([weights], lr=0.0)
    attached = attach(optimizer, [l2_decay(1.0)])
    assert repr(attached) == "Attachment(l2_decay; step 0)"
    attached.remove()
    attached.remove()
    optimizer.step()
    assert weights.grad.tolist() == [1.0, 1.0]  # type: ignore[union-attr]  # set above
    assert "steelyard" not in optimizer.state_dict()
    optimizer.load_state_dict(optimizer.state_dict())
    with attach(optimizer, [l2_decay(1.0)]) as again:
        optimizer.step()
    assert (again.step, again.names) == (1, ("l2_decay",))
    optimizer.step()
    assert weights.grad.tolist() == [2.0, 2.0]  # type: ignore[union-attr]  # set above
    assert again.step == 1


def test_an_exception_in_the_block_removes_the_transforms() -> None:
    optimizer = torch.optim.SGD([ones(2)], lr=0.0)
    with pytest.raises(ZeroDivisionError), attach(optimizer, [centralize()]):
        _ = 1 / 0
    attach(optimizer, [])


def test_a_second_attachment_is_refused() -> None:
    optimizer, other = (torch.optim.SGD([ones(2)], lr=0.0) for _ in range(2))
    attached = attach(optimizer, [centralize(), l2_decay(1.0)])
    attach(other, [l1_decay(1.0)])
    with pytest.raises(InputError) as caught:
        attach(optimizer, [l1_decay(1.0)])
    assert str(caught.value) == (
        "an optimizer must have its transforms attached at once, in their order, got one that has "
        "centralize, l2_decay already: remove() those first."
    )
    attached.remove()
    attach(optimizer, [l1_decay(1.0)])


def test_an_attachment_does_not_keep_the_optimizer_alive() -> None:
    optimizer = torch.optim.SGD([ones(2)], lr=0.0)
    attached, seen = attach(optimizer, [l2_decay(1.0)]), weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert seen() is None
    attached.remove()


def test_a_copy_of_the_optimizer_has_no_transforms() -> None:
    optimizer = torch.optim.SGD([ones(2)], lr=0.0)
    attach(optimizer, [l2_decay(1.0)])
    assert "steelyard" not in copy.deepcopy(optimizer).state_dict()


class Wrapper(torch.optim.Optimizer):
    """A wrapper that never calls the constructor of its base class, and hides what it holds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.hidden = optimizer


def test_an_optimizer_that_accelerate_has_prepared_is_transformed() -> None:
    """Two steps of two micro-batches, against SGD with its own weight decay."""
    ours, theirs = (nn.Linear(3, 2, bias=False) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    by_hand = torch.optim.SGD(theirs.parameters(), lr=0.1, weight_decay=0.5)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    try:
        model, optimizer = accelerator.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
        attached = attach(optimizer, [l2_decay(0.5)])
        steps = []
        for micro_batch in range(4):
            x = torch.full((1, 3), 1.0 + micro_batch)
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().sum())
                optimizer.step()
                optimizer.zero_grad()
            steps.append(attached.step)
            (theirs(x).square().sum() / 2).backward()
            if micro_batch % 2:
                by_hand.step()
                by_hand.zero_grad()
        assert steps == [0, 1, 1, 2]
        torch.testing.assert_close(model.weight, theirs.weight)
        assert optimizer.state_dict()["steelyard"] == {"step": 2, "transforms": ["l2_decay"]}
        with pytest.raises(InputError, match="must have its transforms attached at once"):
            attach(optimizer.optimizer, [l2_decay(0.5)])
        optimizer.load_state_dict(optimizer.state_dict())
        attached.remove()
        assert "steelyard" not in optimizer.state_dict()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def test_an_optimizer_that_lightning_has_wrapped_is_transformed() -> None:
    weights = ones(2)
    optimizer = LightningOptimizer(torch.optim.SGD([weights], lr=0.0))
    attached = attach(optimizer, [l2_decay(1.0)])  # type: ignore[arg-type]  # no subclass
    optimizer.optimizer.step()
    assert weights.grad.tolist() == [2.0, 2.0]  # type: ignore[union-attr]  # set above
    assert attached.step == 1


def test_attach_refuses_what_is_no_optimizer_or_transform() -> None:
    with pytest.raises(InputError, match=r"^optimizer must be a torch\.optim\.Optimizer, got Lin"):
        attach(nn.Linear(2, 2), [])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"got Wrapper: attach to the optimizer that"):
        attach(Wrapper(torch.optim.SGD([ones(2)])), [])
    with pytest.raises(SpecError, match=r"^transforms must be listed .* got l2_decay alone: put"):
        attach(torch.optim.SGD([ones(2)]), l2_decay(0.1))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"^a transform must be made by .* got <function l2_decay"):
        attach(torch.optim.SGD([ones(2)]), [l2_decay])  # type: ignore[list-item]


# Selected parameters.


def test_where_leaves_out_biases_and_norms() -> None:
    matrix, bias = ones(2, 2), ones(2)
    optimizer = torch.optim.SGD([matrix, bias], lr=0.0)
    attach(optimizer, [l2_decay(1.0, where=lambda p: p.ndim > 1)])
    optimizer.step()
    assert matrix.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]  # type: ignore[union-attr]
    assert bias.grad.tolist() == [1.0, 1.0]  # type: ignore[union-attr]  # set above


def test_each_group_can_have_its_own_transform() -> None:
    first, second = ones(4), ones(4)
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.0)
    groups = [set(group["params"]) for group in optimizer.param_groups]
    attach(
        optimizer,
        [
            clip_by_global_norm(1.0, where=groups[0].__contains__),
            clip_by_global_norm(4.0, where=groups[1].__contains__),
            l2_decay(1.0, where=groups[1].__contains__),
        ],
    )
    optimizer.step()
    assert first.grad.tolist() == [0.5] * 4  # type: ignore[union-attr]  # set above
    assert second.grad.tolist() == [2.0] * 4  # type: ignore[union-attr]  # set above


def test_parameters_without_gradient_are_left_out() -> None:
    there, missing = ones(2, 2), ones(2, 2, gradient=False)
    optimizer = torch.optim.SGD([there, missing], lr=0.1)
    attach(
        optimizer,
        [
            l2_decay(1.0, decoupled=True),
            elastic_net_decay(1.0),
            clip_by_global_norm(1.0),
            centralize(),
            gradient_noise(0.1),
            l1_decay(1.0, where=lambda p: p is missing),
        ],
    )
    optimizer.step()
    assert missing.grad is None
    assert missing.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert not torch.equal(there, missing)


def test_a_step_without_any_gradient_lists_the_parameters() -> None:
    weights = ones(2, 3, gradient=False)
    optimizer = torch.optim.SGD([weights, ones(1, gradient=False)], lr=0.1)
    attached = attach(optimizer, [centralize()])
    with pytest.raises(InputError) as caught:
        optimizer.step()
    assert str(caught.value) == (
        "an optimizer with transforms must step with gradients, got none for any of its 2 "
        "parameters (parameter 0 of group 0, shape (2, 3); parameter 1 of group 0, shape (1,)): "
        "call loss.backward() before step()."
    )
    assert attached.step == 0


def test_groups_added_later_are_transformed() -> None:
    late = ones(2)
    optimizer = torch.optim.SGD([ones(2)], lr=0.0)
    attach(optimizer, [l2_decay(1.0)])
    optimizer.add_param_group({"params": [late]})
    optimizer.step()
    assert late.grad.tolist() == [2.0, 2.0]  # type: ignore[union-attr]  # set above


def test_transforms_are_not_recorded_by_autograd() -> None:
    weights = ones(2, 2)
    optimizer = torch.optim.SGD([weights], lr=0.1)
    attach(optimizer, [l2_decay(0.1, decoupled=True), elastic_net_decay(0.1), centralize()])
    assert torch.is_grad_enabled()
    optimizer.step()
    assert weights.grad is not None
    assert not weights.grad.requires_grad
    assert weights.is_leaf


# Closures.


@pytest.mark.parametrize("keyword", [True, False])
def test_transforms_run_after_the_closure(keyword: bool) -> None:
    weights = Parameter(torch.tensor([2.0]))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    attached = attach(optimizer, [l2_decay(0.5), l2_decay(0.25, decoupled=True)])

    def closure() -> float:
        optimizer.zero_grad()
        loss = weights.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return loss.item()

    loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
    assert loss == 4.0
    assert weights.grad.item() == 5.0  # type: ignore[union-attr]  # set in the closure
    assert weights.item() == pytest.approx(2.0 * (1 - 0.1 * 0.25) - 0.1 * 5.0)
    assert attached.step == 1


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_minimises_the_loss_with_its_decay(search: str | None) -> None:
    weights = Parameter(torch.tensor([3.0, -2.0], dtype=torch.float64))
    target = torch.tensor([1.0, 4.0], dtype=torch.float64)
    optimizer = torch.optim.LBFGS([weights], max_iter=20, line_search_fn=search)
    attached = attach(optimizer, [l2_decay(1.0)])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = 0.5 * (weights - target).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        # The search compares losses with gradients: it has to see those of one function.
        return loss.detach() + 0.5 * weights.detach().square().sum()

    optimizer.step(closure)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    torch.testing.assert_close(weights.detach(), target / 2)  # of ½(w − t)² + ½w²
    assert attached.step == 1


def test_decoupled_decay_shrinks_once_a_step_however_often_the_closure_runs() -> None:
    class Thrice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return [closure() for _ in range(3)]

    weights = Parameter(torch.tensor([1.0]))
    optimizer = Thrice([weights], lr=0.5)
    attach(optimizer, [l2_decay(0.5, decoupled=True), gradient_noise(1.0)])
    seen: list[float] = []

    def closure() -> None:
        if weights.grad is not None:
            seen.append(weights.grad.item())
        weights.grad = torch.zeros(1)

    optimizer.step(closure)
    assert weights.item() == 0.75
    assert seen[0] == seen[1] != 0  # the noise of one step is one
    optimizer.step(closure)
    assert weights.item() == 0.5625


# `GradScaler`.


def scaled_step(fused: bool, gradient: float, *, unscale: bool) -> tuple[Parameter, int]:
    weights = Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weights], lr=0.1, weight_decay=0.0, fused=fused)
    attached = attach(optimizer, [clip_by_global_norm(1.0), l2_decay(1.0, decoupled=True)])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((weights * gradient).sum()).backward()  # type: ignore[no-untyped-call]
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return weights, attached.step


@pytest.mark.parametrize(("fused", "unscale"), [(False, True), (False, False), (True, True)])
def test_gradients_are_unscaled_before_transforms_run(fused: bool, unscale: bool) -> None:
    weights, steps = scaled_step(fused, 5.0, unscale=unscale)
    torch.testing.assert_close(weights.grad, torch.full((2,), 0.5**0.5))
    torch.testing.assert_close(weights.detach(), torch.full((2,), 0.9 - 0.1))
    assert steps == 1


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_is_not_counted(fused: bool) -> None:
    weights, steps = scaled_step(fused, float("inf"), unscale=True)
    assert (weights.tolist(), steps) == ([1.0, 1.0], 0)


def test_a_fused_optimizer_that_unscales_after_the_transforms_is_refused() -> None:
    with pytest.raises(InputError, match=r"call scaler\.unscale_\(optimizer\) before scaler\.step"):
        scaled_step(fused=True, gradient=5.0, unscale=False)


# State.


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def fading() -> list[Transform]:
    return [l2_decay(schedules.linear(1.0, 0.0, 6)), gradient_noise(0.1, seed=2)]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    twin = copy.deepcopy(model)
    straight, first = adamw(model), adamw(twin)
    attach(straight, fading())
    steps(model, straight, 6)
    attach(first, fading())
    steps(twin, first, 2)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    resumed = adamw(twin)
    attached = attach(resumed, fading())
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert attached.step == 2
    steps(twin, resumed, 4)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_state_dict_without_transforms_is_refused_and_changes_nothing() -> None:
    model = nn.Linear(3, 2)
    bare = adamw(model).state_dict()
    optimizer = adamw(model)
    attached = attach(optimizer, fading())
    steps(model, optimizer, 1)
    bare["param_groups"][0]["lr"] = 7.0
    with pytest.raises(StateError) as caught:
        optimizer.load_state_dict(bare)
    assert str(caught.value) == (
        "a state_dict for an optimizer with transforms must hold their state under 'steelyard', "
        "got 'state', 'param_groups': it was saved without them; attach after loading, to begin "
        "at step 0."
    )
    assert (optimizer.param_groups[0]["lr"], attached.step) == (0.1, 1)
    attached.remove()
    optimizer.load_state_dict(bare)
    assert attach(optimizer, fading()).step == 0


def test_a_state_dict_of_other_transforms_is_refused() -> None:
    model = nn.Linear(3, 2)
    saving, loading = adamw(model), adamw(model)
    attach(saving, fading())
    attached = attach(loading, [centralize()])
    message = (
        "the transforms of a state_dict must be those attached, ['centralize'], got "
        "['l2_decay', 'gradient_noise']: attach the same in the same order, or attach after "
        "loading, to begin at step 0."
    )
    with pytest.raises(StateError, match=re.escape(message)):
        loading.load_state_dict(saving.state_dict())
    state = loading.state_dict()
    state["steelyard"]["step"] = -1
    with pytest.raises(StateError, match=r"^step must be a whole number >= 0, got -1\.$"):
        loading.load_state_dict(state)
    assert attached.step == 0


def test_the_step_stays_when_the_optimizer_refuses_the_state_dict() -> None:
    model = nn.Linear(3, 2)
    optimizer = adamw(model)
    attached = attach(optimizer, [centralize()])
    state = optimizer.state_dict()
    state["steelyard"]["step"] = 9
    state["param_groups"] = []
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(state)
    assert attached.step == 0


def test_an_optimizer_without_transforms_ignores_their_state() -> None:
    model = nn.Linear(3, 2)
    saving, loading = adamw(model), adamw(model)
    attach(saving, fading())
    loading.load_state_dict(saving.state_dict())
    assert set(loading.state_dict()) == {"state", "param_groups"}


# Without torch.


def test_missing_torch_names_the_pip_command() -> None:
    code = """
import sys; sys.modules["torch"] = None
from steelyard.errors import MissingExtraError
try:
    import steelyard.integrations.optim
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        "steelyard.integrations.optim needs torch, which is not installed: "
        'pip install "steelyard[torch]".'
    )
