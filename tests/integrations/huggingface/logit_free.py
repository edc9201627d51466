"""The same terms over a projection and over logits, and training with either."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import Tensor
from transformers import Trainer

from steelyard import RegularizerSpec
from steelyard.engine import tiny
from steelyard.integrations import term
from steelyard.integrations.huggingface import RegularizerCallback
from steelyard.penalties import from_logits
from tests.integrations.huggingface.training import (
    Collator,
    RegularizedTrainer,
    arguments,
    assert_same_weights,
    rows,
    surprise,
)
from tests.seeing import Seen

LENGTHS = [45, 29, 42, 37, 26, 40, 48, 31, 24, 43, 33, 44]
# The transposed weight of the output layer, [64, V], is the largest tensor with a vocabulary axis
# in a pass without logits; it has this many rows.
FEATURES = 64


def projection_terms() -> list[RegularizerSpec]:
    return [
        term(from_logits.entropy, 0.3, inputs="projection"),
        term(from_logits.cross_entropy, 0.2, inputs=("projection", "targets")),
        RegularizerSpec(surprise, 0.02, "surprise"),
    ]


def of_labelled_rows(fn: Any) -> Any:
    """The same function of the logits of labelled positions."""

    def by_logits(logits: Tensor, labels: Tensor) -> Tensor:
        kept = labels[:, 1:] != -100
        second = [labels[:, 1:][kept]] if fn is from_logits.cross_entropy else []
        value: Tensor = fn(logits[:, :-1][kept], *second)
        return value

    return by_logits


def logit_terms() -> list[RegularizerSpec]:
    return [
        term(of_labelled_rows(from_logits.entropy), 0.3, "entropy"),
        term(of_labelled_rows(from_logits.cross_entropy), 0.2, "cross_entropy"),
        RegularizerSpec(surprise, 0.02, "surprise"),
    ]


def train(
    folder: Path,
    model: Any,
    terms: Sequence[RegularizerSpec],
    *,
    attached: bool = False,
    **more: Any,
) -> tuple[Any, int]:
    """Train, and return the trainer and the rows of the largest tensor with a vocabulary axis."""
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
    # Under a dispatch mode torch does not notice that a graph is differentiated twice.
    with nullcontext() if tracked else seen:
        trainer.train()
    return trainer, seen.rows.get(tiny.VOCABULARY, 0)


def assert_alike(ours: Any, theirs: Any) -> None:
    assert_same_weights(ours.model, theirs.model)
    for a, b in zip(ours.state.log_history[:-1], theirs.state.log_history[:-1], strict=True):
        names = [name for name in b if name == "loss" or "/" in name]
        assert len(names) == (11 + 13 if "total_grad_norm" in b else 11)  # norms and cosines
        assert [a[name] for name in names] == pytest.approx(
            [b[name] for name in names], rel=1e-5, abs=1e-5
        )


def model_with_capped_logits() -> Any:
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
