"""Forward and backward pass of the model over one packing.

`forward` runs the model over a `Packing` of sequences, `[rows, length]`, and computes the log-probs
of the target tokens; on request also logits, hidden states and the input of the output layer.
`ForwardResult.split` hands each sequence its part, detached from the graph. Losses are evaluated on
those parts, and `ForwardResult.backward` takes their gradients (`OutputGradients`) back through the
graph to the LoRA weights. So the graph of the model and the graph of the loss are separate, and the
chain rule joins them:

    d loss / d weights = sum over outputs of  d loss / d output * d output / d weights

At a temperature t the logits z become z / t before anything reads them: log-probs, logits and the
projection, `(h / t) W^T + b / t`, are those of the policy softmax(z / t).
"""

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

# Extra inputs of terms, beside log-probs, that a forward pass computes.
COMPUTED_INPUTS = ("logits", "projection", "hidden_states")
# Logits of one chunk, where they are computed chunk by chunk: 256 MB on a GPU, 16 MB on a CPU.
_CHUNK_GPU, _CHUNK_CPU = 2**26, 2**22


@dataclass(frozen=True)
class OutputGradients:
    """Gradients d loss / d output of a forward pass, one for each datum; None stands for zeros.

    Attributes:
        logprobs: `[T]` or `[T, K]`.
        logits: `[T, V]`.
        projection: with respect to the hidden states, `[T, H]`; `weight` is that of the shared
            output layer, summed over all data.
        hidden_states: `{layer: [T, H]}`.
        parameters: by key; one for all data.
    """

    logprobs: Sequence[Tensor]
    logits: Sequence[Tensor | None] | None = None
    projection: Sequence[Projection] | None = None
    hidden_states: Sequence[Mapping[int, Tensor | None]] | None = None
    parameters: Mapping[str, Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True)
class ForwardResult:
    """Outputs of the model for a packing, attached to their graph if there is one.

    Attributes:
        packing: places of the sequences.
        logprobs: of the targets, `[rows, length, K]`.
        logits: `[rows, length, V]`; None if they were not requested.
        head_input: input of the output layer, `[rows, length, H]`; None if neither it nor a
            projection was requested.
        hidden_states: `[rows, length, H]` by layer; empty if they were not requested.
        head_output: output of the output layer, `[rows, length, V]`; None unless `"head_input"` was
            requested and the layer ran.
        temperature: divides `logits` and the logits of `logprobs`, and not `head_output`.
    """

    packing: Packing
    logprobs: Tensor
    logits: Tensor | None
    head_input: Tensor | None
    hidden_states: Mapping[int, Tensor]
    head_output: Tensor | None = None
    temperature: float = 1.0

    def split(self, examples: Sequence[DatumTensors], into: Sequence[dict[str, Any]]) -> None:
        """Put the outputs of each sequence, detached, into `into[index]`, by name."""
        for sequence in self.packing.sequences:
            place = (sequence.row, slice(sequence.start, sequence.stop))
            shape = examples[sequence.index].targets.shape
            outputs = into[sequence.index]
            # Targets of K columns are padded to the widest of the packing: cut them again.
            logprobs = self.logprobs.detach()[place][:, : _columns(shape)]
            outputs["logprobs"] = logprobs.reshape(shape)
            if self.logits is not None:
                outputs["logits"] = self.logits.detach()[place]
            if self.head_input is not None:
                outputs["head_input"] = self.head_input.detach()[place]
            if self.hidden_states:
                outputs["hidden_states"] = {
                    layer: states.detach()[place] for layer, states in self.hidden_states.items()
                }

    def backward(
        self, gradients: OutputGradients, weights: Sequence[Tensor], *, keep_graph: bool = False
    ) -> Sequence[Tensor | None]:
        """Gradients of the weights, None where there is none; frees the graph unless it is kept.

        The gradients of all sequences are packed first, and one backward pass starts from the
        packed outputs. Were it to start from the views of single sequences, autograd would make a
        gradient of the size of the whole packing for each of them.
        """
        pairs = [(self.logprobs, self.pack_like(self.logprobs, gradients.logprobs))]
        if self.logits is not None and gradients.logits is not None:
            pairs.append((self.logits, self.pack_like(self.logits, gradients.logits)))
        if self.head_input is not None and gradients.projection is not None:
            rows = [gradient.hidden for gradient in gradients.projection]
            packed = self.pack_like(self.head_input, rows)
            pairs.append((self.head_input, packed / self.temperature))  # a projection holds h / t
        for layer, states in self.hidden_states.items() if gradients.hidden_states else ():
            by_datum = [by_layer[layer] for by_layer in gradients.hidden_states or ()]
            # Layer 0 is the embeddings, which no adapter precedes: they require no gradient.
            if states.requires_grad and any(row is not None for row in by_datum):
                pairs.append((states, self.pack_like(states, by_datum)))
        outputs, output_gradients = zip(*pairs, strict=True)
        return torch.autograd.grad(
            outputs, weights, output_gradients, retain_graph=keep_graph, allow_unused=True
        )

    def pack_like(self, like: Tensor, by_datum: Sequence[Tensor | None]) -> Tensor:
        """Gradients of single sequences as one gradient of a packed output; zeros elsewhere."""
        packed = torch.zeros_like(like, requires_grad=False)
        for sequence in self.packing.sequences:
            gradient = by_datum[sequence.index]
            if gradient is not None:
                gradient = gradient.reshape(sequence.stop - sequence.start, -1).to(packed)
                columns = gradient.shape[1]
                packed[sequence.row, sequence.start : sequence.stop, :columns] = gradient
        return packed


