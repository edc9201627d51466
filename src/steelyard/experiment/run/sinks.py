"""Loggers of metrics in addition to the run folder: TensorBoard, Weights & Biases, trackio."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from steelyard._extras import load
from steelyard.doctor.alerts import alert
from steelyard.doctor.finding import Finding
from steelyard.experiment.config.schema import Config, SinksConfig
from steelyard.experiment.run.folder import RunFolder
from steelyard.output.redaction import redact

_NOT_LOGGED = ("step", "time")


def check_installed(config: SinksConfig) -> None:
    """Check that the packages of the selected sinks are installed.

    Raises:
        MissingExtraError: one is not.
    """
    if config.tensorboard:
        load("tensorboardX", "the tensorboard sink")
    for module, settings in (("wandb", config.wandb), ("trackio", config.trackio)):
        if settings is not None:
            load(module, f"the {module} sink")


class Sinks:
    """All sinks of a run.

    Args:
        config: its `sinks` table selects them.
        run: run folder, where they keep their files.
        start: step that the run continues from; TensorBoard discards later ones.

    Raises:
        MissingExtraError: the package of a sink is not installed.
    """

    def __init__(self, config: Config, run: RunFolder, start: int) -> None:
        self._sinks: list[Any] = []
        settings = config.sinks
        self._alerts = settings.wandb is not None or settings.trackio is not None
        if settings.tensorboard:
            self._sinks.append(_TensorBoard(run, start))
        if settings.wandb is not None:
            options = {
                "mode": settings.wandb.mode,
                "dir": str(run.path),
                # Derived from the path, so that a resumed run continues the same W&B run.
                "id": hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:16],
                "resume": "allow",
            }
            self._sinks.append(_Session("wandb", settings.wandb.project, config, run, options))
        if settings.trackio is not None:
            options = {"resume": "allow"}
            self._sinks.append(_Session("trackio", settings.trackio.project, config, run, options))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the numeric metrics of a step; strings, such as `skipped/<name>/reason`, are not."""
        numbers = {
            key: value
            for key, value in metrics.items()
            if key not in _NOT_LOGGED and isinstance(value, int | float)
        }
        for sink in self._sinks:
            sink.write(step, numbers)

    def findings(self, changed: Sequence[Finding]) -> None:
        """Send alerts for the problems that begin with a step; call it before `write`."""
        if self._alerts:
            alert(changed)

    def close(self) -> None:
        """Flush and close all sinks."""
        for sink in self._sinks:
            sink.close()


class _TensorBoard:
    def __init__(self, run: RunFolder, start: int) -> None:
        module: Any = load("tensorboardX", "the tensorboard sink")
        folder = str(run.path / "tensorboard")
        self._writer = module.SummaryWriter(folder, purge_step=start, write_to_disk=True)

    def write(self, step: int, numbers: Mapping[str, Any]) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Session:
    """Sink for Weights & Biases, and for trackio, which has the same functions."""

    def __init__(
        self, module: str, project: str, config: Config, run: RunFolder, options: dict[str, Any]
    ) -> None:
        self._module: Any = load(module, f"the {module} sink")
        settings = redact(config.model_dump(mode="json"))
        with _redacted_arguments():
            self._module.init(project=project, name=run.path.name, config=settings, **options)

    def write(self, step: int, numbers: Mapping[str, Any]) -> None:
        self._module.log(dict(numbers), step=step)

    def close(self) -> None:
        self._module.finish()


@contextmanager
def _redacted_arguments() -> Iterator[None]:
    """Hide secrets among the overrides on the command line, which W&B records."""
    arguments = sys.argv
    sys.argv = redact(arguments)
    try:
        yield
    finally:
        sys.argv = arguments
