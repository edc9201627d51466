"""Record hidden activations by module path, with forward hooks inside a `with` block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from steelyard.errors import InputError


@contextmanager
def capture(model: nn.Module, names: str | Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Record the outputs of modules inside `model`, by their path, for terms to read.

    Each call of `model` clears the mapping and fills it again; leaving the block empties it, so
    that it keeps no graph alive. A module that returns a tuple is represented by the first tensor
    in it; the second call of a module in one forward pass is recorded as `"path#2"`, and so on.
    Modules that run outside a call of `model` are not recorded: neither a submodule called alone,
    nor the recomputation of gradient checkpointing.

    Args:
        model: the module to be called; capture before compiling it.
        names: paths as in `model.named_modules()`, with the wildcards `*`, `?` and `[...]`.

    Raises:
        InputError: no module matches a path; or, when it is called, a module returns no tensor.

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
    """Put recording hooks on modules inside `model`, and remove them at the end of the block.

    Unlike with `capture`, the caller marks the forward passes, with `begin` and `end`.

    Raises:
        InputError: no module matches a path; or, when it is called, a module returns no tensor.
    """
    captured = Captured()
    chosen = _matching(model, [names] if isinstance(names, str) else list(names))
    with ExitStack() as stack:
        stack.callback(captured.values.clear)
        for name, module in chosen.items():
            stack.callback(module.register_forward_hook(captured.hook(name)).remove)
        yield captured


class Captured:
    """The activations of the current forward pass, or of the last one.

    Attributes:
        values: the outputs, by module path.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self._depth = 0  # a model may call itself: only the outermost call is a new pass

    def begin(self, *_: object) -> None:
        """Mark the beginning of a forward pass; it may be nested."""
        if self._depth == 0:
            self.values.clear()
        self._depth += 1

    def end(self, *_: object) -> None:
        """Mark the end of the innermost forward pass."""
        # With `always_call=True` torch calls this even if an earlier pre-hook raised, and then
        # `begin` never ran: the depth must not become negative.
        self._depth = max(0, self._depth - 1)

    def hook(self, name: str) -> Any:
        """A forward hook that records the output of the module called `name`."""

        def record(_module: nn.Module, _inputs: object, output: object) -> None:
            # Outside a pass this is a submodule called alone, or the recomputation of a
            # checkpointed layer in the backward pass.
            if self._depth:
                self.values[self._unused_key(name)] = _first_tensor(name, output)

        return record

    def _unused_key(self, name: str) -> str:
        key, count = name, 1
        while key in self.values:
            count += 1
            key = f"{name}#{count}"
        return key


def _matching(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    modules = {name: m for name, m in model.named_modules(remove_duplicate=False) if name}
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        matching = {name: m for name, m in modules.items() if fnmatchcase(name, pattern)}
        if not matching:
            paths = ", ".join(repr(name) for name in modules) or "none"
            raise InputError(
                f"a module path must match one in the model, got {pattern!r}; there are: {paths}."
            )
        for name, module in matching.items():
            # A shared module has several paths; it is recorded under the first that matches.
            if not any(module is other for other in chosen.values()):
                chosen[name] = module
    return chosen


def _first_tensor(name: str, output: object) -> Tensor:
    if isinstance(output, tuple | list):
        output = next((item for item in output if isinstance(item, Tensor)), output)
    if not isinstance(output, Tensor):
        raise InputError(
            f"a captured module must give a tensor or a tuple with one, got "
            f"{type(output).__name__} (module {name!r}): capture a module inside it."
        )
    return output