def forward(
    model: Model,
    adapter: Adapter | None,
    examples: Sequence[DatumTensors],
    packing: Packing,
    needs: Sequence[str] = (),
    temperature: float = 1.0,
) -> ForwardResult:
    """Run the model over a packing; with an autograd graph, if gradients are enabled.

    Args:
        model: the model.
        adapter: added to it; None is the base model.
        examples: all data; the packing refers to them by index.
        packing: the sequences of this pass.
        needs: outputs beside the log-probs, of `COMPUTED_INPUTS` or `"head_input"`. With
            `"projection"` and without `"logits"` the output layer is left out of the pass, and no
            tensor `[rows, length, V]` exists at any time.
        temperature: divides the logits.
    """
    device = model.device
    columns = max(_columns(examples[s.index].targets.shape) for s in packing.sequences)
    tokens = packing.fill([example.tokens for example in examples])
    packed = [sequence.index for sequence in packing.sequences]
    targets = packing.fill({i: _padded(examples[i].targets, columns) for i in packed})
    options: dict[str, Any] = {"output_hidden_states": "hidden_states" in needs}
    if model.supports_packing:
        options["position_ids"] = packing.positions().to(device)
    compute_logits = computes_logits(needs)
    watch_head: Any = nullcontext()
    if "projection" in needs or "head_input" in needs:
        watch_head = overheard(model.output_layer, None if compute_logits else stand_in)
    with watch_head as head:
        output = model(adapter, input_ids=tokens.to(device), use_cache=False, **options)
    head_input: Any = head.hidden if head else None
    if compute_logits:
        logits = _policy_logits(output.logits, temperature)
        logprobs = _logprobs(logits, targets.to(device))
    else:
        logprobs = _chunked_logprobs(model, head_input, targets.to(device), temperature)
    hidden_states = enumerate(output.hidden_states) if "hidden_states" in needs else ()
    return ForwardResult(
        packing,
        logprobs,
        logits if "logits" in needs else None,
        head_input,
        dict(hidden_states),
        head.made if "head_input" in needs and compute_logits else None,
        temperature,
    )


def computes_logits(needs: Sequence[str]) -> bool:
    """Return whether `forward` with these needs makes a tensor `[rows, length, V]`."""
    return "logits" in needs or "projection" not in needs


def _chunked_logprobs(
    model: Model, head_input: Tensor, targets: Tensor, temperature: float
) -> Tensor:
    """Log-probs `[rows, length, K]` from the input of the output layer `[rows, length, H]`.

    Gradient checkpointing: only the logits of one chunk exist at a time. They are dropped after the
    forward pass, and the backward pass computes them again.
    """
    size = max((_CHUNK_GPU if head_input.is_cuda else _CHUNK_CPU) // model.limits.vocabulary, 1)
    layer = model.output_layer

    def chunk_logprobs(hidden: Tensor, wanted: Tensor) -> Tensor:
        return _logprobs(_policy_logits(layer(hidden), temperature), wanted)

    hidden, wanted = (torch.split(each.flatten(0, 1), size) for each in (head_input, targets))
    found = [
        checkpoint(chunk_logprobs, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(hidden, wanted, strict=True)
    ]
    return torch.cat(found).reshape(targets.shape)


def _logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    # log p(y) = z_y - logsumexp(z). Autograd saves the logits for it, which exist anyway;
    # log_softmax would save a second tensor [..., V].
    return logits.gather(-1, targets) - logits.logsumexp(-1, keepdim=True)


def _policy_logits(logits: Tensor, temperature: float) -> Tensor:
    """Logits divided by the temperature, in float32 or float64."""
    # A sum of V exponentials needs more than the 8 bits of precision of bfloat16.
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return logits if temperature == 1 else logits / temperature


def _columns(shape: torch.Size) -> int:
    return shape[1] if len(shape) > 1 else 1


def _padded(targets: Tensor, columns: int) -> Tensor:
    """Targets `[T]` or `[T, K]` as `[T, columns]`, padded with token 0, which nobody reads."""
    targets = targets.reshape(len(targets), -1)
    return torch.nn.functional.pad(targets, (0, columns - targets.shape[1]))
