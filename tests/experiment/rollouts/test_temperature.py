"""Runs whose answers are sampled at a temperature train the policy at that temperature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard.engine import tiny, training_client
from steelyard.errors import ConfigError
from steelyard.experiment import RunFolder, resume, train
from steelyard.experiment.config.schema import ModelConfig
from steelyard.experiment.model.backend import open_backend
from steelyard.experiment.rollouts.answers import add_base_logprobs
from tests.engine.server.wire_client import start
from tests.experiment.small_runs import KL, Recorder, small_rollouts, without_clock

SEEN: list[tuple[Any, list[Tensor]]] = []


@pytest.fixture(autouse=True)
def seen() -> Iterator[None]:
    SEEN.clear()
    yield
    SEEN.clear()


def watched(data: Any, logprobs: Sequence[Tensor]) -> Tensor:
    """A term that keeps what it is called with."""
    SEEN.append((list(data), [row.detach().clone() for row in logprobs]))
    return torch.cat(list(logprobs)).mean()


WATCHED = {"use": f"{__name__}:watched", "name": "watched", "weight": 0.0, "run_in": "inline"}


def base_logprobs(datum: Any, temperature: float) -> Tensor:
    """Log-probs of the untrained model by transformers in float64."""
    targets = datum.loss_fn_inputs["target_tokens"].to_torch()
    tokens = torch.tensor([datum.model_input.to_ints()])
    with torch.no_grad():
        logits: Tensor = tiny.build(torch.float64).eval()(tokens).logits[0]
    return (logits / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [without_clock(line) for line in RunFolder(folder).metrics()]


def field(datum: Any, name: str) -> Tensor:
    found: Tensor = datum.loss_fn_inputs[name].to_torch()
    return found


@pytest.mark.parametrize("temperature", [0.7, 1.4])
@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def test_before_an_update_all_ratios_are_1(tmp_path: Path, loss: str, temperature: float) -> None:
    settings = (f"rollouts.temperature={temperature}", f"loss.use={loss}")
    config = small_rollouts(tmp_path, *settings, regularizers=[KL, WATCHED])
    train(config, tmp_path / "run")
    lines = lines_of(tmp_path / "run")
    assert len(lines) == 3
    for line in lines:
        assert line["ratio"] == pytest.approx(1.0, abs=1e-5)
        assert line.get("clip_fraction", 0.0) == 0.0
    assert lines[0]["rollouts/kl"] == pytest.approx(0.0, abs=1e-9)
    assert lines[0]["regularizers/kl/value"] == pytest.approx(0.0, abs=1e-6)
    assert lines[-1]["rollouts/kl"] > 1e-6
    # Step 0 trains the untrained model, whose log-probs a second implementation computes.
    data, rows = next(call for call in SEEN if len(call[0]) > 1)
    for datum, row in zip(data, rows, strict=True):
        kept = field(datum, "weights") > 0
        expected = base_logprobs(datum, temperature)
        torch.testing.assert_close(row.double(), expected, rtol=0, atol=1e-4)
        for name in ("logprobs", "reference_logprobs"):
            found = field(datum, name).double()[kept]
            torch.testing.assert_close(found, expected[kept], rtol=0, atol=1e-4)


def test_reference_logprobs_are_those_at_the_temperature(tmp_path: Path) -> None:
    config = small_rollouts(tmp_path, "train.steps=1", regularizers=[WATCHED])
    train(config, tmp_path / "run")
    data = next(call for call in SEEN if len(call[0]) > 1)[0]
    model = ModelConfig(base_model="tiny-random", rank=2, device="cpu")
    backend = open_backend(model, 0, tmp_path / "checkpoints")
    try:
        for datum in add_base_logprobs(data, backend, 0.7):
            expected = base_logprobs(datum, 0.7).float()
            found = field(datum, "reference_logprobs")
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    finally:
        backend.close()


def test_greedy_answers_are_trained_at_temperature_1(tmp_path: Path) -> None:
    settings = ("rollouts.temperature=0", "rollouts.group_size=1", "rollouts.advantage=none")
    config = small_rollouts(tmp_path, *settings, "loss.use=ppo", regularizers=[WATCHED])
    train(config, tmp_path / "run")
    for line in lines_of(tmp_path / "run"):
        assert line["ratio"] == pytest.approx(1.0, abs=1e-5)
        assert line["clip_fraction"] == 0.0
    data, rows = next(call for call in SEEN if len(call[0]) > 1)
    for datum, row in zip(data, rows, strict=True):
        torch.testing.assert_close(row.double(), base_logprobs(datum, 1.0), rtol=0, atol=1e-4)


@pytest.mark.parametrize("evaluate", ["greedy", "sampled"])
def test_held_out_answers_are_measured_at_temperature_1(tmp_path: Path, evaluate: str) -> None:
    settings = ("rollouts.temperature=0.2", f"rollouts.evaluate={evaluate}", "train.steps=2")
    config = small_rollouts(tmp_path, *settings, regularizers=[KL, WATCHED])
    train(config, tmp_path / "run")
    data, rows = SEEN[0]  # before the first step
    assert len(data) == (1 if evaluate == "greedy" else 4)
    for datum, row in zip(data, rows, strict=True):
        kept = field(datum, "weights") > 0
        expected = base_logprobs(datum, 1.0)
        torch.testing.assert_close(row.double(), expected, rtol=0, atol=1e-4)
        for name in ("logprobs", "reference_logprobs"):
            found = field(datum, name).double()[kept]
            torch.testing.assert_close(found, expected[kept], rtol=0, atol=1e-4)


def test_held_out_answers_have_the_same_seeds_at_every_step(tmp_path: Path) -> None:
    settings = ("rollouts.evaluate=sampled", "train.learning_rate=0", "train.evaluate_every=1")
    train(small_rollouts(tmp_path, *settings), tmp_path / "run")
    answers: dict[int, list[str]] = {}
    for record in RunFolder(tmp_path / "run").rollouts():
        if record.get("held_out"):
            answers.setdefault(record["step"], []).append(record["answer"])
    first, *others = answers.values()
    assert len(others) == 2
    assert len(set(first)) > 1
    assert all(answer == first for answer in others)  # the weights do not change


def test_a_run_at_a_temperature_resumes_to_the_same_bits(tmp_path: Path) -> None:
    settings = ("rollouts.temperature=0.7", "loss.use=ppo", "train.save_every=2")
    config = small_rollouts(tmp_path, *settings, regularizers=[KL])
    train(config, tmp_path / "whole")
    left = iter([False, True])
    train(config, tmp_path / "stopped", stop=lambda: next(left))
    assert len(lines_of(tmp_path / "stopped")) == 1
    resume(tmp_path / "stopped")
    assert lines_of(tmp_path / "stopped") == lines_of(tmp_path / "whole")


def test_a_service_of_ours_trains_at_the_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    with start(tmp_path / "served") as running:
        service = ("model.backend=tinker", f"model.base_url={running.base_url}")
        settings = ("rollouts.temperature=0.7", "loss.use=ppo", "train.steps=2")
        config = small_rollouts(tmp_path, *service, *settings, regularizers=[KL])
        train(config, tmp_path / "run")
    lines = lines_of(tmp_path / "run")
    assert len(lines) == 2
    for line in lines:
        assert line["ratio"] == pytest.approx(1.0, abs=1e-5)
        assert line["clip_fraction"] == 0.0
    assert lines[0]["rollouts/kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("ignores", [False, True])
def test_a_service_without_temperatures_is_an_error_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ignores: bool
) -> None:
    """It refuses the key of `loss_fn_config`, or ignores it."""

    def without(config: Any) -> tuple[float, Any]:
        kept = {k: v for k, v in (config or {}).items() if not (ignores and k == "temperature")}
        return 1.0, kept

    monkeypatch.setattr(training_client, "split_temperature", without)
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    with start(tmp_path / "served") as running:
        service = ("model.backend=tinker", f"model.base_url={running.base_url}")
        config = small_rollouts(tmp_path, *service, "rollouts.temperature=0.7")
        with pytest.raises(ConfigError) as raised:
            train(config, tmp_path / "run")
        assert str(raised.value) == (
            "rollouts.temperature must be 1, or 0, for a service that computes log-probs at "
            "temperature 1 alone, got 0.7: the ratios would compare answers that were sampled at "
            "0.7 with log-probs at 1. Set rollouts.temperature = 1, or train with model.backend = "
            "'local' or on 'steelyard serve'."
        )
        assert not (tmp_path / "run" / "rollouts.jsonl").exists()
        assert lines_of(tmp_path / "run") == []
        one = small_rollouts(tmp_path, *service, "train.steps=1")
        train(one, tmp_path / "one")
    assert len(lines_of(tmp_path / "one")) == 1


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_part_of_the_vocabulary_is_warned_of_once(tmp_path: Path, top_p: float) -> None:
    recorder = Recorder()
    config = small_rollouts(tmp_path, f"rollouts.top_p={top_p}", "rollouts.temperature=0.7")
    train(config, tmp_path / "run", watch=recorder)
    said = [text for text in recorder.messages if "top_p" in text]
    assert len(said) == (top_p < 1)
    for text in said:
        assert text.startswith("warning: rollouts.top_p = 0.9 samples from a part of the")
        assert "log-probs are those of the whole distribution at temperature 0.7" in text
    # So they are of one distribution, and the ratios are 1 all the same.
    assert lines_of(tmp_path / "run")[0]["ratio"] == pytest.approx(1.0, abs=1e-5)
