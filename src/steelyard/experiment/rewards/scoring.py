"""Score answers: each reward on each answer, where the reward runs, in parallel."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from time import monotonic
from typing import Any, Literal, TypeAlias

from steelyard.errors import NonFiniteError, SteelyardError, TermError, TermResultError
from steelyard.execution.executor import Batch, Ticket
from steelyard.execution.process_lifecycle import ForkGuard
from steelyard.execution.workers import Workers, default_workers
from steelyard.experiment.rewards.gates import counted, values_for
from steelyard.experiment.rewards.reward import Reward, Score, in_order
from steelyard.gradients.parse_result import awaited
from steelyard.spec.checks import is_finite, is_whole
from steelyard.spec.error_messages import describe, shorten, title

AnsweredRecord: TypeAlias = tuple[Mapping[str, Any], str]
_MAX_SHOWN = 60  # characters of a value or of a prompt in a message
# That of float32, in which advantages are trained: sums and squares of rewards cannot overflow.
LARGEST = 3.4028234663852886e38


def score(
    rewards: Sequence[Reward],
    answers: Sequence[AnsweredRecord],
    *,
    timeout: float,
    workers: Workers | None = None,
    groups: Sequence[int] | None = None,
) -> dict[str, list[Score]]:
    """Score each answer with each reward.

    A failure or a timeout concerns one reward on one answer. Each call gets a copy of the record.
    There are as many threads and processes at once as cores, any number of coroutines, and as many
    tasks of Ray as its cluster has resources for; a reward whose function has an attribute
    `concurrency` has that many calls at once instead. A reward that reads others is called when
    they are done; see `gates`.

    Args:
        rewards: the rewards.
        answers: pairs of a record, the line of the prompts file, and the text of an answer.
        timeout: seconds that one call may take, for rewards without a timeout of their own.
        workers: the pools to run on; None: those that the process shares.
        groups: number of the group of each answer, for `scale_by`; None: they are one group.

    Returns:
        The scores by reward, in the order of the answers.

    Raises:
        TermError: a reward with `on_error="raise"` failed, and the other calls are cancelled; or
            one cannot be loaded.
        SpecError: a reward reads another that there is not, or two read each other.

    Example:
        >>> short = Reward("short", lambda record, answer: len(answer) <= record["limit"])
        >>> scores = score([short], [({"limit": 3}, "yes"), ({}, "no")], timeout=30.0)["short"]
        >>> scores[0].value, scores[1].error
        (1.0, "KeyError: 'limit'")
    """
    ordered = in_order(rewards)
    for reward in rewards:
        reward.load()
    names = [reward.name for reward in rewards]
    groups = [0] * len(answers) if groups is None else groups
    scores: dict[str, list[Score]] = {}
    for together in ordered:
        arguments = {reward.name: _arguments(reward, names, answers, scores) for reward in together}
        own = _score_together(together, arguments, timeout, workers or default_workers())
        scores |= {
            reward.name: counted(reward, own[reward.name], scores, groups) for reward in together
        }
    return {name: scores[name] for name in names}


# Arguments of a call of a reward; or the failure of a reward that it reads.
_Arguments: TypeAlias = tuple[Any, ...] | Score


def _arguments(
    reward: Reward,
    names: Sequence[str],
    answers: Sequence[AnsweredRecord],
    scores: Mapping[str, Sequence[Score]],
) -> list[_Arguments]:
    if not reward.takes_scores:
        return list(answers)
    read = [values_for(reward, names, scores, index) for index in range(len(answers))]
    return [
        values if isinstance(values, Score) else (*answer, values)
        for answer, values in zip(answers, read, strict=True)
    ]


def _score_together(
    rewards: Sequence[Reward],
    arguments: Mapping[str, Sequence[_Arguments]],
    timeout: float,
    workers: Workers,
) -> dict[str, list[Score]]:
    """Scores of rewards that do not read each other, for each of their calls."""
    executors = workers.executors
    calls = {r.name: _Call(r.name, r.fn, r.options) for r in rewards}
    scores: dict[tuple[str, int], Score] = {}
    inline: list[tuple[Reward, int, tuple[Any, ...]]] = []
    tickets: dict[Ticket, tuple[Reward, int, tuple[Any, ...]]] = {}
    count = max((len(of_reward) for of_reward in arguments.values()), default=0)
    for index in range(count):
        for reward in rewards:
            given = arguments[reward.name][index]
            if isinstance(given, Score):
                scores[reward.name, index] = given
            elif reward.executor == "inline":
                inline.append((reward, index, given))
            else:
                awaits = executors[reward.executor].awaits
                ticket = _ticket(reward, calls[reward.name], given, awaits, timeout)
                tickets[ticket] = (reward, index, given)
    by_name = {_queue(reward): executors[reward.executor] for reward, _, _ in tickets.values()}
    widths = {_queue(reward): width for reward in rewards if (width := _concurrency(reward))}
    with Batch(list(tickets), by_name, os.cpu_count() or 1, widths=widths) as batch:
        for reward, index, given in inline:
            run = functools.partial(calls[reward.name].run, *given)
            started = monotonic()
            result = _score_of(reward, given, run)
            scores[reward.name, index] = replace(result, seconds=monotonic() - started)
        for ticket in batch.settled():
            reward, index, given = tickets[ticket]
            if ticket.running:  # it timed out, and could not be stopped
                by_name[ticket.executor].abandon()
            result = _score_of(reward, given, ticket.result)
            scores[reward.name, index] = replace(result, seconds=_duration(ticket))
    return {
        reward.name: [scores[reward.name, index] for index in range(count)] for reward in rewards
    }


@dataclass(frozen=True)
class _Call:
    """A reward to be called; it pickles if the function and its options do."""

    name: str
    fn: Callable[..., Any]
    options: Mapping[str, Any]

    def run(
        self, record: Mapping[str, Any], answer: str, scores: Mapping[str, float] | None = None
    ) -> float:
        with ForkGuard(self.name, "reward"):
            returned = self._begin(record, answer, scores)
            value = awaited(returned) if inspect.isawaitable(returned) else returned
        return _number(self.name, value)

    async def arun(
        self, record: Mapping[str, Any], answer: str, scores: Mapping[str, float] | None = None
    ) -> float:
        with ForkGuard(self.name, "reward"):
            value = await self._begin(record, answer, scores)
        return _number(self.name, value)

    def _begin(
        self, record: Mapping[str, Any], answer: str, scores: Mapping[str, float] | None
    ) -> Any:
        more = {} if scores is None else {"scores": dict(scores)}
        # A copy: the reward may write to it, and other rewards read the record.
        return self.fn(copy.deepcopy(record), answer, **self.options, **more)


def _ticket(
    reward: Reward, call: _Call, arguments: tuple[Any, ...], awaits: bool, timeout: float
) -> Ticket:
    return Ticket(
        reward.name,
        _queue(reward),
        call.arun if awaits else call.run,
        arguments,
        reward.timeout or timeout,
        kind="reward",
        shared=(call,),
        resources=reward.resources,
    )


def _duration(ticket: Ticket) -> float:
    """Seconds of a settled call; of one that timed out and still runs, those so far."""
    if ticket.started is None:
        return 0.0
    return (monotonic() if ticket.ended is None else ticket.ended) - ticket.started


def _queue(reward: Reward) -> str:
    return reward.executor if _concurrency(reward) is None else f"{reward.executor} {reward.name}"


def _concurrency(reward: Reward) -> int | None:
    count = getattr(reward.fn, "concurrency", None)
    return count if is_whole(count, at_least=1) else None


def _score_of(reward: Reward, arguments: tuple[Any, ...], read: Callable[[], float]) -> Score:
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
            f"{what.rstrip('.')}, for an answer to the prompt {_prompt(arguments[0])}: correct the "
            f"reward, or drop such answers with on_error = 'drop'.",
            term=reward.name,
            reason=reason,
        ) from error


def _number(name: str, value: Any) -> float:
    """Convert what a reward returned; scalars of NumPy and torch, and booleans, are numbers."""
    number = value.item() if getattr(value, "shape", None) == () else value
    if isinstance(number, bool) or (is_finite(number) and abs(number) <= LARGEST):
        return float(number)
    range_ = "number between -3.4e38 and 3.4e38" if is_finite(number) else "finite number"
    rule = (
        f"{title(name, 'reward')} must return a {range_} for each answer, got {_shown(value)} "
        f"({type(value).__name__})."
    )
    if isinstance(number, Real):
        kind: Literal["nan", "inf"] = "nan" if number != number else "inf"  # noqa: PLR0124 - NaN
        raise NonFiniteError(rule, term=name, kind=kind)
    raise TermResultError(rule, term=name)


def _prompt(record: Mapping[str, Any]) -> str:
    match record:
        case {"prompt": text} | {"messages": [*_, {"content": text}]}:
            return _shown(text)
    return _shown(record)


def _shown(value: Any) -> str:
    return shorten(repr(value), _MAX_SHOWN)
