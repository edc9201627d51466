"""Rules about terms: bounds, gradients, weights, shares, batches, time, skips."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from steelyard.doctor.observation import Memory, Observation, RewardStep, TermStep
from steelyard.doctor.rule import Diagnosis, Judgements, percent, rule, short_number, smaller_rate
from steelyard.output.step_metrics import short_reason, skipped_terms
from steelyard.spec.error_messages import title

# Bounds.
BEYOND = 0.2  # of the scale: a violation below this is the noise of a batch
_SETTLING = 10  # steps in which a controller finds its multiplier
_OVERSHOT = 4.0  # of the scale: beyond that a value that was within its bound has been thrown out
_FALLING = 0.9  # a multiplier below this fraction of its largest in six steps is coming down
# Gradients.
# Of log-probs at which answers were sampled: those of a pass over them differ by rounding.
_ZERO_OF_SAMPLES, _SAMPLED = 1e-4, "logprobs"
_ZERO = 1e-10  # a value at most this is 0: a KL divergence after the smallest update is above it
_SMALL_SHARE, _GOOD_SHARE = 0.01, 0.1
_LARGE_SHARE, _MODERATE_SHARE = 0.8, 0.3
_OPPOSING, _CANCELLED = -0.5, 1 / 3
# The gradient of a KL on the data of the base loss, where the two have found their balance.
_BALANCED, _USED = 2 / 3, 0.8  # of the gradient of the base loss; of a bound
_LEFT_TO_LEARN = 0.2  # nats a token
_FADED = 0.1  # a base gradient below this fraction of its first norms has little left to do
# A sum over N tokens is N times a mean: a weight of a mean that is below N times this is lost.
_LOST_WEIGHT, _NOTICED_SHARE = 0.01, 0.05
_RESPONSE_WINDOW, _MEASURES = 20, 8
_LONG_SECONDS, _LONG_FRACTION = 0.5, 0.5

_CURE_BY_EXECUTOR: Final = {
    "process": "run it on Ray (run_in='ray') on another machine, or at fewer steps (every=4)",
    "ray": "give its task more resources, or run it at fewer steps (every=4)",
    "async": "give it a faster service, or run it at fewer steps (every=4)",
}
_CURE_OF_TIME = "compute it in a process (run_in='process'), or at fewer steps (every=4)"


@rule(
    "bound broken",
    "problem",
    when=f"from step {_SETTLING} on, a value is beyond its bound by more than "
    f"{percent(BEYOND)} of it while the multiplier is not falling; earlier, if it was within "
    f"the bound and is now beyond it by more than {_OVERSHOT:g} times the bound",
    cure="a smaller learning rate, or grad_clip_norm, if one update moves the value by more "
    "than the bound; the sign of the term, if it moves away while the multiplier rises; else "
    "more steps, or a bound that can be met",
    begin=(5, 5),
    end=5,
)
def bound_broken(now: Observation, memory: Memory) -> Judgements:
    """The value of a term with a bound stays beyond it."""
    for term in now.terms:
        scale = term.facts.scale or abs(term.bound or 0.0)
        violation, value, multiplier = term.violation, term.value, term.weight
        if not scale or violation is None or value is None or multiplier is None:
            continue
        beyond = violation / scale
        values = memory.last(f"{term.name}/value", value, 6)
        multipliers = memory.last(f"{term.name}/multiplier", multiplier, 6)
        if beyond <= BEYOND:
            memory.first(f"{term.name}/was within", 1.0)
            yield term.subject, None
            continue
        thrown_out = beyond > _OVERSHOT and memory.holds(f"{term.name}/was within")
        if now.step < _SETTLING and not thrown_out:
            continue
        # One that rises again after a fall swings, and is not coming down.
        if multipliers[-1] < min([_FALLING * max(multipliers), *multipliers[-2:-1]]):
            continue
        yield term.subject, _broken_bound(now, term, scale, values, multipliers)


def _broken_bound(
    now: Observation, term: TermStep, scale: float, values: list[float], multipliers: list[float]
) -> Diagnosis:
    """Diagnosis with the cause that the last six values and multipliers show."""
    bound = term.bound or 0.0
    jump = max((abs(b - a) for a, b in pairwise(values)), default=0.0) / scale
    upper = values[-1] > bound
    away = (values[-1] - values[0]) * (1 if upper else -1) > BEYOND * scale
    rises = multipliers[-1] > multipliers[0]
    highest = max(multipliers)
    is_stuck = highest > 0 and highest - min(multipliers) <= 0.01 * highest
    cause, cure = "", "give it more steps, or a bound that can be met"
    if jump > 1:
        cause = (
            f"one update moves it by up to {short_number(jump)} × its bound: the step is too large"
        )
        cure = f"{smaller_rate(now, jump)}, or set grad_clip_norm"
    elif away and rises:
        cause = "it moves away while the multiplier rises: more weight does not pull it back"
        cure = (
            "check the sign of the term and of the bound (at_most or at_least), and take off the "
            "term that pushes it"
        )
    elif is_stuck:
        cause = "the multiplier no longer changes: it is at its limit"
        cure = f"take a bound that can be met, nearer to {values[-1]:.3g}"
    history = f"multiplier {short_number(multipliers[0])} → {short_number(multipliers[-1])}"
    return Diagnosis(
        f"{title(term.name)} is beyond its bound of {bound:.3g}",
        f"{values[-1]:.3g} at step {now.step}, {history}",
        cure,
        cause,
    )


@rule(
    "no gradient",
    "problem",
    when="after an update, the gradient of a term with a weight is missing or 0 although its "
    "value is not 0; of a divergence from a reference, also while its value is 0 (at most "
    f"{_ZERO:g}; of one from the log-probs of the samples themselves, {_ZERO_OF_SAMPLES:g})",
    cure="by kind of term: log-probs of another model as the reference; gradient='score' or "
    "'numerical' for a term that is no function of the log-probs; gradient='none' if it is "
    "meant to be measured alone",
    begin=(5, 5),
    end=3,
)
def no_gradient(now: Observation, memory: Memory) -> Judgements:  # noqa: ARG001 - keeps nothing
    """A term that is trained on does not change the gradient."""
    for term in now.terms:
        must_differ = term.facts.compares_models or bool(term.facts.zero_means)
        # A divergence of exactly 0 is no bound that holds, for which the multiplier is 0.
        trains = term.weight or (term.is_bounded and must_differ)
        if not now.updated or not trains or term.facts.gradient == "none":
            continue
        zero = _ZERO_OF_SAMPLES if term.facts.reference == _SAMPLED else _ZERO
        is_zero = term.value is not None and abs(term.value) <= zero
        if now.tracked and term.weight:
            if term.has_gradient and term.grad_norm is None:  # not finite, which is another rule
                continue
            is_silent = not term.grad_norm
            # A constraint that is satisfied is 0, and so is its gradient.
            is_well = not is_zero and not is_silent if must_differ else is_zero or not is_silent
        elif must_differ and term.value is not None:
            is_well = not is_zero
        else:
            continue
        yield term.subject, None if is_well else _missing_gradient(now, term, is_zero=is_zero)


def _missing_gradient(now: Observation, term: TermStep, *, is_zero: bool) -> Diagnosis:
    if term.facts.compares_models and is_zero:
        cause = "its reference is the model itself"
        cure = "use log-probs of a model that stays as it is, such as the base model"
    elif term.facts.zero_means and is_zero:
        cause, cure = term.facts.zero_means, "change what it compares, or take it off"
    elif term.facts.gradient == "score":
        cause = "all data of a batch have the same penalty, which compares them"
        cure = "use data, or a penalty, that differ within a batch"
    else:
        cause = "its loss does not depend on the log-probs through torch"
        cure = (
            "use gradient='score' (one penalty per datum) or gradient='numerical'; gradient='none' "
            "if it is only to be measured"
        )
    value = "unknown" if term.value is None else f"{term.value:.3g}"
    norm = "0" if term.has_gradient or not now.tracked else "missing"
    return Diagnosis(
        f"{title(term.name)} has no gradient: it does not affect training",
        f"value {value}, gradient norm {norm} at step {now.step}",
        cure,
        cause,
    )


@rule(
    "sum beside means",
    "warning",
    when="the base loss is a sum over tokens, and the weight of every term that is a mean is "
    f"below {_LOST_WEIGHT:g} per token, unless its share of the gradient is above "
    f"{percent(_NOTICED_SHARE)}",
    cure="reduction = 'mean' for the base loss, or weights times the number of tokens",
)
def sum_beside_means(now: Observation, memory: Memory) -> Judgements:
    """Terms that are means have next to no effect beside a base loss that is a sum."""
    if now.facts.reduction != "sum":
        return
    tokens = now.number("tokens")
    if tokens is None:
        per_answer = now.number("rollouts/answer_tokens")
        answers = now.facts.batch_size
        tokens = per_answer * answers if per_answer and answers else None
    means = [
        term
        for term in now.terms
        if term.facts.reduction == "mean" and term.weight and not term.is_bounded
    ]
    steady = [term for term in means if not _is_moving(term, memory)]
    if tokens is None or not steady or len(steady) < len(means):
        return
    lost = [
        term
        for term in steady
        if (term.weight or 0.0) < _LOST_WEIGHT * tokens and (term.share or 0.0) < _NOTICED_SHARE
    ]
    if len(lost) < len(steady):
        yield "base_loss", None
        return
    first = lost[0]
    base = now.number("base_loss/value")
    size = "" if base is None else f" of {base:.3g}"
    yield (
        "base_loss",
        Diagnosis(
            "the base loss is a sum over tokens beside terms that are means, which have next to "
            "no effect",
            f"a sum{size} over {tokens:.0f} tokens, and {title(first.name)} with weight "
            f"{first.weight:.3g}",
            f"set the weight to {(first.weight or 0.0) * tokens:.3g}, which is as much as "
            f"{first.weight:.3g} beside a mean; or take the mean (reduction='mean' in a config)",
        ),
    )


def _is_moving(term: TermStep, memory: Memory) -> bool:
    """Whether the weight changed from one step to the next, or a schedule has just begun."""
    weight = term.weight or 0.0
    last = memory.last(f"{term.name}/weight", weight, 2)
    if len(last) < 2:  # noqa: PLR2004 - a step before
        return term.facts.weight is None
    return last[0] != last[1]


@rule(
    "batch too small",
    "warning",
    when="a call has fewer data than a term needs that compares groups of them: 16, two "
    "groups of 8",
    cure="a larger batch_size; calls that accumulate do not help, since each is measured alone",
)
def batch_too_small(now: Observation, memory: Memory) -> Judgements:  # noqa: ARG001 - keeps nothing
    """A statistic over the data of a call is mostly noise."""
    for term in now.terms:
        own, smallest = term.facts.batch_size, term.facts.smallest_batch
        batch = now.facts.batch_size if own is None else own
        if batch is None or smallest is None or not (term.weight or term.is_bounded):
            continue
        if batch >= smallest:
            yield term.subject, None
            continue
        yield (
            term.subject,
            Diagnosis(
                f"{title(term.name)} compares groups of data, and a batch is too small for that",
                f"{batch} data in a call, at least {smallest} wanted",
                f"set the batch size to {smallest} or more",
                "the gap between means of a few data is mostly noise",
            ),
        )


@rule(
    "no response",
    "warning",
    when=f"a term with a share of the gradient above {percent(_MODERATE_SHARE)}, which the "
    f"base loss does not oppose, rises: significantly over {_RESPONSE_WINDOW} steps (by twice "
    f"the standard error), or at each of the last {_MEASURES} steps whose effect was measured",
    cure="check the sign of its gradient, its estimator and the learning rate, or take it off",
    begin=(3, 3),
    end=5,
)
def no_response(now: Observation, memory: Memory) -> Judgements:
    """A term rises although much of the gradient is its own."""
    for term in now.terms:
        value, share = term.value, term.share
        if value is None or term.is_bounded or term.facts.restraint or not term.weight:
            continue
        values = memory.last(f"{term.name}/value", value, _RESPONSE_WINDOW)
        measured = []
        if term.progress is not None:
            measured = memory.last(f"{term.name}/progress", term.progress, _MEASURES)
        if share is None or not now.updated:
            continue
        is_measured = len(measured) == _MEASURES
        if not is_measured and len(values) < _RESPONSE_WINDOW:
            continue
        is_large = share > _MODERATE_SHARE and (term.cosine or 0.0) > _OPPOSING
        if not is_large or not (min(measured) > 0 if is_measured else _rises(values)):
            yield term.subject, None
            continue
        evidence = f"each of the last {_MEASURES} measured updates raised it"
        if not is_measured:
            half = _RESPONSE_WINDOW // 2
            before, after = _mean(values[:half]), _mean(values[half:])
            evidence = f"{before:.3g} → {after:.3g} over {_RESPONSE_WINDOW} steps"
        yield (
            term.subject,
            Diagnosis(
                f"{title(term.name)} rises although it is trained to fall",
                f"{evidence}, with {percent(share)} of the gradient at step {now.step}",
                "check the sign of its gradient and its estimator, or take it off",
            ),
        )


def _rises(values: list[float]) -> bool:
    """Whether the mean of the second half is above that of the first by two standard errors."""
    half = len(values) // 2
    first, second = values[:half], values[half:]
    spread = (_variance(first) + _variance(second)) / half
    difference = _mean(second) - _mean(first)
    return difference > 0 and difference * difference > 4 * spread  # of the squares


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _variance(values: list[float]) -> float:
    mean = _mean(values)
    return sum((value - mean) * (value - mean) for value in values) / (len(values) - 1)


@rule(
    "dominates",
    "warning",
    when=f"a term has more than {percent(_LARGE_SHARE)} of the sum of the gradient norms in "
    "its space; not for restraints (KL, anchors), bounds, or once the base gradient has "
    f"faded below {percent(_FADED)} of its first norms",
    cure="the weight that gives it 30 %",
    begin=(8, 10),
    end=5,
)
def dominates(now: Observation, memory: Memory) -> Judgements:
    """One term decides the direction of the step."""
    if _base_has_faded(now, memory):
        return
    for term in now.terms:
        if term.share is None or not term.weight or term.facts.restraint or term.is_bounded:
            continue
        if term.share <= _LARGE_SHARE:
            yield term.subject, None
            continue
        weight = term.weight_for(_MODERATE_SHARE)
        lower = f"lower its weight to {weight:.2g}, which gives it 30 %" if weight else ""
        yield (
            term.subject,
            Diagnosis(
                f"{title(term.name)} dominates the gradient",
                f"{percent(term.share)} of the sum of the norms at step {now.step}",
                lower or "lower its weight",
            ),
        )


@rule(
    "fights the base loss",
    "warning",
    when=f"the gradient of a term opposes that of the base loss (cosine below {_OPPOSING:g}) "
    f"and cancels more than {percent(_CANCELLED)} of it; not for restraints (KL, anchors), "
    f"bounds, or once the base gradient has faded below {percent(_FADED)} of its first norms",
    cure="a lower weight, or at_most in place of the weight; anchor=True if it is meant to",
    begin=(8, 10),
    end=5,
)
def fights(now: Observation, memory: Memory) -> Judgements:
    """A term undoes much of what the base loss does."""
    # An aggregator settles conflicts itself; the norms are those before its factors.
    if _base_has_faded(now, memory) or now.number("factors/base") is not None:
        return
    for term in now.terms:
        cosine, cancelled = term.cosine, term.cancelled
        if cosine is None or cancelled is None or term.facts.restraint or term.is_bounded:
            continue
        if cosine >= _OPPOSING or cancelled <= _CANCELLED:
            yield term.subject, None
            continue
        share = percent(cancelled)
        yield (
            term.subject,
            Diagnosis(
                f"{title(term.name)} works against the base loss",
                f"cosine {cosine:.2f}, cancels {share} of its gradient at step {now.step}",
                "lower its weight, or give it a bound; anchor=True says that it is meant to",
            ),
        )


@rule(
    "brakes the base loss",
    "information",
    when="beside cross-entropy, the gradient of a divergence from a reference on the data of the "
    f"base loss cancels more than {percent(_BALANCED)} of it, while the loss is above "
    f"{_LEFT_TO_LEARN:g} nats a token; where no gradients are tracked, a bound of it is used up "
    "to 80 %",
    cure="data of its own, which protects what those data show; else a larger bound or a lower "
    "weight",
    begin=(5, 5),
    end=5,
)
def brakes(now: Observation, memory: Memory) -> Judgements:
    """A KL on the data of the base loss limits what can be learned of them."""
    loss = now.number("base_loss/value" if now.facts.reduction == "mean" else "nll")
    if now.facts.loss != "cross_entropy" or now.facts.answers or loss is None:
        return
    first = memory.first("loss", loss)[0]
    for term in now.terms:
        reads_the_batch = term.facts.compares_models and term.facts.batch_size is None
        if not reads_the_batch or not term.weight or term.facts.bound == "at_least":
            continue
        if term.cancelled is not None:
            is_brake = term.cancelled > _BALANCED
            how = f"cancels {percent(term.cancelled)} of the gradient of the base loss"
        elif term.bound and term.value is not None and not now.tracked:
            is_brake = term.value > _USED * term.bound
            how = f"{term.value:.3g} with a bound of {term.bound:.3g}"
        else:
            continue
        if not is_brake or loss <= _LEFT_TO_LEARN:
            yield term.subject, None
            continue
        cure = "raise the bound" if term.is_bounded else "lower the weight"
        diagnosis = Diagnosis(
            f"{title(term.name)} holds the base loss back: both are measured on the same tokens",
            f"{how}; the base loss went from {first:.3g} to {loss:.3g} nats a token by step "
            f"{now.step}",
            'give it data of its own (data = "other.jsonl"), to stay as before on those; or '
            f"{cure} to learn more of the task",
            "a token that gains a nat moves its log-prob away from the reference by as much",
        )
        yield term.subject, diagnosis


def _base_has_faded(now: Observation, memory: Memory) -> bool:
    """Whether the base gradient is not known, 0, or below a tenth of its first norms."""
    norm = now.number("base_loss/grad_norm")
    return not norm or norm < _FADED * memory.mean_of_first("base_loss/grad_norm", norm)


@rule(
    "takes the time",
    "information",
    when=f"a term or a reward takes more than {percent(_LONG_FRACTION)} of the seconds of a "
    f"step, and more than {_LONG_SECONDS:g} s",
    cure="by where it runs: a process, Ray, a faster service, or every=4",
    begin=(5, 5),
    end=5,
)
def takes_the_time(now: Observation, memory: Memory) -> Judgements:  # noqa: ARG001 - keeps nothing
    """Steps wait for one term or reward."""
    seconds = now.number("seconds")
    if not seconds or now.step == 0:  # the first call loads what it needs
        return
    timed_steps: list[TermStep | RewardStep] = [*now.terms, *now.rewards]
    for timed in timed_steps:
        duration = timed.seconds
        if duration is None:
            continue
        if duration <= _LONG_SECONDS or duration <= _LONG_FRACTION * seconds:
            yield timed.subject, None
            continue
        name = title(timed.name, "regularizer" if isinstance(timed, TermStep) else "reward")
        yield (
            timed.subject,
            Diagnosis(
                f"{name} takes most of the time of a step",
                f"{duration:.2g} of {seconds:.2g} s at step {now.step}",
                _CURE_BY_EXECUTOR.get(timed.facts.run_in, _CURE_OF_TIME),
            ),
        )


@rule(
    "skipped often",
    "warning",
    when="a term failed and was skipped, at 3 of its last 10 steps",
    cure="repair what failed, or raise its timeout; those steps trained without it",
    begin=(3, 10),
    end=10,
)
def skipped_often(now: Observation, memory: Memory) -> Judgements:  # noqa: ARG001 - keeps nothing
    """A term is missing from many steps."""
    skipped = skipped_terms(now.metrics)
    for name, reason in sorted(skipped.items()):
        why = f": {short_reason(reason)}" if reason else ""
        yield (
            f"regularizers/{name}",
            Diagnosis(
                f"{title(name)} is skipped often, and training goes on without it",
                f"3 or more of its last 10 steps, the last one step {now.step}{why}",
                "repair what failed, or raise its timeout",
            ),
        )
    for term in now.terms:
        if term.name not in skipped:  # of several calls of a step, some may have failed
            yield term.subject, None


@rule(
    "small share",
    "information",
    when=f"a term with a steady weight has less than {percent(_SMALL_SHARE)} of the sum of "
    "the gradient norms; not for bounds, gradients of 0, other spaces, or while its weight "
    "changes",
    cure=f"the weight that gives it {percent(_GOOD_SHARE)}; for a divergence from a "
    "reference, also the bound that it holds already",
    begin=(8, 10),
    end=5,
)
def small_share(now: Observation, memory: Memory) -> Judgements:
    """A term has next to no effect at this weight."""
    for term in now.terms:
        if _is_moving(term, memory) or term.is_bounded or not term.share:
            continue
        weight = term.weight_for(_GOOD_SHARE)
        if weight is None:
            continue
        if term.share >= _SMALL_SHARE:
            yield term.subject, None
            continue
        cure = f"take a weight of {weight:.2g}, which gives it 10 %"
        if term.facts.compares_models and term.value:
            cure += f"; or leave it, if it is to stay below {term.value:.2g}, where it is"
        share = percent(term.share, digits=2)
        yield (
            term.subject,
            Diagnosis(
                f"{title(term.name)} has next to no effect at its weight of {term.weight:.3g}",
                f"{share} of the sum of the gradient norms at step {now.step}",
                cure,
            ),
        )
