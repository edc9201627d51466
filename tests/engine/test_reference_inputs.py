"""What the base model computes beside the trained one, and the exact KL to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tinker import types

from steelyard import RegularizerSpec, regularize
from steelyard.engine import LocalServiceClient
from steelyard.engine.training_client import LocalTrainingClient
from steelyard.errors import InputError, TermError
from steelyard.regularizers import NLL, KLToReference


def datum(*tokens: int) -> types.Datum:
    weights = [0.0] + [1.0] * (len(tokens) - 2)
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), "weights": weights},  # type: ignore[dict-item]  # the SDK converts lists
    )


BATCH = [datum(1, 2, 3), datum(3, 4, 5, 6)]
OTHERS = [datum(7, 8, 9, i, i + 1) for i in range(6)]


@pytest.fixture
def trained() -> LocalTrainingClient:
    """A client whose model differs from the base model."""
    client = LocalServiceClient().create_lora_training_client("tiny-random", rank=4, seed=0)
    for _ in range(3):
        client.forward_backward(BATCH, "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=0.03)).result()
    return client


def kl_by_hand(client: LocalTrainingClient, data: list[types.Datum], direction: str) -> float:
    """KL over the vocabulary in float64, from passes of this client and of an untrained one."""
    base = LocalServiceClient().create_lora_training_client("tiny-random", rank=4, seed=1)
    rows = []
    ours = client.open_pass(data, ("logits",)).given["logits"]
    theirs = base.open_pass(data, ("logits",)).given["logits"]
    for one, own, other in zip(data, ours, theirs, strict=True):
        counted = one.loss_fn_inputs["weights"].to_torch() != 0
        p, r = (x.double().log_softmax(-1)[counted] for x in (own, other))
        if direction == "reverse":
            p, r = r, p
        rows.append((p.exp() * (p - r)).sum(-1))
    return torch.cat(rows).mean().item()


def test_they_are_the_outputs_of_the_base_model(trained: LocalTrainingClient) -> None:
    base = LocalServiceClient().create_lora_training_client("tiny-random", rank=4, seed=1)
    expected = base.open_pass(OTHERS, ("logits",)).given["logits"]
    given = trained.open_pass(OTHERS, ("reference_logits", "reference_projection")).given
    for i, logits in enumerate(expected):
        torch.testing.assert_close(given["reference_logits"][i], logits)
        torch.testing.assert_close(given["reference_projection"][i].logits(), logits)


def test_they_are_at_the_temperature_of_the_policy(trained: LocalTrainingClient) -> None:
    needs = ("reference_logits", "reference_projection")
    at_one = trained.open_pass(OTHERS, needs).given
    at_two = trained.open_pass(OTHERS, needs, temperature=2.0).given
    torch.testing.assert_close(at_two["reference_logits"][0], at_one["reference_logits"][0] / 2)
    torch.testing.assert_close(
        at_two["reference_projection"][0].logits(), at_one["reference_projection"][0].logits() / 2
    )


def test_the_base_model_runs_only_for_the_data_that_need_it(trained: LocalTrainingClient) -> None:
    given = trained.open_pass([*BATCH, *OTHERS], ("reference_logits",), reference_of=[2, 4]).given
    have = [i for i, logits in enumerate(given["reference_logits"]) if logits is not None]
    assert have == [2, 4]


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("grad_space", ["logprobs", "parameters"])
def test_the_kl_to_the_base_model_on_data_of_its_own_is_exact(
    trained: LocalTrainingClient, direction: Any, grad_space: Any
) -> None:
    term = RegularizerSpec(
        KLToReference(direction=direction), 2.0, "keep", data=OTHERS, per_step=len(OTHERS)
    )
    client = regularize(trained, [term], track_grad_norms=True, grad_space=grad_space)
    output = client.forward_backward(BATCH, "cross_entropy").result()
    expected = kl_by_hand(trained, OTHERS, direction)
    assert expected > 0.01
    assert output.regularizers["keep"].value == pytest.approx(expected, rel=1e-4)
    assert output.regularizers["keep"].grad_norm > 0
    # The gradient lowers it: a step of gradient descent along the term's own gradient.
    assert (("base", "keep") in output.cosines) == (grad_space == "parameters")


def test_its_gradient_agrees_with_differences(trained: LocalTrainingClient) -> None:
    """d KL / d A for one weight of the adapter, by central differences in float32."""
    term = RegularizerSpec(KLToReference(), 1.0, "keep", data=OTHERS, per_step=len(OTHERS))
    client = regularize(trained, [term])
    client.forward_backward_custom(OTHERS[:1], lambda data, lps: lps[0].sum() * 0.0).result()
    gradients = trained.gradients()
    key = max(gradients, key=lambda name: float(gradients[name].abs().max()))
    index = int(gradients[key].abs().argmax())
    parameter = trained._trainer.adapter.parameters[key]
    values = []
    for move in (1e-2, -1e-2):
        with torch.no_grad():
            parameter.view(-1)[index] += move
        values.append(kl_by_hand(trained, OTHERS, "forward"))
        with torch.no_grad():
            parameter.view(-1)[index] -= move
    slope = (values[0] - values[1]) / 2e-2
    assert gradients[key].view(-1)[index].item() == pytest.approx(slope, rel=2e-2)


def test_large_batches_read_the_projection(trained: LocalTrainingClient) -> None:
    logits_only = KLToReference().needs_for(OTHERS, ("logits", "reference_logits"), own=True)
    assert logits_only == ("logits", "reference_logits")
    both = ("logits", "projection", "reference_logits", "reference_projection")
    many = [datum(*range(1, 400))] * 4  # of a vocabulary taken for one of 2^17
    assert KLToReference().needs_for(many, both, own=True) == ("projection", "reference_projection")
    term = RegularizerSpec(
        KLToReference(), 1.0, "keep", data=OTHERS, per_step=6,
        needs=("projection", "reference_projection"),
    )  # fmt: skip
    output = regularize(trained, [term]).forward_backward(BATCH, "cross_entropy").result()
    expected = kl_by_hand(trained, OTHERS, "forward")
    assert output.regularizers["keep"].value == pytest.approx(expected, rel=1e-4)


def test_what_is_not_exact_stays_an_estimate() -> None:
    both = ("logits", "reference_logits")
    assert KLToReference().needs_for(OTHERS, both) == ()  # data of the batch
    assert KLToReference(estimator="exact").needs_for(OTHERS, both) == both
    assert KLToReference().needs_for(OTHERS, ("logits",), own=True) == ()  # no base model there
    assert KLToReference(reference="other").needs_for(OTHERS, both, own=True) == ()
    assert KLToReference(level="sequence").needs_for(OTHERS, both, own=True) == ()
    assert KLToReference().needs_for([], both, own=True) == both
    assert KLToReference().needs_for(None, both, own=True) == ()


def test_exact_without_the_engine_is_an_error_that_says_so() -> None:
    with pytest.raises(InputError, match=r"which steelyard\.engine computes"):
        KLToReference(estimator="exact").compute(OTHERS[:1], [torch.zeros(4)])


def test_a_likelihood_term_beside_another_loss(trained: LocalTrainingClient) -> None:
    term = RegularizerSpec(NLL(), 0.5, "sft", data=OTHERS, per_step=3)
    client = regularize(trained, [term])
    first = client.forward_backward(BATCH, "cross_entropy").result()
    assert len(first.loss_fn_outputs) == len(BATCH)
    values = [first.regularizers["sft"].value]
    for _ in range(8):
        client.optim_step(types.AdamParams(learning_rate=0.02)).result()
        values.append(
            client.forward_backward(BATCH, "cross_entropy").result().regularizers["sft"].value
        )
    assert values[-1] < values[0]


def test_a_thread_gets_constants_without_a_gradient(trained: LocalTrainingClient) -> None:
    def closeness(data: Any, logprobs: Any, logits: Any, reference_logits: Any) -> torch.Tensor:
        assert len(data) == len(logprobs) == len(logits) == len(reference_logits)
        rows = zip(logits, reference_logits, strict=True)
        return torch.stack([(own - base).square().mean() for own, base in rows]).mean()

    needs = ("logits", "reference_logits")
    values = []
    for run_in in ("inline", "thread"):
        spec = RegularizerSpec(
            closeness,
            0.1,
            "close",
            data=OTHERS,
            per_step=6,
            needs=needs,
            run_in=run_in,
        )
        client = regularize(trained, [spec], track_grad_norms=True)
        output = client.forward_backward(BATCH, "cross_entropy").result()
        values.append((output.regularizers["close"].value, output.regularizers["close"].grad_norm))
    assert values[0] == pytest.approx(values[1])


def test_a_term_that_fails_on_its_own_data_is_named(trained: LocalTrainingClient) -> None:
    spec = RegularizerSpec(KLToReference(reference="missing"), 1.0, "keep", data=OTHERS)
    with pytest.raises(TermError, match=r"regularizer 'keep' failed.*'missing'"):
        regularize(trained, [spec]).forward_backward(BATCH, "cross_entropy").result()
