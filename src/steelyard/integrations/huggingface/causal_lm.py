"""Logits, projection, log-probs and labels of a Hugging Face causal language model."""

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

IGNORE_INDEX = -100


@dataclass(eq=False)
class Forward:
    """Inputs and outputs of the last forward pass that has a graph.

    Attributes:
        inputs: the keyword arguments of the model.
        outputs: what the model returned.
        backbone: what its backbone returned: the model without its output layer.
    """

    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: Any = None
    backbone: Any = None


@contextmanager
def record_forward(model: nn.Module, unwrapped: nn.Module) -> Iterator[Forward]:
    """Record the forward passes of a model until the block ends.

    A pass without a graph, such as that of a reference model's weights, is not recorded.

    Args:
        model: the module that the trainer calls; it may wrap `unwrapped`.
        unwrapped: the language model itself.
    """
    forward = Forward()

    def record(_module: nn.Module, _args: object, kwargs: Mapping[str, Any], output: Any) -> None:
        if torch.is_grad_enabled():
            forward.inputs, forward.outputs = dict(kwargs), output

    def record_backbone(_module: nn.Module, _args: object, output: Any) -> None:
        if torch.is_grad_enabled():
            forward.backbone = output

    handles = [model.register_forward_hook(record, with_kwargs=True)]
    backbone = getattr(unwrapped, "base_model", unwrapped)
    if backbone is not unwrapped:
        handles.append(backbone.register_forward_hook(record_backbone))
    try:
        yield forward
    finally:
        for handle in handles:
            handle.remove()


def output_layer(unwrapped: Any) -> nn.Module | None:
    """The layer that computes the logits; None if the model has none."""
    find: Callable[[], nn.Module | None] = getattr(unwrapped, "get_output_embeddings", lambda: None)
    return find()


def logits_of(unwrapped: Any, forward: Forward) -> Tensor | None:
    """Logits of a forward pass, `[B, T, V]`; None if they cannot be found.

    Where a fused head did not materialize them (TRL's, Liger's), the model runs again from the
    output of its backbone on. That costs one projection onto the vocabulary; unlike a product
    with the output layer's weight it keeps the model's own scaling and capping of logits.
    """
    logits = getattr(forward.outputs, "logits", None)
    if logits is not None or forward.backbone is None:
        return logits
    return _rerun_head(unwrapped, forward)


def projection_of(unwrapped: Any, forward: Forward, head: Heard) -> Projection | None:
    """Projection that stands for the logits of a forward pass: hidden states and output layer.

    Behind a fused head the hidden states are found by running the model again from the output of
    its backbone on, with an output layer that returns a placeholder instead of logits.

    Raises:
        InputError: the model changes its logits after the output layer; or that layer is neither
            `torch.nn.Linear` nor peft's LoRA of one.
    """
    logits = getattr(forward.outputs, "logits", None)
    if head.hidden is None and forward.backbone is not None:
        with overheard(head.layer, stand_in) as head:  # noqa: PLR1704 - the same layer's
            logits = _rerun_head(unwrapped, forward)
    if logits is not None and head.hidden is not None and not head.untouched(logits):
        raise InputError(
            f"projection needs a model whose logits are what its output layer gives, and "
            f"{type(unwrapped).__name__} changes them after it: read logits."
        )
    return head.projection


def _rerun_head(unwrapped: Any, forward: Forward) -> Tensor:
    """Run the model again with the recorded output of its backbone, and return its logits.

    Labels and flags such as TRL's `fused_lm_head=True` are left out, so that the model's plain
    forward pass runs.
    """
    names = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
    inputs = {name: forward.inputs[name] for name in names if name in forward.inputs}
    backbone, outputs = unwrapped.base_model, forward.backbone
    # An attribute of the instance hides the method until it is deleted.
    backbone.forward = lambda *_, **__: outputs
    try:
        logits: Tensor = unwrapped(**inputs, use_cache=False).logits
    finally:
        del backbone.forward
    return logits


def target_logprobs(forward: Forward, logits: Tensor | Projection | None) -> list[Tensor] | None:
    """Log-probs of the next tokens, `[T - 1]` for each sequence; None if they cannot be computed.

    They are the second argument of terms over `(data, logprobs)`; ignored positions hold the
    log-prob of token 0, and have weight 0 in `data_of`.

    Args:
        forward: the forward pass, for its `labels`.
        logits: `[B, T, V]`, or a projection that stands for them.
    """
    fused = getattr(forward.outputs, "log_probs", None)
    if fused is not None:
        return list(fused)
    labels = forward.inputs.get("labels")
    if logits is None or labels is None or labels.dim() + 1 != len(logits.shape):
        return None
    targets = labels[:, 1:].clamp(min=0)  # `gather` does not take -100
    if isinstance(logits, Projection):
        return list(from_logits.target_logprobs(logits[:, :-1], targets))
    logprobs = logits[:, :-1].float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return list(logprobs)


def data_of(labels: Tensor) -> list[dict[str, Any]]:
    """One datum for each sequence of `target_logprobs`; ignored labels have weight 0."""
    return [
        {"loss_fn_inputs": {"target_tokens": row, "weights": (row != IGNORE_INDEX).float()}}
        for row in labels[:, 1:]
    ]


def next_labels(inputs: Mapping[str, Any], *, shifted: bool) -> Tensor | None:
    """Labels that the positions of a batch are compared with, `[B, T]`; None without labels.

    Args:
        inputs: with `labels`, or `shift_labels`, which are already aligned with the positions.
        shifted: whether the loss compares a position with the label of the next one.
    """
    labels: Tensor | None = inputs.get("shift_labels")
    if labels is not None:
        return labels
    labels = inputs.get("labels")
    if labels is None or not shifted:
        return labels
    return nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)


def token_count(inputs: Mapping[str, Any], *, shifted: bool) -> Tensor | None:
    """Number of labels that the loss of a batch counts; None without labels."""
    labels = next_labels(inputs, shifted=shifted)
    return None if labels is None else (labels != IGNORE_INDEX).sum()
