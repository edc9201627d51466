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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from steelyard.engine.adapter import Adapter
from steelyard.engine.attention import packed_arguments
from steelyard.engine.datum_tensors import DatumTensors
from steelyard.engine.model import Model
from steelyard.engine.packing import Packing
from steelyard.engine.token_logprobs import token_logprobs
from steelyard.penalties.from_logits.lm_head import record_call, stand_in
from steelyard.penalties.from_logits.projection import Projection

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
        packed = self.logprobs.detach()
        for sequence in self.packing.sequences:
            span = (sequence.row, slice(sequence.start, sequence.stop))
            shape = examples[sequence.index].targets.shape
            outputs = into[sequence.index]
            # Targets of K columns are padded to the widest of the packing: cut them again.
            outputs["logprobs"] = packed[span][:, : _columns(shape)].reshape(shape)
            if self.logits is not None:
                outputs["logits"] = self.logits.detach()[span]
            if self.head_input is not None:
                outputs["head_input"] = self.head_input.detach()[span]
            if self.hidden_states:
                outputs["hidden_states"] = {
                    layer: states.detach()[span] for layer, states in self.hidden_states.items()
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
        given = [by_datum[sequence.index] for sequence in self.packing.sequences]
        columns = like.shape[-1]
        if self.packing.in_one_row and all(
            g is not None and g.shape[1:].numel() == columns for g in given
        ):
            rows = [gradient.reshape(-1, columns) for gradient in given if gradient is not None]
            return torch.cat(rows)[None].to(like)
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
    *,
    recompute: bool = False,
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
        recompute: keep the inputs of layers alone in the graph; the backward pass runs them again.
    """
    device = model.device
    columns = max(_columns(examples[s.index].targets.shape) for s in packing.sequences)
    tokens = packing.fill([example.tokens for example in examples])
    packed = [sequence.index for sequence in packing.sequences]
    targets = packing.fill({i: _padded(examples[i].targets, columns) for i in packed})
    options: dict[str, Any] = {"output_hidden_states": "hidden_states" in needs}
    if packing.in_one_row:
        lengths = [sequence.stop - sequence.start for sequence in packing.sequences]
        options |= packed_arguments(lengths, device)
    if packing.in_one_row or model.supports_packing:
        options["position_ids"] = packing.positions().to(device)
    compute_logits = computes_logits(model, needs)
    watch_head: Any = nullcontext()
    if not compute_logits or "projection" in needs or "head_input" in needs:
        watch_head = record_call(model.output_layer, None if compute_logits else stand_in)
    with watch_head as head, model.recomputing(recompute):
        output = model(adapter, input_ids=tokens.to(device), use_cache=False, **options)
    head_input: Any = head.hidden if head else None
    if not compute_logits and model.computes_without_logits:
        flat = targets.to(device).flatten(0, 1)
        with nullcontext() if adapter is not None else model.without_adapter():
            logprobs = token_logprobs(
                model.output_layer, head_input.flatten(0, 1), flat, temperature
            ).view(targets.shape)
    elif compute_logits:
        logits = _policy_logits(output.logits, temperature)
        logprobs = _logprobs(logits, targets.to(device))
    else:
        logprobs = _chunked_logprobs(model, head_input, targets.to(device), temperature)
    hidden_states = enumerate(output.hidden_states) if "hidden_states" in needs else ()
    return ForwardResult(
        packing,
        logprobs,
        logits if "logits" in needs else None,
        head_input if "projection" in needs or "head_input" in needs else None,
        dict(hidden_states),
        head.output if "head_input" in needs and compute_logits else None,
        temperature,
    )


def computes_logits(model: Model, needs: Sequence[str]) -> bool:
    """Return whether `forward` with these needs makes a tensor `[rows, length, V]`."""
    without = "projection" in needs or model.computes_without_logits
    return "logits" in needs or not without


def _chunked_logprobs(
    model: Model, head_input: Tensor, targets: Tensor, temperature: float
) -> Tensor:
    """Log-probs `[rows, length, K]` from the input of the output layer `[rows, length, H]`.

    Gradient checkpointing: only the logits of one chunk exist at a time. They are dropped after the
    forward pass, and the backward pass computes them again.
    """
    size = max((_CHUNK_GPU if head_input.is_cuda else _CHUNK_CPU) // model.limits.vocabulary, 1)
    layer = model.output_layer

    def chunk_logprobs(hidden: Tensor, targets: Tensor) -> Tensor:
        return _logprobs(_policy_logits(layer(hidden), temperature), targets)

    inputs, tokens = (torch.split(rows.flatten(0, 1), size) for rows in (head_input, targets))
    logprobs = [
        checkpoint(chunk_logprobs, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(inputs, tokens, strict=True)
    ]
    return torch.cat(logprobs).reshape(targets.shape)


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


def backward_each(
    result: ForwardResult,
    terms: Sequence[OutputGradients],
    weights: Sequence[Tensor],
    head: Sequence[Tensor],
) -> Iterator[Sequence[Tensor | None]]:
    """Yield the gradients of the weights for each term; the last pass frees the graph.

    Args:
        result: a packing with its graph.
        terms: d term / d outputs of each term.
        weights: the weights, those of the output layer included.
        head: the parameters of the output layer.
    """
    shared = None
    if sum(map(_reads_logprobs_alone, terms)) > 1:
        shared = _SharedHead.of(result, weights, head)
    last = len(terms) - 1
    for i, gradients in enumerate(terms):
        if shared is not None and _reads_logprobs_alone(gradients):
            upstream = result.pack_like(result.logprobs, gradients.logprobs)
            yield shared.backward(upstream, weights, keep_graph=i < last)
        else:
            yield result.backward(gradients, weights, keep_graph=i < last)


class _SharedHead:
    """The part of the backward pass that all terms share, through the output layer.

    Args:
        z: output of the output layer, `[rows, length, V]`.
        h: its input, `[rows, length, H]`.
        d_z: d logprob / d z at each position.
        d_h: d logprob / d h at each position.
        places: indices of the weights that belong to the output layer.
    """

    def __init__(
        self, z: Tensor, h: Tensor, d_z: Tensor, d_h: Tensor, places: Sequence[int]
    ) -> None:
        self._z, self._h, self._d_z, self._d_h, self._places = z, h, d_z, d_h, places

    @classmethod
    def of(
        cls, result: ForwardResult, weights: Sequence[Tensor], head: Sequence[Tensor]
    ) -> _SharedHead | None:
        """Compute it; None if z is not known, or if a position has several log-probs."""
        z, h = result.head_output, result.head_input
        if z is None or h is None or result.logprobs.shape[-1] != 1:
            return None
        ones = torch.ones_like(result.logprobs)
        (d_z,) = torch.autograd.grad(result.logprobs, z, ones, retain_graph=True)
        (d_h,) = torch.autograd.grad(z, h, d_z, retain_graph=True)
        of_head = {id(parameter) for parameter in head}
        return cls(z, h, d_z, d_h, [i for i, weight in enumerate(weights) if id(weight) in of_head])

    def backward(
        self, upstream: Tensor, weights: Sequence[Tensor], *, keep_graph: bool
    ) -> Sequence[Tensor | None]:
        """Gradients of the weights, given d term / d logprobs, `[rows, length, 1]`."""
        options = {"retain_graph": keep_graph, "allow_unused": True}
        # The weights of the output layer have no path from h, and None here.
        start = (upstream * self._d_h).to(self._h)
        gradients = list(torch.autograd.grad(self._h, weights, start, **options))
        if self._places:
            own = [weights[i] for i in self._places]
            start = (upstream * self._d_z).to(self._z)
            of_head = torch.autograd.grad(self._z, own, start, **options)
            for i, gradient in zip(self._places, of_head, strict=True):
                gradients[i] = gradient
        return gradients


def _reads_logprobs_alone(gradients: OutputGradients) -> bool:
    return (
        gradients.logits is None
        and gradients.projection is None
        and gradients.hidden_states is None
    )
