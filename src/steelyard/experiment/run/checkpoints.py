"""Checkpoints of a run: the client's state, and a JSON record that points to it.

The record is written atomically, and after the state that it points to. Whenever the process is
killed, the newest record points to a complete checkpoint. Random numbers and the order of the data
are functions of the seed and the step, so the record holds only these two.

step-00000010.json   a checkpoint that a run can be resumed from, after 10 steps
best-00000007.json   weights after 7 steps with which a metric of the next step was measured; the
                     state of the terms is that of the middle of a step, so nothing resumes from it
best.json            which of them is the best, by `train.keep_best`
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from steelyard.clients.regularized import RegularizedClient
from steelyard.errors import CheckpointError, RunError
from steelyard.experiment.run.folder import RunFolder
from steelyard.output.run_files import write_file
from steelyard.spec.checks import is_whole

T = TypeVar("T")


@dataclass(frozen=True)
class RunCheckpoint:
    """Record of a checkpoint.

    Attributes:
        step: number of completed steps.
        path: path of the client's checkpoint.
        seed: seed of random numbers and of the order of the data.
        metrics_bytes: size of `metrics.jsonl` when the checkpoint was saved.
        terms: state of the regularizers, if the client's checkpoint does not contain it.
    """

    step: int
    path: str
    seed: int
    metrics_bytes: int
    terms: dict[str, Any] | None


@dataclass(frozen=True)
class BestCheckpoint:
    """Record of the best checkpoint of a run.

    Attributes:
        step: number of completed steps.
        metric: metric that it is the best by.
        value: of the metric, measured with the weights of the checkpoint.
        in_training: whether the metric is measured in training, before an update. Such weights
            are saved by `save_candidate`.
    """

    step: int
    metric: str
    value: float
    in_training: bool = False


def save(
    client: RegularizedClient,
    run: RunFolder,
    step: int,
    seed: int,
    keep: int,
    best: BestCheckpoint | None = None,
) -> None:
    """Save a checkpoint after `step` steps; delete all but the last `keep` and the best one.

    Raises:
        CheckpointError: the disk or the service failed; older checkpoints are unchanged.
        RunError: the record could not be written.
    """
    path = _write(client, run, record_file(run, step), step, seed).path
    folder = run.checkpoints / path.removeprefix("tinker://")
    if folder.is_dir():  # that of a Tinker service is not on this machine
        run.link_adapter(folder)
    if best is not None:
        write_file(_best_path(run), json.dumps(asdict(best), indent=2).encode())
    _delete_old(run, keep)


def save_candidate(client: RegularizedClient, run: RunFolder, step: int, seed: int) -> None:
    """Save the weights after `step` steps, which the best checkpoint may turn out to have.

    Raises:
        CheckpointError: the disk or the service failed.
        RunError: the record could not be written.
    """
    _write(client, run, _candidate_path(run, step), step, seed)


def delete_candidates(run: RunFolder, best: BestCheckpoint | None) -> None:
    """Delete the candidates but `best`, which the next call of `save` records, and the last best.

    Raises:
        CheckpointError: they cannot be deleted, or a record is damaged.
    """
    kept = (best, best_checkpoint(run))
    stay = {_path_of(run, checkpoint) for checkpoint in kept if checkpoint is not None}
    _delete(run, [record for record in _candidates(run) if record not in stay])


def best_checkpoint(run: RunFolder) -> BestCheckpoint | None:
    """Best checkpoint of a run; None if `train.keep_best` has not kept one.

    Raises:
        CheckpointError: the record is damaged.
    """
    path = _best_path(run)
    try:
        return BestCheckpoint(**json.loads(path.read_bytes().decode("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} must be a whole record: {error}.") from error


def latest_checkpoint(run: RunFolder) -> RunCheckpoint | None:
    """Newest record of a run; None before the first.

    Raises:
        CheckpointError: the record is damaged.
    """
    records = _records(run)
    return _read(records[-1]) if records else None


@contextlib.contextmanager
def suggest_older(run: RunFolder) -> Iterator[None]:
    """Add to an error of the newest checkpoint how to go on from the one before it."""
    try:
        yield
    except CheckpointError as error:
        records = _records(run)
        if len(records) > 1:
            error.add_note(f"To go on from the one before it, delete {records[-1]}.")
        raise


def find_checkpoint(run: RunFolder, step: int | Literal["best"] | None = None) -> RunCheckpoint:
    """Record after `step` steps, of the best checkpoint, or the newest one.

    Raises:
        RunError: there is none.
        CheckpointError: the record is damaged.
    """
    records = _records(run)
    if not records:
        raise RunError(
            f"{run.path} must hold a checkpoint, and it has none yet: wait for the first, after "
            f"train.save_every steps, or go on with 'steelyard resume {run.path}'."
        )
    if step is None:
        return _read(records[-1])
    if step == "best":
        best = best_checkpoint(run)
        if best is None:
            raise RunError(
                f"{run.path} must have a best checkpoint, and it has none: train with "
                f"train.keep_best, which names the metric, for more than one step, or take the "
                f"newest one."
            )
        if best.in_training:
            return _read(_candidate_path(run, best.step))
        step = best.step
    record = record_file(run, step)
    if record not in records:
        steps = [record.stem.removeprefix("step-").lstrip("0") for record in records]
        raise RunError(
            f"step must be that of a checkpoint of {run.path}, {' or '.join(steps)}, got {step}: "
            f"train.keep is the number of checkpoints that a run keeps."
        )
    return _read(record)


def load(client: RegularizedClient, checkpoint: RunCheckpoint) -> None:
    """Restore the weights, the optimizer and the regularizers' state of a checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
    """
    client.load_state_with_optimizer(checkpoint.path).result()
    if checkpoint.terms is not None:
        client.load_state_dict(checkpoint.terms)


def record_file(run: RunFolder, step: int) -> Path:
    """File of the record of a checkpoint."""
    return run.checkpoints / f"step-{step:08d}.json"


def _candidate_path(run: RunFolder, step: int) -> Path:
    return run.checkpoints / f"best-{step:08d}.json"


def _path_of(run: RunFolder, best: BestCheckpoint) -> Path:
    """Record of the weights of the best checkpoint."""
    return (_candidate_path if best.in_training else record_file)(run, best.step)


def best_files(run: RunFolder, step: int) -> list[Path]:
    """Records of the best checkpoint, if it is not after `step` steps or more; else none.

    Raises:
        CheckpointError: the record is damaged.
    """
    best = best_checkpoint(run)
    if best is None or best.step > step:
        return []
    return [_path_of(run, best), _best_path(run)]


def _best_path(run: RunFolder) -> Path:
    return run.checkpoints / "best.json"


def _records(run: RunFolder) -> list[Path]:
    return sorted(run.checkpoints.glob("step-*.json"))


def _candidates(run: RunFolder) -> list[Path]:
    return sorted(run.checkpoints.glob("best-*.json"))


def _write(
    client: RegularizedClient, run: RunFolder, record: Path, step: int, seed: int
) -> RunCheckpoint:
    """Save the state of the client under the name of a record, and then write the record."""
    size = run.measured()
    path = client.save_state(record.stem, overwrite=True).result().path
    # A local client saves the state of attached regularizers with its own; the SDK's cannot.
    terms = None if hasattr(client.client, "attach") else client.state_dict()
    checkpoint = RunCheckpoint(step, path, seed, size, terms)
    write_file(record, json.dumps(asdict(checkpoint), indent=2).encode())
    return checkpoint


def _read(record: Path) -> RunCheckpoint:
    try:
        checkpoint = RunCheckpoint(**json.loads(record.read_bytes().decode("utf-8")))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{record} must be a whole record: {error}.") from error
    numbers = (checkpoint.step, checkpoint.seed, checkpoint.metrics_bytes)
    has_types = isinstance(checkpoint.path, str) and isinstance(checkpoint.terms, dict | None)
    if not has_types or not all(is_whole(number, at_least=0) for number in numbers):
        raise CheckpointError(
            f"{record} must be a whole record, with whole numbers >= 0 as step, seed and "
            f"metrics_bytes, a string as path, and an object or null as terms, got "
            f"{checkpoint!r:.200}."
        )
    return checkpoint


def with_checkpoint(
    run: RunFolder, step: int | Literal["best"] | None, use: Callable[[RunCheckpoint], T]
) -> tuple[T, RunCheckpoint]:
    """Call a function with a checkpoint, and again if a run that goes on replaces it meanwhile.

    Args:
        run: run folder.
        step: as in `find_checkpoint`.
        use: reads the checkpoint.

    Returns:
        Its result, and the checkpoint.

    Raises:
        RunError: there is no such checkpoint, or no longer.
        CheckpointError: it is damaged.
    """
    while True:
        checkpoint = find_checkpoint(run, step)
        try:
            return use(checkpoint), checkpoint
        except CheckpointError:
            if find_checkpoint(run, step) == checkpoint:
                raise


def _delete_old(run: RunFolder, keep: int) -> None:
    records, best = _records(run), best_checkpoint(run)
    stay = {*records[-keep:], *([] if best is None else [_path_of(run, best)])}
    _delete(run, [record for record in (*records, *_candidates(run)) if record not in stay])


def _delete(run: RunFolder, records: Sequence[Path]) -> None:
    """Delete records, and all states that no other record leads to."""
    # Records first: killed in between, this leaves checkpoints without a record, which the next
    # call deletes, and never a record without its checkpoint.
    others = {*_records(run), *_candidates(run)} - {*records}
    kept = {_read(record).path for record in others}
    try:
        for record in records:
            record.unlink(missing_ok=True)
        links = [
            link
            for name in ("step", "best")
            for link in run.checkpoints.glob(f"*/weights/{name}-*")
            if f"tinker://{link.relative_to(run.checkpoints).as_posix()}" not in kept
        ]
        if links:  # of a run on this machine
            from steelyard.engine.checkpoints import remove_checkpoint  # noqa: PLC0415 - takes seconds

            for link in links:
                remove_checkpoint(link)
    except OSError as error:
        raise CheckpointError(
            f"{run.checkpoints} must be writable, and deleting old checkpoints failed: {error}."
        ) from error
