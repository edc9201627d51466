"""Inputs of terms from a forward pass of the real `Trainer`, with and without logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from steelyard import RegularizerSpec
from steelyard.engine import tiny
from steelyard.errors import InputError
from steelyard.integrations import term
from steelyard.integrations.huggingface.forward_capture import ForwardCapture
from steelyard.penalties import from_logits
from steelyard.penalties.from_logits import Projection
from tests.integrations.huggingface.logit_free import (
    FEATURES,
    assert_alike,
    logit_terms,
    model_with_capped_logits,
    projection_terms,
    train,
)
from tests.integrations.huggingface.training import (
    Collator,
    RegularizedTrainer,
    arguments,
    assert_same_weights,
    rows,
    surprise,
)

pytestmark = pytest.mark.usefixtures("small_chunks")


def doubled_loss(logits: Tensor, labels: Tensor, vocab_size: int, **rest: Any) -> Tensor:
    loss: Tensor = ForCausalLMLoss(logits, labels, vocab_size, **rest)
    return 2 * loss


class Inline(transformers.LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A model that computes its loss without asking for its loss function."""

    def forward(self, input_ids: Tensor, labels: Tensor, **rest: Any) -> Any:
        items = rest.pop("num_items_in_batch", None)
        out = super().forward(input_ids=input_ids, **rest)
        out.loss = ForCausalLMLoss(out.logits, labels, tiny.VOCABULARY, items)
        return out


class Silent(transformers.LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A model whose loss would come out, and be wrong, from any logits."""

    def forward(self, input_ids: Tensor, labels: Tensor, **rest: Any) -> Any:
        rest.pop("num_items_in_batch", None)
        out = super().forward(input_ids=input_ids, **rest)
        out.loss = out.logits.square().mean() + 0 * labels.sum()
        return out


class Unlabelled(transformers.LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A model with a loss of its own that reads no labels."""

    def forward(self, input_ids: Tensor, **rest: Any) -> Any:
        out = super().forward(input_ids=input_ids)
        out.loss = out.logits.mean()
        return out


def unlabelled() -> Any:
    return Unlabelled(tiny.build(torch.float32).config).train()  # type: ignore[no-untyped-call]


def with_another_loss(kind: str) -> Any:
    model = tiny.build(torch.float32)
    if kind == "loss function":
        model.loss_function = doubled_loss
    elif kind == "inline":
        model.__class__ = Inline
    elif kind == "silent":
        model.__class__ = Silent
    return model


@pytest.mark.parametrize("kind", ["loss function", "inline", "silent"])
def test_a_loss_that_is_not_transformers_own_gets_logits(kind: str, tmp_path: Path) -> None:
    ours, most = train(tmp_path, with_another_loss(kind), projection_terms())
    theirs, _ = train(tmp_path, with_another_loss(kind), logit_terms())
    assert most > FEATURES
    assert_alike(ours, theirs)


def test_a_term_that_reads_logits_gets_them(tmp_path: Path) -> None:
    def level(logits: Tensor) -> Tensor:
        return logits.mean()

    terms = [*projection_terms(), term(level, 0.0)]
    ours, most = train(tmp_path, tiny.build(torch.float32), terms, max_steps=1)
    assert most > FEATURES
    plain, _ = train(tmp_path, tiny.build(torch.float32), projection_terms(), max_steps=1)
    assert_same_weights(ours.model, plain.model)


def test_a_captured_output_layer_gives_logits(tmp_path: Path) -> None:
    seen = []

    def look(projection: Projection, activations: dict[str, Tensor]) -> Tensor:
        seen.append(activations["lm_head"].shape[-1])
        value: Tensor = from_logits.entropy(projection)
        return value

    train(tmp_path, tiny.build(torch.float32), [term(look, 0.1)], capture="lm_head", max_steps=2)
    assert seen == [tiny.VOCABULARY] * 2


def test_the_placeholder_of_logits_is_no_input(tmp_path: Path) -> None:
    terms = [*projection_terms(), term(lambda router: router.sum(), 1.0, "router")]
    with pytest.raises(InputError, match="reads the input 'router', which is not") as caught:
        train(tmp_path, tiny.build(torch.float32), terms)
    assert "'projection.hidden'" in str(caught.value)
    assert "'logits'" not in str(caught.value)


def test_returned_outputs_have_logits(tmp_path: Path) -> None:
    trainer: Any = RegularizedTrainer(
        model=tiny.build(torch.float32).train(),
        args=arguments(tmp_path),
        train_dataset=rows([6, 9]),
        terms=projection_terms(),
    )
    batch = Collator()(rows([6, 9]))
    total, outputs = trainer.compute_loss(trainer.model, dict(batch), return_outputs=True)
    assert outputs.logits.shape == (2, 9, tiny.VOCABULARY)
    lean = trainer.compute_loss(trainer.model, dict(batch))
    torch.testing.assert_close(lean, total)


def test_an_error_is_raised_at_once_after_a_pass_without_logits_has_worked(tmp_path: Path) -> None:
    trainer: Any = RegularizedTrainer(
        model=tiny.build(torch.float32).train(),
        args=arguments(tmp_path),
        train_dataset=rows([6]),
        terms=projection_terms(),
    )
    batch = Collator()(rows([6]))
    calls: list[int] = []
    trainer.compute_loss(trainer.model, dict(batch))
    trainer.model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(IndexError):
        trainer.compute_loss(trainer.model, {**batch, "input_ids": batch["input_ids"] + 512})
    assert calls == [1]
    other = tiny.build(torch.float32).train()
    other.model.register_forward_pre_hook(lambda *_: calls.append(2))
    fresh = RegularizedTrainer(
        model=other, args=arguments(tmp_path), train_dataset=rows([6]), terms=projection_terms()
    )
    with pytest.raises(IndexError):
        fresh.compute_loss(other, {**batch, "input_ids": batch["input_ids"] + 512})
    assert calls == [1, 2, 2]


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (RegularizerSpec(surprise, 0.02, "surprise"), "data"),
        (term(from_logits.entropy, 0.5, inputs="projection"), "projection"),
    ],
)
def test_without_labels_there_is_no_completion(
    spec: RegularizerSpec, name: str, tmp_path: Path
) -> None:
    trainer: Any = RegularizedTrainer(
        model=unlabelled(), args=arguments(tmp_path), train_dataset=rows([6]), terms=[spec]
    )
    with pytest.raises(InputError, match=f"^Trainer has no input '{name}'.*no labels"):
        trainer.compute_loss(trainer.model, {"input_ids": torch.arange(6)[None]})


