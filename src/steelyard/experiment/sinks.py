"""Where metrics go beside the run folder: TensorBoard, Weights & Biases, trackio."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from typing import Any

from steelyard._extras import cure
from steelyard.experiment.config import Config
from steelyard.experiment.run_dir import RunFolder

_LINE = ("step", "time")


class Sinks:
    """The sinks of a run, all written at once.

    Args:
        config: which there are.
        run: where they keep their files.
        start: the step the run goes on from; what was written after it is purged or resumed.

    Attributes:
        any: whether there is one.

    Raises:
        MissingExtraError: one is not installed.
    """

    def __init__(self, config: Config, run: RunFolder, start: int) -> None:
        self._sinks: list[Any] = []
        wanted = config.sinks
        if wanted.tensorboard:
            self._sinks.append(_TensorBoard(run, start))
        if wanted.wandb is not None:
            options = {
                "mode": wanted.wandb.mode,
                "dir": str(run.path),
                "id": hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:16],
                "resume": "allow",
            }
            self._sinks.append(_Session("wandb", wanted.wandb.project, config, run, options))
        if wanted.trackio is not None:
            options = {"resume": "allow"}
            self._sinks.append(_Session("trackio", wanted.trackio.project, config, run, options))
        self.any = bool(self._sinks)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Pass the numbers of a step on; texts, such as why a term was skipped, stay behind."""
        numbers = {
            key: value
            for key, value in metrics.items()
            if key not in _LINE and isinstance(value, int | float)
        }
        for sink in self._sinks:
            sink.write(step, numbers)

    def close(self) -> None:
        """Finish what is under way."""
        for sink in self._sinks:
            sink.close()


class _TensorBoard:
    def __init__(self, run: RunFolder, start: int) -> None:
        module = _load("tensorboardX", "the tensorboard sink")
        folder = str(run.path / "tensorboard")
        self._writer = module.SummaryWriter(folder, purge_step=start, write_to_disk=True)

    def write(self, step: int, numbers: Mapping[str, Any]) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Session:
    """Weights & Biases, and trackio, which has its verbs."""

    def __init__(
        self, module: str, project: str, config: Config, run: RunFolder, options: dict[str, Any]
    ) -> None:
        self._module = _load(module, f"the {module} sink")
        self._run = self._module.init(
            project=project, name=run.path.name, config=config.model_dump(mode="json"), **options
        )

    def write(self, step: int, numbers: Mapping[str, Any]) -> None:
        self._module.log(dict(numbers), step=step)

    def close(self) -> None:
        self._module.finish()


def _load(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise cure(what, error) from error
