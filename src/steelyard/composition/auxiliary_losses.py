"""Auxiliary losses: any module of a model deposits one, and the composite loss collects it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steelyard.errors import InputError

Deposits: TypeAlias = dict[str, Tensor]


class _Open(threading.local):
    """The open collections of a thread; deposits go to the innermost one."""

    def __init__(self) -> None:
        self.stack: list[Deposits] = []


_open = _Open()


def aux_loss(name: str, value: Tensor) -> Tensor:
    """Deposit an auxiliary loss for the collection that is open during this forward pass.

    Deposits of one name, from several layers, are summed. Without an open collection the call
    has no effect, so a model can always make it.

    Args:
        name: the name under which the composite has its weight.
        value: a scalar that carries its gradient.

    Returns:
        `value`.

    Raises:
        InputError: it is no scalar tensor.

    Example:
        >>> import torch
        >>> with collect_aux() as deposits:
        ...     for layer in range(3):
        ...         _ = aux_loss("router", torch.tensor(0.5))
        >>> deposits
        {'router': tensor(1.5000)}
    """
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(
            f"an auxiliary loss must be a scalar tensor, got {shape}: reduce it with .sum() or "
            f".mean() (auxiliary loss {name!r})."
        )
    if _open.stack:
        deposits = _open.stack[-1]
        scalar = value.reshape(())
        deposits[name] = deposits[name] + scalar if name in deposits else scalar
    return value


@contextmanager
def collect_aux() -> Iterator[Deposits]:
    """Collect the auxiliary losses that are deposited in this thread inside the block."""
    deposits = _begin_collecting()
    try:
        yield deposits
    finally:
        _end_collecting(deposits)


class DepositCollector:
    """Collects what a model deposits in a forward pass, for the next call of a composite.

    Attributes:
        deposits: of the last forward pass.
    """

    def __init__(self) -> None:
        self.deposits: Deposits = {}
        self._warned_of: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        # Deposits hold the graph of their forward pass, which cannot be pickled.
        return {**vars(self), "deposits": {}}

    def watch(self, model: nn.Module) -> RemovableHandle:
        """Collect during each forward pass of `model`, until the handle is removed."""
        before = model.register_forward_pre_hook(self._begin)
        after = model.register_forward_hook(self._end, always_call=True)
        return _Both(before, after)

    # Methods rather than closures: a deep copy of model and composite keeps the hooks connected.
    def _begin(self, *_: object) -> None:
        self.deposits = _begin_collecting()

    def _end(self, *_: object) -> None:
        _end_collecting(self.deposits)

    def warn_unweighed(self, deposits: object, weighed: set[str]) -> None:
        """Warn once of each deposit that has no weight."""
        if not isinstance(deposits, Mapping):  # an output of the model that happens to be "aux"
            return
        for name in deposits.keys() - weighed - self._warned_of:
            self._warned_of.add(name)
            warnings.warn(
                f"the model leaves the auxiliary loss {name!r}, which has no weight and is not "
                f"part of the loss: give it one with aux={{{name!r}: ...}}.",
                stacklevel=5,
            )


class _Both(RemovableHandle):
    """Two handles as one."""

    def __init__(self, first: RemovableHandle, second: RemovableHandle) -> None:
        self._handles = (first, second)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _begin_collecting() -> Deposits:
    """Open a collection of deposits, until `_end_collecting`."""
    deposits: Deposits = {}
    _open.stack.append(deposits)
    return deposits


def _end_collecting(deposits: Deposits) -> None:
    """Close a collection, if it is open."""
    for at, collection in enumerate(_open.stack):
        if collection is deposits:
            del _open.stack[at]
            return
