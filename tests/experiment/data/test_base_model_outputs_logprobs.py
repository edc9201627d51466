"""Log-probs of the base model as a field of the data."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tinker import types

from steelyard.experiment import RunFolder, read_config
from steelyard.experiment.data.base_model_outputs import (
    add_reference_logprobs,
    share_reference_logprobs,
)
from steelyard.experiment.data.encoding import Encoder, Group
from steelyard.experiment.model.backend import Backend
from tests.experiment.small_runs import lines

NO_BACKEND: Any = None  # any call of it would fail


@pytest.fixture
def groups(plain: Encoder) -> list[Group]:
    preference = {"prompt": "a", "chosen": "b", "rejected": "longer"}
    return [plain.encode("completion", line) for line in lines(2)] + [
        plain.encode("preference", preference)
    ]


def reference(datum: types.Datum) -> torch.Tensor:
    return datum.loss_fn_inputs["reference_logprobs"].to_torch()


def test_every_datum_gets_the_logprobs_of_the_untrained_client(
    groups: list[Group], backend: Backend, run: RunFolder
) -> None:
    completed = add_reference_logprobs(groups, backend, run)
    assert [len(group) for group in completed] == [1, 1, 2]
    data = [datum for group in groups for datum in group]
    expected = backend.logprobs(data)
    found = [datum for group in completed for datum in group]
    for datum, original, row in zip(found, data, expected, strict=True):
        assert torch.equal(reference(datum), row)
        assert datum.record == original.record  # type: ignore[attr-defined]
        assert "reference_logprobs" not in original.loss_fn_inputs
    cached = safetensors.torch.load((run.path / "reference.safetensors").read_bytes())
    assert sorted(map(len, cached.values())) == sorted(map(len, expected))
    assert not list(run.path.glob(".reference*"))


def test_a_resumed_run_reads_them_from_its_folder(
    groups: list[Group], backend: Backend, run: RunFolder
) -> None:
    first = add_reference_logprobs(groups, backend, run)
    again = add_reference_logprobs(groups, NO_BACKEND, run)
    for group, other in zip(first, again, strict=True):
        for datum, same in zip(group, other, strict=True):
            assert torch.equal(reference(datum), reference(same))


def test_a_damaged_cache_is_computed_again(
    groups: list[Group], backend: Backend, run: RunFolder
) -> None:
    add_reference_logprobs(groups, backend, run)
    file = run.path / "reference.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    completed = add_reference_logprobs(groups, backend, run)
    expected = backend.logprobs([datum for group in groups for datum in group])
    for datum, row in zip((d for group in completed for d in group), expected, strict=True):
        assert torch.equal(reference(datum), row)


class Counting:
    """The backend, with the lengths of the data of each call."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.calls: list[list[int]] = []

    def logprobs(self, data: Any, progress: Any, *, temperature: float) -> list[torch.Tensor]:
        self.calls.append([len(datum.model_input.to_ints()) for datum in data])
        return self.backend.logprobs(data, progress, temperature=temperature)


def begun(path: Path) -> RunFolder:
    run = RunFolder(path)
    run.begin(read_config({"model": {"base_model": "tiny-random"}, "data": {"path": __file__}}))
    return run


def test_only_data_that_no_run_has_had_are_computed(
    groups: list[Group], backend: Backend, folder: Path
) -> None:
    share_reference_logprobs(folder)
    counting: Any = Counting(backend)
    messages: list[str] = []
    # Runs may be two folders further down.
    for name, part in (("x", groups[1:]), ("y", groups), ("1/x", [*groups, groups[0]])):
        run = begun(folder / name)
        completed = add_reference_logprobs(part, counting, run, messages.append)
        expected = backend.logprobs([datum for group in part for datum in group])
        for datum, row in zip((d for group in completed for d in group), expected, strict=True):
            torch.testing.assert_close(reference(datum), row)
    lengths = [[len(datum.model_input.to_ints()) for datum in group] for group in groups]
    assert counting.calls == [[*lengths[1], *lengths[2]], lengths[0]]
    assert messages == ["computing the base model's log-probs"] * 2
    share_reference_logprobs(folder)  # does not empty it
    assert len(safetensors.torch.load((folder / "reference.safetensors").read_bytes())) == 4


def test_runs_that_start_together_compute_once(
    groups: list[Group], backend: Backend, folder: Path
) -> None:
    share_reference_logprobs(folder)
    counting: Any = Counting(backend)
    runs = [begun(folder / name) for name in "abc"]
    barrier = threading.Barrier(3)

    def start(run: RunFolder) -> None:
        barrier.wait()
        add_reference_logprobs(groups, counting, run)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(start, runs))
    assert len(counting.calls) == 1


def test_other_tokens_of_the_same_lengths_do_not_fit(
    plain: Encoder, backend: Backend, run: RunFolder
) -> None:
    def group(completion: str) -> Group:
        return plain.encode("completion", {"prompt": "a", "completion": completion})

    add_reference_logprobs([group("bcd")], backend, run)
    ((datum,),) = add_reference_logprobs([group("xyz")], backend, run)
    (expected,) = backend.logprobs(group("xyz"))
    assert torch.equal(reference(datum), expected)


def test_another_model_does_not_fit(groups: list[Group], backend: Backend, run: RunFolder) -> None:
    add_reference_logprobs(groups, backend, run)
    config = run.path / "config.json"
    config.write_text(config.read_text().replace("smollm2-135m", "tiny-random"))
    with pytest.raises(AttributeError):  # it is to be computed, with no backend
        add_reference_logprobs(groups, NO_BACKEND, run)


def test_a_cache_of_an_earlier_version_does_not_fit(groups: list[Group], run: RunFolder) -> None:
    """All log-probs in one tensor, with the lengths beside it."""
    tensors = {"logprobs": torch.zeros(9), "lengths": torch.tensor([4, 5])}
    (run.path / "reference.safetensors").write_bytes(safetensors.torch.save(tensors))
    with pytest.raises(AttributeError):
        add_reference_logprobs(groups, NO_BACKEND, run)


def test_logprobs_of_the_data_file_are_kept(run: RunFolder, plain: Encoder) -> None:
    line = {"prompt": "a", "completion": "b", "reference_logprobs": [-1.0, -2.0]}
    (group,) = add_reference_logprobs([plain.encode("completion", line)], NO_BACKEND, run)
    assert reference(group[0]).tolist() == [-1.0, -2.0]
    assert not (run.path / "reference.safetensors").exists()


def test_the_progress_of_a_long_computation_is_said(
    plain: Encoder, backend: Backend, folder: Path
) -> None:
    records = [{"prompt": f"{number}", "completion": " is one"} for number in range(40)]
    many = [plain.encode("completion", record) for record in records]
    messages: list[str] = []
    add_reference_logprobs(many, backend, begun(folder / "long"), messages.append)
    assert messages == [
        "computing the base model's log-probs",
        "base model's log-probs: 16 of 40 examples",
        "base model's log-probs: 32 of 40 examples",
    ]
