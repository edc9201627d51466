"""Rewards that ask a judge: the scorer of a task, Z3, an HTTP service, or a reward model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from steelyard._extras import require
from steelyard.errors import ModelError, TermError
from steelyard.experiment.data.record_sources import score_task
from steelyard.regularizers.json_service import JsonService, ServiceOptions, as_json
from steelyard.regularizers.logic import verdict
from steelyard.spec.checks import OptionChecks
from steelyard.spec.error_messages import describe, title

_CHECKS = OptionChecks("reward")


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """Reward an answer by the scorer of the task of reasoning-gym that its prompt comes from.

    The scorer gets the text without white space around it. As a rule an answer that is exactly
    right is 1, and one that contains the right one has a part of it.

    Raises:
        MissingExtraError: reasoning-gym is not installed.

    Example:
        >>> record = {"prompt": "4 + 5 =", "answer": "9", "task": "chain_sum", "metadata": {}}
        >>> TaskScore()(record, " 9"), TaskScore()(record, "It is 9."), TaskScore()(record, "8")
        (1.0, 0.125, 0.0)
    """

    name: ClassVar[str] = "reasoning_gym"
    reads_fields: ClassVar[tuple[str, ...]] = ("prompt", "answer", "task", "metadata")

    def __post_init__(self) -> None:
        require("reasoning_gym", "reward 'reasoning_gym'")

    def __call__(self, record: Mapping[str, Any], answer: str) -> float:
        """Score one answer."""
        return score_task(record, answer.strip())


@dataclass(frozen=True, kw_only=True)
class LogicCheck:
    """Reward an answer by Z3's verdict on its constraints: sat, unsat or unknown.

    The constraints that the function returns are asserted together. To reward a claim that follows
    from facts, assert the facts and the negation of the claim, and swap the rewards of `sat` and
    `unsat`.

    It runs in a process unless its entry says otherwise. Z3 does not always keep to its own time
    limit; the `timeout` of the reward kills the process. In threads, Z3 decides one answer at a
    time.

    Args:
        constraints: a function `(record, answer)`, or its `"package.module:attr"`, that returns a
            Z3 expression or a list of them. An empty list is satisfiable.
        solver_timeout: seconds that Z3 may take for one answer.
        sat: the reward if the constraints can be true together.
        unsat: the reward if they contradict each other.
        unknown: the reward if Z3 cannot decide.

    Raises:
        SpecError: an option is invalid.
        MissingExtraError: Z3 is not installed.

    Example:
        >>> import z3
        >>> def solves(record, answer):
        ...     x = z3.Int("x")
        ...     return [x == int(answer), x * x == record["square"]]
        >>> check = LogicCheck(constraints=solves)
        >>> check({"square": 9}, "-3"), check({"square": 9}, "4")
        (1.0, 0.0)
    """

    constraints: Callable[[Mapping[str, Any], str], Any]
    solver_timeout: float = 1.0
    sat: float = 1.0
    unsat: float = 0.0
    unknown: float = 0.0
    name: ClassVar[str] = "logic"
    run_in: ClassVar[str] = "process"

    def __post_init__(self) -> None:
        resolved = _CHECKS.function("constraints", self.constraints, self.name)
        object.__setattr__(self, "constraints", resolved)
        _CHECKS.positive("solver_timeout", self.solver_timeout, self.name)
        for option in ("sat", "unsat", "unknown"):
            _CHECKS.number(option, getattr(self, option), self.name)
        require("z3", title(self.name, "reward"))

    def __call__(self, record: Mapping[str, Any], answer: str) -> float:
        """Reward of an answer.

        Raises:
            InputError: its constraints are no Z3 expressions.
        """
        assertions = partial(self.constraints, record, answer)
        return float(getattr(self, verdict(assertions, self.solver_timeout, "an answer")))


class HttpValidation:
    """Reward an answer by the number that an HTTP endpoint returns for it.

    For each answer a JSON request is sent by POST, `{"record": {...}, "answer": "..."}` by default;
    the response must be a JSON object with a finite number, and may have other members.

    It is async and runs on the library's event loop. Retries, connections, redirects and secrets
    are those of `steelyard.regularizers.ExternalValidation`. If a request fails for good, the
    reward fails for that answer alone.

    Args:
        url: `http://...` or `https://...`.
        field: the member of the response that holds the reward.
        payload: a function `(record, answer)`, or its `"package.module:attr"`, that returns the
            request, serialisable as JSON.
        headers: sent with every request; for example an `Authorization`.
        concurrency: the largest number of concurrent requests. An answer that waits for its turn
            does not time out.
        request_timeout: seconds one attempt may take, from connecting to the last byte.
        retries: the largest number of retries of a request.
        backoff: the pause before the first retry, in seconds; each further one is twice as long.
        max_backoff: the longest pause, whatever `Retry-After` says.
        max_bytes: the largest response.
        follow_redirects: follow redirects that repeat the POST request (307 and 308).

    Raises:
        SpecError: an option is invalid.
        MissingExtraError: httpx is not installed.

    Example:
        >>> HttpValidation(url="https://user:secret@judge.example/score?key=secret")
        HttpValidation(url='https://judge.example/score')
    """

    name = "http_validation"

    def __init__(
        self,
        *,
        url: str,
        field: str = "reward",
        payload: Callable[[Mapping[str, Any], str], Any] | str | None = None,
        headers: Mapping[str, str] | None = None,
        concurrency: int = 16,
        request_timeout: float = 10.0,
        retries: int = 3,
        backoff: float = 0.1,
        max_backoff: float = 5.0,
        max_bytes: int = 65_536,
        follow_redirects: bool = False,
    ) -> None:
        self._payload = (
            default_payload if payload is None else _CHECKS.function("payload", payload, self.name)
        )
        self._field = _CHECKS.text("field", field, self.name)
        options = ServiceOptions(
            url=url,
            headers=headers,
            concurrency=concurrency,
            request_timeout=request_timeout,
            retries=retries,
            backoff=backoff,
            max_backoff=max_backoff,
            max_bytes=max_bytes,
            follow_redirects=follow_redirects,
        )
        self._service = JsonService(self.name, _CHECKS, field, options)
        self.concurrency = concurrency

    def __repr__(self) -> str:
        return f"HttpValidation(url={self._service.public_url!r})"

    async def __call__(self, record: Mapping[str, Any], answer: str) -> float:
        """Reward of an answer.

        Raises:
            TermError: the service does not answer with a number.
            InputError: JSON cannot hold the request.
        """
        body = as_json(self._payload(record, answer), "payload", "an answer")
        try:
            response = await self._service.post(body)
        except TermError as error:
            raise TermError(
                f"the service at {self._service.public_url} must answer with a JSON object that "
                f"has a finite number {self._field!r}, {error}: correct the service."
            ) from None
        return float(response.content)

    def check_ready(self) -> None:
        """Check that a server answers at the URL.

        Raises:
            TermError: there is none.
        """
        self._service.check_ready()

    def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        self._service.close()


def default_payload(record: Mapping[str, Any], answer: str) -> dict[str, Any]:
    """Request without a `payload` function: the record and the answer."""
    return {"record": record, "answer": answer}


# By model and device, for all rewards of the process: a worker process gets a copy of the reward
# with each answer, and must not load the model each time.
_loaded: dict[tuple[str, str | None], _Scorer] = {}
_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """Reward an answer by the output of a reward model, the logit of its single label.

    The model reads the prompt and the answer as a chat, if its tokenizer has a chat template, and
    as a pair of texts otherwise. It scores one answer at a time, in a thread, and is loaded before
    the first one, outside of the timeout; in a process (`run_in = "process"`), within it.

    Args:
        model: the folder or the Hub id of a model with one label.
        device: `"cpu"`, `"cuda"` …; None: a GPU if there is one.
        max_length: the largest number of tokens; longer texts lose tokens at their beginning. None:
            that of the model.
        chat: whether to use the chat template; None: if there is one.

    Raises:
        SpecError: an option is invalid.
        MissingExtraError: transformers is not installed.
    """

    model: str
    device: str | None = None
    max_length: int | None = None
    chat: bool | None = None
    name: ClassVar[str] = "reward_model"
    concurrency: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _CHECKS.text("model", self.model, self.name)
        if self.device is not None:
            _CHECKS.text("device", self.device, self.name)
        if self.max_length is not None:
            _CHECKS.whole("max_length", self.max_length, 1, self.name)
        if self.chat is not None:
            _CHECKS.flag("chat", self.chat, self.name)
        require("transformers", title(self.name, "reward"))

    def load(self) -> None:
        """Load the model and its tokenizer, if that has not been done.

        Raises:
            ModelError: it cannot be loaded, has several labels, or no chat template though it is
                to be used.
        """
        with _lock:
            self._scorer()

    def __call__(self, record: Mapping[str, Any], answer: str) -> float:
        """Reward of an answer."""
        with _lock:  # a tokenizer is not safe for threads
            return self._scorer().score(record, answer, self.max_length, self.chat)

    def close(self) -> None:
        """Free the model. A later call loads it again."""
        with _lock:
            _loaded.pop((self.model, self.device), None)

    def _scorer(self) -> _Scorer:
        key = (self.model, self.device)
        if key not in _loaded:
            _loaded[key] = _load(self.model, self.device)
        scorer = _loaded[key]
        if self.chat and scorer.tokenizer.chat_template is None:
            raise ModelError(
                f"chat = true needs a tokenizer with a chat template, and that of {self.model!r} "
                f"has none (reward {self.name!r}): leave chat out."
            )
        return scorer


@dataclass(frozen=True)
class _Scorer:
    """A loaded model and its tokenizer."""

    model: Any
    tokenizer: Any

    def score(
        self, record: Mapping[str, Any], answer: str, limit: int | None, chat: bool | None
    ) -> float:
        import torch  # noqa: PLC0415 - as transformers

        longest = getattr(self.model.config, "max_position_embeddings", None)
        longest = min(longest or self.tokenizer.model_max_length, self.tokenizer.model_max_length)
        settings = {
            "truncation": True,
            "max_length": limit or longest,
            "return_tensors": "pt",
        }
        if self.tokenizer.chat_template is not None and chat is not False:
            messages = [*_messages(record), {"role": "assistant", "content": answer}]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            # The template has written the special tokens.
            inputs = self.tokenizer(text, add_special_tokens=False, **settings)
        else:
            prompt = "\n".join(message["content"] for message in _messages(record))
            inputs = self.tokenizer(prompt, answer, **settings)
        with torch.inference_mode():
            logits = self.model(**inputs.to(self.model.device)).logits
        return float(logits[0, 0])


def _messages(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "messages" in record:
        return list(record["messages"])
    return [{"role": "user", "content": record["prompt"]}]


def _load(name: str, device: str | None) -> _Scorer:
    import torch  # noqa: PLC0415 - as transformers
    from transformers import (  # noqa: PLC0415 - takes seconds
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, truncation_side="left")
        model = AutoModelForSequenceClassification.from_pretrained(name)
        model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ModelError(
            f"model must be a folder or a Hub id of a reward model, got {name!r}, which cannot be "
            f"loaded: {describe(error)} (reward 'reward_model')."
        ) from error
    if model.config.num_labels != 1:
        raise ModelError(
            f"model must have one label, whose logit is the reward, got {name!r} with "
            f"{model.config.num_labels} (reward 'reward_model')."
        )
    return _Scorer(model.eval(), tokenizer)
