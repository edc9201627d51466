"""Rules about a run as a whole: its losses, held-out loss and optimizer."""

from __future__ import annotations

import math
from functools import lru_cache

from steelyard.doctor.observation import Memory, Observation, TermKeys, is_broken_number
from steelyard.doctor.rule import Diagnosis, Judgements, percent, rule, smaller_rate
from steelyard.errors import NonFiniteError
from steelyard.spec.error_messages import BASE, title

_WORSE = 0.2  # nats; of another loss: fraction of its value at step 0
_RISEN, _BACK = 0.1, 0.05  # the same, above the best held-out loss
_EXPLODED, _EXPLODED_NATS, _EXPLODED_OTHERS = 2.0, 1.0, 100.0
_EARLY = 5  # steps
_NEAR = 4.0  # times the first loss, or 1
_CLIPPED_HARD = 10.0
_CROSS_ENTROPY = "cross_entropy"


@rule(
    "not finite",
    "problem",
    when="a value or a gradient norm is NaN, infinite, or above 1e100",
    cure="go back to the checkpoint before, with a smaller learning rate; check_finite=True "
    "stops at the term and the example",
    end=3,
)
def not_finite(now: Observation, memory: Memory) -> Judgements:  # noqa: ARG001 - keeps nothing
    """A number of the run is no number."""
    for subject, name, keys in _finite_numbers(tuple(term.name for term in now.terms)):
        broken = [key for key in keys if is_broken_number(now.metrics, key)]
        if not broken:
            if not now.metrics.keys().isdisjoint(keys):
                yield subject, None
            continue
        shown = ", ".join(f"{key} = {str(now.metrics[key])[:12]}" for key in broken)
        diagnosis = Diagnosis(
            f"{name} has a number that is not finite",
            f"{shown} at step {now.step}",
            "go back to the checkpoint before, with a smaller learning rate; check_finite=True "
            "stops at the term and the example",
        )
        yield subject, diagnosis


