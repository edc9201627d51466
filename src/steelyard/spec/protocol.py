"""Protocols of regularizers, and types of the functions around them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

# A loss is a torch tensor, a NumPy value or a number; this stage loads none of those libraries.
Metrics: TypeAlias = Mapping[str, float]
TermFn: TypeAlias = Callable[..., Any]
Schedule: TypeAlias = Callable[[int], float]


@runtime_checkable
class Regularizer(Protocol):
    """An object with `compute(data, logprobs, **options) -> loss | (loss, metrics)`.

    `compute` may be async. It returns None for a batch in which it has nothing to measure: the
    term is then left out of the call. Optional members are used when they are there: `name`, the
    default name of its spec; `run_in` and `gradient`, what `"auto"` means for it in a spec;
    `state_dict()` / `load_state_dict(state)`, with which the pipeline saves and restores the
    state that the regularizer keeps from batch to batch; and `measure`, called like `compute` to
    measure the regularizer on held-out data: it returns the quantity itself, defined alike in
    every run whatever the state is, and does not advance the state. Without it, `compute` is
    called, of a copy if there is state. Two are sentences, for messages: `measures_only`, why the
    term must not be trained on, for one with these options, which a spec then refuses unless its
    weight is 0 or its `gradient` `"none"`; and `zero_means`, what it says of a term that its value
    is 0 at one step after the other, which a pipeline then warns about.

    Example:
        >>> class Brevity:
        ...     name = "brevity"
        ...     def compute(self, data, logprobs):
        ...         return sum(len(lp) for lp in logprobs)
        >>> isinstance(Brevity(), Regularizer)
        True
    """

    @property
    def compute(self) -> TermFn:
        """A method that returns the penalty of a batch, alone or with a mapping of metrics."""


@runtime_checkable
class Stateful(Protocol):
    """An object with state: `state_dict()` and `load_state_dict(state)`."""

    def state_dict(self) -> Any:
        """State to save."""

    def load_state_dict(self, state: Any) -> object:
        """Restore a saved state."""


@runtime_checkable
class ChoosesNeeds(Protocol):
    """A regularizer that reads extra inputs with some data: `needs_for(data, gives)`.

    `Entropy`, for one, reads the whole vocabulary where the tokens of the data were not sampled.
    """

    def needs_for(self, data: Any, gives: Collection[str]) -> tuple[str, ...]:
        """Extra inputs that `compute` receives with these data, of those that the client gives."""
