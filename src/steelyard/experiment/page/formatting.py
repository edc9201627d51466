"""Text of the report: numbers, names, changes and reasons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from steelyard.experiment.compare.statistics import Estimate
from steelyard.experiment.page.run_statistics import Change, TermStatistics
from steelyard.output.step_metrics import space_label

MINUTE = 60.0
HOUR = 3600.0
NONE = "–"
_MAX_REASONS = 3  # listed one by one; further reasons are counted together


def number(value: float | None, *, signed: bool = False) -> str:
    """Text of a number with about three significant digits and a typographic minus sign.

    Example:
        >>> number(2.34567), number(-0.00012), number(0.5, signed=True), number(None)
        ('2.346', '−0.00012', '+0.500', '–')
    """
    if value is None or math.isnan(value):
        return NONE
    size = abs(value)
    if size == 0:
        text = "0"
    elif size >= 1e5 or size < 1e-4:  # noqa: PLR2004 - outside, zeros are hard to count
        text = f"{size:.1e}"
    elif size >= 100:  # noqa: PLR2004
        text = f"{size:.1f}"
    elif size >= 0.01:  # noqa: PLR2004
        text = f"{size:.3f}"
    else:
        text = f"{size:.2g}"
    sign = "−" if value < 0 else "+" if signed and value > 0 else ""
    return sign + text


def with_margin(estimate: Estimate | None, *, signed: bool = False) -> str:
    """Text of a mean and the margin of its interval, if it has one.

    Example:
        >>> with_margin(Estimate(0.25, 0.5, 3), signed=True), with_margin(None)
        ('+0.250 ± 0.500', '–')
    """
    if estimate is None:
        return NONE
    margin = "" if estimate.margin is None else f" ± {number(estimate.margin)}"
    return number(estimate.mean, signed=signed) + margin


def percent(fraction: float | None, *, signed: bool = False) -> str:
    """Text of a fraction as a percentage.

    Example:
        >>> percent(0.256), percent(-0.07, signed=True), percent(0.004)
        ('26 %', '−7 %', '0.4 %')
    """
    if fraction is None or math.isnan(fraction):
        return NONE
    size = abs(100 * fraction)
    text = f"{size:.1f}" if 0 < size < 1 else f"{size:.0f}"
    sign = "−" if fraction < 0 else "+" if signed and fraction > 0 else ""
    return f"{sign}{text} %"


def seconds(value: float | None) -> str:
    """Text of a duration, in ms, s, min or h.

    Example:
        >>> seconds(0.00042), seconds(0.0421), seconds(3.25), seconds(84), seconds(7384)
        ('0.42 ms', '42 ms', '3.2 s', '1 min 24 s', '2 h 3 min')
    """
    if value is None or not math.isfinite(value):
        return NONE
    # Each limit is where the rounded text would reach the next unit: 59.97 is no "60.0 s".
    if value < 0.00995:  # noqa: PLR2004
        return f"{1000 * value:.2g} ms"
    if value < 0.9995:  # noqa: PLR2004
        return f"{1000 * value:.0f} ms"
    if value < MINUTE - 0.05:
        return f"{value:.1f} s"
    if value < HOUR - 0.5:
        return "{} min {} s".format(*divmod(round(value), 60))
    return "{} h {} min".format(*divmod(round(value / MINUTE), 60))


def cosine(value: float | None) -> str:
    """Text of a cosine: two decimals and a sign.

    Example:
        >>> cosine(0.987), cosine(-0.3), cosine(-1e-9), cosine(None)
        ('+0.99', '−0.30', '0.00', '–')
    """
    if value is None or math.isnan(value):
        return NONE
    text = f"{abs(value):.2f}"
    sign = "" if text == "0.00" else "−" if value < 0 else "+"
    return sign + text


def join_names(names: Iterable[str]) -> str:
    """Join names with commas and a final "and".

    Example:
        >>> join_names(["kl"]), join_names(["kl", "l1", "judge"])
        ('kl', 'kl, l1 and judge')
    """
    *most, last = list(names) or [NONE]
    return f"{', '.join(most)} and {last}" if most else last


def format_change(value: Change | None) -> str:
    """Text of a change: "from … to …"."""
    if value is None:
        return "not measured"
    return f"from {number(value.first)} to {number(value.last)}"


def format_space(space: str | None) -> str:
    """Text of what a gradient is with respect to; a dash if there is none."""
    return NONE if space is None else space_label(space)


def cosine_spaces(spaces: Sequence[str]) -> str:
    """Sentence on the spaces of the gradients between which cosines are, of one run or several.

    Example:
        >>> cosine_spaces(["parameters"])
        'With respect to the parameters.'
    """
    text = f"With respect to the {join_names(map(format_space, spaces))}"
    if len(spaces) > 1:
        return f"{text}: only runs with the same one are comparable."
    if "parameters" in spaces:
        return f"{text}."
    return f"{text}; with respect to the model's weights they may differ, even in sign."


def skip_count(term: TermStatistics) -> int:
    """Number of steps at which a term was skipped."""
    return sum(term.skipped.values())


def skip_reasons(term: TermStatistics) -> str:
    """Reasons for which a term was skipped, with counts where there are several.

    Example:
        >>> skip_reasons(TermStatistics("judge", skipped={"TermTimeoutError: too late": 3, "": 1}))
        'TermTimeoutError: too late (3 ×) and an unrecorded reason (1 ×)'
        >>> skip_reasons(TermStatistics("judge", skipped={"a": 9, "b": 5, "c": 4, "d": 2, "e": 1}))
        'a (9 ×), b (5 ×), c (4 ×) and 2 other reasons (3 ×)'
    """
    return list_reasons(term.skipped)


def list_reasons(counts_by_reason: Mapping[str, int]) -> str:
    """Reasons, the most frequent ones first, with counts where there are several."""
    counts = [(reason or "an unrecorded reason", n) for reason, n in counts_by_reason.items()]
    listed, others = counts[:_MAX_REASONS], counts[_MAX_REASONS:]
    if others:
        listed.append((f"{len(others)} other reasons", sum(count for _, count in others)))
    if len(listed) == 1:
        return listed[0][0]
    return join_names(f"{reason} ({count} ×)" for reason, count in listed)
