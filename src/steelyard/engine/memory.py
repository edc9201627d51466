"""How many tokens the memory has room for in one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import psutil
import torch
from torch import Tensor

from steelyard.engine.adapter import Adapter
from steelyard.engine.datum_tensors import DatumTensors
from steelyard.engine.forward import forward
from steelyard.engine.model import Model
from steelyard.engine.packing import PackedSequence, Packing

_PROBE = 32
# Of what is free; the rest is for gradients on their way, for terms and for everybody else.
_SHARE = 0.5
_LEAST = 64

T = TypeVar("T")


class TokenBudget:
    """The most tokens that one graph may hold: set by the user, or found.

    Found means: a short forward pass shows how much the graph keeps for each token, and half of
    the free memory is taken for it. Where that was too much, on a GPU, it is halved and tried
    again.
    """

    def __init__(self, model: Model, max_tokens: int | None) -> None:
        self._model = model
        self._tokens = max_tokens

    def tokens(self, adapter: Adapter) -> int:
        """The most tokens, padding counted."""
        if self._tokens is None:
            room = int(_SHARE * _free(self._model.device) / _bytes_per_token(self._model, adapter))
            self._tokens = max(_LEAST, room)
        return self._tokens

    def within(self, adapter: Adapter, work: Callable[[int], T]) -> T:
        """`work(tokens)`, with fewer tokens if that did not fit after all."""
        while True:
            tokens = self.tokens(adapter)
            try:
                return work(tokens)
            except torch.OutOfMemoryError:
                if tokens <= _LEAST:
                    raise
            # Outside the handler: its traceback would keep the graph alive.
            torch.cuda.empty_cache()
            self._tokens = max(_LEAST, tokens // 2)


def _bytes_per_token(model: Model, adapter: Adapter) -> int:
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    size = min(_PROBE, model.limits.context)
    tokens = torch.zeros(size, dtype=torch.int64)
    packing = Packing(1, size, (PackedSequence(0, 0, 0, size),))
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        run = forward(model, adapter, [DatumTensors(tokens, tokens, {})], packing)
    for address in model.own_memory():
        kept.pop(address, None)
    del run
    # On the way back the logits have a gradient of their size.
    back = model.limits.vocabulary * torch.float32.itemsize
    return sum(kept.values()) // size + back


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free: int = psutil.virtual_memory().available
    return free
