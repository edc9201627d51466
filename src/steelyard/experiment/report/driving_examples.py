"""The examples that drive each term, as text with the share of each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from steelyard.errors import RunError
from steelyard.experiment.driver_records import Piece, redact_pieces
from steelyard.experiment.report.formatting import percent
from steelyard.experiment.report.load import DRIVERS, LoadedRun
from steelyard.spec import BASE

_MAX_STEPS = 12  # in the page; of more steps with records, some are left out, never the last
_FAINT = 0.02  # of the strongest token; below that a token has no colour
_STRONG = 0.5  # of the strongest token; above that a token is underlined


@dataclass(frozen=True)
class Span:
    """Consecutive text of a datum.

    Attributes:
        text: one token, or several without colour.
        depth: depth of its colour, from 0 to 1: its share, divided by that of the strongest token.
        title: its share as a text; empty without colour.
    """

    text: str
    depth: float = 0.0
    title: str = ""

    @property
    def strong(self) -> bool:
        """Whether it is among the strongest tokens."""
        return self.depth >= _STRONG


@dataclass(frozen=True)
class Example:
    """A datum that drives a term.

    Attributes:
        source: line and file of the datum.
        share: its share of the gradient.
        spans: its text.
    """

    source: str
    share: float
    spans: Sequence[Span]


@dataclass(frozen=True)
class DrivenTerm:
    """Examples that drive a term at one step.

    Attributes:
        name: name of the term, `"base"` for the base loss.
        index: index among the regularizers of the run, for its colour; None for the base loss.
        grad_norm: norm of its gradient, before the weight.
        examples: the strongest first.
    """

    name: str
    index: int | None
    grad_norm: float | None
    examples: Sequence[Example]


def driving_examples(run: LoadedRun) -> dict[int, list[DrivenTerm]]:
    """Driven terms by step, the base loss first; at most twelve steps, the last one included.

    Raises:
        RunError: a record is not as a run writes it.
    """
    try:
        return _driving_examples(run)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{run.folder / DRIVERS} must hold records as a run writes them, and one is damaged: "
            f"{type(error).__name__}: {error}. Remove it, and the report leaves them out."
        ) from error


def _driving_examples(run: LoadedRun) -> dict[int, list[DrivenTerm]]:
    by_step: dict[int, dict[str, Mapping[str, Any]]] = {}
    for record in run.drivers:
        by_step.setdefault(record["step"], {})[record["term"]] = record
    steps = sorted(by_step)
    every = -(-len(steps) // _MAX_STEPS) or 1
    terms = [BASE, *run.terms]
    return {
        step: [_term(by_step[step][name], terms) for name in terms if name in by_step[step]]
        for step in reversed(steps[::-1][::every])
    }


def _term(record: Mapping[str, Any], terms: Sequence[str]) -> DrivenTerm:
    # Of a run whose config was edited since, a secret may span several tokens.
    texts = [redact_pieces([(text, share) for text, share in d["tokens"]]) for d in record["data"]]
    strongest = max(share or 0.0 for pieces in texts for _, share in pieces)
    name, norm = record["term"], record.get("grad_norm")
    examples = [
        Example(_source(datum, record), datum["share"], _spans(pieces, strongest))
        for datum, pieces in zip(record["data"], texts, strict=True)
    ]
    return DrivenTerm(name, None if name == BASE else terms.index(name) - 1, norm, examples)


def _source(datum: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    field = f", {datum['field']}" if "field" in datum else ""
    return f"{record['file']}, line {datum['line']}{field}"


def _spans(pieces: Sequence[Piece], strongest: float) -> list[Span]:
    """Spans of a datum; neighbours without colour are joined."""
    spans: list[Span] = []
    scaled = [(text, share, (share or 0.0) / (strongest or 1.0)) for text, share in pieces]
    for colored, group in groupby(scaled, key=lambda piece: piece[2] >= _FAINT):
        if colored:
            spans += [Span(text, round(depth, 3), percent(share)) for text, share, depth in group]
        else:
            spans.append(Span("".join(text for text, _, _ in group)))
    return spans
