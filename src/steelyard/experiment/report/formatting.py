"""Text of the report: numbers, names, and the sentences of the summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from steelyard.experiment.flags import DOMINATES, FIGHTS, NO_GRADIENT
from steelyard.experiment.paired_differences import Estimate
from steelyard.experiment.report.load import LoadedRun
from steelyard.experiment.report.metrics import Change, Findings, TermFinding
from steelyard.experiment.step_metrics import space_label

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
    if value is None or math.isnan(value):
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


def summarize(found: Findings) -> list[str]:
    """Sentences about one run: its losses, skipped terms, and flagged terms."""
    sentences = [_progress(found), *_losses(found)]
    if not found.terms:
        return [*sentences, "There were no regularizers."]
    for term in found.skipping:
        reasons = skip_reasons(term)
        end = "" if reasons.endswith("…") else "."
        steps = f"{skip_count(term)} of {found.steps} steps"
        sentences.append(f"“{term.name}” was skipped at {steps}: {reasons}{end}")
    sentences += [
        f"“{term.name}” went {format_change(term.value)}, with a bound of {number(term.bound)}: it "
        f"was beyond it by more than 5 % at {term.unmet} of {term.steps} steps."
        for term in found.terms
        if term.bound is not None
    ]
    if not found.tracked:
        return [*sentences, "Gradient norms were not tracked: shares and cosines are unknown."]
    return [*sentences, *_gradient_sentences(found)]


def skip_count(term: TermFinding) -> int:
    """Number of steps at which a term was skipped."""
    return sum(term.skipped.values())


def skip_reasons(term: TermFinding) -> str:
    """Reasons for which a term was skipped, with counts where there are several.

    Example:
        >>> skip_reasons(TermFinding("judge", skipped={"TermTimeoutError: too late": 3, "": 1}))
        'TermTimeoutError: too late (3 ×) and an unrecorded reason (1 ×)'
        >>> skip_reasons(TermFinding("judge", skipped={"a": 9, "b": 5, "c": 4, "d": 2, "e": 1}))
        'a (9 ×), b (5 ×), c (4 ×) and 2 other reasons (3 ×)'
    """
    counts = [(reason or "an unrecorded reason", count) for reason, count in term.skipped.items()]
    listed, others = counts[:_MAX_REASONS], counts[_MAX_REASONS:]
    if others:
        listed.append((f"{len(others)} other reasons", sum(count for _, count in others)))
    if len(listed) == 1:
        return listed[0][0]
    return join_names(f"{reason} ({count} ×)" for reason, count in listed)


def summarize_runs(runs: Sequence[LoadedRun], found: Sequence[Findings]) -> list[str]:
    """Sentences about several runs: how many, and which has the lowest held-out loss.

    Held-out losses are compared only between runs with the same data and base loss.
    """
    steps = sum(each.steps for each in found)
    sentences = [f"{len(runs)} runs, {steps} steps in all."]
    measured = [
        (run, each.held_out.last, each.steps)
        for run, each in zip(runs, found, strict=True)
        if each.held_out is not None
    ]
    if len(measured) < 2:  # noqa: PLR2004 - one run has nothing to be compared with
        return sentences
    different = [
        section
        for section in ("data", "loss")
        if any(
            run.config.get(section) != measured[0][0].config.get(section) for run, *_ in measured
        )
    ]
    if different:
        what = join_names({"data": "data", "loss": "base losses"}[each] for each in different)
        return [*sentences, f"Their {what} differ, so held-out losses are not compared."]
    same_length = len({steps for *_, steps in measured}) == 1

    def describe(run: LoadedRun, loss: float, steps: int) -> str:
        return f"“{run.name}” ({number(loss)}{'' if same_length else f' after {steps} steps'})"

    lowest, highest = (pick(measured, key=lambda each: each[1]) for pick in (min, max))
    sentences.append(
        f"The held-out loss ends lowest in {describe(*lowest)} and highest in {describe(*highest)}."
    )
    return sentences


def _progress(found: Findings) -> str:
    steps = f"{found.steps} step{'s' if found.steps != 1 else ''}"
    if found.planned is not None and found.planned > found.steps:
        steps = f"{found.steps} of {found.planned} steps"
    time = "" if found.seconds is None else f" in {seconds(found.seconds)}"
    return f"{steps}{time}."


def _losses(found: Findings) -> list[str]:
    """Sentences about the base loss, the held-out loss, and the total where it is comparable."""
    sentences = []
    if found.per_token is not None:
        sentences.append(f"The base loss per token {_moved(found.per_token)}.")
    elif found.base.value is not None:
        sentences.append(f"The base loss {_moved(found.base.value)}.")
    if found.held_out is not None:
        sentences.append(f"On held-out data the loss went {format_change(found.held_out)}.")
    if not found.terms:
        return sentences
    if found.loss is None:
        sentences.append(
            "The total loss is not compared: its terms or weights changed from step to step."
        )
        return sentences
    steps = f", over the {found.loss.steps} steps with the same terms and weights,"
    total = f"The total loss{steps if found.loss.steps < found.steps else ''}"
    tokens = ""
    if found.tokens is not None and found.tokens[0] < found.tokens[1]:
        tokens = "; its base is a sum over {:g} to {:g} tokens a batch".format(*found.tokens)
    return [*sentences, f"{total} {_moved(found.loss)}{tokens}."]


def _moved(change: Change) -> str:
    difference = change.last - change.first
    if difference == 0:
        return f"stayed at {number(change.last)}"
    moved = f"{'fell' if difference < 0 else 'rose'} {format_change(change)}"
    relative = change.relative
    details = [] if relative is None else [percent(relative, signed=True)]
    if change.over > 1:
        details.append(f"means of the first and last {change.over} of these steps")
    return f"{moved} ({', '.join(details)})" if details else moved


def _gradient_sentences(found: Findings) -> list[str]:
    sentences = [
        f"“{term.name}” dominates: it has {percent(term.share)} of the sum of the gradient norms "
        f"with respect to the {format_space(term.space)}."
        for term in found.flagged(DOMINATES)
    ]
    sentences += [
        f"With respect to the {format_space(term.space)}, the gradient of “{term.name}” opposes "
        f"that of the base loss (cosine {cosine(term.cosine)}) and cancels "
        f"{percent(term.cancelled)} of it."
        for term in found.flagged(FIGHTS)
    ]
    without_gradient = found.flagged(NO_GRADIENT)
    if without_gradient:
        names = join_names(f"“{term.name}”" for term in without_gradient)
        has = "has" if len(without_gradient) == 1 else "have"
        sentences.append(f"{names} {has} no gradient: measured, but without effect on training.")
    if not any(term.flags for term in found.terms):
        sentences.append("No term dominates, and none fights the base loss.")
    elsewhere = [term for term in found.terms if term.space not in (None, found.base.space)]
    sentences += [
        f"The gradient of “{term.name}” is with respect to the {format_space(term.space)} and "
        f"not comparable with that of the base loss."
        for term in elsewhere
    ]
    return sentences
