"""What the forward pass of a Hugging Face model gives to terms, beyond what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from steelyard.errors import InputError
from steelyard.penalties import from_logits
from steelyard.penalties.from_logits import Projection
from steelyard.penalties.from_logits.lm_head import Heard, overheard, stand_in

IGNORED = -100


@dataclass(eq=False)
class Forward:
    """The last forward pass that can be differentiated: what went in and what came out."""

    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: Any = None
    backbone: Any = None


@contextmanager
def observed(model: nn.Module, inner: nn.Module) -> Iterator[Forward]:
    """Watch a model for as long as the block lasts.

    Args:
        model: what the trainer calls; it may wrap `inner`.
        inner: the model itself, for its backbone.
    """
    seen = Forward()

    def keep(_module: nn.Module, _args: object, kwargs: Mapping[str, Any], output: Any) -> None:
        if torch.is_grad_enabled():
            seen.inputs, seen.outputs = dict(kwargs), output

    def keep_backbone(_module: nn.Module, _args: object, output: Any) -> None:
        if torch.is_grad_enabled():
            seen.backbone = output

    handles = [model.register_forward_hook(keep, with_kwargs=True)]
    backbone = getattr(inner, "base_model", inner)
    if backbone is not inner:
        handles.append(backbone.register_forward_hook(keep_backbone))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def output_layer(inner: Any) -> nn.Module | None:
    """The layer that makes logits, if the model has one."""
    find: Callable[[], nn.Module | None] = getattr(inner, "get_output_embeddings", lambda: None)
    return find()


def logits_of(inner: Any, seen: Forward) -> Tensor | None:
    """The logits of a forward pass: its own, or those that a fused head did not build.

    There the model runs again from the output of its backbone on, which costs one projection
    onto the vocabulary, so that its own scaling and capping of logits apply.
    """
    own = getattr(seen.outputs, "logits", None)
    if own is not None or seen.backbone is None:
        return own
    return _again(inner, seen)


def projection_of(inner: Any, seen: Forward, heard: Heard) -> Projection | None:
    """What the output layer read, and the layer, where a term reads that in the place of logits.

    Behind a fused head it is found by running the model again from the output of its backbone
    on, which makes no logits either.

    Raises:
        InputError: the model does something to what the layer gives; or it is of no kind we know.
    """
    logits = getattr(seen.outputs, "logits", None)
    if heard.hidden is None and seen.backbone is not None:
        with overheard(heard.layer, stand_in) as heard:  # noqa: PLR1704 - the same layer's
            logits = _again(inner, seen)
    if logits is not None and heard.hidden is not None and not heard.untouched(logits):
        raise InputError(
            f"projection needs a model whose logits are what its output layer gives, and "
            f"{type(inner).__name__} changes them after it: read logits."
        )
    return heard.projection


def _again(inner: Any, seen: Forward) -> Tensor:
    kept = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
    inputs = {name: seen.inputs[name] for name in kept if name in seen.inputs}
    backbone, outputs = inner.base_model, seen.backbone
    # An attribute of the instance hides the method until it is deleted.
    backbone.forward = lambda *_, **__: outputs
    try:
        again: Tensor = inner(**inputs, use_cache=False).logits
    finally:
        del backbone.forward
    return again


def target_logprobs(seen: Forward, logits: Tensor | Projection | None) -> list[Tensor] | None:
    """The log-probs of each sequence's next tokens, as the terms over `(data, logprobs)` read."""
    fused = getattr(seen.outputs, "log_probs", None)
    if fused is not None:
        return list(fused)
    labels = seen.inputs.get("labels")
    if logits is None or labels is None or labels.dim() + 1 != len(logits.shape):
        return None
    targets = labels[:, 1:].clamp(min=0)
    if isinstance(logits, Projection):
        return list(from_logits.target_logprobs(logits[:, :-1], targets))
    logprobs = logits[:, :-1].float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return list(logprobs)


def data_of(labels: Tensor) -> list[dict[str, Any]]:
    """The data that go with `target_logprobs`: ignored labels have weight 0."""
    return [
        {"loss_fn_inputs": {"target_tokens": row, "weights": (row != IGNORED).float()}}
        for row in labels[:, 1:]
    ]


def next_labels(inputs: Mapping[str, Any], *, shifted: bool) -> Tensor | None:
    """The label that each position of a batch is compared with; None if there are none.

    Args:
        inputs: with `labels`, or `shift_labels`, where each is at its position already.
        shifted: whether the loss compares with the label of the next position.
    """
    labels: Tensor | None = inputs.get("shift_labels")
    if labels is not None:
        return labels
    labels = inputs.get("labels")
    if labels is None or not shifted:
        return labels
    return nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)


def token_count(inputs: Mapping[str, Any], *, shifted: bool) -> Tensor | None:
    """How many labels of a batch count in its loss; None if it has none."""
    labels = next_labels(inputs, shifted=shifted)
    return None if labels is None else (labels != IGNORED).sum()
