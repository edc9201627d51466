"""Backends: the tiny model on this machine, and a run on a Tinker service.

The service is the SDK's own training client, answered by the engine: see `tests.clients.sdk`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from tinker import types

from steelyard.engine import LocalServiceClient, tiny
from steelyard.errors import ConfigError, RunError
from steelyard.experiment import Config, RunFolder, read_config, resume, train
from steelyard.experiment.config.schema import ModelConfig, TermConfig
from steelyard.experiment.data.encoding import Encoder
from steelyard.experiment.model.backend import Backend, check_model, check_service, open_backend
from steelyard.experiment.training import loop
from tests.cli.project import metrics_of, write_project
from tests.clients.sdk import Answered, Holder
from tests.engine.server.wire_client import start


class Remote(Answered):
    """The SDK's client, with checkpoints, sampling and the tokenizer from the engine too."""

    def save_state(
        self, name: str, ttl_seconds: Any = None, overwrite: bool = False, user_metadata: Any = None
    ) -> Any:
        return self.engine.save_state(name, ttl_seconds, overwrite, user_metadata)

    def load_state_with_optimizer(self, path: str, weights_access_token: Any = None) -> Any:
        return self.engine.load_state_with_optimizer(path)

    def save_weights_and_get_sampling_client(self, *_: Any, **__: Any) -> Any:
        return self.engine.save_weights_and_get_sampling_client()

    def get_tokenizer(self) -> Any:
        return self.engine.get_tokenizer()


class Service:
    """The part of the SDK's service client that a run uses; keeps checkpoints in another folder."""

    made: list[Remote]
    root: Path
    holder: Holder

    def __init__(self, base_url: str | None = None, api_key: str | None = None) -> None:
        self.base_url = base_url
        self._local = LocalServiceClient(checkpoint_dir=self.root, device="cpu", max_tokens=2048)

    def create_lora_training_client(self, base_model: str, **options: Any) -> Remote:
        engine = self._local.create_lora_training_client("tiny-random", **options)
        self.made.append(Remote(engine, self.holder))
        return self.made[-1]

    def close(self, status: Any) -> Any:
        return self._local.close(status)


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Service]]:
    Service.made, Service.root, Service.holder = [], tmp_path / "far-away", Holder()
    monkeypatch.setattr(tinker, "ServiceClient", Service)
    monkeypatch.setattr(loop, "check_service", lambda config: None)
    yield Service
    Service.holder.close()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    project = write_project(tmp_path)
    remote = ["model.backend=tinker", "model.base_url=http://localhost:1", "train.steps=4"]
    return read_config(project / "c.toml", [*remote, "train.save_every=2"])


def test_a_run_on_a_service_is_resumed_with_the_state_of_its_terms(
    service: type[Service], config: Config, tmp_path: Path
) -> None:
    train(config, tmp_path / "whole")
    answers = iter([False, False, False, True])
    outcome = train(config, tmp_path / "r", stop=lambda: next(answers))
    assert (outcome.status, outcome.steps) == ("interrupted", 3)
    record = json.loads((tmp_path / "r/checkpoints/step-00000003.json").read_text())
    assert set(record["terms"]["terms"]) == {"drift", "steady"}
    assert resume(tmp_path / "r").status == "done"
    assert metrics_of(tmp_path / "r") == metrics_of(tmp_path / "whole")


def test_only_tokens_and_weights_are_sent_to_a_service(
    service: type[Service], config: Config, tmp_path: Path
) -> None:
    train(config, tmp_path / "r")
    sent = [data for verb, data in service.made[0].sent if verb != "optim_step"]
    assert len(sent) > 8
    for datum in (datum for data in sent for datum in data):
        assert set(datum.loss_fn_inputs) == {"target_tokens", "weights"}
        assert not getattr(datum, "record", {})


def test_a_term_that_needs_logits_is_refused_on_a_service(
    service: type[Service], config: Config, tmp_path: Path
) -> None:
    entry = config.regularizers[2].model_copy(update={"needs": ["logits"]})
    wrong = config.model_copy(update={"regularizers": [entry]})
    with pytest.raises(ValueError, match="fn must accept"):
        train(wrong, tmp_path / "r")
    assert not RunFolder(tmp_path / "r").holds_run


# The real SDK.


