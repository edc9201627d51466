"""Memory: how many tokens one autograd graph may hold, and what happens when memory runs out.

1. Before the first call, `TokenBudget` estimates how many tokens fit, from a short forward pass
   and the free memory; apart for passes that compute no logits. Larger batches are split into
   packings of at most that many tokens.
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

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from steelyard.engine.adapter import Adapter
from steelyard.engine.datum_tensors import DatumTensors
from steelyard.engine.forward import computes_logits, forward
from steelyard.engine.model import Model, free_bytes
from steelyard.engine.packing import PackedSequence, Packing

# Tokens of the forward pass that measures a graph.
_PROBE = 32
# Part of the free memory for graphs. The rest is for weight gradients, terms and other processes.
_FRACTION = 0.5
_MINIMUM = 64

T = TypeVar("T")


class TokenBudget:
    """Most tokens that one autograd graph may hold, set by the user or estimated.

    Args:
        model: the model whose graphs are limited.
        max_tokens: the limit; None estimates it when it is first needed.
    """

    def __init__(self, model: Model, max_tokens: int | None) -> None:
        self._model = model
        # With logits and without them: a graph without holds far more tokens.
        self._tokens = dict.fromkeys((True, False), max_tokens)

    def tokens(self, adapter: Adapter, needs: Sequence[str] = ()) -> int:
        """Most tokens of one graph, padding included.

        The estimate is `0.5 * free bytes / bytes per token`, at least 64.

        Args:
            adapter: the adapter that the graph includes.
            needs: outputs beside the log-probs, as for `forward`.
        """
        logits = computes_logits(needs)
        tokens = self._tokens[logits]
        if tokens is None:
            each = _bytes_per_token(self._model, adapter, logits=logits)
            tokens = max(_MINIMUM, int(_FRACTION * free_bytes(self._model.device) / each))
            self._tokens[logits] = tokens
        return tokens

    def run(self, adapter: Adapter, work: Callable[[int], T], needs: Sequence[str] = ()) -> T:
        """Result of `work(tokens)`, repeated with half the tokens while memory runs out.

        Args:
            adapter: the adapter that the graphs include.
            work: makes graphs of at most so many tokens; it must be safe to repeat.
            needs: outputs of those graphs beside the log-probs, as for `forward`.

        Raises:
            torch.OutOfMemoryError: 64 tokens are too many.
        """
        while True:
            tokens = self.tokens(adapter, needs)
            try:
                return work(tokens)
            except (RuntimeError, MemoryError) as error:
                if not _is_out_of_memory(error):
                    raise
                if tokens <= _MINIMUM:
                    raise torch.OutOfMemoryError(
                        f"a forward and backward pass of {tokens} tokens must fit into memory, "
                        f"and it does not: {error}"
                    ) from error
            # Outside the handler, whose traceback would keep the graph's tensors alive.
            torch.cuda.empty_cache()
            self._tokens[computes_logits(needs)] = max(_MINIMUM, tokens // 2)


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


def _bytes_per_token(model: Model, adapter: Adapter, *, logits: bool) -> int:
    """Bytes that a forward and backward pass hold for each token, measured on a short sequence."""
    needs = () if logits else ("projection",)
    storages: dict[int, int] = {}

    # Autograd calls this hook for each tensor that it saves for the backward pass. Several of
    # them may be views of one storage, which counts once.
    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    length = min(_PROBE, model.limits.context)
    tokens = torch.zeros(length, dtype=torch.int64)
    packing = Packing(1, length, (PackedSequence(0, 0, 0, length),))
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
        # The result keeps the graph alive, so that no address is used twice while it is measured.
        result = forward(model, adapter, [DatumTensors(tokens, tokens, {})], packing, needs)
    for address in model.weight_addresses():
        storages.pop(address, None)
    del result
    # The backward pass makes d loss / d logits, one float32 for each word of the vocabulary;
    # without logits, for a chunk of the tokens at a time.
    logits_gradient = model.limits.vocabulary * torch.float32.itemsize if logits else 0
    return max(sum(storages.values()) // length + logits_gradient, 1)
