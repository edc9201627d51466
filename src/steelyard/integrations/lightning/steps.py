"""Steps of a LightningModule: the inputs that terms read from a batch, and the metrics they log."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch import distributed as dist

from steelyard._torch_internals import is_fully_sharded
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import Reads
from steelyard.errors import InputError, SpecError
from steelyard.gradients.layout import fields_of
from steelyard.spec.regularizer import RegularizerSpec

if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    try:
        import lightning.pytorch as pl
    except ModuleNotFoundError as missing:
        try:
            import pytorch_lightning as pl
        except ModuleNotFoundError:
            raise missing from None

Callback = pl.Callback
LightningModule = pl.LightningModule
Trainer = pl.Trainer


_LABELLED = {"labels", "logits"}
_IGNORED = -100  # as a label: torch's `ignore_index`, and transformers'


def batch_fields(batch: object, names: Sequence[str]) -> Mapping[str, Any]:
    """Fields of a batch, by name.

    The items of a tuple are called by `names`, or else `batch.0`, `batch.1`, …; a single tensor
    is called by the only one of `names`, or else `batch`.

    Raises:
        InputError: there are more or fewer items than names.
    """
    fields = fields_of(batch)
    if fields is not None:
        return fields
    if not isinstance(batch, tuple | list):
        batch, names = (batch,), names or ("batch",)
    names = names or getattr(batch, "_fields", [f"batch.{i}" for i in range(len(batch))])
    if len(names) != len(batch):
        raise InputError(
            f"batch must name each item of a batch, got {len(names)} names ({', '.join(names)}) "
            f"for {len(batch)} items."
        )
    return dict(zip(names, batch, strict=True))


def merge_sources(sources: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the fields of all sources; a name with two different values becomes `source.name`."""
    distinct = {(name, id(value)) for fields in sources.values() for name, value in fields.items()}
    counts = Counter(name for name, _ in distinct)
    return {
        name if counts[name] == 1 else f"{source}.{name}": value
        for source, fields in sources.items()
        for name, value in fields.items()
    }


def unlabelled_terms(
    specs: Sequence[RegularizerSpec], inputs: Mapping[str, Any], module: nn.Module
) -> frozenset[str]:
    """Names of the terms that have nothing to measure, since all labels of a batch are -100.

    They are those that read `labels` or `logits`: a mean over the tokens that count would be 0/0.

    Args:
        specs: of all terms.
        inputs: of the terms.
        module: that is trained. Several processes gather its sharded parameters together: then
            none of them leaves out a term.
    """
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.numel():
        return frozenset()
    reading = [s for s in specs if isinstance(s.fn, Reads) and _LABELLED & {*s.fn.required}]
    if not reading or (labels != _IGNORED).any():
        return frozenset()
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if several and is_fully_sharded(module):
        return frozenset()
    return frozenset(s.name for s in reading if not (several and s.ranks == "one"))


def follow_trainer(composite: CompositeLoss, trainer: Trainer, module: LightningModule) -> None:
    """Set the step of a composite to that of a trainer, and what its run folder declares."""
    composite.step = trainer.global_step
    composite.set_wrapper(trainer.strategy.model or module)
    if composite.run_config:
        return
    steps = trainer.estimated_stepping_batches
    clips_norm = trainer.gradient_clip_algorithm in (None, "norm")
    rates = [float(group["lr"]) for one in trainer.optimizers[:1] for group in one.param_groups]
    train = {
        # Lightning has -1 for an iterable dataset without max_steps.
        "steps": int(steps) if math.isfinite(steps) and steps >= 0 else None,
        "gradient_accumulation_steps": trainer.accumulate_grad_batches,
        "learning_rate": rates[0] if rates else None,  # a module may have no optimizer
        "grad_clip_norm": float(trainer.gradient_clip_val or 0.0) if clips_norm else None,
        "processes": trainer.world_size,
    }
    composite.run_config = {"trainer": type(module).__name__, "train": train}


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
