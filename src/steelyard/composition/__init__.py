"""The one core: evaluate the terms that are due, aggregate their gradients, build the output.

`term_set` holds the terms, `evaluate` runs them (`placement` decides where, `skips` what happens
on a failure), `inputs` are their inputs, `bounds` finds the weights of terms with a bound, and
`aggregate` makes one gradient and one output of their results, with the plain sum or with one of
TorchJD's `weightings`. The core has two interfaces:
`Pipeline` on one flat vector of log-probs, and `CompositeLoss` on named tensors in the caller's
graph. `named_losses` are the losses that training clients know by name.
"""

from steelyard.composition.aggregate import AggregationWarning, Aggregator, WeightedSum
from steelyard.composition.auxiliary_losses import Deposits, aux_loss, collect_aux
from steelyard.composition.bounds import UnmetBoundWarning
from steelyard.composition.composite import (
    CompositeLoss,
    Share,
    TermLike,
    innermost_optimizer,
)
from steelyard.composition.input_lookup import gather
from steelyard.composition.input_names import Reads, itself, reads, term
from steelyard.composition.inputs import ToParameters
from steelyard.composition.named_losses import (
    TEMPERATURE,
    NamedBaseLoss,
    NamedLoss,
    find_loss,
    loss_names,
    split_temperature,
)
from steelyard.composition.per_datum import PerDatum, Reduction, Separable
from steelyard.composition.pipeline import Pipeline, acompute, compute
from steelyard.composition.ranks import mean_state
from steelyard.composition.remote_call import RemoteCall
from steelyard.composition.terms import (
    DetachedTermWarning,
    Term,
    TermResult,
    UncomparedTermWarning,
    ZeroTermWarning,
)
from steelyard.composition.weightings import AggregatorLike, GramWeighting, aggregator_of

__all__ = [  # noqa: RUF022 - sorted as Python sorts
    "AggregationWarning",
    "Aggregator",
    "AggregatorLike",
    "CompositeLoss",
    "Deposits",
    "DetachedTermWarning",
    "GramWeighting",
    "NamedBaseLoss",
    "NamedLoss",
    "PerDatum",
    "Pipeline",
    "Reads",
    "Reduction",
    "RemoteCall",
    "Separable",
    "Share",
    "TEMPERATURE",
    "Term",
    "TermLike",
    "TermResult",
    "ToParameters",
    "UncomparedTermWarning",
    "UnmetBoundWarning",
    "WeightedSum",
    "ZeroTermWarning",
    "acompute",
    "aggregator_of",
    "aux_loss",
    "collect_aux",
    "compute",
    "find_loss",
    "gather",
    "innermost_optimizer",
    "itself",
    "loss_names",
    "mean_state",
    "reads",
    "split_temperature",
    "term",
]
