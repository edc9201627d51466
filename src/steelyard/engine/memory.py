"""Memory: how many tokens one autograd graph may hold, and what happens when memory runs out.

1. Before the first call, `TokenBudget` estimates how many tokens fit, from a short forward pass
   and the free memory; apart for passes that compute no logits. Larger batches are split into
   packings of at most that many tokens. On a GPU there is a second, larger limit: for graphs that
   keep the inputs of layers alone and run these again in the backward pass (`recomputation`). A
   loss that needs the graphs of all packings at once keeps them whole; else, with recomputed
   layers; else it runs the model forward a second time. Checkpoints hold the limits, so that a
   resumed run computes as the first one did.
2. If memory runs out nevertheless, `TokenBudget.run` halves the budget and repeats the call, down
   to 64 tokens. Gradients count only when the whole call has succeeded, so nothing is
   added twice. The smaller budget stays for later calls.
3. If a backward pass through graphs that were kept runs out of memory, `or_none` reports it, and
   the trainer drops the graphs and repeats the forward pass packing by packing.

`torch.OutOfMemoryError` is raised for GPU memory alone. On a CPU an allocation that the operating
system refuses is a plain `RuntimeError`, recognised by its message. Where the system grants more
memory than it has, as Linux does by default, it may end the process instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from steelyard.engine.adapter import Adapter
from steelyard.engine.datum_tensors import DatumTensors
from steelyard.engine.forward import computes_logits, forward
from steelyard.engine.model import Model, free_bytes
from steelyard.engine.packing import PackedSequence, Packing
from steelyard.spec.checks import is_whole

# Tokens of the forward pass that measures a graph.
_PROBE = 32
# Part of the free memory for graphs. The rest is for weight gradients, terms and other processes;
# on a GPU, for a chunk of logits and their gradient.
_FRACTION, _FRACTION_GPU = 0.5, 0.8
_MINIMUM = 64

# Names of the limits of graphs with logits and without them, in a checkpoint.
_NAMES = {"with_logits": True, "without_logits": False}

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class GraphLimits:
    """Most tokens of one autograd graph, padding included.

    Attributes:
        whole: of a graph that keeps everything.
        recomputed: of a graph that keeps the inputs of layers alone; the same number if layers
            cannot be recomputed.
    """

    whole: int
    recomputed: int

    def recomputes(self, tokens: int) -> bool:
        """Return whether a graph over so many tokens must recompute layers."""
        return self.whole < tokens and self.whole < self.recomputed

    def halved(self) -> GraphLimits:
        """Half of each limit, at least 64."""
        return GraphLimits(max(_MINIMUM, self.whole // 2), max(_MINIMUM, self.recomputed // 2))


class TokenBudget:
    """Most tokens that one autograd graph may hold, set by the user or estimated.

    Args:
        model: the model whose graphs are limited.
        max_tokens: the limit; None estimates it when it is first needed.
    """

    def __init__(self, model: Model, max_tokens: int | None) -> None:
        self._model = model
        self._is_estimated = max_tokens is None
        # With logits and without them: a graph without holds far more tokens.
        limits = None if max_tokens is None else GraphLimits(max_tokens, max_tokens)
        self._limits: dict[bool, GraphLimits | None] = dict.fromkeys((True, False), limits)

    def limits(self, adapter: Adapter, needs: Sequence[str] = ()) -> GraphLimits:
        """Most tokens of one graph.

        The estimate is a part of the free bytes, divided by the bytes of a token; at least 64.

        Args:
            adapter: the adapter that the graph includes.
            needs: outputs beside the log-probs, as for `forward`.
        """
        logits = computes_logits(self._model, needs)
        limits = self._limits[logits]
        if limits is None:
            limits = self._limits[logits] = self._estimate(adapter, logits=logits)
        return limits

    def tokens(self, adapter: Adapter, needs: Sequence[str] = ()) -> int:
        """Most tokens of one graph that keeps everything, as `limits` has them."""
        return self.limits(adapter, needs).whole

    def run(
        self, adapter: Adapter, work: Callable[[GraphLimits], T], needs: Sequence[str] = ()
    ) -> T:
        """Result of `work(limits)`, repeated with half the tokens while memory runs out.

        Args:
            adapter: the adapter that the graphs include.
            work: makes graphs within the limits; it must be safe to repeat.
            needs: outputs of those graphs beside the log-probs, as for `forward`.

        Raises:
            torch.OutOfMemoryError: 64 tokens are too many.
        """
        while True:
            limits = self.limits(adapter, needs)
            try:
                return work(limits)
            except (RuntimeError, MemoryError) as error:
                if not _is_out_of_memory(error):
                    raise
                if limits.recomputed <= _MINIMUM:  # the larger of the two
                    raise torch.OutOfMemoryError(
                        f"a forward and backward pass of {limits.recomputed} tokens must fit into "
                        f"memory, and it does not: {error}"
                    ) from error
            # Outside the handler, whose traceback would keep the graph's tensors alive.
            torch.cuda.empty_cache()
            self._limits[computes_logits(self._model, needs)] = limits.halved()

    def state_dict(self) -> dict[str, dict[str, int]]:
        """Limits that were estimated for a GPU; empty where they are given or not known yet."""
        if not (self._is_estimated and self._model.recomputes):
            return {}
        known = {name: self._limits[logits] for name, logits in _NAMES.items()}
        return {name: asdict(limits) for name, limits in known.items() if limits is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use limits that `state_dict` returned, unless they are given here or not on a GPU."""
        if not (self._is_estimated and self._model.recomputes):
            return
        for name, logits in _NAMES.items():
            if name in state:
                self._limits[logits] = GraphLimits(**state[name])

    def _estimate(self, adapter: Adapter, *, logits: bool) -> GraphLimits:
        free = free_bytes(self._model.device)
        part = _FRACTION_GPU if self._model.device.type == "cuda" else _FRACTION
        token_bytes = _bytes_per_token(self._model, adapter, logits=logits)
        whole = max(_MINIMUM, int(part * free / token_bytes))
        if not self._model.recomputes:
            return GraphLimits(whole, whole)
        kept = _bytes_per_token(self._model, adapter, logits=logits, recompute=True)
        # The backward pass holds everything of one layer at a time.
        kept += token_bytes // self._model.layers_to_recompute
        recomputed = max(whole, int(part * free / kept))
        _LOG.info(
            "%s: a graph of %d tokens fits into memory (%.1f MB a token, %.0f GB free), or of %d "
            "whose layers are computed again in the backward pass (%.1f MB a token); larger "
            "batches are split.",
            self._model.source.name,
            whole,
            token_bytes / 1e6,
            free / 1e9,
            recomputed,
            kept / 1e6,
        )
        return GraphLimits(whole, recomputed)


