"""External validation: penalties from an HTTP service, one per datum."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from steelyard.errors import InputError, TermError
from steelyard.gradients.datum_fields import as_tensor, loss_fn_input
from steelyard.gradients.layout import LogProbs
from steelyard.regularizers import _options
from steelyard.regularizers.json_service import JsonService, Response, ServiceOptions, as_json


class ExternalValidation:
    """Penalise each datum by the number that an HTTP endpoint returns for it.

    For each datum a JSON request is sent by POST; the response must be a JSON object with a
    finite number `penalty`, and may have other members. The value is the mean penalty.

    **The gradient is the score-function estimate**: unbiased for the expected penalty if the
    data were sampled from the model being trained; on fixed data it makes penalised data less
    likely.

    It is async and runs on the library's event loop; connections stay open from call to call,
    until `close`, the end of the workers it runs on, or the end of the program. A request is
    retried after a 429, a 5xx, a broken connection or a timeout, with exponential backoff, or
    after the time in `Retry-After`. A 4xx, a redirect, and a response that is too long or invalid
    fail at once. If a request fails for good, the term fails, unless `unanswered` is set.

    Errors, repr and telemetry show the URL without user, password and query, and no header.
    (httpx itself logs the URL with its query, at level INFO: put secrets in headers.)

    On fixed data a weight of 1 / (tokens of a datum) cancels what a mean of cross-entropy per token
    learns from a datum of penalty 1; a larger one makes it less likely without end.

    Reads from each datum: the fields that `payload` reads; `weights` (optional), where 0 leaves a
    token out of the gradient. Without `payload` the request is `{"tokens": [...],
    "target_tokens": [...], "weights": [...]}`: the model input, and those of the other two that
    the datum has.

    Args:
        url: `http://...` or `https://...`.
        payload: a function `(datum, index)`, or its `"package.module:attr"`, that returns the
            request, serialisable as JSON.
        headers: sent with every request; for example an `Authorization`.
        concurrency: the largest number of concurrent requests, and of open connections.
        request_timeout: seconds one attempt may take, from connecting to the last byte.
        retries: the largest number of retries of a request.
        backoff: the pause before the first retry, in seconds; each further one is twice as long.
        max_backoff: the longest pause, whatever `Retry-After` says.
        max_bytes: the largest response; reading stops there, and the request fails.
        unanswered: the penalty of data without a valid response; None: that is an error.
        follow_redirects: follow redirects that repeat the POST request (307 and 308), at most
            five, instead of failing. `headers` and the password of the URL are sent only to the
            scheme, host and port of `url`; a redirect from https to http fails.

    Raises:
        SpecError: an option is invalid.
        MissingExtraError: httpx is not installed.

    Example:
        >>> judge = ExternalValidation(
        ...     url="https://user:secret@kb.example/check?key=secret",
        ...     payload=lambda datum, index: {"text": datum["text"]},
        ...     headers={"Authorization": "Bearer secret"},
        ... )
        >>> judge
        ExternalValidation(url='https://kb.example/check')
    """

    name = "external_validation"
    gradient = "score"

    def __init__(
        self,
        *,
        url: str,
        payload: Callable[[Any, int], Any] | str | None = None,
        headers: Mapping[str, str] | None = None,
        concurrency: int = 16,
        request_timeout: float = 10.0,
        retries: int = 3,
        backoff: float = 0.1,
        max_backoff: float = 5.0,
        max_bytes: int = 65_536,
        unanswered: float | None = None,
        follow_redirects: bool = False,
    ) -> None:
        name = self.name
        self._payload = (
            default_payload if payload is None else _options.function("payload", payload, name)
        )
        self._unanswered = (
            None if unanswered is None else _options.number("unanswered", unanswered, name)
        )
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
        self._service = JsonService(name, _options.CHECKS, "penalty", options)

    def __repr__(self) -> str:
        return f"ExternalValidation(url={self._service.public_url!r})"

    async def compute(
        self,
        data: Any,
        logprobs: LogProbs,  # noqa: ARG002 - the verdict does not depend on them
    ) -> tuple[list[float], dict[str, float]]:
        """Compute one penalty per datum.

        Metrics: the numbers of `retries` and of data `unanswered`, and `latency_ms`, the mean
        milliseconds from sending a request to its response, without waiting and retries.
        """
        bodies = [self._body(datum, index) for index, datum in enumerate(data)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._request(body, index))
                    for index, body in enumerate(bodies)
                ]
        except ExceptionGroup as failed:  # the first failure has cancelled the rest
            raise failed.exceptions[0] from None
        results = [task.result() for task in tasks]
        answers = [answer for answer in results if answer is not None]
        metrics = {
            "retries": float(sum(answer.retries for answer in answers)),
            "unanswered": float(len(results) - len(answers)),
        }
        if answers:
            seconds = sum(answer.seconds for answer in answers) / len(answers)
            metrics["latency_ms"] = 1000 * seconds
        penalties = [self._unanswered if answer is None else answer.content for answer in results]
        return penalties, metrics  # type: ignore[return-value]  # None only if unanswered is given

    def check_ready(self) -> None:
        """Check that a server answers at the URL, unless `unanswered` stands for its answers.

        Raises:
            TermError: there is none.
        """
        if self._unanswered is None:
            self._service.check_ready()

    def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        self._service.close()

    async def _request(self, body: str, index: int) -> Response | None:
        """Response with the penalty of a datum; None if `unanswered` stands for it."""
        try:
            return await self._service.post(body)
        except TermError as error:
            if self._unanswered is not None:
                return None
            raise TermError(
                f"the validator at {self._service.public_url} must answer for datum {index} with "
                f"a JSON object that has a finite number 'penalty', {error}: fix the service, or "
                f"pass unanswered=... for such data.",
                datum=index,
            ) from None

    def _body(self, datum: Any, index: int) -> str:
        return as_json(self._payload(datum, index), "payload", f"datum {index}", datum=index)


def default_payload(datum: Any, index: int) -> dict[str, Any]:
    """Request for a datum without a `payload` function: its tokens, targets and weights.

    Raises:
        InputError: the datum has neither tokens nor targets.
    """
    payload = {}
    tokens = datum.get("model_input") if isinstance(datum, Mapping) else None
    tokens = getattr(datum, "model_input", tokens)
    if tokens is not None:
        payload["tokens"] = tokens.to_ints() if hasattr(tokens, "to_ints") else list(tokens)
    for field in ("target_tokens", "weights"):
        value = loss_fn_input(datum, field)
        if value is not None:
            payload[field] = as_tensor(value).tolist()
    if not payload:
        raise InputError(
            f"datum {index} must have a model_input or target_tokens to be sent, got neither: "
            f"pass payload=... to say what to send.",
            datum=index,
        )
    return payload
