"""`RegularizedModule` in the real Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from steelyard import schedules
from steelyard.errors import InputError, SpecError
from steelyard.integrations import CompositeLoss, aux_loss, collect_aux, term
from steelyard.integrations.lightning import RegularizedModule
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
    read,
    same,
    trainer,
)

DATA = batches(4, 3, 5, 4, 2)
HELD_OUT = batches(3, 5, seed=2)
WARMUP = schedules.warmup(0.3, steps=4)


def activity(hidden: Tensor) -> Tensor:
    return hidden.square().mean()


def confidence(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).mean()


def terms() -> list[Any]:
    return [
        term(activity, WARMUP, "activity"),
        term(confidence, 0.1, "confidence", every=2),
    ]


def parts(inputs: Mapping[str, Any], step: int, epoch: int) -> dict[str, Tensor]:
    hidden, logits = inputs["hidden"], inputs["logits"]
    found = {
        "base": cross_entropy(logits, inputs["labels"]),
        "activity": WARMUP(step) * activity(hidden),
    }
    found["confidence"] = 0.1 * confidence(logits) if step % 2 == 0 else torch.zeros(())
    return {**found, "router": 0.2 * inputs["router"]}


class Model(RegularizedModule, Plain):
    def __init__(self, composite: CompositeLoss | None = None, model: Net | None = None) -> None:
        super().__init__(model)
        if composite is None:
            composite = CompositeLoss(cross_entropy, terms(), aux={"router": 0.2})
        self.composite = composite

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits, hidden = self.net(batch[0])
        return self.compose(logits=logits, hidden=hidden, labels=batch[1])


class Evaluated(Model):
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        Model.training_step(self, batch, batch_idx)

    test_step = validation_step


def contributions(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """The rows of a logger as `by_hand` gives them."""
    found = []
    for row in rows:
        terms = {
            key.split("/")[2]: value
            for key, value in row.items()
            if key.startswith("train/regularizers/") and key.endswith("/contribution")
        }
        found.append({"base": row["train/base_loss/value"], **terms})
    return found


@pytest.mark.parametrize(
    ("accumulate", "clip"), [(1, 0), (2, 0), (3, 0.05)], ids=["plain", "accumulated", "clipped"]
)
def test_training_equals_the_same_by_hand(accumulate: int, clip: float) -> None:
    recorder, model, hand = Recorder(), Model(), net()
    trainer(recorder, accumulate_grad_batches=accumulate, gradient_clip_val=clip).fit(model, DATA)
    rows = by_hand(hand, DATA, parts, accumulate=accumulate, clip=clip)
    assert same(model.net, hand)
    # Lightning logs once for each optimizer step: the last of the batches behind it.
    last = [i for i in range(10) if (i % 5 + 1) % accumulate == 0 or i % 5 == 4]
    rows = [rows[i] for i in last]
    assert contributions(recorder.rows) == [pytest.approx(row, rel=1e-6) for row in rows]
    totals = recorder.having("train/loss_total")
    assert totals == pytest.approx([sum(row.values()) for row in rows], rel=1e-6)


def test_training_in_double_precision() -> None:
    recorder, model, hand = Recorder(), Model(), net().double()
    trainer(recorder, precision="64-true").fit(model, DATA)
    rows = by_hand(hand, Batches([(x.double(), labels) for x, labels in DATA]), parts)
    assert same(model.net, hand)
    assert contributions(recorder.rows) == [pytest.approx(row, rel=1e-6) for row in rows]


def test_every_component_is_logged_raw_and_weighted() -> None:
    recorder = Recorder()
    trainer(recorder, epochs=1).fit(Model(), DATA)
    first, second = recorder.rows[:2]
    assert first.keys() == {
        "epoch",
        "train/loss_total",
        "train/base_loss/value",
        "train/regularizer_total",
        *(
            f"train/regularizers/{name}/{what}"
            for name in ("activity", "confidence", "router")
            for what in ("value", "weight", "contribution", "duration")
        ),
    }
    value, weight, contribution = (
        second[f"train/regularizers/activity/{what}"]
        for what in ("value", "weight", "contribution")
    )
    assert weight == pytest.approx(0.3 / 4)
    assert contribution == pytest.approx(weight * value)
    assert first["train/regularizers/confidence/contribution"] > 0
    assert second["train/regularizers/confidence/contribution"] == 0  # not due


def test_manual_optimization_equals_the_same_by_hand() -> None:
    class Manual(Model):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            optimizer.step()
            return loss

    recorder, model, hand = Recorder(), Manual(), net()
    trainer(recorder).fit(model, DATA)
    rows = by_hand(hand, DATA, parts)
    assert same(model.net, hand)
    assert contributions(recorder.rows) == [pytest.approx(row, rel=1e-6) for row in rows]


# Validation.


def with_drift() -> CompositeLoss:
    weight = schedules.by_epoch(schedules.linear(0.5, 2.5, steps=2), len(DATA.batches))
    return CompositeLoss(cross_entropy, [term(Drift(), weight), *terms()], aux={"router": 0.2})


class DriftByHand:
    def __init__(self) -> None:
        self.drift = Drift()

    def __call__(self, inputs: Mapping[str, Any], step: int, epoch: int) -> dict[str, Tensor]:
        found = parts(inputs, step, epoch)
        drift = (0.5 + epoch) * self.drift(inputs["hidden"])
        return {"base": found.pop("base"), "drift": drift, **found}


def test_validation_does_not_change_training() -> None:
    recorder, model, hand = Recorder(), Evaluated(with_drift()), net()
    trainer().test(model, HELD_OUT, verbose=False)  # in inference mode, unlike the validation below
    trainer(recorder, num_sanity_val_steps=1).fit(model, DATA, HELD_OUT)
    drift = DriftByHand()
    rows = by_hand(hand, DATA, drift)
    assert same(model.net, hand)
    logged = [row for row in recorder.rows if "train/loss_total" in row]
    assert contributions(logged) == [pytest.approx(row, rel=1e-6) for row in rows]
    assert model.composite.step == 9


def test_validation_logs_the_components_on_its_own_data() -> None:
    recorder, model = Recorder(), Evaluated(with_drift())
    trainer(recorder).fit(model, DATA, HELD_OUT)
    hand, drift = net(), DriftByHand()
    by_hand(hand, DATA, drift)
    expected: dict[str, float] = {}
    for x, labels in HELD_OUT:
        kept = deepcopy(drift)  # each batch sees the state that training left
        found = kept(read(hand, x, labels), 9, 1)
        for name, value in found.items():  # the mean of an epoch weighs batches by their size
            expected[name] = expected.get(name, 0.0) + value.item() * len(x) / 8
    last = next(row for row in reversed(recorder.rows) if "val/loss_total" in row)
    assert last["val/loss_total"] == pytest.approx(sum(expected.values()), rel=1e-6)
    assert last["val/base_loss/value"] == pytest.approx(expected["base"], rel=1e-6)
    for name in ("drift", "activity", "router"):
        logged = last[f"val/regularizers/{name}/contribution"]
        assert logged == pytest.approx(expected[name], rel=1e-6)


def test_a_test_run_logs_with_its_own_prefix() -> None:
    recorder = Recorder()
    trainer(recorder).test(Evaluated(), HELD_OUT, verbose=False)
    assert "test/regularizers/activity/value" in recorder.rows[-1]
    assert not any(key.startswith(("val/", "train/")) for key in recorder.rows[-1])


# Checkpoints.


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = Evaluated(with_drift())
    trainer(epochs=4).fit(whole, DATA, HELD_OUT)

    half = Evaluated(with_drift())
    first = trainer(epochs=2)
    first.fit(half, DATA, HELD_OUT)
    first.save_checkpoint(tmp_path / "half.ckpt")

    rest, recorder = Evaluated(with_drift(), net(seed=5)), Recorder()
    trainer(recorder, epochs=4).fit(rest, DATA, HELD_OUT, ckpt_path=tmp_path / "half.ckpt")
    assert same(rest, whole)
    drift = whole.composite.get_extra_state()
    assert rest.composite.get_extra_state() == drift
    assert drift["step"] == 19
    assert recorder.having("train/regularizers/drift/weight") == [2.5] * 10


def test_a_checkpoint_is_evaluated_with_the_weights_it_was_trained_with(tmp_path: Path) -> None:
    model = Evaluated(with_drift())
    done = trainer()
    done.fit(model, DATA, HELD_OUT)
    done.save_checkpoint(tmp_path / "done.ckpt")
    recorder = Recorder()
    fresh = Evaluated(with_drift(), net(seed=5))
    trainer(recorder).test(fresh, HELD_OUT, ckpt_path=tmp_path / "done.ckpt", verbose=False)
    row = recorder.rows[-1]
    assert row["test/regularizers/drift/weight"] == 1.5  # the last epoch's
    assert row["test/regularizers/activity/weight"] == pytest.approx(0.3)


def test_a_weight_can_follow_the_epoch() -> None:
    recorder = Recorder()
    trainer(recorder, epochs=3).fit(Model(with_drift()), DATA)
    weights = recorder.having("train/regularizers/drift/weight")
    assert weights == [0.5] * 5 + [1.5] * 5 + [2.5] * 5


def test_a_module_can_be_copied() -> None:
    model = Model(with_drift())
    copied = deepcopy(model)  # as weight averaging does
    copied.training_step(DATA.batches[0], 0)
    copied.composite.set_weight("activity", 7.0)
    state = model.composite.get_extra_state()
    assert state["terms"]["drift"]["average"] == 0
    assert model.composite.specs[1].weight == WARMUP


# Logging.


def test_log_settings_reach_lightning() -> None:
    class Epochs(Model):
        log_settings: ClassVar[Mapping[str, Any]] = {"on_step": False, "on_epoch": True}

    recorder = Recorder()
    trainer(recorder, epochs=1).fit(Epochs(), DATA)
    rows = by_hand(net(), DATA, parts, epochs=1)
    mean = sum(row["base"] * len(x) for row, (x, _) in zip(rows, DATA, strict=True)) / 18
    assert recorder.having("train/base_loss/value") == [pytest.approx(mean, rel=1e-6)]


def test_batch_size_weighs_the_mean_of_an_epoch() -> None:
    class Counted(Model):
        log_settings: ClassVar[Mapping[str, Any]] = {"on_step": False, "on_epoch": True}

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            logits, hidden = self.net(batch[0])
            size = batch_idx + 1
            return self.compose(logits=logits, hidden=hidden, labels=batch[1], batch_size=size)

    recorder = Recorder()
    trainer(recorder, epochs=1).fit(Counted(), DATA)
    rows = by_hand(net(), DATA, parts, epochs=1)
    mean = sum(row["base"] * size for size, row in enumerate(rows, 1)) / 15
    assert recorder.having("train/base_loss/value") == [pytest.approx(mean, rel=1e-6)]


def test_an_unknown_log_setting_is_refused() -> None:
    with pytest.raises(
        SpecError, match=r"arguments of log_dict, got 'on_steps'; there are: .*on_step,"
    ):

        class Wrong(Model):
            log_settings: ClassVar[Mapping[str, Any]] = {"on_steps": True}


def test_a_prediction_is_not_logged() -> None:
    class Predicts(Model):
        def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
            logits, hidden = self.net(batch[0])
            return self.compose(logits=logits, hidden=hidden, labels=batch[1])

    recorder, model = Recorder(), Predicts()
    predicted: Any = trainer(recorder).predict(model, HELD_OUT)
    assert recorder.rows == []
    expected = parts(read(model.net, *HELD_OUT.batches[0]), 0, 0)
    assert predicted[0].item() == pytest.approx(
        torch.stack(list(expected.values())).sum().item(), rel=1e-6
    )


def test_a_prediction_does_not_change_the_state_of_the_terms() -> None:
    class Predicts(Model):
        def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
            logits, hidden = self.net(batch[0])
            return self.compose(logits=logits, hidden=hidden, labels=batch[1])

    drift = Drift()
    model = Predicts(CompositeLoss(cross_entropy, [term(drift, 0.5)], aux={"router": 0.1}))
    trainer().predict(model, HELD_OUT)
    assert drift.average.item() == 0.0


# Auxiliary losses.


def test_a_step_that_composes_twice_counts_each_auxiliary_loss_once() -> None:
    class Twice(Model):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            first = super().training_step(batch, batch_idx)
            return first + super().training_step(batch, batch_idx)

    model = Twice()
    model.composite.step = 0  # without a trainer each call would be a step
    total = model.training_step(DATA.batches[0], 0)
    assert total.item() == pytest.approx(2 * Model().training_step(DATA.batches[0], 0).item())


def test_a_step_may_compose_what_the_parent_step_computed() -> None:
    class Computes(Model):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            return self.net(batch[0])

    class Composes(Computes):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            logits, hidden = super().training_step(batch, batch_idx)
            return self.compose(logits=logits, hidden=hidden, labels=batch[1])

    total = Composes().training_step(DATA.batches[0], 0)
    assert torch.equal(total, Model().training_step(DATA.batches[0], 0))


def test_a_step_that_fails_stops_collecting_auxiliary_losses() -> None:
    class Fails(Model):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            self.net(batch[0])
            raise ZeroDivisionError

    model = Fails()
    with collect_aux() as around:
        with pytest.raises(ZeroDivisionError):
            model.training_step(DATA.batches[0], 0)
        aux_loss("mine", torch.ones(()))
    assert around.keys() == {"mine"}
    assert model._aux is None


def test_an_auxiliary_loss_without_a_weight_warns() -> None:
    model = Model(CompositeLoss(cross_entropy, terms()))
    with pytest.warns(
        UserWarning, match=r"leaves the auxiliary loss 'router', which has no weight"
    ):
        model.training_step(DATA.batches[0], 0)


def test_an_input_called_aux_is_an_ordinary_input() -> None:
    composite = CompositeLoss(cross_entropy, [term(lambda aux: aux.sum(), 0.5, "mine")])
    logits = torch.zeros(1, 4, requires_grad=True)
    total = composite(logits=logits, labels=torch.tensor([1]), aux=logits + 1)
    assert total.item() == pytest.approx(torch.tensor(4.0).log().item() + 2)


# Bad arguments.


def test_a_module_without_a_composite_is_refused() -> None:
    class Bare(RegularizedModule, Plain):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return self.compose(logits=batch[0])

    with pytest.raises(
        InputError,
        match=r"composite must be a CompositeLoss, got None: set self\.composite in Bare\.__init__",
    ):
        trainer().fit(Bare(), DATA)


def test_a_missing_input_lists_the_available_ones() -> None:
    class Forgets(Model):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            logits, _ = self.net(batch[0])
            return self.compose(logits=logits, labels=batch[1])

    there = r"'logits', 'labels', 'aux\.router'"
    with pytest.raises(InputError, match=rf"'hidden', which is not there; the inputs are: {there}"):
        trainer().fit(Forgets(), DATA)
