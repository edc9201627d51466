"""Files of 0.1.0 still work; `tests/data/0.1.0` says how its files were made."""

from __future__ import annotations

import json
import math
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tinker import types
from torch import Tensor, nn
from torch.nn import functional

from steelyard import RegularizerSpec, regularize, schedules
from steelyard.clients import RegularizedClient
from steelyard.engine import LocalServiceClient
from steelyard.integrations import CompositeLoss
from steelyard.regularizers import Adaptive, EMADrift

from .cli.command import CommandRunner
from .cli.project import metrics_of

WRITTEN = Path(__file__).parent / "data" / "0.1.0"
# On fixed data k1 and k2 of a KL to the reference are named after what they are there.
LOG_RATIO = {
    "regularizers/kl/custom/k1": "regularizers/kl/custom/log_ratio",
    "regularizers/kl/custom/k2": "regularizers/kl/custom/half_squared_log_ratio",
}


def renamed(line: dict[str, Any]) -> dict[str, Any]:
    """Metrics of 0.1.0 under the names of today, without the k3 of fixed data."""
    named = {LOG_RATIO.get(key, key): value for key, value in line.items()}
    named.pop("regularizers/kl/custom/k3")
    return named


def unpack(name: str, folder: Path) -> Path:
    with tarfile.open(WRITTEN / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def expected_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((WRITTEN / f"{name}.json").read_text())
    return found


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """All metrics of 0.1.0 are there and agree, up to what another processor makes of them."""
    known = {key: value for key, value in found.items() if key in expected}
    assert known == pytest.approx(expected, rel=1e-3, abs=1e-4)


# A run.


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandRunner]:
    with CommandRunner(tmp_path_factory.mktemp("output")) as made:
        yield made


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The project with its run, moved to another folder; the paths in the run are adapted."""
    folder = tmp_path / "moved"
    shutil.copytree(WRITTEN / "project", folder)
    run = unpack("run", folder)
    for name in ("config.json", "data.json"):
        file = run / name
        file.write_text(file.read_text().replace("PROJECT", str(folder)))
    return folder


def weights_in(line: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in line.items() if key.endswith("/weight")}


def test_a_run_resumes_where_it_was(command: CommandRunner, project: Path, tmp_path: Path) -> None:
    before = metrics_of(project / "run")
    assert [line["step"] for line in before] == [0, 1, 2, 3, 4]
    done = command.run("resume", "run", cwd=project)
    assert done.code == 0, done.err
    (tmp_path / "metrics.jsonl").write_bytes((WRITTEN / "continued.jsonl").read_bytes())
    expected = [renamed(line) for line in metrics_of(tmp_path)]
    found = metrics_of(project / "run")
    assert [line["step"] for line in found] == [line["step"] for line in expected] == [*range(8)]
    assert found[:3] == before[:3]  # those before the checkpoint
    for line in found[3:]:
        assert line.pop("optim/learning_rate") > 0  # 0.1.0 did not write it
    assert_close(found[3], expected[3])
    average = "regularizers/drift/custom/average"  # the state of the terms, as it was saved
    multiplier = "regularizers/steady/custom/multiplier"
    assert (found[3][average], found[3][multiplier]) == (before[3][average], before[3][multiplier])
    for mine, theirs in zip(found[3:], expected[3:], strict=True):
        # So the same terms ran, and failed; 0.1.0 did not write which were skipped.
        new = {key for key in mine if key.startswith("skipped/")}
        later = {k for k in mine if k.endswith(("/grad_space", "/share"))}
        later |= {k for k in mine if k.startswith("held_out/skipped/")}
        # 0.1.0 took the entropy of these data, which were not sampled, from their own tokens.
        gone = {key for key in theirs if key.startswith("cosines/") and key.endswith("/entropy")}
        assert not gone or mine["regularizers/entropy/grad_space"] in ("logits", "projection")
        assert mine.keys() - new - later == theirs.keys() - gone
        failed = "regularizers/flaky/value" not in theirs
        assert new == ({"skipped/flaky", "skipped/flaky/reason"} if failed else set())
        assert weights_in(mine) == pytest.approx(weights_in(theirs), rel=1e-12)
        assert all(math.isfinite(mine[key]) for key in theirs.keys() - gone)
    assert ["regularizers/flaky/value" in line for line in found].count(False) == 4
    assert json.loads((project / "run" / "result.json").read_text())["status"] == "done"


def test_a_run_has_a_report(command: CommandRunner, project: Path) -> None:
    done = command.run("report", "run", cwd=project)
    assert done.code == 0, done.err
    page = next(project.rglob("*.html")).read_text()
    assert all(name in page for name in ("kl", "drift", "steady", "flaky", "entropy"))


# The state of a client.


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return unpack("client", tmp_path)


@pytest.fixture
def client(saved: Path) -> Iterator[RegularizedClient]:
    with LocalServiceClient(checkpoint_dir=saved / "checkpoints", device="cpu") as service:
        # Another seed: what agrees with 0.1.0 was loaded.
        yield regularize(service.create_lora_training_client("tiny-random", rank=2, seed=1))


def datum(tokens: list[int]) -> types.Datum:
    targets = torch.tensor(tokens) + 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": types.TensorData.from_torch(targets)},
    )


def nll(_: Any, logprobs: list[Tensor]) -> Tensor:
    return -torch.cat(logprobs).mean()


def next_call(client: RegularizedClient) -> dict[str, Any]:
    metrics: dict[str, Any] = client.forward_backward_custom(
        [datum([1, 2, 3]), datum([5, 6, 7, 8])],
        nll,
        regularizers=expected_of("client")["regularizers"],
    ).result().metrics  # fmt: skip
    return metrics


def test_a_checkpoint_of_a_client_loads(client: RegularizedClient) -> None:
    expected = expected_of("client")
    client.load_state_with_optimizer(expected["path"]).result()
    assert client.state_dict() == expected["state"]
    found = next_call(client)
    assert_close(found, expected["next"])
    for exact in ("regularizers/drift/custom/average", "regularizers/size/custom/multiplier"):
        assert found[exact] == expected["next"][exact]


def test_a_file_of_the_state_of_the_terms_loads(client: RegularizedClient, saved: Path) -> None:
    expected = expected_of("client")
    client.load_pipeline_state(saved / "pipeline.json")
    assert client.optim_steps == 3
    assert client.state_dict() == expected["state"]
    found = next_call(client)
    for exact in ("regularizers/drift/custom/average", "regularizers/size/custom/multiplier"):
        assert found[exact] == expected["next"][exact]


# The state of a composite.


class Scaled(nn.Module):
    """A base loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.0))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits * self.scale, labels)


def test_the_state_of_a_composite_loads() -> None:
    expected, base = expected_of("composite"), Scaled()
    drift, size = EMADrift(decay=0.5), Adaptive(regularizer="l1", target=1.0)
    terms = [
        RegularizerSpec(drift, 0.5, "drift"),
        RegularizerSpec(size, schedules.linear(0.1, 0.2, 10), "size"),
    ]
    loss = CompositeLoss(base, terms)
    loss.load_state_dict(torch.load(WRITTEN / "composite.pt", weights_only=True))
    assert loss.step == expected["state"]["step"] == 3
    assert drift.state_dict() == expected["state"]["terms"]["drift"]
    assert size.state_dict() == expected["state"]["terms"]["size"]
    assert loss.get_extra_state() == expected["state"]
    assert base.scale.item() == expected["scale"]
    logits = torch.arange(6.0).reshape(2, 3) / 4
    logprobs = [logits.log_softmax(-1)[i, label : label + 1] for i, label in enumerate((0, 2))]
    loss(logits=logits, labels=torch.tensor([0, 2]), data=[], logprobs=logprobs)
    assert_close(loss.output.metrics, expected["next"])
