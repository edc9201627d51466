"""Forward pass of a Hugging Face causal language model: its logits, projection and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from steelyard._torch_internals import is_fully_sharded
from steelyard.errors import InputError
from steelyard.gradients.sharded import named_shards
from steelyard.penalties.from_logits.lm_head import (
    RecordedCall,
    forward_replaced,
    record_call,
    stand_in,
)
from steelyard.penalties.from_logits.projection import Projection

IGNORE_INDEX = -100


@dataclass(eq=False)
class Forward:
    """Inputs and outputs of one forward pass.

    Attributes:
        inputs: the keyword arguments of the model.
        outputs: what the model returned.
        backbone: what its backbone returned: the model without its output layer.
    """

    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: Any = None
    backbone: Any = None

    @property
    def ran(self) -> bool:
        """Whether there was such a pass."""
        return self.outputs is not None or self.backbone is not None


@contextmanager
def record_forward(
    model: nn.Module, unwrapped: nn.Module, *, graph: bool = True
) -> Iterator[Forward]:
    """Record the last forward pass of a model until the block ends.

    Args:
        model: the module that the trainer calls; it may wrap `unwrapped`.
        unwrapped: the language model itself.
        graph: whether to record passes with a graph, or those without one: of a reference model,
            or of the model itself with its adapter disabled.
    """
    forward = Forward()

    def record(_module: nn.Module, _args: object, kwargs: Mapping[str, Any], output: Any) -> None:
        if torch.is_grad_enabled() == graph:
            forward.inputs, forward.outputs = dict(kwargs), output

    def record_backbone(_module: nn.Module, _args: object, output: Any) -> None:
        if torch.is_grad_enabled() == graph:
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
    return _rerun_head(unwrapped, forward, forward.backbone)


def logits_at(unwrapped: Any, forward: Forward, positions: Tensor) -> Tensor:
    """Logits at some positions of a forward pass, `[N, V]`.

    Behind a fused head only these positions are projected onto the vocabulary.

    Args:
        unwrapped: the model without wrappers.
        forward: its forward pass.
        positions: `[B, T]`, True at N places; virtual tokens in front of them are left out.

    Raises:
        InputError: the model returns neither logits nor hidden states of each position.
    """
    logits = getattr(forward.outputs, "logits", None)
    output = getattr(forward.backbone, "last_hidden_state", None) if logits is None else logits
    if output is None or output.dim() != 3 or output.shape[1] < positions.shape[1]:  # noqa: PLR2004
        raise InputError(
            f"the completion needs a language model with logits [B, T, V], and "
            f"{type(unwrapped).__name__} has none: read other fields of its output."
        )
    rows: Tensor = output[:, -positions.shape[1] :][positions.to(output.device)]
    if logits is not None:
        return rows
    return _rerun_head(unwrapped, forward, type(forward.backbone)(last_hidden_state=rows[None]))[0]


def projection_of(unwrapped: Any, forward: Forward, head: RecordedCall) -> Projection | None:
    """Projection that stands for the logits of a forward pass: hidden states and output layer.

    Behind a fused head the hidden states are found by running the model again from the output of
    its backbone on, with an output layer that returns a placeholder instead of logits.

    Raises:
        InputError: the model changes its logits after the output layer; or that layer is neither
            `torch.nn.Linear` nor peft's LoRA of one.
    """
    logits = getattr(forward.outputs, "logits", None)
    if head.hidden is None and forward.backbone is not None:
        with record_call(head.layer, stand_in) as head:  # noqa: PLR1704 - the same layer's
            logits = _rerun_head(unwrapped, forward, forward.backbone)
    if logits is not None and head.hidden is not None and not head.untouched(logits):
        raise InputError(
            f"projection needs a model whose logits are what its output layer gives, and "
            f"{type(unwrapped).__name__} changes them after it: read logits."
        )
    return with_shards(unwrapped, head.projection)


def with_shards(unwrapped: Any, projection: Projection | None) -> Projection | None:
    """Projection with the shards of its output layer, if FSDP has gathered that layer.

    FSDP frees the gathered layer at the end of every backward pass, also of one that measures the
    base loss for a bound, and a projection reads it once more after that.
    """
    if projection is None or not is_fully_sharded(unwrapped):
        return projection
    shards = named_shards(unwrapped)
    gathered: dict[int, Any] = {id(p): shards[name] for name, p in unwrapped.named_parameters()}

    def shard_of(part: Any) -> Any:
        shard = gathered.get(id(part))
        if shard is None:
            return part
        # Another tensor than the parameter, which a term may read too, with another gradient.
        return shard.redistribute(shard.device_mesh, shard.placements).to(part.dtype)

    bias = None if projection.bias is None else shard_of(projection.bias)
    return replace(projection, weight=shard_of(projection.weight), bias=bias)


def _rerun_head(unwrapped: Any, forward: Forward, outputs: Any) -> Tensor:
    """Run the model again with given outputs of its backbone, and return its logits.

    Labels and flags such as TRL's `fused_lm_head=True` are left out, so that the model's plain
    forward pass runs.
    """
    names = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
    inputs = {name: forward.inputs[name] for name in names if name in forward.inputs}
    with forward_replaced(unwrapped.base_model, lambda *_, **__: outputs):
        logits: Tensor = unwrapped(**inputs, use_cache=False).logits
    return logits


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
