"""Terms with data of their own on a server: one request a pass, and the numbers of the engine."""

from __future__ import annotations

from typing import Any

import pytest
import tinker
import torch

from steelyard import RegularizerSpec, regularize
from steelyard.engine import LocalServiceClient
from steelyard.errors import SpecError
from steelyard.experiment.training.base_losses import CrossEntropy
from steelyard.gradients.datum_fields import loss_fn_input
from steelyard.regularizers import L2, NLL, KLToReference
from tests.clients.sdk import Answered, Holder, engine

from .batches import STEP, assert_same, batch

OTHERS = batch(100, lengths=[5, 7, 3, 8, 6, 4])


def rewarded(data: Any, logprobs: list[torch.Tensor]) -> torch.Tensor:
    """A function of the user, over a field, which it divides by."""
    rows = zip(data, logprobs, strict=True)
    return torch.stack(
        [(row / loss_fn_input(datum, "logprobs").to_torch()).square().sum() for datum, row in rows]
    ).mean()


def own(fn: Any, weight: float, name: str, **more: Any) -> RegularizerSpec:
    return RegularizerSpec(fn, weight, name, data=OTHERS, per_step=2, **more)


SPECS = [
    own(KLToReference(estimator="k2"), 0.7, "kept"),
    own(NLL(), 0.5, "sft"),
    own(rewarded, 0.01, "function", every=2),
    RegularizerSpec(L2(), 0.01, "batch"),
    RegularizerSpec(KLToReference(), 0.2, "kl"),
]


@pytest.mark.parametrize("base", ["cross_entropy", "importance_sampling", "ppo", CrossEntropy()])
@pytest.mark.parametrize("side", [True, False])
def test_a_server_gives_the_numbers_of_the_engine(
    training: tinker.TrainingClient, base: Any, side: bool
) -> None:
    local = LocalServiceClient().create_lora_training_client("tiny-random", rank=4, seed=0)
    ways = [
        regularize(client, SPECS, track_grad_norms=True, server_side=on, seed=3)
        for client, on in ((training, side), (local, False))
    ]
    for step in range(3):
        outputs, updates = [], []
        for client in ways:
            call = client.forward_backward if isinstance(base, str) else (
                client.forward_backward_custom
            )  # fmt: skip
            outputs.append(call(batch(step), base).result())
            updates.append(client.optim_step(STEP).result().metrics)
        found, expected = outputs
        assert found.passes == (1 if side else 2)
        assert len(found.loss_fn_outputs) == len(batch(step))
        assert found.server_metrics.pop("surrogate_loss:sum", None) is not None
        expected.server_metrics.pop("surrogate_loss:sum")
        assert_same(found, expected)
        assert ("function" in found.not_run) == (step == 1)
        assert {name for pair in found.cosines for name in pair} == {"base", "batch", "kl"}
        for name in ("base", "kept", "sft"):
            drivers = [(d.datum, pytest.approx(d.share, abs=1e-4)) for d in found.drivers(name, 3)]
            assert [(d.datum, d.share) for d in expected.drivers(name, 3)] == drivers
        norms = [update["unclipped_grad_l2:mean"] for update in updates]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4, abs=1e-6)


def test_calls_of_one_step_draw_different_data(training: tinker.TrainingClient) -> None:
    client = regularize(training, [own(NLL(), 0.5, "sft")], server_side=True)
    drawn = []
    for _ in range(6):
        client.forward_backward(batch(), "cross_entropy", None).result()
        drawn.append(tuple(map(id, client.last_data.own["sft"])))
    assert len(set(drawn)) > 1


def test_a_pass_is_one_request_with_zeros_for_the_base_loss_on_other_data() -> None:
    holder = Holder()
    try:
        client = Answered(engine(), holder)
        wrapped = regularize(client, [own(NLL(), 0.0, "sft"), own(NLL(), 2.0, "more")])
        wrapped.forward_backward(batch(), "cross_entropy").result()
        assert [verb for verb, _ in client.sent] == ["forward", "forward_backward"]
        for _, data in client.sent:
            assert len(data) == len(batch()) + 4
            assert all({*d.loss_fn_inputs} == {"target_tokens", "weights"} for d in data)
        weights = [d.loss_fn_inputs["weights"].to_torch() for d in client.sent[1][1]]
        for row, datum in zip(weights[:4], batch(), strict=True):
            torch.testing.assert_close(row, datum.loss_fn_inputs["weights"].to_torch())
        assert not any(row.any() for row in weights[4:6])  # of a term with weight 0
        assert all(row.any() for row in weights[6:])
    finally:
        holder.close()


def test_the_exact_kl_of_the_engine_is_the_log_ratio_on_a_server(
    training: tinker.TrainingClient,
) -> None:
    client = regularize(training, [own(KLToReference(), 0.7, "kept")])
    output = client.forward_backward(batch(), "cross_entropy").result()
    assert set(output.regularizers["kept"].custom) == {"k1", "k2", "k3"}
    exact = regularize(training, [own(KLToReference(estimator="exact"), 0.7, "kept")])
    with pytest.raises(Exception, match=r"which steelyard\.engine computes"):
        exact.forward_backward(batch(), "cross_entropy").result()


def test_a_bound_takes_two_passes_and_says_so(training: tinker.TrainingClient) -> None:
    bounded = RegularizerSpec(NLL(), name="sft", at_most=0.1, data=OTHERS, per_step=2)
    client = regularize(training, [bounded])
    output = client.forward_backward(batch(), "cross_entropy").result()
    assert output.passes == 2
    assert list(client.explain().reasons) == ["sft"]
    assert output.regularizers["sft"].weight > 0
    with pytest.raises(SpecError, match="server_side=True needs a loss"):
        regularize(training, [bounded], server_side=True).forward_backward(batch(), "cross_entropy")
