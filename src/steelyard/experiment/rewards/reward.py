"""`Reward`: a named, weighted function `(record, answer) -> float`, built from a config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from steelyard.errors import ConfigError, SpecError, TermError
from steelyard.execution.workers import default_workers
from steelyard.experiment.config.data_tables import RewardConfig
from steelyard.experiment.config.reading import import_modules, locate_errors
from steelyard.experiment.config.schema import Config
from steelyard.experiment.config.secrets import resolve_secrets
from steelyard.experiment.config.weights import MAX_CHECKED_STEPS, range_of, schedule_of
from steelyard.spec.error_messages import describe, did_you_mean, title
from steelyard.spec.protocol import Schedule, is_async, options_of, rejects
from steelyard.spec.registry import build, lookup, registered
from steelyard.spec.regularizer import RunIn, check_resources, check_run_in
from steelyard.spec.weights import weight_at

_PACKAGE = "steelyard.experiment.rewards"
# Names of the ready-made rewards in config files.
REWARDS = {
    "exact_match": f"{_PACKAGE}.text:ExactMatch",
    "regex_match": f"{_PACKAGE}.text:RegexMatch",
    "number_match": f"{_PACKAGE}.text:NumberMatch",
    "length": f"{_PACKAGE}.text:Length",
    "valid_json": f"{_PACKAGE}.text:ValidJSON",
    "logic": f"{_PACKAGE}.judges:LogicCheck",
    "http_validation": f"{_PACKAGE}.judges:HttpValidation",
    "reward_model": f"{_PACKAGE}.judges:RewardModel",
    "reasoning_gym": f"{_PACKAGE}.judges:TaskScore",
}
_RULE = (
    f"use must be a ready-made reward ({', '.join(REWARDS)}), a registered name or "
    f"'package.module:attr'"
)


@dataclass(frozen=True)
class Reward:
    """One reward of a run.

    Attributes:
        name: unique among the rewards of a run.
        fn: called as `fn(record, answer, **options)`; may be async.
        weight: a number >= 0, or a schedule of them.
        options: keyword arguments of each call.
        resources: of its tasks, with `run_in="ray"`, as for a `RegularizerSpec`.
        run_in: where it runs; `"auto"` is the `run_in` of `fn`, if it has one; else the event loop
            if it is async, and a thread if not.
        timeout: seconds that one answer may take; None: that of the run.
        on_error: whether a failure drops the answer or fails the run.
        enabled: whether it counts; one that does not is still measured.
        gate: name of a reward; this one counts where that is above 0, and is 0 elsewhere.
        scale_by: name of a reward; this one is multiplied by the mean of that over its group.

    Raises:
        SpecError: `fn` cannot be called with a record, an answer and the options, or the executor
            of `run_in` cannot run it.

    Example:
        >>> from steelyard import schedules
        >>> def short(record, answer, words=10):
        ...     return float(len(answer.split()) <= words)
        >>> Reward("short", short, weight=schedules.warmup(0.5, 10)).weight_at(5)
        0.25
    """

    name: str
    fn: Callable[..., Any]
    weight: float | Schedule = 1.0
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    resources: Mapping[str, Any] = field(default_factory=dict, hash=False)
    run_in: RunIn = "auto"
    timeout: float | None = None
    on_error: Literal["drop", "raise"] = "drop"
    enabled: bool = True
    gate: str = ""
    scale_by: str = ""

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise SpecError(
                f"a reward must be a function (record, answer) -> float, got {self.fn!r} "
                f"({self.title})."
            )
        preferred = getattr(self.fn, "run_in", None)
        # An inline call cannot be stopped, so one with a timeout runs in a thread.
        stoppable = preferred != "inline" or self.timeout is None
        if self.run_in == "auto" and isinstance(preferred, str) and stoppable:
            object.__setattr__(self, "run_in", preferred)
        check_run_in(self.run_in, self.fn, self.timeout, self.title)
        check_resources(self.resources, self.run_in, self.title)
        given = ("scores",) if self.takes_scores else ()
        reason = rejects(self.fn, (*self.options, *given))
        if reason is not None:
            raise SpecError(
                f"a reward must accept (record, answer) and the options {list(self.options)}: "
                f"{reason} ({self.title})."
            )

    @property
    def title(self) -> str:
        """Name of the reward in messages."""
        return title(self.name, "reward")

    @property
    def executor(self) -> str:
        """Where it runs: `"inline"` or the name of an executor."""
        if self.run_in != "auto":
            return self.run_in
        return "async" if is_async(self.fn) else "thread"

    @property
    def takes_scores(self) -> bool:
        """Whether `fn` takes the values of other rewards, as its argument `scores`."""
        if "scores" in self.options:
            return False
        try:
            return "scores" in options_of(self.fn)
        except (TypeError, ValueError):  # builtins and some C functions show no signature
            return False

    @property
    def named(self) -> list[tuple[str, str]]:
        """Names of other rewards that it is given by, each with the key that names it."""
        declared = getattr(self.fn, "reads_scores", ()) if self.takes_scores else ()
        keys = [("gate", self.gate), ("scale_by", self.scale_by)]
        return [(key, name) for key, name in keys if name] + [
            ("reads_scores", str(name)) for name in declared
        ]

    def reads_scores(self, names: Sequence[str]) -> list[str]:
        """Those of `names` whose values `fn` takes: those that it declares, or all others."""
        if not self.takes_scores:
            return []
        declared = getattr(self.fn, "reads_scores", None)
        return list(declared) if declared else [name for name in names if name != self.name]

    def reads(self, names: Sequence[str]) -> list[str]:
        """Those of `names` whose values must be known before its own."""
        return list(dict.fromkeys([*(name for _, name in self.named), *self.reads_scores(names)]))

    def weight_at(self, step: int) -> float:
        """Weight at a step; 0 if it is not enabled.

        Raises:
            SpecError: a schedule yields a negative or non-finite weight there.
        """
        if not self.enabled:
            return 0.0
        weight: float = weight_at(self.weight, step, self.name, kind="reward")
        return weight

    def load(self) -> None:
        """Load `fn` if it has a `load` method, such as a model, and runs in this process.

        Raises:
            TermError: it cannot be loaded.
        """
        load = getattr(self.fn, "load", None)
        if not callable(load) or self.executor not in ("inline", "thread", "async"):
            return
        try:
            load()
        except Exception as error:
            raise TermError(
                f"{self.title} must be loaded before it scores answers, and that failed: "
                f"{describe(error)}",
                term=self.name,
            ) from error


@dataclass(frozen=True)
class Score:
    """Result of one reward for one answer: either a value, or the reason why there is none.

    Attributes:
        value: the reward.
        error: the reason why there is none, without the name of the reward.
        cause: the exception behind it.
        seconds: duration of the call.
    """

    value: float | None = None
    error: str | None = None
    cause: BaseException | None = field(default=None, compare=False, repr=False)
    seconds: float = field(default=0.0, compare=False, repr=False)


def in_order(rewards: Sequence[Reward]) -> list[list[Reward]]:
    """Divide rewards into lists, so that each reads only rewards of lists before its own.

    Raises:
        SpecError: a reward reads one that there is not, or two read each other.

    Example:
        >>> def short(record, answer):
        ...     return 1.0
        >>> rewards = [Reward("short", short, gate="right"), Reward("right", short)]
        >>> [[reward.name for reward in together] for together in in_order(rewards)]
        [['right'], ['short']]
    """
    names = [reward.name for reward in rewards]
    read = {reward.name: reward.reads(names) for reward in rewards}
    for reward in rewards:
        for key, name in reward.named:
            if name not in names:
                others = [other for other in names if other != reward.name]
                raise SpecError(
                    f"{key} must be the name of another reward, {_listed(others)}, got {name!r}"
                    f"{did_you_mean(name, others) or '.'} ({reward.title})"
                )
    left, done = list(rewards), set[str]()
    ordered: list[list[Reward]] = []
    while left:
        ready = [reward for reward in left if done.issuperset(read[reward.name])]
        if not ready:
            raise SpecError(_describe_cycle(left[0], read, done))
        ordered.append(ready)
        done |= {reward.name for reward in ready}
        left = [reward for reward in left if reward not in ready]
    return ordered


def _describe_cycle(first: Reward, read: Mapping[str, Sequence[str]], done: set[str]) -> str:
    seen: list[str] = [first.name]
    while True:
        following = next(name for name in read[seen[-1]] if name not in done)
        if following in seen:
            cycle = [*seen[seen.index(following) :], following]
            break
        seen.append(following)
    return (
        f"no reward may depend on itself, and one does: {' reads '.join(map(repr, cycle))}: remove "
        f"a gate or a scale_by, or declare the rewards that a function takes as scores by an "
        f"attribute reads_scores."
    )


def _listed(names: Sequence[str]) -> str:
    return f"one of {', '.join(map(repr, names))}" if names else "and there is none"


def build_rewards(config: Config) -> tuple[Reward, ...]:
    """Build the rewards of a config, after importing the modules that it lists.

    Raises:
        ConfigError: a name is unknown or stands twice, options or a weight are invalid, a secret is
            missing, or a reward cannot be sent to the process that it is to run in.
    """
    import_modules(config)
    rewards: dict[str, Reward] = {}
    for number, entry in enumerate(config.rewards, 1):
        with locate_errors(f"[[rewards]] #{number}"):
            reward = _build(entry)
            if reward.name in rewards:
                raise ConfigError(
                    f"name must be unique, and {reward.name!r} stands twice: give it another"
                )
            check_weights(reward, config.train.steps)
            _prepare(reward)
            rewards[reward.name] = reward
    with locate_errors("[[rewards]]"):
        in_order(list(rewards.values()))
    return tuple(rewards.values())


def _build(entry: RewardConfig) -> Reward:
    if range_of(entry.weight) is not None:
        raise ConfigError("weight must be a number or a schedule to train with, got a range")
    _check_use(entry.use)
    fn, options = build(REWARDS.get(entry.use, entry.use), resolve_secrets(entry.options))
    return Reward(
        name=entry.name or _own_name(fn) or entry.use.rpartition(":")[2],
        fn=fn,
        weight=schedule_of(entry.weight),
        options=options,
        resources=resolve_secrets(entry.resources, key="resources"),
        run_in=entry.run_in,
        timeout=entry.timeout,
        on_error=entry.on_error,
        enabled=entry.enabled,
        gate=entry.gate,
        scale_by=entry.scale_by,
    )


def _check_use(use: str) -> None:
    if use in REWARDS:
        return
    if ":" not in use and use not in registered():
        hint = did_you_mean(use, REWARDS) or did_you_mean(use, registered()) or "."
        raise ConfigError(f"{_RULE}, got {use!r}{hint}")
    if _is_regularizer(lookup(use)):
        raise ConfigError(
            f"{_RULE}, got {use!r}, which is a regularizer: put it in [[regularizers]]."
        )


def _is_regularizer(thing: Any) -> bool:
    """Return whether an object, or what a class builds, has `compute` and cannot be called."""
    cls = thing if inspect.isclass(thing) else type(thing)
    callable_ = any("__call__" in vars(base) for base in cls.__mro__)
    return hasattr(cls, "compute") and not callable_


def _own_name(fn: Any) -> str:
    name = getattr(fn, "name", "")
    return name if isinstance(name, str) else ""


def check_weights(reward: Reward, steps: int) -> None:
    """Check the weight of a reward at every step: a run of hours should not end there.

    Raises:
        SpecError: a schedule yields no valid number.
    """
    if callable(reward.weight):
        for step in range(min(steps, MAX_CHECKED_STEPS)):
            reward.weight_at(step)


def _prepare(reward: Reward) -> None:
    """Check that its executor can run the reward, before the first step."""
    if reward.executor == "inline":
        return
    executor = default_workers().executors[reward.executor]
    try:
        executor.prepare(reward.name, (reward.fn, reward.options))
    except TermError as error:
        why = describe(error.__cause__ or error)
        raise ConfigError(
            f"run_in must be a place where the reward can run, and {reward.executor!r} is none: "
            f"{why} ({reward.title}): leave out what cannot be pickled, or use run_in = 'thread'."
        ) from error
