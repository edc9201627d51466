from __future__ import annotations

from typing import Any

import httpx
import pytest
import tinker

from steelyard.engine.server.app import RunningServer
from steelyard.engine.server.state import ServerSettings
from steelyard.errors import InputError
from tests.engine.data import SMALL, ragged


def test_every_limit_is_enforced(strict: RunningServer) -> None:
    with tinker.ServiceClient(base_url=strict.base_url, api_key="tml-secret") as service:
        first = service.create_lora_training_client("tiny-random", rank=2, seed=0)
        with pytest.raises(tinker.APIStatusError, match="at most 50 tokens, got 60"):
            first.forward_backward(ragged(0, [30, 30]), "cross_entropy").result()
        with pytest.raises(tinker.APIStatusError, match="at most 4000 bytes"):
            first.forward_backward(ragged(0, [45], 40), "cross_entropy").result()
        assert first.optim_step(SMALL).result().metrics, "later requests run"
        service.create_lora_training_client("tiny-random", rank=2, seed=0)
        with pytest.raises(tinker.PermissionDeniedError, match="at most 2 models"):
            service.create_lora_training_client("tiny-random", rank=2, seed=0)

        def small(logprobs: Any) -> Any:
            return logprobs.sum(), {}

        def other(logprobs: Any) -> Any:
            return logprobs.mean(), {}

        def large(logprobs: Any) -> Any:
            return (logprobs + 1 + 2 + 3 + 4 + 5).sum(), {}

        with pytest.raises(tinker.BadRequestError, match="1 to 6 nodes, got 8"):
            service.create_custom_loss(large, {"logprobs": 1}).result()
        service.create_custom_loss(small, {"logprobs": 1}).result()
        with pytest.raises(tinker.PermissionDeniedError, match="at most 1 losses"):
            service.create_custom_loss(other, {"logprobs": 1}).result()
        samplers = [service.create_sampling_client(base_model="tiny-random") for _ in range(3)]
        assert samplers[2].get_base_model()
        with pytest.raises(tinker.NotFoundError, match="at most 2 are kept"):
            samplers[0].get_base_model()
        headers = {"X-API-Key": "tml-secret"}
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0"}
        with httpx.Client(base_url=strict.base_url, headers=headers) as http:
            found = [http.post("/api/v1/create_session", json=body) for _ in range(3)]
        assert [response.status_code for response in found] == [200, 200, 403]


def test_the_defaults_are_valid() -> None:
    assert ServerSettings().api_key is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number >= 1, got 0"),
        ({"max_rank": True}, "max_rank must be a whole number >= 1, got True"),
        ({"gap_seconds": -1.0}, "gap_seconds must be a finite number > 0, got -1.0"),
        ({"keep_seconds": float("inf")}, "keep_seconds must be a finite number > 0, got inf"),
        ({"api_key": "secret"}, "api_key must start with 'tml-'"),
        ({"api_key": 5}, "api_key must start with 'tml-'"),
        # As a file that ends with its line has it.
        ({"api_key": "tml-secret\n"}, "and consist of visible ASCII characters"),
        ({"api_key": "tml-clé"}, "and consist of visible ASCII characters"),
        ({"max_loss_bytes": 0}, "max_loss_bytes must be a whole number >= 1, got 0"),
        ({"max_connections": 1.5}, "max_connections must be a whole number >= 1, got 1.5"),
        ({"loss_seconds": 0}, "loss_seconds must be a finite number > 0, got 0"),
        ({"gap_seconds": None}, "gap_seconds must be a finite number > 0, got None"),
        ({"allowed_hosts": "a.org"}, "allowed_hosts must be a list of host names .* got 'a.org'"),
        ({"allowed_hosts": 5}, "allowed_hosts must be a list .* got 5"),
        ({"allowed_hosts": [5]}, r"allowed_hosts must be a list .* got \[5\]"),
        ({"allowed_hosts": ["a b"]}, r"allowed_hosts must be a list .* got \['a b'\]"),
    ],
)
def test_an_invalid_setting_is_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ServerSettings(**settings)
