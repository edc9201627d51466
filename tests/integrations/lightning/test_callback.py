"""`RegularizerCallback` in the real Trainer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from steelyard import schedules
from steelyard.errors import InputError, SpecError
from steelyard.integrations import term
from steelyard.integrations.lightning import RegularizerCallback
from tests.integrations.lightning.models import (
    Batch,
    Batches,
    Drift,
    Net,
    Plain,
    Recorder,
    batches,
    by_hand,
    cross_entropy,
    net,
    same,
    trainer,
)

DATA = batches(4, 3, 5, 4, 2)
WARMUP = schedules.warmup(0.3, steps=4)


class Returns(Plain):
    """A training step that returns a tensor."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return cross_entropy(self.net(batch[0])[0], batch[1])


class ReturnsMore(Plain):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        logits, hidden = self.net(batch[0])
        return {"loss": cross_entropy(logits, batch[1]), "hidden": hidden}


class OfTensors(Plain):
    """A training step whose batch is one tensor."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.net(batch)[0].square().mean()


def saturation(before: Tensor) -> Tensor:
    return before.square().mean()


def sharpness(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.gather(1, labels[:, None]).square().mean()


def size(parameters: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([value.square().sum() for value in parameters.values()]).sum()


def callback(**settings: Any) -> RegularizerCallback:
    return RegularizerCallback(
        [
            term(saturation, WARMUP, "saturation", inputs="net.first"),
            term(sharpness, 0.1, "sharpness", inputs=("net.last", "labels")),
            term(size, 0.01, "size", every=2),
        ],
        aux={"router": 0.2},
        capture=["net.f*", "net.last"],
        batch=("x", "labels"),
        **settings,
    )


class ByHand:
    """The same terms by hand; a plain hook captures the first layer."""

    def __init__(self, model: Net) -> None:
        self.model = model
        model.first.register_forward_hook(self.keep)

    def keep(self, _module: object, _inputs: object, output: Tensor) -> None:
        self.before = output

    def __call__(self, inputs: Mapping[str, Any], step: int, epoch: int) -> dict[str, Tensor]:
        logits, labels = inputs["logits"], inputs["labels"]
        parameters = {f"net.{name}": value for name, value in self.model.named_parameters()}
        return {
            "base": cross_entropy(logits, labels),
            "saturation": WARMUP(step) * saturation(self.before),
            "sharpness": 0.1 * sharpness(logits, labels),
            "size": 0.01 * size(parameters) if step % 2 == 0 else torch.zeros(()),
            "router": 0.2 * inputs["router"],
        }


@pytest.mark.parametrize("kind", [Returns, ReturnsMore])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_equals_the_same_by_hand(kind: type[Plain], accumulate: int) -> None:
    recorder, model, hand = Recorder(), kind(), net()
    each = trainer(recorder, accumulate_grad_batches=accumulate, callbacks=[callback()])
    each.fit(model, DATA)
    rows = by_hand(hand, DATA, ByHand(hand), accumulate=accumulate)
    assert same(model.net, hand)
    last = [i for i in range(10) if (i % 5 + 1) % accumulate == 0 or i % 5 == 4]
    for logged, i in zip(recorder.rows, last, strict=True):
        assert logged["train/loss_total"] == pytest.approx(sum(rows[i].values()), rel=1e-6)
        assert logged["train/base_loss/value"] == pytest.approx(rows[i].pop("base"), rel=1e-6)
        for name, value in rows[i].items():
            contribution = logged[f"train/regularizers/{name}/contribution"]
            assert contribution == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("named", ["pixels", ("pixels",)])
def test_a_batch_of_one_tensor_has_one_name(named: Any) -> None:
    seen = []

    def mean(pixels: Tensor) -> Tensor:
        seen.append(pixels)
        return pixels.mean()

    added = RegularizerCallback(
        [term(mean, 0.0, "seen", gradient="none")],
        aux={"router": 0.2},
        batch=named,
    )
    data: Any = Batches([x for x, _ in DATA])  # type: ignore[misc]
    trainer(callbacks=[added], epochs=1).fit(OfTensors(), data)
    assert [len(each) for each in seen] == [4, 3, 5, 4, 2]


def test_activations_outside_the_training_step_are_not_captured() -> None:
    class Validates(Returns):
        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            self.net(batch[0])

    model, hand = Validates(), net()
    trainer(callbacks=[callback()]).fit(model, DATA, batches(3, seed=2))
    by_hand(hand, DATA, ByHand(hand))
    assert same(model.net, hand)


def test_log_settings_reach_lightning() -> None:
    recorder = Recorder()
    log = {"on_step": False, "on_epoch": True}
    trainer(recorder, epochs=1, callbacks=[callback(log=log)]).fit(Returns(), DATA)
    hand = net()
    rows = by_hand(hand, DATA, ByHand(hand), epochs=1)
    mean = sum(row["base"] * len(x) for row, (x, _) in zip(rows, DATA, strict=True)) / 18
    assert recorder.having("train/base_loss/value") == [pytest.approx(mean, rel=1e-6)]
    with pytest.raises(
        SpecError, match=r"arguments of log_dict, got 'epoch'; there are: .*on_epoch"
    ):
        callback(log={"epoch": True})


def test_gradient_norms_with_respect_to_the_parameters() -> None:
    recorder, model, hand = Recorder(), Returns(), net()
    each = callback(track_grad_norms=True, wrt=model, track_every=2)
    trainer(recorder, epochs=1, callbacks=[each], limit_train_batches=2).fit(model, DATA)
    before = hand.first(DATA.batches[0][0])
    gradients = torch.autograd.grad(saturation(before), list(hand.first.parameters()))
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    logged = recorder.rows[0]["train/regularizers/saturation/grad_norm"]
    assert logged == pytest.approx(norm, rel=1e-5)
    by_hand(hand, Batches(DATA.batches[:2]), ByHand(hand), epochs=1)
    assert same(model.net, hand)


def test_other_outputs_of_the_step_are_passed_on() -> None:
    seen: list[Any] = []

    class Sees(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            seen.append(outputs)

    trainer(epochs=1, callbacks=[callback(), Sees()]).fit(ReturnsMore(), DATA)
    assert [each.keys() for each in seen] == [{"loss", "hidden"}] * 5


def test_a_step_may_be_skipped() -> None:
    class Skips(Returns):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    model, hand = Skips(), net()
    with pytest.warns(UserWarning, match="`training_step` returned `None`"):
        trainer(epochs=1, callbacks=[callback()], limit_train_batches=2).fit(model, DATA)
    by_hand(hand, Batches(DATA.batches[:1]), ByHand(hand), epochs=1)
    assert same(model.net, hand)


def test_a_name_in_two_sources_is_read_with_its_source() -> None:
    class Both(ReturnsMore):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {**super().training_step(batch["pair"], batch_idx), "x": batch["x"] + 1}

    found: list[tuple[Tensor, Tensor]] = []

    def compare(mine: Tensor, yours: Tensor, loss: Tensor) -> Tensor:
        found.append((mine, yours))
        return loss * 0

    each = term(compare, 1.0, "compare", inputs=("batch.x", "outputs.x", "loss"))
    data: Any = batches(4)
    data.batches = [{"x": torch.zeros(4), "loss": torch.zeros(4), "pair": data.batches[0]}]
    trainer(epochs=1, callbacks=[RegularizerCallback([each], aux={"router": 0})]).fit(Both(), data)
    assert found[0][0].tolist() == [0] * 4
    assert found[0][1].tolist() == [1] * 4


# Cleanup and resuming.


def hooks(model: Plain) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


def test_hooks_and_graphs_are_released_after_training() -> None:
    model, each = Returns(), callback()
    activations: list[Any] = []
    wrapped: list[bool] = []
    alive: list[bool] = []

    def watch(_module: object, _inputs: object, output: Tensor) -> None:
        activations.append(weakref.ref(output))

    class Sees(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            gc.collect()
            wrapped.append("training_step" in vars(module))
            alive.append(activations[-1]() is not None)

    model.net.first.register_forward_hook(watch)
    trainer(epochs=1, callbacks=[each, Sees()]).fit(model, DATA)
    assert wrapped == [True] * 5
    assert alive == [False] * 5
    assert "training_step" not in vars(model)
    assert hooks(model) == 1
    assert list(each.composite.output.regularizers) == ["saturation", "sharpness", "size", "router"]


def test_hooks_are_removed_after_a_failure() -> None:
    class Fails(Returns):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    model = Fails()
    with pytest.raises(ZeroDivisionError):
        trainer(epochs=1, callbacks=[callback()]).fit(model, DATA)
    assert "training_step" not in vars(model)
    assert hooks(model) == 0


def test_a_training_step_on_the_instance_is_restored() -> None:
    model = Returns()
    own: Callable[..., Any] = model.training_step  # as torch.compile leaves it
    model.training_step = own  # type: ignore[method-assign]
    trainer(epochs=1, callbacks=[callback()]).fit(model, DATA)
    assert vars(model)["training_step"] is own


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    def with_drift() -> RegularizerCallback:
        weight = schedules.by_epoch(schedules.linear(0.5, 3.5, steps=3), len(DATA.batches))
        drift = term(Drift(), weight, inputs="net.first")
        return RegularizerCallback(
            [drift, term(saturation, WARMUP, inputs="net.first")],
            capture="net.first",
            aux={"router": 0.1},
        )

    whole, all_along = Returns(), with_drift()
    trainer(epochs=4, callbacks=[all_along]).fit(whole, DATA)

    first = trainer(epochs=2, callbacks=[with_drift()])
    first.fit(Returns(), DATA)
    first.save_checkpoint(tmp_path / "half.ckpt")

    rest, again, recorder = Returns(net(seed=5)), with_drift(), Recorder()
    trainer(recorder, epochs=4, callbacks=[again]).fit(rest, DATA, ckpt_path=tmp_path / "half.ckpt")
    assert same(rest, whole)
    assert again.state_dict() == all_along.state_dict()
    assert again.composite.step == 19
    assert recorder.having("train/regularizers/drift/weight") == [2.5] * 5 + [3.5] * 5


# Bad arguments.


def test_manual_optimization_is_refused() -> None:
    class Manual(Returns):
        automatic_optimization = False

    with pytest.raises(
        InputError, match=r"Manual optimizes by itself .*: compose in the step, with Reg"
    ):
        trainer(callbacks=[callback()]).fit(Manual(), DATA)


def test_a_path_that_matches_no_module_lists_the_paths() -> None:
    wrong = RegularizerCallback(capture="net.middle")
    with pytest.raises(
        InputError, match=r"got 'net\.middle'; there are: 'net', 'net\.first', 'net\.last'"
    ):
        trainer(callbacks=[wrong]).fit(Returns(), DATA)


def test_a_missing_input_lists_the_available_ones() -> None:
    wrong = RegularizerCallback([term(saturation, 0.1)], capture="net.last", aux={"router": 0.1})
    there = r"'batch\.0', 'batch\.1', 'loss', 'net\.last', 'parameters\.net\..*', 'aux\.router'"
    with pytest.raises(
        InputError, match=rf"'saturation' reads the input 'before', .* are: {there}"
    ):
        trainer(callbacks=[wrong]).fit(Returns(), DATA)


def test_two_callbacks_are_refused_by_lightning() -> None:
    with pytest.raises(
        RuntimeError, match=r"more than one stateful callback of type `RegularizerCa"
    ):
        trainer(callbacks=[callback(), callback()])
