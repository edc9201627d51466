"""Runs in their own processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.errors import RunError
from steelyard.experiment import RunFolder, train
from steelyard.experiment.compare.runs import _Child, _memory_is_free, run_in_parallel
from steelyard.experiment.run.log import NewSteps
from tests.experiment.small_runs import L2, Recorder, small_config, without_clock


@pytest.fixture
def ended() -> subprocess.Popen[bytes]:
    """A process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process


def test_runs_in_processes_give_the_same_metrics(folder: Path) -> None:
    (folder / "keyed_term.py").write_text(
        "def f(data, logprobs, password):\n"
        "    assert password == 'literal-6502'\n"
        "    return logprobs[0].square().mean()\n"
    )
    entry = {**L2, "use": "keyed_term:f", "options": {"password": "literal-6502"}}
    configs = {
        folder / "with": small_config(folder, "train.steps=2", regularizers=[entry]),
        folder / "without": small_config(folder, "train.steps=2", regularizers=[]),
    }
    recorders = {path: Recorder() for path in configs}
    run_in_parallel(configs, 2, recorders.__getitem__, lambda: False)
    for path, config in configs.items():
        assert [metrics["step"] for metrics in recorders[path].steps] == [0, 1]
        train(config, folder / f"{path.name} here")
        there, here = (RunFolder(p).metrics() for p in (path, folder / f"{path.name} here"))
        assert [without_clock(line) for line in there] == [without_clock(line) for line in here]
        files = [file for file in path.rglob("*") if file.is_file()]
        assert not [file for file in files if b"literal-6502" in file.read_bytes()]


def test_a_run_that_fails_is_named_and_no_other_is_started(folder: Path) -> None:
    (folder / "broken_term.py").write_text("def f(data, logprobs):\n    raise OSError('away')\n")
    entry = {**L2, "use": "broken_term:f"}
    configs = {
        folder / "bad": small_config(folder, regularizers=[entry]),
        folder / "next": small_config(folder),
    }
    rule = r"and bad did not: TermError: .*OSError: away\. See .*bad/log\.txt and .*bad/output\.txt"
    with pytest.raises(RunError, match=rule) as caught:
        run_in_parallel(configs, 1, lambda _: Recorder(), lambda: False)
    (note,) = caught.value.__notes__
    assert note.splitlines()[:2] == [
        f'  File "{folder}/broken_term.py", line 2, in f',
        "    raise OSError('away')",
    ]
    assert "OSError: away" in (folder / "bad" / "log.txt").read_text()
    assert not (folder / "next").exists()
    assert not RunFolder(folder / "bad").holds_run, "a corrected config can begin there"


def test_the_output_of_a_run_is_not_written_through_a_link(folder: Path) -> None:
    """A folder from somebody else may have one to any file of the user's."""
    mine = folder / "mine"
    mine.write_text("mine")
    (folder / "r").mkdir()
    (folder / "r" / "output.txt").symlink_to(mine)
    with pytest.raises(RunError, match=r"output\.txt must be a file or folder of the run itself"):
        run_in_parallel(
            {folder / "r": small_config(folder)}, 2, lambda _: Recorder(), lambda: False
        )
    assert mine.read_text() == "mine"


def test_nothing_starts_after_a_stop(folder: Path) -> None:
    begun: list[Path] = []
    run_in_parallel({folder / "r": small_config(folder)}, 2, begun.append, lambda: True)  # type: ignore[arg-type]  # never called
    assert begun == []
    assert not (folder / "r").exists()


def test_a_process_that_has_ended_takes_no_memory(
    run: RunFolder, ended: subprocess.Popen[bytes]
) -> None:
    assert _Child(run.path, ended, NewSteps(run.metrics_file, 3, Recorder())).memory == 0


def test_another_run_starts_when_every_running_one_has_made_a_step(
    run: RunFolder, ended: subprocess.Popen[bytes]
) -> None:
    assert _memory_is_free([])
    made_a_step = _Child(run.path, ended, NewSteps(run.metrics_file, 3, Recorder(), reported=1))
    has_not = _Child(run.path, ended, NewSteps(run.metrics_file, 3, Recorder()))
    assert _memory_is_free([made_a_step])
    assert not _memory_is_free([made_a_step, has_not])
