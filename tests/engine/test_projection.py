"""Terms over a projection: the gradients of terms over logits, which are never computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tinker import types
from torch import Tensor

from steelyard import RegularizerSpec, regularize
from steelyard.engine import LocalServiceClient, LocalTrainingClient, forward, tiny
from steelyard.engine.datum_tensors import read_examples
from steelyard.engine.forward import OutputGradients
from steelyard.errors import InputError, TermError
from steelyard.penalties.from_logits import Projection, compose_logits, entropy
from steelyard.penalties.from_logits import projection as projected
from steelyard.regularizers import Entropy
from tests.seeing import Seen

from .data import by_hand, close, datum, ragged, same, train

LENGTHS = [23, 4, 40, 9]
DATA = ragged(3, LENGTHS)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_CHUNK_CPU", 7 * tiny.VOCABULARY)  # 76 tokens
    monkeypatch.setattr(projected, "_ELSEWHERE", 5 * tiny.VOCABULARY)


def create(max_tokens: int | None = None, dtype: str = "float64", **more: Any) -> Any:
    service = LocalServiceClient(dtype=dtype, max_tokens=max_tokens)
    client = service.create_lora_training_client("tiny-random", rank=3, seed=1, **more)
    train(client)
    return client


def squares(_: object, logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
    return torch.cat([row.flatten() for row in logprobs]).square().mean(), {}


def spread(rows: Sequence[Any]) -> Tensor:
    total: Tensor = sum((i + 1) * entropy(each) for i, each in enumerate(rows))
    return total


def anchored(data: Sequence[types.Datum], rows: Sequence[Any]) -> Tensor:
    """Cross-entropy and z-loss together, of all data but the second."""
    totals = []
    for one, z in zip(data, rows, strict=True):
        device = (z.hidden if isinstance(z, Projection) else z).device
        targets = one.loss_fn_inputs["target_tokens"].to_torch().to(device)
        terms: list[Any] = ["cross_entropy", ("z_loss", {"weight": 0.1})]
        if len(targets) > 4:
            totals.append(compose_logits(z, terms, targets=targets).total)
    return torch.stack(totals).mean()


def terms(need: str) -> list[RegularizerSpec]:
    return [
        RegularizerSpec(lambda d, lp, **z: spread(z[need]), 0.5, "spread", needs=(need,)),
        RegularizerSpec(
            lambda d, lp, **z: anchored(d, z[need]) + lp[1].sum(), 0.3, "anchored", needs=(need,)
        ),
    ]


def composed(client: Any, need: str) -> tuple[Any, dict[str, Tensor]]:
    output = regularize(client).forward_backward_custom(
        DATA, squares, regularizers=terms(need), track_grad_norms=True
    )
    result = output.result()
    gradients = client.gradients()
    client.optim_step(types.AdamParams(learning_rate=0.0)).result()
    return result, gradients


@pytest.mark.parametrize("max_tokens", [None, 30], ids=["whole", "in parts"])
@pytest.mark.parametrize("unembed", [True, False])
def test_terms_over_a_projection_have_the_gradients_of_terms_over_logits(
    unembed: bool, max_tokens: int | None
) -> None:
    client = create(max_tokens, train_unembed=unembed)
    wanted, by_logits = composed(client, "logits")
    found, by_projection = composed(client, "projection")
    assert found.loss_total == pytest.approx(wanted.loss_total, rel=1e-12)
    assert any("lm_head" in key for key in by_logits) == unembed
    close(by_projection, by_logits, 1e-10)
    for name in ("spread", "anchored"):
        assert found.regularizers[name].grad_space == "projection"
        ours, theirs = found.regularizers[name].value, wanted.regularizers[name].value
        assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_a_projection_on_any_device(device: str, dtype: str) -> None:
    """In float32 on a GPU the terms run by the kernels."""
    found = []
    for place, need in (("cpu", "logits"), (device, "projection")):
        with LocalServiceClient(dtype=dtype, device=place) as service:
            client = service.create_lora_training_client("tiny-random", rank=3, seed=1)
            train(client)
            output, gradients = composed(client, need)
            found.append((output.loss_total, {key: x.cpu() for key, x in gradients.items()}))
    # transformers computes the positions' cosines in float32, which differ between devices.
    exact = 1e-10 if device == "cpu" else 1e-6
    tolerance = exact if dtype == "float64" else 1e-3
    assert found[1][0] == pytest.approx(found[0][0], rel=tolerance)
    close(found[1][1], found[0][1], tolerance)


@pytest.mark.parametrize("unembed", [True, False])
def test_gradient_norms_include_hidden_states_and_a_trained_output_weight(unembed: bool) -> None:
    client = create(train_unembed=unembed)
    output, _ = composed(client, "projection")
    weights, gradients = client.weights(), {}
    for name, fn in (("spread", spread), ("anchored", lambda rows: anchored(DATA, rows))):
        hidden = []
        for one in DATA:
            states = by_hand(weights, one.model_input.to_ints(), output_hidden_states=True)
            hidden.append(states.hidden_states[-1][0].detach().requires_grad_())
        layer = tiny.build(torch.float64).lm_head.weight.detach()
        if unembed:
            key = "base_model.model.lm_head.lora_{}.weight"
            a, b = weights[key.format("A")], weights[key.format("B")]
            layer = (layer + 32 / 3 * b @ a).requires_grad_()
        value = fn([each @ layer.T for each in hidden])
        leaves = [*hidden, layer] if unembed else hidden
        found = torch.autograd.grad(value, leaves, allow_unused=True)
        gradients[name] = torch.cat(
            [
                (torch.zeros_like(x) if g is None else g).flatten()
                for x, g in zip(leaves, found, strict=True)
            ]
        )
        norm = output.regularizers[name].grad_norm
        assert norm == pytest.approx(gradients[name].norm().item(), rel=1e-8)
    cosine = torch.cosine_similarity(gradients["spread"], gradients["anchored"], 0).item()
    assert output.cosines["spread", "anchored"] == pytest.approx(cosine, rel=1e-8)


@pytest.mark.parametrize("need", ["logits", "projection"])
def test_a_step_with_a_projection_computes_logits_chunk_by_chunk(need: str) -> None:
    client = create()
    trainer = client._trainer
    examples = read_examples(DATA, {}, trainer.model.limits)
    trainer.open_pass(examples, (need,))  # the test for projections runs once, before this

    def step() -> int:
        seen = Seen()
        with seen:
            opened = trainer.open_pass(examples, (need,))
            given = [found[need] for found in opened.outputs]
            if need == "projection":
                leaves = [each.hidden for each in given]
                value = spread(given)
                *by_hidden, by_weight = torch.autograd.grad(value, [*leaves, given[0].weight])
                gradients: list[Any] = [Projection(each, by_weight) for each in by_hidden]
            else:
                leaves = [each.requires_grad_() for each in given]
                gradients = list(torch.autograd.grad(spread(given), leaves))
            by_logprobs = [torch.ones_like(found["logprobs"]) for found in opened.outputs]
            extra_gradients: dict[str, Any] = {need: gradients}
            trainer.backward(opened, OutputGradients(by_logprobs, **extra_gradients))
        return seen.rows.get(tiny.VOCABULARY, 0)

    rows = client._worker.submit(step).result()
    features = 64  # of the output layer's weight, turned
    assert rows >= sum(LENGTHS) if need == "logits" else rows <= features


def test_logits_and_projection_of_one_pass_agree() -> None:
    client = create()
    data = ragged(8, [5, 12, 3], width=3)
    opened = client.open_pass(data, ("logits", "projection"))
    lean = client.open_pass(data, ("projection",))
    for z, p, q in zip(
        opened.given["logits"], opened.given["projection"], lean.given["projection"], strict=True
    ):
        torch.testing.assert_close(p.logits().detach(), z, rtol=0, atol=1e-12)
        torch.testing.assert_close(q.hidden, p.hidden)
        assert p.weight is opened.given["projection"][0].weight
    for ours, theirs in zip(lean.logprobs, opened.logprobs, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    gradients = [torch.randn_like(row) for row in lean.logprobs]
    lean.backward(gradients, {}).result()
    ours = client.gradients()
    client.optim_step(types.AdamParams(learning_rate=0.0)).result()
    opened = client.open_pass(data, ("logits",))
    opened.backward(gradients, {}).result()
    close(ours, client.gradients(), 1e-10)


def test_weights_that_changed_before_the_backward_pass_are_used_by_it() -> None:
    """The graph and the output layer's weight are computed again."""
    client, other = create(), create()
    opened, kept = (c.open_pass(DATA, ("projection",)) for c in (client, other))
    train(client, seed=20)
    train(other, seed=20)
    kept = other.open_pass(DATA, ("projection",))
    zero = [torch.zeros_like(row) for row in opened.logprobs]
    by_weight = torch.randn_like(opened.given["projection"][0].weight)
    gradients = [
        Projection(torch.randn_like(p.hidden), by_weight) for p in opened.given["projection"]
    ]
    opened.backward(zero, {"projection": gradients}).result()
    kept.backward(zero, {"projection": gradients}).result()
    close(client.gradients(), other.gradients(), 1e-10)


