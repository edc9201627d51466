"""Hidden activations by name: forward hooks for as long as a `with` block lasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from steelyard.errors import InputError


@contextmanager
def capture(model: nn.Module, names: str | Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """The outputs of modules inside `model`, by their path, for terms to read.

    The mapping is filled anew by each call of `model`, and empty after the block, so that it
    keeps no graph alive. A module that gives a tuple is represented by the first tensor in it;
    the second call of a module in one pass stands as `"path#2"`, and so on. What runs outside a
    call of `model` is not seen: neither a part of it called alone, nor the second forward pass
    of gradient checkpointing.

    Args:
        model: what is called; capture before it is compiled.
        names: paths as in `model.named_modules()`, with the wildcards `*`, `?` and `[...]`.

    Raises:
        InputError: a path matches nothing; or, when it is called, a module gives no tensor.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> with capture(model, "[01]") as activations:
        ...     _ = model(torch.ones(4, 2))
        ...     {name: tuple(a.shape) for name, a in activations.items()}
        {'0': (4, 3), '1': (4, 3)}
        >>> activations
        {}
    """
    with hooked(model, names) as captured, ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(captured.begin).remove)
        stack.callback(model.register_forward_hook(captured.end, always_call=True).remove)
        yield captured.values


@contextmanager
def hooked(model: nn.Module, names: str | Sequence[str]) -> Iterator[Captured]:
    """Hooks on modules inside `model`, for who says himself when a pass begins and ends.

    Raises:
        InputError: a path matches nothing; or, when it is called, a module gives no tensor.
    """
    captured = Captured()
    chosen = _matching(model, [names] if isinstance(names, str) else list(names))
    with ExitStack() as stack:
        stack.callback(captured.values.clear)
        for name, module in chosen.items():
            stack.callback(module.register_forward_hook(captured.hook(name)).remove)
        yield captured


class Captured:
    """The activations of the pass that is under way, or of the last one."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self._depth = 0

    def begin(self, *_: object) -> None:
        """A pass begins, or one inside it."""
        if self._depth == 0:
            self.values.clear()
        self._depth += 1

    def end(self, *_: object) -> None:
        """The pass that began last ends."""
        # It runs even if another hook has raised before `begin` could.
        self._depth = max(0, self._depth - 1)

    def hook(self, name: str) -> Any:
        """A forward hook that keeps what the module of that name gives during a pass."""

        def keep(_module: nn.Module, _inputs: object, output: object) -> None:
            if self._depth:
                self.values[self._free(name)] = _tensor_in(name, output)

        return keep

    def _free(self, name: str) -> str:
        key, count = name, 1
        while key in self.values:
            count += 1
            key = f"{name}#{count}"
        return key


def _matching(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    modules = {name: m for name, m in model.named_modules(remove_duplicate=False) if name}
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        found = {name: m for name, m in modules.items() if fnmatchcase(name, pattern)}
        if not found:
            there = ", ".join(repr(name) for name in modules) or "none"
            raise InputError(
                f"a module path must match one in the model, got {pattern!r}; there are: {there}."
            )
        for name, module in found.items():
            # A module that has several names stands under the first that matches.
            if not any(module is other for other in chosen.values()):
                chosen[name] = module
    return chosen


def _tensor_in(name: str, output: object) -> Tensor:
    if isinstance(output, tuple | list):
        output = next((each for each in output if isinstance(each, Tensor)), output)
    if not isinstance(output, Tensor):
        raise InputError(
            f"a captured module must give a tensor or a tuple with one, got "
            f"{type(output).__name__} (module {name!r}): capture a module inside it."
        )
    return output
