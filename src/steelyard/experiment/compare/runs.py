"""Several runs: a config with several seeds, and runs at once in processes or threads."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import psutil

from steelyard.errors import ConfigError, RunError
from steelyard.experiment.config.data_tables import Prompts, RolloutsConfig, SourceConfig
from steelyard.experiment.config.schema import Config
from steelyard.experiment.config.secrets import literal_secrets
from steelyard.experiment.run.folder import RunFolder
from steelyard.experiment.run.log import NewSteps, Watcher


def seeded_configs(config: Config, seeds: int) -> dict[int, Config]:
    """Configs that differ in `train.seed`, by that seed: the config's own, and those after it.

    A seed sets the initial LoRA matrices, the order of the data, the sampled answers (unless
    `rollouts.seed` does) and the random numbers that terms draw. The tasks of reasoning-gym and the
    held-out lines stay those of the config's own seed, so that all runs are measured on the same
    data. The first config is `config` itself.

    Raises:
        ConfigError: `seeds` is not a whole number >= 1.
    """
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise ConfigError(f"seeds must be a whole number >= 1, got {seeds!r}.")
    first = config.train.seed
    return {seed: with_seed(config, seed) for seed in range(first, first + seeds)}


def seed_folder(parent: Path, config: Config, seed: int) -> Path:
    """Folder of the runs with a seed: `parent` for the config's own, else `parent/seed-<seed>`."""
    return parent if seed == config.train.seed else parent / f"seed-{seed}"


def with_seed(config: Config, seed: int) -> Config:
    """Config with another `train.seed`, measured on the same held-out lines and tasks."""
    if seed == config.train.seed:
        return config
    train = config.train.model_copy(update={"seed": seed})
    source = config.source
    if source.split_seed is None:
        source = source.model_copy(update={"split_seed": config.train.seed})
    if isinstance(source, RolloutsConfig):
        prompts = _with_tasks_of(source.prompts, config.train.seed)
        source = source.model_copy(update={"prompts": prompts})
    return config.model_copy(update={"train": train, config.source_key: source})


def _with_tasks_of(prompts: Prompts, seed: int) -> Prompts:
    """Prompts whose tasks are those of a seed, unless they have one of their own."""
    if isinstance(prompts, list):
        return [_source_with_seed(source, seed) for source in prompts]
    return _source_with_seed(prompts, seed) if isinstance(prompts, SourceConfig) else prompts


def _source_with_seed(source: SourceConfig, seed: int) -> SourceConfig:
    is_open = source.is_task and source.seed is None
    return source.model_copy(update={"seed": seed}) if is_open else source


_MEMORY_MARGIN = 1.25  # times the memory of the largest run must be free to start another
_POLL_SECONDS = 0.2
_INTERRUPTED = 130  # exit status of a run that saved and ended after SIGINT


@dataclass
class _Child:
    folder: Path
    process: subprocess.Popen[bytes]
    steps: NewSteps

    @property
    def memory(self) -> int:
        """Resident bytes; 0 when the process has ended."""
        try:
            resident: int = psutil.Process(self.process.pid).memory_info().rss
        except psutil.Error:
            return 0
        return resident


def run_in_parallel(
    configs: Mapping[Path, Config],
    jobs: int,
    begin: Callable[[Path], Watcher],
    stop: Callable[[], bool],
) -> None:
    """Train the runs of these folders, at most `jobs` at a time; resume those already begun.

    The next run starts once every running one has made a step, which shows how much memory a run
    takes, and if that much memory is free. `begin` is called with its folder, and returns its
    watcher.

    A run that fails would as a rule fail in the others too: they are interrupted, and save a
    checkpoint. One that a signal ended, as the system does when memory is short, is the only one:
    the others go on.

    Raises:
        RunError: a run failed, or a signal ended it.
    """
    waiting = list(configs.items())
    running: list[_Child] = []
    ended: dict[Path, int] = {}  # exit code of each run that did not end well
    stopping = False
    while running or (waiting and not stopping):
        if not stopping and (stop() or any(code > 0 for code in ended.values())):
            stopping = True
            for child in running:
                child.process.send_signal(signal.SIGINT)
        if waiting and not stopping and len(running) < jobs and _memory_is_free(running):
            folder, config = waiting.pop(0)
            running.append(_start(folder, config, begin(folder)))
        for child in list(running):
            child.steps.report()
            code = child.process.poll()
            if code is not None:
                child.steps.report()  # those between the last look and its end
                running.remove(child)
                if code not in (0, _INTERRUPTED):
                    ended[child.folder] = code
        time.sleep(_POLL_SECONDS)
    if ended:
        for folder in configs:
            # As `train` does: a corrected config can then begin in the same folder.
            RunFolder(folder).discard_start()
        raise _failure(ended)


