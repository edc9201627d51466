"""Reward from an HTTP service."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from steelyard.errors import TermError
from steelyard.regularizers.judges import JsonService, as_json
from steelyard.spec import OptionChecks

_CHECKS = OptionChecks("reward")


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
        self._service = JsonService(
            self.name,
            _CHECKS,
            field,
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
