"""Terms that read a projection in the real `Trainer`: as with logits, which are not made then."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from steelyard import RegularizerSpec
from steelyard.engine import tiny
from steelyard.errors import InputError
from steelyard.integrations import term
from steelyard.integrations.huggingface import RegularizerCallback
from steelyard.integrations.huggingface.logit_free_loss import OwnLoss, can_stand_in, counted
from steelyard.penalties import from_logits
from steelyard.penalties.from_logits import Projection
from steelyard.penalties.from_logits import _projection_inputs as projected
from steelyard.penalties.from_logits.lm_head import Heard
from tests.integrations.huggingface.test_trainer import (
    Collator,
    RegularizedTrainer,
    arguments,
    assert_same_weights,
    rows,
    surprise,
)
from tests.seeing import Seen

LENGTHS = [45, 29, 42, 37, 26, 40, 48, 31, 24, 43, 33, 44]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projected, "_ELSEWHERE", 5 * tiny.VOCABULARY)


def from_the_projection() -> list[RegularizerSpec]:
    return [
        term(from_logits.entropy, 0.3, inputs="projection"),
        term(from_logits.cross_entropy, 0.2, inputs=("projection", "targets")),
        RegularizerSpec(surprise, 0.02, "surprise"),
    ]


def of_logits(fn: Any) -> Any:
    """The same of the rows that count, by hand."""

    def by_logits(logits: Tensor, labels: Tensor) -> Tensor:
        kept = labels[:, 1:] != -100
        second = [labels[:, 1:][kept]] if fn is from_logits.cross_entropy else []
        value: Tensor = fn(logits[:, :-1][kept], *second)
        return value

    return by_logits


def from_logits_themselves() -> list[RegularizerSpec]:
    return [
        term(of_logits(from_logits.entropy), 0.3, "entropy"),
        term(of_logits(from_logits.cross_entropy), 0.2, "cross_entropy"),
        RegularizerSpec(surprise, 0.02, "surprise"),
    ]


def trained(
    folder: Path,
    model: Any,
    terms: Sequence[RegularizerSpec],
    *,
    attached: bool = False,
    **more: Any,
) -> tuple[Any, int]:
    """A trainer that has trained, and the rows of the largest tensor of logits on the way."""
    tracked = more.pop("tracked", False)
    options = {"track_grad_norms": tracked}
    capture = more.pop("capture", ())
    settings: dict[str, Any] = {
        "model": model,
        "args": arguments(folder, **more),
        "train_dataset": rows(LENGTHS),
        "data_collator": Collator(),
    }
    trainer: Any
    if attached:
        trainer = Trainer(**settings)
        RegularizerCallback(terms, **options).attach(trainer)
    else:
        trainer = RegularizedTrainer(**settings, terms=terms, term_options=options, capture=capture)
    seen = Seen()
    # Under such a mode torch does not see that a graph is gone through twice.
    with nullcontext() if tracked else seen:
        trainer.train()
    return trainer, seen.rows.get(tiny.VOCABULARY, 0)


def assert_alike(ours: Any, theirs: Any) -> None:
    assert_same_weights(ours.model, theirs.model)
    for a, b in zip(ours.state.log_history[:-1], theirs.state.log_history[:-1], strict=True):
        names = [name for name in b if name == "loss" or "/" in name]
        assert len(names) == 11
        assert [a[name] for name in names] == pytest.approx([b[name] for name in names], rel=1e-5)


FEATURES = 64  # of the output layer's weight, turned


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_same_training_without_logits(
    attached: bool, accumulation: int, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "attached": attached}
    model = tiny.build(torch.float32)
    if attached:  # and somebody has named it
        model.loss_function = ForCausalLMLoss
    lean, most = trained(tmp_path, model, from_the_projection(), **more)
    theirs, all_of_them = trained(
        tmp_path, tiny.build(torch.float32), from_logits_themselves(), **more
    )
    assert most <= FEATURES < all_of_them
    assert_alike(lean, theirs)
    assert ("_loss_function" in vars(model)) == attached
    assert model.loss_function is ForCausalLMLoss
    assert "forward" not in vars(model.lm_head)
    batch = Collator()(rows([6]))
    assert model(**batch).logits.shape == (1, 6, tiny.VOCABULARY)


def test_a_tied_layer_with_tracked_norms(tmp_path: Path) -> None:
    found = []
    for terms in (from_the_projection(), from_logits_themselves()):
        model = tiny.build(torch.float32)
        model.lm_head.weight = model.model.embed_tokens.weight
        found.append(trained(tmp_path, model, terms, max_steps=2, tracked=True)[0])
    assert_alike(*found)


def with_lora(target: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = get_peft_model(tiny.build(torch.float32), LoraConfig(r=2, target_modules=[target]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize(("target", "lean"), [("q_proj", True), ("lm_head", False)])
def test_adapters(target: str, lean: bool, tmp_path: Path) -> None:
    ours, most = trained(tmp_path, with_lora(target), from_the_projection())
    theirs, _ = trained(tmp_path, with_lora(target), from_logits_themselves())
    assert_alike(ours, theirs)
    assert (most <= FEATURES) == lean


def my_loss(logits: Tensor, labels: Tensor, vocab_size: int, **rest: Any) -> Tensor:
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


def another(kind: str) -> Any:
    model = tiny.build(torch.float32)
    if kind == "loss function":
        model.loss_function = my_loss
    elif kind == "inline":
        model.__class__ = Inline
    elif kind == "silent":
        model.__class__ = Silent
    return model


@pytest.mark.parametrize("kind", ["loss function", "inline", "silent"])
def test_a_loss_that_is_not_transformers_own_has_its_logits(kind: str, tmp_path: Path) -> None:
    ours, most = trained(tmp_path, another(kind), from_the_projection())
    theirs, _ = trained(tmp_path, another(kind), from_logits_themselves())
    assert most > FEATURES
    assert_alike(ours, theirs)


def test_who_reads_logits_has_them(tmp_path: Path) -> None:
    def level(logits: Tensor) -> Tensor:
        return logits.mean()

    terms = [*from_the_projection(), term(level, 0.0)]
    ours, most = trained(tmp_path, tiny.build(torch.float32), terms, max_steps=1)
    assert most > FEATURES
    plain, _ = trained(tmp_path, tiny.build(torch.float32), from_the_projection(), max_steps=1)
    assert_same_weights(ours.model, plain.model)


def test_a_captured_output_layer_gives_logits(tmp_path: Path) -> None:
    seen = []

    def look(projection: Projection, activations: dict[str, Tensor]) -> Tensor:
        seen.append(activations["lm_head"].shape[-1])
        value: Tensor = from_logits.entropy(projection)
        return value

    trained(tmp_path, tiny.build(torch.float32), [term(look, 0.1)], capture="lm_head", max_steps=2)
    assert seen == [tiny.VOCABULARY] * 2


def test_label_smoothing_keeps_its_way(tmp_path: Path) -> None:
    more: dict[str, Any] = {"label_smoothing_factor": 0.1, "max_steps": 1}
    terms, others = from_the_projection()[:2], from_logits_themselves()[:2]
    ours, _ = trained(tmp_path, tiny.build(torch.float32), terms, **more)
    theirs, _ = trained(tmp_path, tiny.build(torch.float32), others, **more)
    assert_same_weights(ours.model, theirs.model)


def test_what_stands_in_for_logits_is_not_offered(tmp_path: Path) -> None:
    terms = [*from_the_projection(), term(lambda router: router.sum(), 1.0, "router")]
    with pytest.raises(InputError, match="reads the input 'router', which is not") as caught:
        trained(tmp_path, tiny.build(torch.float32), terms)
    assert "'projection.hidden'" in str(caught.value)
    assert "'logits'" not in str(caught.value)


def test_returned_outputs_have_logits(tmp_path: Path) -> None:
    trainer: Any = RegularizedTrainer(
        model=tiny.build(torch.float32).train(),
        args=arguments(tmp_path),
        train_dataset=rows([6, 9]),
        terms=from_the_projection(),
    )
    batch = Collator()(rows([6, 9]))
    total, outputs = trainer.compute_loss(trainer.model, dict(batch), return_outputs=True)
    assert outputs.logits.shape == (2, 9, tiny.VOCABULARY)
    lean = trainer.compute_loss(trainer.model, dict(batch))
    torch.testing.assert_close(lean, total)


def test_an_error_is_raised_as_ever_once_it_is_known_to_work(tmp_path: Path) -> None:
    trainer: Any = RegularizedTrainer(
        model=tiny.build(torch.float32).train(),
        args=arguments(tmp_path),
        train_dataset=rows([6]),
        terms=from_the_projection(),
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
        model=other, args=arguments(tmp_path), train_dataset=rows([6]), terms=from_the_projection()
    )
    with pytest.raises(IndexError):
        fresh.compute_loss(other, {**batch, "input_ids": batch["input_ids"] + 512})
    assert calls == [1, 2, 2]


def capped() -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": tiny.VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = transformers.Gemma2Config(**sizes)
    return transformers.Gemma2ForCausalLM(config)  # type: ignore[no-untyped-call]


def test_a_model_that_changes_its_logits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Gemma2ForCausalLM changes them after it: read logits"):
        trained(tmp_path, capped(), from_the_projection())


def test_log_probs_without_labels_are_not_there(tmp_path: Path) -> None:
    trainer: Any = RegularizedTrainer(
        model=unlabelled(),
        args=arguments(tmp_path),
        train_dataset=rows([6]),
        terms=[RegularizerSpec(surprise, 0.02, "surprise")],
    )
    with pytest.raises(InputError, match="reads the input 'data', which is not there"):
        trainer.compute_loss(trainer.model, {"input_ids": torch.arange(6)[None]})


def test_all_positions_count_where_there_are_no_labels(tmp_path: Path) -> None:
    model = unlabelled()
    trainer: Any = RegularizedTrainer(
        model=model,
        args=arguments(tmp_path),
        train_dataset=rows([6]),
        terms=[term(from_logits.entropy, 0.5, inputs="projection")],
    )
    ids = torch.arange(6)[None]
    total = trainer.compute_loss(model, {"input_ids": ids})
    logits = model(ids).logits
    torch.testing.assert_close(total, logits.mean() + 0.5 * from_logits.entropy(logits))


def test_a_term_that_needs_one_for_each_datum_is_refused(tmp_path: Path) -> None:
    spec = RegularizerSpec(lambda d, lp, projection: lp[0].sum(), 1.0, "x", needs=("projection",))
    with pytest.raises(InputError, match=r"must run on steelyard\.engine.*regularizer 'x'"):
        trained(tmp_path, tiny.build(torch.float32), [spec])


def test_a_model_without_an_output_layer_lists_what_there_is(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(512, 1)

        def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
            return {"loss": self.table(input_ids).mean() + 0 * labels.sum()}

    with pytest.raises(InputError, match="reads the input 'projection', which is not there"):
        trained(tmp_path, Bare(), from_the_projection()[:1])


# The pieces.


def test_rows_that_count() -> None:
    projection = Projection(torch.arange(12.0).reshape(2, 3, 2), torch.zeros(4, 2))
    labels = torch.tensor([[7, 1, -100], [7, -100, 2]])
    found = counted(projection, {"labels": labels})
    assert found.targets is not None
    assert found.mask is not None
    assert found.targets.tolist() == [1, 2]
    assert found.mask.tolist() == [[True, False, False], [False, True, False]]
    assert found.projection.hidden.tolist() == [[0, 1], [8, 9]]
    assert counted(projection, {"shift_labels": labels}).projection.shape == (4, 4)
    assert counted(projection, {"labels": labels}, shifted=False).projection.shape == (4, 4)
    assert counted(projection, {}) == (projection, None, None)
    assert counted(projection, {"labels": labels[:, 1:]}) == (projection, None, None)


@pytest.mark.parametrize("often", [False, True])
@pytest.mark.parametrize("items", [None, 5, torch.tensor(5)])
def test_the_own_loss_is_transformers_own(items: Any, often: bool) -> None:
    made = torch.Generator().manual_seed(3)
    layer = nn.Linear(4, 9)
    hidden = torch.randn(2, 5, 4, generator=made)
    labels = torch.randint(0, 9, (2, 5), generator=made)
    labels[0, 2] = labels[1, 4] = -100
    stood = hidden[..., :1]
    loss = OwnLoss(Heard(layer, hidden, stood), often)
    found = loss(stood, labels, 9, items)
    torch.testing.assert_close(found, ForCausalLMLoss(layer(hidden), labels, 9, items))
    shifted = labels.roll(-1, 1)
    torch.testing.assert_close(
        loss(stood, labels, 9, items, shift_labels=shifted),
        ForCausalLMLoss(layer(hidden), labels, 9, items, shift_labels=shifted),
    )
    short = labels[:, 1:]
    for given in (
        (stood * 2, labels, 9),
        (stood, labels, 8),
        (stood, labels, 9, None, 0),
        (stood, short, 9),
    ):
        again = OwnLoss(Heard(layer, hidden, stood))
        again(*given)
        assert again.counted is None


def test_when_it_can_stand_in() -> None:
    model = tiny.build(torch.float32)
    assert can_stand_in(model, model.lm_head)
    assert not can_stand_in(nn.Linear(2, 2), nn.Linear(2, 2))
    handle = model.lm_head.register_forward_hook(lambda *_: None)
    assert not can_stand_in(model, model.lm_head)
    handle.remove()
    assert not can_stand_in(model, model.model.embed_tokens)
    model.loss_function = my_loss
    assert not can_stand_in(model, model.lm_head)
