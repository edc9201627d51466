"""A run on a Tinker service.

The service is the SDK's own training client, answered by the engine: see `tests.clients.sdk`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker

from steelyard.engine import LocalServiceClient
from steelyard.experiment import Config, RunFolder, read_config, resume, train
from tests.cli.project import metrics_of, write_project
from tests.clients.sdk import Answered, Holder


class Remote(Answered):
    """What a run needs beyond the passes, from the engine too."""

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
    """The part of the SDK's service client that a run uses; keeps its checkpoints elsewhere."""

    made: list[Remote]
    root: Path
    holder: Holder

    def __init__(self, base_url: str | None = None) -> None:
        self.base_url = base_url
        self._local = LocalServiceClient(checkpoint_dir=self.root, device="cpu", max_tokens=2048)

    def create_lora_training_client(self, base_model: str, **options: Any) -> Remote:
        engine = self._local.create_lora_training_client("tiny-random", **options)
        self.made.append(Remote(engine, self.holder))
        return self.made[-1]


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Service]]:
    Service.made, Service.root, Service.holder = [], tmp_path / "far-away", Holder()
    monkeypatch.setattr(tinker, "ServiceClient", Service)
    yield Service
    Service.holder.close()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    project = write_project(tmp_path)
    remote = ["model.backend=tinker", "model.base_url=http://localhost:1", "train.steps=4"]
    return read_config(project / "c.toml", [*remote, "train.save_every=2"])


def test_a_run_on_a_service_is_resumed_with_the_memory_of_its_terms(
    service: type[Service], config: Config, tmp_path: Path
) -> None:
    train(config, tmp_path / "whole")
    asked = iter([False, False, False, True])
    outcome = train(config, tmp_path / "r", stop=lambda: next(asked))
    assert (outcome.status, outcome.steps) == ("interrupted", 3)
    record = json.loads((tmp_path / "r/checkpoints/step-00000003.json").read_text())
    assert set(record["terms"]["terms"]) == {"drift", "steady"}
    assert resume(tmp_path / "r").status == "done"
    assert metrics_of(tmp_path / "r") == metrics_of(tmp_path / "whole")


def test_nothing_but_tokens_and_weights_leaves_the_machine(
    service: type[Service], config: Config, tmp_path: Path
) -> None:
    train(config, tmp_path / "r")
    sent = [data for verb, data in service.made[0].sent if verb != "optim_step"]
    assert len(sent) > 8
    for datum in (datum for data in sent for datum in data):
        assert set(datum.loss_fn_inputs) == {"target_tokens", "weights"}
        assert not getattr(datum, "record", {})


def test_a_term_that_needs_more_than_a_service_gives_is_refused(
    service: type[Service], config: Config, tmp_path: Path
) -> None:
    entry = config.regularizers[2].model_copy(update={"needs": ["logits"]})
    wrong = config.model_copy(update={"regularizers": [entry]})
    with pytest.raises(ValueError, match="fn must accept"):
        train(wrong, tmp_path / "r")
    assert not RunFolder(tmp_path / "r").holds_run
