"""The numbers of a composite on their way to `log_dict`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from torch import distributed as dist

from steelyard.errors import SpecError
from steelyard.integrations.lightning.lightning_import import LightningModule
from steelyard.integrations.torch import CompositeLoss

_OPTIONS = inspect.signature(LightningModule.log_dict).parameters.keys() - {"self", "dictionary"}


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for `log_dict`; `sync_dist` unless they say otherwise.

    Raises:
        SpecError: `log_dict` does not know one.
    """
    for name in settings:
        if name not in _OPTIONS:
            raise SpecError(
                f"the settings of the logs must be arguments of log_dict, got {name!r}; "
                f"there are: {', '.join(sorted(_OPTIONS))}."
            )
    return {"sync_dist": True, **settings}


def log(module: LightningModule, composite: CompositeLoss, settings: Mapping[str, Any]) -> None:
    """Hand every number to `log_dict`, under the stage's name.

    With `sync_dist` each is averaged over the ranks that have it: a term may have been skipped on
    one of them, where `log_dict` alone would wait forever for a key that does not come.
    """
    output = composite.output
    idle = (*output.not_run, *output.skipped)
    skippable = [str(spec.name) for spec in composite.specs if spec.on_error == "skip"]
    # Lightning repeats what a key was last: a term that did not run added nothing, and one that
    # was not skipped says so.
    metrics = {
        **output.metrics,
        **{f"regularizers/{name}/contribution": 0.0 for name in idle},
        **{f"skipped/{name}": float(name in output.skipped) for name in skippable},
    }
    training = module.trainer.training
    sync = settings["sync_dist"]
    if sync and dist.is_available() and dist.is_initialized():
        averages = _averages(metrics)
        # The mean of an epoch is left to Lightning, which knows the sizes of the batches.
        sync = settings.get("on_epoch") or not training
        metrics = averages | metrics if sync else averages
    stage = "train" if training else "test" if module.trainer.testing else "val"
    named = {f"{stage}/{name}": value for name, value in metrics.items()}
    module.log_dict(named, **{**settings, "sync_dist": bool(sync)})


def _averages(metrics: dict[str, float]) -> dict[str, float]:
    ranks: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, metrics)
    names = dict.fromkeys(name for each in ranks for name in each)  # in one order everywhere
    return {name: fmean(each[name] for each in ranks if name in each) for name in names}
