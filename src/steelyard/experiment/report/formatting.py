"""Numbers and lists as a person reads them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from steelyard.experiment.flags import DOMINATES, FIGHTS, NO_GRADIENT
from steelyard.experiment.report.findings import Change, Findings, TermFinding
from steelyard.experiment.report.load import LoadedRun

MINUTE = 60.0
HOUR = 3600.0
NONE = "–"
_REASONS = 3  # that are told apart


def number(value: float | None, *, signed: bool = False) -> str:
    """Three significant digits or so, with a real minus sign.

    Example:
        >>> number(2.34567), number(-0.00012), number(0.5, signed=True), number(None)
        ('2.346', '−0.00012', '+0.500', '–')
    """
    if value is None or math.isnan(value):
        return NONE
    size = abs(value)
    if size == 0:
        text = "0"
    elif size >= 1e5 or size < 1e-4:  # noqa: PLR2004 - where zeros become hard to count
        text = f"{size:.1e}"
    elif size >= 100:  # noqa: PLR2004
        text = f"{size:.1f}"
    elif size >= 0.01:  # noqa: PLR2004
        text = f"{size:.3f}"
    else:
        text = f"{size:.2g}"
    sign = "−" if value < 0 else "+" if signed and value > 0 else ""
    return sign + text


def percent(part: float | None, *, signed: bool = False) -> str:
    """A part of 1 as a percentage.

    Example:
        >>> percent(0.256), percent(-0.07, signed=True), percent(0.004)
        ('26 %', '−7 %', '0.4 %')
    """
    if part is None or math.isnan(part):
        return NONE
    size = abs(100 * part)
    text = f"{size:.1f}" if 0 < size < 1 else f"{size:.0f}"
    sign = "−" if part < 0 else "+" if signed and part > 0 else ""
    return f"{sign}{text} %"


def seconds(value: float | None) -> str:
    """A time in the unit that suits it.

    Example:
        >>> seconds(0.00042), seconds(0.0421), seconds(3.25), seconds(84), seconds(7384)
        ('0.42 ms', '42 ms', '3.2 s', '1 min 24 s', '2 h 3 min')
    """
    if value is None or math.isnan(value):
        return NONE
    if value < 1:
        return f"{1000 * value:.2g} ms" if value < 0.1 else f"{1000 * value:.0f} ms"  # noqa: PLR2004
    if value < MINUTE:
        return f"{value:.1f} s"
    if value < HOUR:
        return f"{int(value // MINUTE)} min {round(value % MINUTE):d} s"
    return f"{int(value // HOUR)} h {int(value % HOUR // MINUTE)} min"


def cosine(value: float | None) -> str:
    """Two decimals and a sign.

    Example:
        >>> cosine(0.987), cosine(-0.3), cosine(-1e-9), cosine(None)
        ('+0.99', '−0.30', '0.00', '–')
    """
    if value is None or math.isnan(value):
        return NONE
    text = f"{abs(value):.2f}"
    sign = "" if text == "0.00" else "−" if value < 0 else "+"
    return sign + text


def listed(names: Iterable[str]) -> str:
    """Names as a sentence has them.

    Example:
        >>> listed(["kl"]), listed(["kl", "l1", "judge"])
        ('kl', 'kl, l1 and judge')
    """
    *most, last = list(names) or [NONE]
    return f"{', '.join(most)} and {last}" if most else last


def change(value: Change | None) -> str:
    """How a number moved."""
    if value is None:
        return "not measured"
    return f"from {number(value.first)} to {number(value.last)}"


def sentences(found: Findings) -> list[str]:
    """What a run shows, in a few sentences."""
    said = [_progress(found)]
    if found.held_out is not None:
        said.append(f"On held-out data the loss went {change(found.held_out)}.")
    if not found.terms:
        return [*said, "There were no regularizers."]
    for term in found.skipping:
        why = counted(term)
        end = "" if why.endswith("…") else "."
        said.append(
            f"“{term.name}” was skipped at {skips(term)} of {found.steps} steps: {why}{end}"
        )
    if not found.tracked:
        return [*said, "Gradient norms were not tracked, so nothing is known of who pulls."]
    said += [
        f"“{term.name}” dominates: {percent(term.share)} of the gradient is its own."
        for term in found.flagged(DOMINATES)
    ]
    fighting = found.flagged(FIGHTS)
    if fighting:
        who = listed(f"“{term.name}” (cosine {cosine(term.cosine)})" for term in fighting)
        said.append(f"{who} {_verb(fighting, 'pulls', 'pull')} against the base loss.")
    idle = found.flagged(NO_GRADIENT)
    if idle:
        who, has = listed(f"“{term.name}”" for term in idle), _verb(idle, "has", "have")
        said.append(f"{who} {has} no gradient: measured, but with no say in training.")
    if not any(term.flags for term in found.terms):
        said.append("No term dominates, and none fights the base loss.")
    return said


def skips(term: TermFinding) -> int:
    """At how many steps a term was skipped."""
    return sum(term.skipped.values())


def counted(term: TermFinding) -> str:
    """Why a term was skipped, with how often where there are several reasons.

    Example:
        >>> counted(TermFinding("judge", skipped={"TermTimeoutError: too late": 3, "": 1}))
        'TermTimeoutError: too late (3 ×) and a reason that was not written down (1 ×)'
        >>> counted(TermFinding("judge", skipped={"a": 9, "b": 5, "c": 4, "d": 2, "e": 1}))
        'a (9 ×), b (5 ×), c (4 ×) and 2 other reasons (3 ×)'
    """
    named = [(reason or "a reason that was not written down", n)
             for reason, n in term.skipped.items()]  # fmt: skip
    shown, more = named[:_REASONS], named[_REASONS:]
    if more:
        shown.append((f"{len(more)} other reasons", sum(n for _, n in more)))
    one = len(shown) == 1
    return listed(reason if one else f"{reason} ({n} ×)" for reason, n in shown)


def compared(runs: Sequence[LoadedRun], found: Sequence[Findings]) -> list[str]:
    """What several runs show beside each other, in a few sentences."""
    steps = sum(each.steps for each in found)
    said = [f"{len(runs)} runs, {steps} steps in all."]
    known = {
        run.name: each.held_out.last
        for run, each in zip(runs, found, strict=True)
        if each.held_out is not None
    }
    if len(known) > 1:
        best, worst = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
        said.append(
            f"The held-out loss ends lowest in “{best}” ({number(known[best])}) and highest in "
            f"“{worst}” ({number(known[worst])})."
        )
    return said


def _progress(found: Findings) -> str:
    steps = f"{found.steps} step{'s' if found.steps != 1 else ''}"
    if found.planned is not None and found.planned > found.steps:
        steps = f"{found.steps} of {found.planned} steps"
    time = "" if found.seconds is None else f" in {seconds(found.seconds)}"
    if found.loss is None:
        return f"{steps}{time}."
    moved = found.loss.last - found.loss.first
    verb = "fell" if moved < 0 else "rose" if moved > 0 else "stayed"
    part = found.loss.relative
    by = [] if part is None else [percent(part, signed=True)]
    if found.loss.over > 1:
        by.append(f"means of the first and last {found.loss.over} steps")
    noted = f" ({', '.join(by)})" if by else ""
    return f"{steps}{time}: the loss {verb} {change(found.loss)}{noted}."


def _verb(terms: Sequence[TermFinding], one: str, many: str) -> str:
    return one if len(terms) == 1 else many
