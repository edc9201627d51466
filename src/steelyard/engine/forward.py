"""One forward pass of one packing, and the way back through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from steelyard.engine.adapter import Adapter
from steelyard.engine.datum_tensors import DatumTensors
from steelyard.engine.model import Model
from steelyard.engine.packing import Packing
from steelyard.penalties.from_logits import Projection
from steelyard.penalties.from_logits.lm_head import overheard, stand_in

# What a term may ask for beyond log-probs that a forward pass makes.
MADE = ("logits", "projection", "hidden_states")
# Logits of a chunk, where they are not made as a whole: 256 MB on a GPU, 16 MB on a CPU.
_ON_GPU, _ELSEWHERE = 2**26, 2**22


@dataclass(frozen=True)
class OutputGradients:
    """d loss / d what forward passes gave, for each datum; None where nothing pulls.

    Attributes:
        logprobs: `[T]` or `[T, K]`.
        logits: `[T, V]`.
        projection: by the hidden states, `[T, H]`; the weight's is that of all data together.
        hidden_states: `{layer: [T, H]}`.
        parameters: by key; not for each datum.
    """

    logprobs: Sequence[Tensor]
    logits: Sequence[Tensor | None] | None = None
    projection: Sequence[Projection] | None = None
    hidden_states: Sequence[Mapping[int, Tensor | None]] | None = None
    parameters: Mapping[str, Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True)
class ForwardResult:
    """What the model gave for the sequences of a packing, still attached to its graph.

    `read` is what its output layer read.
    """

    packing: Packing
    logprobs: Tensor
    logits: Tensor | None
    read: Tensor | None
    hidden_states: Mapping[int, Tensor]

    def split(self, examples: Sequence[DatumTensors], into: Sequence[dict[str, Any]]) -> None:
        """Put what there is for each sequence into its mapping, without the graph."""
        for slot in self.packing.slots:
            place = (slot.row, slice(slot.start, slot.stop))
            shape = examples[slot.index].targets.shape
            found = into[slot.index]
            found["logprobs"] = self.logprobs.detach()[place][:, : _width(shape)].reshape(shape)
            if self.logits is not None:
                found["logits"] = self.logits.detach()[place]
            if self.read is not None:
                found["read"] = self.read.detach()[place]
            if self.hidden_states:
                found["hidden_states"] = {
                    layer: states.detach()[place] for layer, states in self.hidden_states.items()
                }

    def pull(self, pulls: OutputGradients, weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The gradients of the weights; the graph is used up.

        Whole packings go back, not the view of each sequence: each view would cost a gradient
        of the size of all.
        """
        pairs = [(self.logprobs, self._gathered(self.logprobs, pulls.logprobs))]
        if self.logits is not None and pulls.logits is not None:
            pairs.append((self.logits, self._gathered(self.logits, pulls.logits)))
        if self.read is not None and pulls.projection is not None:
            rows = [by.hidden for by in pulls.projection]
            pairs.append((self.read, self._gathered(self.read, rows)))
        for layer, states in self.hidden_states.items() if pulls.hidden_states else ():
            rows = [by_layer[layer] for by_layer in pulls.hidden_states or ()]
            # The embeddings come before every adapter, so that nothing leads back from them.
            if states.requires_grad and any(row is not None for row in rows):
                pairs.append((states, self._gathered(states, rows)))
        outputs, gradients = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, weights, gradients, allow_unused=True)

    def _gathered(self, like: Tensor, rows: Sequence[Tensor | None]) -> Tensor:
        packed = torch.zeros_like(like, requires_grad=False)
        for slot in self.packing.slots:
            row = rows[slot.index]
            if row is not None:
                row = row.reshape(slot.stop - slot.start, -1).to(packed)
                packed[slot.row, slot.start : slot.stop, : row.shape[1]] = row
        return packed


def forward(
    model: Model,
    adapter: Adapter | None,
    examples: Sequence[DatumTensors],
    packing: Packing,
    needs: Sequence[str] = (),
) -> ForwardResult:
    """Run the model over a packing; with a graph, if gradients are enabled."""
    device = model.device
    width = max(_width(examples[slot.index].targets.shape) for slot in packing.slots)
    tokens = packing.fill([example.tokens for example in examples])
    targets = packing.fill([_widened(example.targets, width) for example in examples])
    options: dict[str, Any] = {"output_hidden_states": "hidden_states" in needs}
    if model.packs:
        options["position_ids"] = packing.positions().to(device)
    whole = "logits" in needs or "projection" not in needs
    listening: Any = nullcontext()
    if "projection" in needs:
        listening = overheard(model.output_layer, None if whole else stand_in)
    with listening as heard:
        given = model(adapter, input_ids=tokens.to(device), use_cache=False, **options)
    read: Any = heard.hidden if heard else None
    if whole:
        logits = _wide(given.logits)
        logprobs = _logprobs(logits, targets.to(device))
    else:
        logprobs = _in_chunks(model, read, targets.to(device))
    hidden = enumerate(given.hidden_states) if "hidden_states" in needs else ()
    return ForwardResult(
        packing, logprobs, logits if "logits" in needs else None, read, dict(hidden)
    )


def _in_chunks(model: Model, read: Tensor, targets: Tensor) -> Tensor:
    """The log-probs from what the output layer read; a chunk's logits are made, and made again."""
    size = max((_ON_GPU if read.is_cuda else _ELSEWHERE) // model.limits.vocabulary, 1)
    layer = model.output_layer

    def of(rows: Tensor, asked: Tensor) -> Tensor:
        return _logprobs(_wide(layer(rows)), asked)

    rows, asked = (torch.split(each.flatten(0, 1), size) for each in (read, targets))
    found = [
        checkpoint(of, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(rows, asked, strict=True)
    ]
    return torch.cat(found).reshape(targets.shape)


def _logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    # Not log_softmax: that would keep a second tensor as large as the logits.
    return logits.gather(-1, targets) - logits.logsumexp(-1, keepdim=True)


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _width(shape: torch.Size) -> int:
    return shape[1] if len(shape) > 1 else 1


def _widened(targets: Tensor, width: int) -> Tensor:
    targets = targets.reshape(len(targets), -1)
    return torch.nn.functional.pad(targets, (0, width - targets.shape[1]))