def far(data: object, logprobs: object, projection: Sequence[Projection]) -> Tensor:
    """Term at the top level of a module, so that another process can import it."""
    return spread(projection)


def test_a_term_in_another_process_has_the_same_gradient() -> None:
    found = []
    client = create(train_unembed=False)
    for place in ("inline", "process"):
        spec = RegularizerSpec(far, 1.0, "far", needs=("projection",), run_in=place)
        output = regularize(client).forward_backward_custom(
            DATA, squares, regularizers=[spec], track_grad_norms=True
        )
        norm = output.result().regularizers["far"].grad_norm
        found.append((norm, client.gradients()))
        client.optim_step(types.AdamParams(learning_rate=0.0)).result()
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    close(found[1][1], found[0][1], 1e-12)


def saved(folder: Path, model: Any) -> str:
    model.save_pretrained(folder)
    return str(folder)


def test_the_projection_of_a_tied_output_layer_has_the_gradients_of_logits(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0
    )
    folder = saved(tmp_path, transformers.GPT2LMHeadModel(config))  # type: ignore[no-untyped-call]
    with LocalServiceClient(dtype="float64") as service:
        client = service.create_lora_training_client(folder, rank=2, seed=0)
        data = [datum([1, 2, 3, 4]), datum([9, 8])]
        client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.05)).result()
        found = []
        for need in ("logits", "projection"):
            regularize(client).forward_backward_custom(
                data, squares, regularizers=terms(need)[:1]
            ).result()
            found.append(client.gradients())
            client.optim_step(types.AdamParams(learning_rate=0.0)).result()
    close(found[1], found[0], 1e-10)


