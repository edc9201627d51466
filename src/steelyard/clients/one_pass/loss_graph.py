"""The loss that is uploaded: its terms, its operations, and the metrics that it sends back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from steelyard.composition import PerDatum

LOGPROBS, MASK = "logprobs", "mask"


class UnsuitableTermError(Exception):
    """A term cannot be part of an uploaded loss; the message says why.

    Attributes:
        term: its name.
    """

    def __init__(self, term: str, reason: str) -> None:
        super().__init__(reason)
        self.term = term


@dataclass(frozen=True)
class GraphTerm:
    """A term of the graph.

    Attributes:
        name: of the term.
        form: its functions.
        inputs: names of the graph's inputs, by the names of the form's fields.
    """

    name: str
    form: PerDatum
    inputs: Mapping[str, str]

    @property
    def functions(self) -> dict[str, Callable[..., Tensor]]:
        """Its metrics that are functions, by name."""
        found = self.form.metrics.items()
        return {name: each[0] for name, each in found if isinstance(each, tuple)}

    def sums(
        self, logprobs: Tensor, mask: Tensor, fields: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Sum of the values for one datum, and of what is differentiated, by calling the form."""
        form = self.form

        def kept(values: Tensor) -> Tensor:
            if form.all_tokens or not values.dim():
                return values
            rows = mask != 0
            return torch.where(rows if values.dim() == 1 else rows.unsqueeze(-1), values, 0.0)

        values = form.values(kept(logprobs), **fields)
        other = values if form.gradient_of is None else form.gradient_of(kept(logprobs), **fields)
        return kept(values).sum(), kept(other).sum()


@dataclass(frozen=True)
class TermKeys:
    """Metrics of a term.

    Attributes:
        value: of s_i.
        rank: of its values: 0 for one number per datum, else values of tokens, or of classes.
        metrics: of its own metrics, with their ranks, by name.
    """

    value: str
    rank: int
    metrics: Mapping[str, tuple[str, int]]


@dataclass(frozen=True)
class LossGraph:
    """An uploadable loss.

    Attributes:
        graph: its operations; the output is (loss, metrics).
        ranks: rank of each input, in order, the log-probs first.
        terms: metrics of each term.
        products: metric of ⟨g_i, g_j⟩, i ≤ j; empty unless tracked.
        squared_norm: metric of ⟨G, G⟩; empty unless tracked.
    """

    graph: fx.Graph
    ranks: Mapping[str, int]
    terms: Sequence[TermKeys]
    products: Mapping[tuple[int, int], str] = field(default_factory=dict)
    squared_norm: str = ""

    @cached_property
    def key(self) -> Any:
        """Identifies the graph and its inputs."""
        return self.graph.python_code("self").src, tuple(self.ranks.items())

    @cached_property
    def metric_keys(self) -> frozenset[str]:
        """Keys of the metrics that the server promises to send."""
        output: Any = self.graph.output_node().args[0]  # (loss, metrics)
        return frozenset(output[1])

    def function(self) -> Callable[..., Any]:
        """The graph as a function whose parameters are the inputs, to be traced by the SDK."""
        module = fx.GraphModule({}, self.graph)
        names = ", ".join(self.ranks)
        # The SDK and torch.fx read the names of parameters from the code of a function.
        scope: dict[str, Any] = {"run": fx.Interpreter(module).run}
        exec(f"def steelyard_loss({names}):\n    return run({names})", scope)  # noqa: S102 - our names
        function: Callable[..., Any] = scope["steelyard_loss"]
        return function
