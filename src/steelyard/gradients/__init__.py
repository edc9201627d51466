"""Gradients of terms: computing the gradient of one, and algebra over those of several.

`layout` flattens the log-probs into one vector, `nested_tensors` maps over nested containers, and
`datum_fields` reads the fields of a datum. `parse_result` validates what a term returns.
`isolated` is a call of a term on detached copies of its inputs; `numerical` and `score` estimate
the gradient of terms that autograd cannot differentiate. `algebra` has weighted sums, the Gram
matrix, norms and cosines; `sharded` and `fully_sharded` the same for tensors that are spread over
processes. `fusable` is the protocol of terms that can be computed together.
"""

from steelyard._renamed import leave_aliases as _leave_aliases
from steelyard.gradients.algebra import (
    Row,
    check_gradient,
    differentiate,
    gram,
    norm_of,
    norms_and_cosines,
    split_gradient,
    weighted_sum,
)
from steelyard.gradients.datum_fields import (
    as_tensor,
    counted_tokens,
    loss_fn_input,
    token_mask,
    were_sampled,
)
from steelyard.gradients.fully_sharded import (
    FullyShardedParameters,
    is_fully_sharded,
    named_shards,
)
from steelyard.gradients.fusable import Fusable, Joint
from steelyard.gradients.isolated import IsolatedCall, Method, ValueAndGradient
from steelyard.gradients.layout import Layout, LogProbs, SplitOnRead, flatten, leaf_over
from steelyard.gradients.nested_tensors import (
    Nest,
    device_of,
    fields_of,
    filled,
    leaves_of,
    mapped,
    tensors_in,
)
from steelyard.gradients.numerical import check_count
from steelyard.gradients.parse_result import (
    as_scalar,
    awaited,
    check_finite,
    is_unmeasured,
    split_metrics,
)
from steelyard.gradients.score import read_costs, score_gradient
from steelyard.gradients.sharded import (
    is_sharded,
    local_part,
    part_like,
    sharded_dimensions,
    sharded_gram,
    sharded_like,
    sum_over,
    whole,
)

__all__ = [
    "FullyShardedParameters",
    "Fusable",
    "IsolatedCall",
    "Joint",
    "Layout",
    "LogProbs",
    "Method",
    "Nest",
    "Row",
    "SplitOnRead",
    "ValueAndGradient",
    "as_scalar",
    "as_tensor",
    "awaited",
    "check_count",
    "check_finite",
    "check_gradient",
    "counted_tokens",
    "device_of",
    "differentiate",
    "fields_of",
    "filled",
    "flatten",
    "gram",
    "is_fully_sharded",
    "is_sharded",
    "is_unmeasured",
    "leaf_over",
    "leaves_of",
    "local_part",
    "loss_fn_input",
    "mapped",
    "named_shards",
    "norm_of",
    "norms_and_cosines",
    "part_like",
    "read_costs",
    "score_gradient",
    "sharded_dimensions",
    "sharded_gram",
    "sharded_like",
    "split_gradient",
    "split_metrics",
    "sum_over",
    "tensors_in",
    "token_mask",
    "weighted_sum",
    "were_sampled",
    "whole",
]

# Names of 0.1.0. `evaluate(question)` still works, as `IsolatedCall.run(question)`.
_leave_aliases(
    __name__,
    {
        "Evaluation": "steelyard.gradients:ValueAndGradient",
        "Gradients": "steelyard.gradients:Row",
        "Leaf": "steelyard.gradients:leaf_over",
        "Pull": "steelyard.composition.aggregate:Combined",
        "PullBeyond": "steelyard.composition.aggregate:Combined",
        "Question": "steelyard.gradients:IsolatedCall",
        "Trial": "steelyard.gradients:IsolatedCall",
        "aevaluate": "steelyard.gradients:IsolatedCall.arun",
        "aslopes": "steelyard.gradients:IsolatedCall.aslopes",
        "combine": "steelyard.composition.aggregate:combine",
        "combine_beyond": "steelyard.composition.aggregate:combine",
        "evaluate": "steelyard.gradients:IsolatedCall.run",
        "evaluate_coroutine": "steelyard.gradients:IsolatedCall.run",
        "slopes": "steelyard.gradients:IsolatedCall.slopes",
        "slopes_coroutine": "steelyard.gradients:IsolatedCall.slopes",
    },
)
