"""Log the components of a composite loss with Lightning's `log_dict`."""

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


def check_log_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check the arguments for `log_dict`, and switch `sync_dist` on unless they have it.

    Raises:
        SpecError: `log_dict` has no such argument.
    """
    for name in settings:
        if name not in _OPTIONS:
            raise SpecError(
                f"the settings of the logs must be arguments of log_dict, got {name!r}; "
                f"there are: {', '.join(sorted(_OPTIONS))}."
            )
    return {"sync_dist": True, **settings}


def log_components(
    module: LightningModule, composite: CompositeLoss, settings: Mapping[str, Any]
) -> None:
    """Log every metric of the last output, as `train/…`, `val/…` or `test/…`.

    With `sync_dist` each metric is averaged over the ranks that have it. A term may have been
    skipped on one of them; `log_dict` alone would deadlock there, since it reduces key by key and
    waits for the rank that has no such key.
    """
    output = composite.output
    absent = (*output.not_run, *output.skipped)
    skippable = [str(spec.name) for spec in composite.specs if spec.on_error == "skip"]
    # Lightning shows the last value of a key that is not logged again, so a term that did not run
    # is logged with a contribution of 0, and one that was not skipped with a flag of 0.
    metrics = {
        **output.metrics,
        **{f"regularizers/{name}/contribution": 0.0 for name in absent},
        **{f"skipped/{name}": float(name in output.skipped) for name in skippable},
    }
    training = module.trainer.training
    sync = settings["sync_dist"]
    if sync and dist.is_available() and dist.is_initialized():
        averages = _average_over_ranks(metrics)
        # Lightning computes the mean of an epoch itself, weighted by the sizes of the batches:
        # it gets this rank's own values, and the averages for keys that this rank lacks, so that
        # every rank has the same keys.
        sync = settings.get("on_epoch") or not training
        metrics = averages | metrics if sync else averages
    stage = "train" if training else "test" if module.trainer.testing else "val"
    named = {f"{stage}/{name}": value for name, value in metrics.items()}
    module.log_dict(named, **{**settings, "sync_dist": bool(sync)})


def _average_over_ranks(metrics: dict[str, float]) -> dict[str, float]:
    ranks: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, metrics)
    # A dict keeps the order of insertion: every rank logs the keys in the same order.
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: fmean(rank[name] for rank in ranks if name in rank) for name in names}