def test_the_projection_has_the_bias_of_the_output_layer(tmp_path: Path) -> None:
    config = transformers.PhiConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    model: Any = transformers.PhiForCausalLM(config)  # type: ignore[no-untyped-call]
    torch.nn.init.normal_(model.lm_head.bias, generator=torch.Generator().manual_seed(0))
    folder = saved(tmp_path, model)
    with LocalServiceClient(dtype="float64") as service:
        client = service.create_lora_training_client(folder, rank=2, seed=0)
        data = [datum([1, 2, 3, 4]), datum([9, 8])]
        given = client.open_pass(data, ("projection",)).given["projection"]
        model = transformers.PhiForCausalLM.from_pretrained(folder, dtype=torch.float64)
        for one, projection in zip(data, given, strict=True):
            expected = model(torch.tensor([one.model_input.to_ints()])).logits[0]
            torch.testing.assert_close(projection.logits(), expected, rtol=0, atol=1e-10)
        found = []
        for need in ("logits", "projection"):
            output = regularize(client).forward_backward_custom(
                data, squares, regularizers=terms(need)[:1]
            )
            found.append((output.result().regularizers["spread"].value, client.gradients()))
            client.optim_step(types.AdamParams(learning_rate=0.0)).result()
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-12)
    close(found[1][1], found[0][1], 1e-10)


def test_a_model_that_changes_its_logits_is_refused(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = transformers.Gemma2Config(**sizes)
    capped: Any = transformers.Gemma2ForCausalLM(config)  # type: ignore[no-untyped-call]
    folder = saved(tmp_path, capped)
    with LocalServiceClient() as service:
        client = service.create_lora_training_client(folder, rank=2, seed=0)
        before = client.gradients()
        with pytest.raises(InputError, match=r"changes them after it: use needs=\('logits',\)"):
            client.open_pass([datum([1, 2, 3])], ("projection",))
        client.open_pass([datum([1, 2, 3])], ("logits",))
        assert same(client.gradients(), before)
        assert client.gives == ("hidden_states", "logits", "parameters", "reference_logits")
        entropy_term = RegularizerSpec(Entropy(), 0.1, "entropy")  # on fixed data
        fixed = [datum([1, 2, 3])]
        output = regularize(client, [entropy_term]).forward_backward(fixed, "cross_entropy")
        assert output.result().regularizers["entropy"].grad_space == "logits"


def test_a_model_without_an_output_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "steelyard.engine.model.Model.output_layer", property(lambda _: None), raising=True
    )
    client = create()
    assert "projection" not in client.gives
    with pytest.raises(InputError, match="has none or changes them"):
        client.open_pass(DATA, ("projection",))


def test_a_term_that_fails_accumulates_no_gradient(client: LocalTrainingClient) -> None:
    def broken(data: object, logprobs: object, projection: Sequence[Projection]) -> Tensor:
        return entropy(projection[0], temperature=-1.0)  # type: ignore[no-any-return]

    spec = RegularizerSpec(broken, 1.0, "broken", needs=("projection",))
    with pytest.raises(TermError, match="temperature must be"):
        regularize(client).forward_backward_custom(DATA, squares, regularizers=[spec])
    assert not any(gradient.any() for gradient in client.gradients().values())
