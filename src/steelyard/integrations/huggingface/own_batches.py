"""Data of a term's own in a trainer: a forward pass beside that of the batch, for that term alone.

An item of the data is a tokenized sequence, as in a trainer's dataset: a mapping with `input_ids`
and `labels` (-100 where no token counts) or a `completion_mask`; without both all tokens count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from steelyard.errors import InputError
from steelyard.integrations.huggingface.causal_lm import (
    IGNORE_INDEX,
    Forward,
    output_layer,
    record_forward,
)
from steelyard.integrations.huggingface.completion import Completion
from steelyard.integrations.huggingface.completion_inputs import (
    REFERENCE,
    check_available,
    completion_inputs,
    input_names,
)
from steelyard.integrations.huggingface.forward_capture import CapturedForward
from steelyard.integrations.huggingface.trainer_kinds import KINDS, TrainerKind
from steelyard.penalties.from_logits.lm_head import record_call
from steelyard.spec.regularizer import RegularizerSpec

# The tokens of data of a term's own are told as those of a `Trainer`, whatever trainer it is.
_KIND = replace(
    KINDS["Trainer"],
    no_reference="data of a term's own have a reference where the model has an adapter of peft, "
    "which is disabled for it, or the trainer has a ref_model",
)


def own_inputs(
    trainer: Any,
    kind: TrainerKind | None,
    model: nn.Module,
    spec: RegularizerSpec,
    items: Sequence[Any],
) -> dict[str, Any]:
    """Run the model on some of a term's own data; returns the inputs of the term, by name.

    They are those that a term over the batch of a `Trainer` has. The reference is the model without
    its adapter, or the trainer's `ref_model`.

    Args:
        trainer: the trainer.
        kind: how it runs its model; None if it is unknown.
        model: the module that it calls.
        spec: the term.
        items: the data.

    Raises:
        InputError: an item is no tokenized sequence, or the term reads an input that is not there.
    """
    required, names = input_names([spec])
    whole = trainer.accelerator.unwrap_model(model)  # with its adapter, without data parallelism
    unwrapped = whole.get_base_model() if hasattr(whole, "get_base_model") else whole
    device = next(whole.parameters()).device
    batch = _batch_of(spec.name, items, device)
    arguments: dict[str, Any] = {key: batch[key] for key in ("input_ids", "attention_mask")}
    if "hidden_states" in names:
        arguments["output_hidden_states"] = True
    layer = output_layer(unwrapped) if "projection" in names else None
    listening = nullcontext() if layer is None else record_call(layer)
    with record_forward(whole, unwrapped) as forward, listening as head:
        whole(**arguments)
    reference, of_reference = None, None
    if names & REFERENCE:
        of_reference, reference = _reference_pass(trainer, whole, arguments)
    captured = CapturedForward(None, unwrapped, {}, forward, head, None, reference, of_reference)
    temperature = trainer.temperature if kind is not None and kind.has_temperature else 1.0
    completion = Completion(
        unwrapped, forward, batch["labels"], shifted=True, temperature=temperature, head=head
    )
    inputs = {
        **batch,
        **captured.model_inputs(names),
        **completion_inputs(completion, _KIND, captured, batch, names),
    }
    check_available(trainer, _KIND, required, inputs.keys())
    return inputs


def _reference_pass(
    trainer: Any, model: Any, arguments: Mapping[str, Any]
) -> tuple[Any, Forward | None]:
    """Model of the reference without wrappers, and its forward pass; None if there is none."""
    reference, disabled = getattr(trainer, "ref_model", None), nullcontext()
    if reference is not None:
        reference = trainer.accelerator.unwrap_model(reference)
    elif hasattr(model, "disable_adapter"):
        reference, disabled = model, model.disable_adapter()
    if reference is None:
        return None, None
    return _without_graph(reference, disabled, arguments)


def _without_graph(
    model: Any, disabled: AbstractContextManager[Any], arguments: Mapping[str, Any]
) -> tuple[Any, Forward]:
    unwrapped = model.get_base_model() if hasattr(model, "get_base_model") else model
    with torch.no_grad(), disabled, record_forward(model, unwrapped, graph=False) as forward:
        model(**arguments)
    return unwrapped, forward


def _batch_of(term: str, items: Sequence[Any], device: torch.device) -> dict[str, Tensor]:
    """Pad sequences on the right: `input_ids`, `attention_mask` and `labels`, `[B, T]`."""
    rows = [_tokens(term, item) for item in items]
    width = max(len(tokens) for tokens, _ in rows)

    def padded(values: Sequence[int], filler: int) -> list[int]:
        return [*values, *[filler] * (width - len(values))]

    return {
        "input_ids": torch.tensor([padded(tokens, 0) for tokens, _ in rows], device=device),
        "attention_mask": torch.tensor(
            [padded([1] * len(tokens), 0) for tokens, _ in rows], device=device
        ),
        "labels": torch.tensor([padded(labels, IGNORE_INDEX) for _, labels in rows], device=device),
    }


def _tokens(term: str, item: Any) -> tuple[list[int], list[int]]:
    """Tokens of an item, and its labels.

    Raises:
        InputError: it has none, or as many labels as tokens.
    """
    fields = item if isinstance(item, Mapping) else {}
    tokens = _numbers(fields.get("input_ids"))
    if not tokens:
        raise InputError(
            f"an item of the data of regularizer {term!r} must be a mapping with input_ids, a list "
            f"of tokens, as in the dataset of a trainer, got {type(item).__name__}"
            f"{f' with {sorted(fields)}' if fields else ''}: tokenize it first."
        )
    labels = _numbers(fields.get("labels"))
    mask = _numbers(fields.get("completion_mask")) or [1] * len(tokens)
    if not labels:
        labels = [t if kept else IGNORE_INDEX for t, kept in zip(tokens, mask, strict=False)]
    if len(labels) != len(tokens):
        raise InputError(
            f"an item of the data of regularizer {term!r} must have a label for each of its "
            f"{len(tokens)} tokens, got {len(labels)}."
        )
    return tokens, labels


def _numbers(values: Any) -> list[int]:
    """A list of numbers, from a list, an array or a tensor; empty if there is none."""
    if values is None:
        return []
    numbers: list[int] = values.tolist() if hasattr(values, "tolist") else list(values)
    return numbers