def test_a_missing_api_key_is_an_error_of_ours(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(RunError, match=r"^the Tinker service must accept .*TINKER_API_KEY"):
        open_backend(config.model, seed=0, checkpoints=tmp_path / "c")
    with start(tmp_path / "served") as running:
        model = config.model.model_copy(update={"base_url": running.base_url})
        with pytest.raises(RunError, match=r"^the Tinker service must accept .*TINKER_API_KEY"):
            check_service(model)


def test_a_service_is_checked_within_an_event_loop_as_of_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")

    async def check(url: str) -> None:
        check_service(ModelConfig(backend="tinker", base_url=url))

    with start(tmp_path / "served") as running:
        asyncio.run(check(running.base_url))


def test_a_run_ends_its_session_on_the_service(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    with start(tmp_path / "served") as running:
        model = config.model.model_copy(
            update={"base_url": running.base_url, "base_model": "tiny-random"}
        )
        terms = config.regularizers[1:3]  # without the reference
        settings = config.train.model_copy(update={"sample_prompts": []})
        remote = config.model_copy(
            update={"model": model, "regularizers": terms, "train": settings}
        )
        assert train(remote, tmp_path / "r").status == "done"
        assert list(running._state.sessions) == []
        backend = open_backend(model, seed=0, checkpoints=tmp_path / "c")
        assert len(list(running._state.sessions)) == 1
        backend.close()
        assert list(running._state.sessions) == []
        with pytest.raises(RuntimeError, match="closed"):
            backend.service.create_lora_training_client("tiny-random", rank=2)


# The tiny model, through transformers alone.


def base_model_logprobs(datum: types.Datum) -> torch.Tensor:
    """Log-probs of the targets by the base model, without the engine."""
    inputs = torch.tensor([datum.model_input.to_ints()])
    with torch.no_grad():
        logits = tiny.build(torch.float32)(inputs).logits[0]
    targets = datum.loss_fn_inputs["target_tokens"].to_torch()
    logprobs: torch.Tensor = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return logprobs


def test_logprobs_of_an_untrained_client_are_those_of_the_base_model(
    backend: Backend, plain: Encoder
) -> None:
    records = [{"prompt": "n" * (n % 5), "completion": f" {n}"} for n in range(19)]
    data = [plain.encode("completion", record)[0] for record in records]
    logprobs = backend.logprobs(data)
    assert len(logprobs) == len(data), "more than one batch of 16"
    for datum, row in zip(data, logprobs, strict=True):
        assert not row.requires_grad
        torch.testing.assert_close(row, base_model_logprobs(datum), atol=1e-5, rtol=1e-5)


def test_samples_are_greedy(backend: Backend, plain: Encoder) -> None:
    model, prompt = tiny.build(torch.float32), plain.prompt("One plus", "completion")
    tokens = prompt.to_ints()
    with torch.no_grad():
        for _ in range(4):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    expected = plain.tokenizer.decode(tokens[prompt.length :], skip_special_tokens=True)
    greedy = types.SamplingParams(max_tokens=4, temperature=0.0, seed=0)
    assert backend.sample([prompt, prompt], greedy) == [expected, expected]


def test_groups_are_sampled_as_one_list(backend: Backend, plain: Encoder) -> None:
    params = types.SamplingParams(max_tokens=5, seed=3)
    requests = [(plain.prompt(text, "completion"), 2, params) for text in ("One", "Two plus")]
    groups = backend.sample_groups(requests)
    assert [len(group) for group in groups] == [2, 2]
    again = backend.sample_groups(requests)
    assert [[each.logprobs for each in group] for group in groups] == [
        [each.logprobs for each in group] for group in again
    ]


def test_the_base_model_stays_beside_the_trained_one(backend: Backend, plain: Encoder) -> None:
    data = plain.encode("completion", {"prompt": "One", "completion": " two"})
    before = backend.logprobs(data)[0]
    backend.client.forward_backward(data, "cross_entropy").result()
    backend.client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    torch.testing.assert_close(backend.base.logprobs(data)[0], before)
    assert not torch.allclose(backend.logprobs(data)[0], before)


def test_the_context_is_that_of_the_model(backend: Backend) -> None:
    assert backend.context_length == tiny.build(torch.float32).config.max_position_embeddings


def test_an_unknown_local_model_is_refused_without_loading() -> None:
    check_model(ModelConfig(base_model="tiny-random"))
    check_model(ModelConfig(backend="tinker", base_model="gpt-9"))
    with pytest.raises(ConfigError, match=r"^\[model\]: base_model must be"):
        check_model(ModelConfig(base_model="gpt-9"))


def test_a_run_on_a_service_takes_one_pass(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    opened = []

    def recorded(*args: Any, **kwargs: Any) -> Backend:
        opened.append(open_backend(*args, **kwargs))
        return opened[-1]

    monkeypatch.setattr(loop, "open_backend", recorded)
    terms = [
        TermConfig(use="kl_to_reference", name="kl", weight=0.1),
        TermConfig(use="l2", weight=0.01),
    ]
    with start(tmp_path / "served") as running:
        model = config.model.model_copy(update={"base_url": running.base_url})
        settings = config.train.model_copy(update={"sample_prompts": [], "drivers_every": 1})
        changes = {"model": model, "regularizers": terms, "train": settings}
        assert train(config.model_copy(update=changes), tmp_path / "r").status == "done"
    assert opened[0].client.explain().passes == 1
    # The log-probs that came back give the gradients of single terms.
    assert {record["term"] for record in RunFolder(tmp_path / "r").drivers()} >= {"kl", "l2"}
