"""Name the fields of a batch, and of what `training_step` returns, as inputs of terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist

from steelyard.composition import Reads
from steelyard.errors import InputError
from steelyard.gradients import fields_of, is_fully_sharded
from steelyard.spec import RegularizerSpec

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