def test_a_model_without_output_layer_has_no_projection(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(512, 1)

        def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
            return {"loss": self.table(input_ids).mean() + 0 * labels.sum()}

    with pytest.raises(InputError, match="and Bare has none: read hidden_states"):
        train(tmp_path, Bare(), projection_terms()[:1])


def test_a_model_that_changes_its_logits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Gemma2ForCausalLM changes them after it: read logits"):
        train(tmp_path, model_with_capped_logits(), projection_terms())


def test_inputs_of_a_pass_with_and_without_logits(tmp_path: Path) -> None:
    batch = Collator()(rows([6, 4]))
    expected = tiny.build(torch.float32).train()(**batch)
    mask = torch.tensor([[True] * 5 + [False], [True] * 3 + [False] * 3])
    targets = [*batch["labels"][0, 1:].tolist(), *batch["labels"][1, 1:4].tolist()]
    seen: list[dict[str, Any]] = []

    def look(**inputs: Any) -> Tensor:
        seen.append(inputs)
        value: Tensor = 0 * torch.cat(inputs["logprobs"]).sum()
        return value

    names = ("logprobs", "data", "parameters", "projection", "targets", "mask")
    for logit_free in (False, True):
        read = names if logit_free else (*names, "logits")
        trainer: Any = RegularizedTrainer(
            model=tiny.build(torch.float32).train(),
            args=arguments(tmp_path),
            train_dataset=rows([6]),
            terms=[term(look, 1.0, "look", inputs={name: name for name in read})],
        )
        total = trainer.compute_loss(trainer.model, dict(batch))
        torch.testing.assert_close(total, expected.loss)
        inputs = seen[-1]
        assert torch.equal(inputs["mask"], mask)
        assert inputs["targets"].tolist() == targets
        projection = inputs["projection"]
        torch.testing.assert_close(projection.hidden @ projection.weight.T, expected.logits[mask])
        assert inputs["parameters"]["lm_head.weight"] is trainer.model.lm_head.weight
        assert [len(row) for row in inputs["logprobs"]] == [5, 5]
        logprobs = torch.cat(inputs["logprobs"])[mask[:, :-1].flatten()]
        torch.testing.assert_close(-logprobs.mean(), expected.loss)
        assert len(inputs["data"]) == 2
    torch.testing.assert_close(seen[0]["logits"], expected.logits)


def test_a_field_of_the_batch_is_not_replaced(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def look(projection: Projection, mask: Tensor) -> Tensor:
        seen.append(mask)
        value: Tensor = from_logits.entropy(projection)
        return value

    model = tiny.build(torch.float32).train()
    trainer: Any = RegularizedTrainer(
        model=model, args=arguments(tmp_path), train_dataset=rows([6]), terms=[term(look, 1.0)]
    )
    own = torch.ones(1)
    trainer.compute_loss(model, {**Collator()(rows([6])), "mask": own})
    assert seen[0] is own


def test_a_model_that_returns_a_tuple_has_no_named_outputs() -> None:
    model = nn.Linear(2, 2)
    captured = ForwardCapture([]).run(
        lambda: model(torch.ones(1, 2)).sum(), model, model, projected=False, logit_free=False
    )
    assert captured.model_inputs({"parameters", "logits"}).keys() == {"parameters"}