@lru_cache(maxsize=16)  # as a rule the same terms run at every step
def _finite_numbers(terms: tuple[str, ...]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Subjects of a run with these terms, their names, and the metrics that must be finite."""
    run = ("loss_total", "total_grad_norm", "optim/unclipped_grad_l2:mean", "held_out/loss")
    subjects = [
        ("base_loss", title("base"), ("base_loss/value", "base_loss/grad_norm")),
        ("run", "the run", run),
    ]
    for term in terms:
        keys = TermKeys.of(term)
        numbers = (keys.value, keys.contribution, keys.grad_norm, keys.grad_norm_weighted)
        subjects.append((keys.subject, title(term), numbers))
    return sorted(subjects)


@rule(
    "failed",
    "problem",
    when="a step ended with an error",
    cure="correct what the error names, and resume the run; for a value that is not finite, a "
    "smaller learning rate",
)
def failed(now: Observation, memory: Memory) -> Judgements:  # noqa: ARG001 - keeps nothing
    """The run ended with an error."""
    error, reason = now.metrics.get("failed"), now.metrics.get("failed/reason")
    if not isinstance(error, str):
        return
    name = now.metrics.get("failed/term")
    term = name if isinstance(name, str) else ""
    subject = "run" if not term else "base_loss" if term == BASE else f"regularizers/{term}"
    is_number = error == NonFiniteError.__name__
    yield (
        subject,
        Diagnosis(
            f"{title(term) if term else 'a step'} has failed, and the run has ended",
            f"{error} at step {now.step}: {str(reason).rstrip('.')}",
            f"look at what it names, {smaller_rate(now)}, and resume the run from the checkpoint "
            f"before"
            if is_number
            else "correct it, and resume the run",
        ),
    )


@rule(
    "exploded",
    "problem",
    when=f"cross-entropy is above {_EXPLODED:g} times its largest value of the first three "
    f"steps, and by {_EXPLODED_NATS:g} nat a token; another base loss is above "
    f"{_EXPLODED_OTHERS:g} times that in size, and above {_EXPLODED_OTHERS:g}",
    cure="a smaller learning rate, or grad_clip_norm",
    begin=(3, 5),
    end=5,
)
def exploded(now: Observation, memory: Memory) -> Judgements:
    """The base loss has left the range in which it began."""
    loss = _loss(now)
    if loss is None or (now.updated and not memory.holds("loss")):
        return
    start, *others = (abs(value) for value in memory.first("loss", loss, 3))
    # The first updates may have ruined it already: later values count if they are near the first.
    near = [value for value in others if value <= _NEAR * max(start, 1.0)]
    largest = max([start, *near])
    is_mean = now.facts.loss == _CROSS_ENTROPY and now.facts.reduction == "mean"
    is_nats = is_mean or now.number("nll") is not None
    if is_nats:
        is_exploded = loss > _EXPLODED * largest and loss > largest + _EXPLODED_NATS
    else:
        # A policy loss begins at about 0, since advantages cancel.
        is_exploded = abs(loss) > _EXPLODED_OTHERS * max(largest, 1.0)
    if not is_exploded:
        yield "base_loss", None
        return
    yield (
        "base_loss",
        Diagnosis(
            "the base loss has exploded",
            f"{largest:.3g} in the first steps, {loss:.3g} at step {now.step}",
            f"{smaller_rate(now)}, or set grad_clip_norm",
        ),
    )


@rule(
    "worse than untrained",
    "problem",
    when=f"the held-out loss is above its value at step 0 by more than {_WORSE:g} nats (of "
    f"another loss than cross-entropy: by {percent(_WORSE)})",
    cure="a smaller learning rate if the training loss rose too, or within the first "
    f"{_EARLY} steps; else fewer steps or stop_early",
)
def worse_than_untrained(now: Observation, memory: Memory) -> Judgements:
    """On held-out data the model is worse than before training."""
    training = _training_loss(now, memory)
    loss = now.number("held_out/loss")
    if loss is None:
        return
    if now.step == 0:
        memory.first("held_out", loss)
        return
    if not memory.holds("held_out"):  # resumed: the untrained model was not measured
        return
    untrained = memory.first("held_out", loss)[0]
    if loss - untrained <= _margin(now, _WORSE, untrained):
        yield "held_out", None
        return
    cause, cure = "", f"{smaller_rate(now)}, or give the terms less weight"
    if training is not None:
        start, end = training
        change = f"from {start:.3g} to {end:.3g}"
        if end > start:
            cause = (
                f"the training loss rose too, {change}: the step is too large, or the terms "
                f"outweigh it"
            )
        elif now.step < _EARLY:  # too early to have learned lines by heart
            cause = f"it took {now.step + 1} steps: the step is too large"
        else:
            cause = f"the training loss fell, {change}: its lines are memorised"
            cure = "make fewer steps, stop early, or take more data"
    yield (
        "held_out",
        Diagnosis(
            "on held-out data the model is worse than untrained",
            f"held-out loss {untrained:.3g} → {loss:.3g} at step {now.step}",
            cure,
            cause,
        ),
    )


@rule(
    "overfits",
    "warning",
    when=f"the held-out loss is above its best by more than {_RISEN:g} nats (of another loss: "
    f"by {percent(_RISEN)}) while the training loss is below that of then",
    cure="the checkpoint with the best value (keep_best), stop_early, or more data",
    begin=(2, 2),
)
def overfits(now: Observation, memory: Memory) -> Judgements:
    """The held-out loss rises while the training loss falls."""
    training = _training_loss(now, memory)
    loss = now.number("held_out/loss")
    if loss is None:
        return
    recent = training[1] if training is not None else None
    best = memory.first("best", loss)
    if loss <= best[0]:
        memory.replace("best", [loss, float(now.step), *([] if recent is None else [recent])])
        yield "held_out", None
        return
    value, step, *then = memory.first("best", loss)
    rise = loss - value
    if rise < _margin(now, _BACK, value):
        yield "held_out", None
    elif rise > _margin(now, _RISEN, value) and recent is not None and then and recent < then[0]:
        yield (
            "held_out",
            Diagnosis(
                "the held-out loss rises while the training loss falls",
                f"held-out loss {value:.3g} at step {step:.0f}, {loss:.3g} at step {now.step}; "
                f"training loss {then[0]:.3g} → {recent:.3g}",
                f"take the weights of about step {step:.0f} (keep_best), stop early, or take more "
                "data",
            ),
        )


def _margin(now: Observation, margin: float, value: float) -> float:
    """A margin in nats, or that fraction of the value of a loss that is not in nats."""
    is_nats = now.facts.loss == _CROSS_ENTROPY or now.number("nll") is not None
    return margin if is_nats else margin * abs(value)


def _loss(now: Observation) -> float | None:
    """Base loss of a step: cross-entropy per token where the metrics have it."""
    nll = now.number("nll")
    return now.number("base_loss/value") if nll is None else nll


def _training_loss(now: Observation, memory: Memory) -> tuple[float, float] | None:
    """Training loss of the first and of the last steps; None without one.

    They are means over three steps, or over fewer where there are fewer than six.
    """
    loss = _loss(now)
    if loss is None:
        return None
    first, last = memory.first("start", loss, 3), memory.last("recent", loss, 6)
    count = max(1, min(3, len(last) // 2))
    return math.fsum(first[:count]) / count, math.fsum(last[-count:]) / count


@rule(
    "clipped at most steps",
    "information",
    when="the norm of the gradient is above grad_clip_norm; a warning if it is above "
    f"{_CLIPPED_HARD:g} times that",
    cure="a grad_clip_norm near the usual norm, or a smaller weight for what makes it large",
    begin=(16, 20),
    end=10,
)
def clipped_at_most_steps(now: Observation, memory: Memory) -> Judgements:
    """Clipping, not the learning rate, decides the size of a step."""
    norm = now.number("optim/unclipped_grad_l2:mean")
    limit = now.number("optim/grad_clip_norm")
    limit = now.facts.grad_clip_norm if limit is None else limit
    if norm is None or not limit:
        return
    norms = memory.last("norms", norm, 20)
    if norm <= limit:
        yield "optim", None
        return
    usual = sorted(norms)[len(norms) // 2]
    yield (
        "optim",
        Diagnosis(
            "the gradient is clipped at most steps",
            f"norm {usual:.3g} (median), clipped to {limit:.3g}, up to step {now.step}",
            f"set grad_clip_norm to about {2 * usual:.2g}, so that it cuts the exceptions",
            severity="warning" if usual > _CLIPPED_HARD * limit else None,
        ),
    )
