"""What tensors torch makes while a block lasts."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it so
    """Notes how large the tensors are that are made.

    Attributes:
        elements: of the largest.
        rows: by the length of a row, the most that one tensor has of it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0
        self.rows: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
                if each.numel():
                    length = each.shape[-1] if each.dim() else 1
                    self.rows[length] = max(self.rows.get(length, 0), each.numel() // length)
        return out