def _start(folder: Path, config: Config, watch: Watcher) -> _Child:
    run = RunFolder(folder)
    with run.locked():  # checks too that no file of it is a link, to which we would write
        if not run.holds_run:
            run.begin(config)
    # The run folder holds no secrets, and every user can list the arguments of a process.
    secrets = literal_secrets(config.model_dump(mode="json"))
    overrides = "".join(f"{key}={json.dumps(value)}\n" for key, value in secrets.items())
    command = [sys.executable, "-m", "steelyard", "resume", str(folder), "-"]
    with run.output.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - this Python and our own command
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C reaches only us; we send SIGINT once
        )
    assert process.stdin is not None  # noqa: S101 - a pipe
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # its exit code says why
        pipe.write(overrides.encode())
    return _Child(folder, process, NewSteps(run.metrics_file, config.train.steps, watch))


def _memory_is_free(running: list[_Child]) -> bool:
    if not running:
        return True
    if not all(child.steps.reported for child in running):
        return False
    largest = max(child.memory for child in running)
    return bool(psutil.virtual_memory().available > _MEMORY_MARGIN * largest)


def _failure(ended: Mapping[Path, int]) -> RunError:
    """Error of runs that did not end well."""
    folder, code = max(ended.items(), key=lambda item: item[1])  # one that failed, if any
    where = f"See {folder / 'log.txt'} and {RunFolder(folder).output}."
    if code > 0:
        reason, *notes = _printed_error(folder) or [f"it ended with the exit code {code}."]
        error = RunError(
            f"every run must end well, and {folder.name} did not: {reason.rstrip('.')}. {where}"
        )
        for note in notes:
            error.add_note(note)
        return error
    ends = " ".join(
        f"{path.name} did not: signal {-signal} ended it." for path, signal in ended.items()
    )
    return RunError(
        f"every run must end well, and {ends} The others went on. Start it again to continue "
        f"those that were ended, with fewer --jobs if memory is short. {where}"
    )


def _printed_error(folder: Path) -> list[str]:
    """Error at the end of a run's output, with its notes: the indented lines below it, if any."""
    lines = RunFolder(folder).output.read_text("utf-8", errors="replace").strip().splitlines()
    first = max((n for n, line in enumerate(lines) if not line.startswith("  ")), default=0)
    return [lines[first], "\n".join(lines[first + 1 :])] if lines[first + 1 :] else lines[first:]


Stop: TypeAlias = Callable[[], bool]


def run_together(tasks: Sequence[Callable[[Stop], None]], at_once: int, stop: Stop) -> None:
    """Call each of the tasks in a thread, at most `at_once` at a time, and wait for all.

    A task gets a function that returns True when it should end: once `stop()` does, or once
    another task has failed. The error of the first one, in their order, is raised.
    """
    failed = threading.Event()

    def stopping() -> bool:
        return failed.is_set() or stop()

    def run(task: Callable[[Stop], None]) -> None:
        if stopping():
            return
        try:
            task(stopping)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(max(1, at_once), "steelyard-run") as pool:
        futures = [pool.submit(run, task) for task in tasks]
        try:
            wait(futures)
        except BaseException:  # Ctrl-C where nobody handles it
            failed.set()
            raise
    for future in futures:
        future.result()
