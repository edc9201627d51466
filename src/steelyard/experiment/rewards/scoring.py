"""Score answers: each reward on each answer, in the place where the reward runs, in parallel."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, Self, TypeAlias

from steelyard.errors import NonFiniteError, SteelyardError, TermError, TermResultError
from steelyard.execution import Batch, Ticket, Workers, default_workers
from steelyard.experiment.rewards.reward import Reward
from steelyard.gradients import awaited
from steelyard.spec import describe, is_finite, is_whole, shorten, title

Answer: TypeAlias = tuple[Mapping[str, Any], str]
_MAX_SHOWN = 60  # characters of a value or of a prompt in a message
# That of float32, in which advantages are trained: sums and squares of rewards cannot overflow.
LARGEST = 3.4028234663852886e38


@dataclass(frozen=True)
class Score:
    """Result of one reward for one answer: either a value, or the reason why there is none.

    Attributes:
        value: the reward.
        error: the reason why there is none, without the name of the reward.
        cause: the exception behind it.
    """

    value: float | None = None
    error: str | None = None
    cause: BaseException | None = field(default=None, compare=False, repr=False)


def score(
    rewards: Sequence[Reward],
    answers: Sequence[Answer],
    *,
    timeout: float,
    workers: Workers | None = None,
) -> dict[str, list[Score]]:
    """Score each answer with each reward.

    A failure or a timeout concerns one reward on one answer. Each call gets a copy of the record.
    There are as many threads and processes at once as cores, any number of coroutines, and as many
    tasks of Ray as its cluster has resources for; a reward whose function has an attribute
    `concurrency` has that many calls at once instead.

    Args:
        rewards: the rewards.
        answers: pairs of a record, the line of the prompts file, and the text of an answer.
        timeout: seconds that one call may take, for rewards without a timeout of their own.
        workers: the pools to run on; None: those that the process shares.

    Returns:
        The scores by reward, in the order of the answers.

    Raises:
        TermError: a reward with `on_error="raise"` failed, and the other calls are cancelled; or
            one cannot be loaded.

    Example:
        >>> short = Reward("short", lambda record, answer: len(answer) <= record["limit"])
        >>> scores = score([short], [({"limit": 3}, "yes"), ({}, "no")], timeout=30.0)["short"]
        >>> scores[0].value, scores[1].error
        (1.0, "KeyError: 'limit'")
    """
    for reward in rewards:
        reward.load()
    executors = (workers or default_workers()).executors
    calls = {reward.name: _Call.of(reward) for reward in rewards}
    pairs = [(reward, index) for index in range(len(answers)) for reward in rewards]
    inline = [pair for pair in pairs if pair[0].place == "inline"]
    tickets = {
        _ticket(
            reward, calls[reward.name], answers[index], executors[reward.place].awaits, timeout
        ): (reward, index)
        for reward, index in pairs
        if reward.place != "inline"
    }
    lanes = {_lane(reward): executors[reward.place] for reward, _ in tickets.values()}
    widths = {_lane(reward): count for reward in rewards if (count := _concurrency(reward))}
    scores: dict[tuple[str, int], Score] = {}
    with Batch(list(tickets), lanes, os.cpu_count() or 1, widths=widths) as batch:
        for reward, index in inline:
            run = functools.partial(calls[reward.name].run, *answers[index])
            scores[reward.name, index] = _score_of(reward, answers[index], run)
        for ticket in batch.settled():
            reward, index = tickets[ticket]
            if ticket.running:  # it timed out, and could not be stopped
                lanes[ticket.lane].abandon()
            scores[reward.name, index] = _score_of(reward, answers[index], ticket.result)
    indices = range(len(answers))
    return {reward.name: [scores[reward.name, index] for index in indices] for reward in rewards}


@dataclass(frozen=True)
class _Call:
    """A reward to be called; it pickles if the function and its options do."""

    name: str
    fn: Callable[..., Any]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, reward: Reward) -> Self:
        return cls(reward.name, reward.fn, reward.call_options)

    def run(self, record: Mapping[str, Any], answer: str) -> float:
        returned = self._begin(record, answer)
        return _number(self.name, awaited(returned) if inspect.isawaitable(returned) else returned)

    async def arun(self, record: Mapping[str, Any], answer: str) -> float:
        return _number(self.name, await self._begin(record, answer))

    def _begin(self, record: Mapping[str, Any], answer: str) -> Any:
        # A copy: the reward may write to it, and other rewards read the record.
        return self.fn(copy.deepcopy(record), answer, **self.options)


def _ticket(reward: Reward, call: _Call, answer: Answer, awaits: bool, timeout: float) -> Ticket:
    return Ticket(
        reward.name,
        _lane(reward),
        call.arun if awaits else call.run,
        answer,
        reward.timeout or timeout,
        kind="reward",
        shared=(call,),
        placement=reward.placement,
    )


def _lane(reward: Reward) -> str:
    return reward.place if _concurrency(reward) is None else f"{reward.place} {reward.name}"


def _concurrency(reward: Reward) -> int | None:
    count = getattr(reward.fn, "concurrency", None)
    return count if is_whole(count, at_least=1) else None


def _score_of(reward: Reward, answer: Answer, read: Callable[[], float]) -> Score:
    try:
        return Score(read())
    except (Exception, SystemExit, CancelledError) as error:
        # The library's own messages say it all; of another error the type may be the better half.
        reason = str(error) if isinstance(error, SteelyardError) else describe(error)
        if reward.on_error == "drop":
            return Score(error=reason, cause=error)
        names_reward = isinstance(error, TermError) and error.term == reward.name
        what = reason if names_reward else f"{reward.title} failed: {reason}"
        raise TermError(
            f"{what.rstrip('.')}, for an answer to the prompt {_prompt(answer[0])}: correct the "
            f"reward, or drop such answers with on_error = 'drop'.",
            term=reward.name,
            reason=reason,
        ) from error


def _number(name: str, value: Any) -> float:
    """Convert what a reward returned; scalars of NumPy and torch, and booleans, are numbers."""
    found = value.item() if getattr(value, "shape", None) == () else value
    if isinstance(found, bool) or (is_finite(found) and abs(found) <= LARGEST):
        return float(found)
    range_ = "number between -3.4e38 and 3.4e38" if is_finite(found) else "finite number"
    rule = (
        f"{title(name, 'reward')} must return a {range_} for each answer, got {_shown(value)} "
        f"({type(value).__name__})."
    )
    if isinstance(found, Real):
        kind: Literal["nan", "inf"] = "nan" if found != found else "inf"  # noqa: PLR0124 - NaN
        raise NonFiniteError(rule, term=name, kind=kind)
    raise TermResultError(rule, term=name)


def _prompt(record: Mapping[str, Any]) -> str:
    match record:
        case {"prompt": text} | {"messages": [*_, {"content": text}]}:
            return _shown(text)
    return _shown(record)


def _shown(value: Any) -> str:
    return shorten(repr(value), _MAX_SHOWN)
