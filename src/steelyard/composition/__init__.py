"""Joins specs, execution and gradients into the total: `Pipeline`, `compute`, `acompute`.

One call goes this way: `pipeline` takes a snapshot of the terms and their weights, `call`
runs them (`jobs` turns those that run apart into tickets), and `join` makes the output.
"""

from steelyard.composition.functions import acompute, compute
from steelyard.composition.pipeline import Pipeline
from steelyard.composition.term import DetachedTermWarning

__all__ = ["DetachedTermWarning", "Pipeline", "acompute", "compute"]
