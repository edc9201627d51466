"""Auxiliary losses: any module of a model deposits one, and the composite loss collects it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from torch import Tensor

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
    deposits = begin_collecting()
    try:
        yield deposits
    finally:
        end_collecting(deposits)


def begin_collecting() -> Deposits:
    """Open a collection of deposits, until `end_collecting`."""
    deposits: Deposits = {}
    _open.stack.append(deposits)
    return deposits


def end_collecting(deposits: Deposits) -> None:
    """Close a collection, if it is open."""
    for at, collection in enumerate(_open.stack):
        if collection is deposits:
            del _open.stack[at]
            return