def is_limits_state(value: object) -> bool:
    """Return whether a value is one that `TokenBudget.state_dict` may have returned."""
    return isinstance(value, dict) and all(
        name in _NAMES
        and isinstance(limits, dict)
        and limits.keys() == {"whole", "recomputed"}
        and all(is_whole(limit, at_least=1) for limit in limits.values())
        for name, limits in value.items()
    )


def or_none(work: Callable[[], T]) -> T | None:
    """Result of `work`, or None if memory ran out."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        return None


def _is_out_of_memory(error: Exception) -> bool:
    # The CPU's allocator has no error class of its own; libraries below torch raise `bad_alloc`.
    refused = ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        text in str(error) for text in refused
    )


def _bytes_per_token(
    model: Model, adapter: Adapter, *, logits: bool, recompute: bool = False
) -> int:
    """Bytes that a forward and backward pass hold for each token, measured on a short sequence."""
    needs = ("logits",) if logits else ("projection",)
    storages: dict[int, int] = {}

    # Autograd calls this hook for each tensor that it saves for the backward pass. Several of
    # them may be views of one storage, which counts once.
    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    length = min(_PROBE, model.limits.context)
    tokens = torch.zeros(length, dtype=torch.int64)
    places = (PackedSequence(0, 0, 0, length),)
    packing = Packing(1, length, places, in_one_row=model.packs_in_one_row)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
        # The result keeps the graph alive, so that no address is used twice while it is measured.
        examples = [DatumTensors(tokens, tokens, {})]
        result = forward(model, adapter, examples, packing, needs, recompute=recompute)
    for address in model.weight_addresses():
        storages.pop(address, None)
    del result
    # The backward pass makes d loss / d logits, one float32 for each word of the vocabulary;
    # without logits, for a chunk of the tokens at a time.
    logits_gradient = model.limits.vocabulary * torch.float32.itemsize if logits else 0
    return max(sum(storages.values()) // length + logits_gradient, 1)
