"""`Reward`: a named, weighted function `(record, answer) -> float`, built from a config."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from steelyard.errors import ConfigError, SpecError, TermError
from steelyard.execution import default_workers
from steelyard.experiment.build_parts import import_modules, locate_errors
from steelyard.experiment.config import Config
from steelyard.experiment.config_rollouts import RewardConfig
from steelyard.experiment.config_secrets import resolve_secrets
from steelyard.experiment.config_weights import MAX_CHECKED_STEPS, range_of, schedule_of
from steelyard.spec import (
    RunIn,
    Schedule,
    build,
    check_placement,
    check_run_in,
    describe,
    did_you_mean,
    is_async,
    lookup,
    registered,
    rejects,
    split_placement,
    title,
    weight_at,
)

_PACKAGE = "steelyard.experiment.rewards"
# Names of the ready-made rewards in config files.
REWARDS = {
    "exact_match": f"{_PACKAGE}.text_match:ExactMatch",
    "regex_match": f"{_PACKAGE}.text_match:RegexMatch",
    "number_match": f"{_PACKAGE}.text_match:NumberMatch",
    "length": f"{_PACKAGE}.text_form:Length",
    "valid_json": f"{_PACKAGE}.text_form:ValidJSON",
    "logic": f"{_PACKAGE}.logic_check:LogicCheck",
    "http_validation": f"{_PACKAGE}.http_validation:HttpValidation",
    "reward_model": f"{_PACKAGE}.reward_model:RewardModel",
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
        options: keyword arguments of each call; with `run_in="ray"`, `num_cpus`, `num_gpus`,
            `resources` and `runtime_env` are those of the Ray tasks instead.
        run_in: where it runs; `"auto"` is the `run_in` of `fn`, if it has one; else the event loop
            if it is async, and a thread if not.
        timeout: seconds that one answer may take; None: that of the run.
        on_error: whether a failure drops the answer or fails the run.
        enabled: whether it counts; one that does not is still measured.

    Raises:
        SpecError: `fn` cannot be called with a record, an answer and the options, or cannot run in
            that place.

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
    run_in: RunIn = "auto"
    timeout: float | None = None
    on_error: Literal["drop", "raise"] = "drop"
    enabled: bool = True

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
        check_placement(self.placement, self.title)
        reason = rejects(self.fn, self.call_options)
        if reason is not None:
            raise SpecError(
                f"a reward must accept (record, answer) and the options {list(self.call_options)}: "
                f"{reason} ({self.title})."
            )

    @property
    def call_options(self) -> dict[str, Any]:
        """The keyword arguments of each call: the options without those of Ray tasks."""
        return split_placement(self.run_in, self.options)[0]

    @functools.cached_property
    def placement(self) -> dict[str, Any]:
        """The options of its Ray tasks, such as `num_gpus`; empty if it runs elsewhere."""
        return split_placement(self.run_in, self.options)[1]

    @property
    def title(self) -> str:
        """Name of the reward in messages."""
        return title(self.name, "reward")

    @property
    def place(self) -> str:
        """Place where it runs: `"inline"` or the name of an executor."""
        if self.run_in != "auto":
            return self.run_in
        return "async" if is_async(self.fn) else "thread"

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
        if not callable(load) or self.place not in ("inline", "thread", "async"):
            return
        try:
            load()
        except Exception as error:
            raise TermError(
                f"{self.title} must be loaded before it scores answers, and that failed: "
                f"{describe(error)}",
                term=self.name,
            ) from error


def build_rewards(config: Config) -> tuple[Reward, ...]:
    """Build the rewards of a config, after importing the modules that it lists.

    Raises:
        ConfigError: a name is unknown or stands twice, options or a weight are invalid, a secret is
            missing, or a reward cannot be sent to the process that it is to run in.
    """
    import_modules(config)
    rewards: dict[str, Reward] = {}
    for number, entry in enumerate(config.rewards, 1):
        prepare = functools.partial(_build, entry, config.train.steps, rewards)
        reward = locate_errors(f"[[rewards]] #{number}", prepare)
        rewards[reward.name] = reward
    return tuple(rewards.values())


def _build(entry: RewardConfig, steps: int, others: Mapping[str, Reward]) -> Reward:
    if range_of(entry.weight) is not None:
        raise ConfigError("weight must be a number or a schedule to train with, got a range")
    _check_use(entry.use)
    own, placement = split_placement(entry.run_in, resolve_secrets(entry.options))
    fn, options = build(REWARDS.get(entry.use, entry.use), own)
    reward = Reward(
        name=entry.name or _own_name(fn) or entry.use.rpartition(":")[2],
        fn=fn,
        weight=schedule_of(entry.weight),
        options={**options, **placement},
        run_in=entry.run_in,
        timeout=entry.timeout,
        on_error=entry.on_error,
        enabled=entry.enabled,
    )
    if reward.name in others:
        raise ConfigError(f"name must be unique, and {reward.name!r} stands twice: give it another")
    check_weights(reward, steps)
    _prepare(reward)
    return reward


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
    """Whether an object, or what a class builds, has `compute` and cannot be called."""
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
    """Check that the reward can run in its place, before the first step."""
    if reward.place == "inline":
        return
    executor = default_workers().executors[reward.place]
    try:
        executor.prepare(reward.name, (reward.fn, reward.call_options))
    except TermError as error:
        why = describe(error.__cause__ or error)
        raise ConfigError(
            f"run_in must be a place where the reward can run, and {reward.place!r} is none: {why} "
            f"({reward.title}): leave out what cannot be pickled, or use run_in = 'thread'."
        ) from error
