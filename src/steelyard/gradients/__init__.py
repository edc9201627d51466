"""What each term pulls: its gradient with respect to the log-probs, norms and cosines.

`layout` and `leaf` turn the log-probs into one flat vector; `inputs` reads the fields of a
datum; `evaluation` asks a term for its value and differentiates it once; `numerical` and
`score` are the estimators for terms that autograd cannot see through; `gram` is the algebra
over several terms, and `beyond` the same for what a term may have asked for beyond log-probs;
`joint` is what terms say that can be computed together.
"""

from steelyard.gradients.beyond import (
    Gradients,
    Nest,
    PullBeyond,
    combine_beyond,
    leaves_of,
    mapped,
    tensors_in,
)
from steelyard.gradients.evaluation import (
    Evaluation,
    Method,
    Question,
    Trial,
    aevaluate,
    aslopes,
    check_gradient,
    evaluate,
    evaluate_coroutine,
    slopes,
    slopes_coroutine,
)
from steelyard.gradients.gram import Pull, combine
from steelyard.gradients.inputs import as_tensor, loss_fn_input
from steelyard.gradients.joint import Fusable, Joint
from steelyard.gradients.layout import Layout, LogProbs, flatten
from steelyard.gradients.leaf import Leaf
from steelyard.gradients.numerical import check_count

__all__ = [
    "Evaluation",
    "Fusable",
    "Gradients",
    "Joint",
    "Layout",
    "Leaf",
    "LogProbs",
    "Method",
    "Nest",
    "Pull",
    "PullBeyond",
    "Question",
    "Trial",
    "aevaluate",
    "as_tensor",
    "aslopes",
    "check_count",
    "check_gradient",
    "combine",
    "combine_beyond",
    "evaluate",
    "evaluate_coroutine",
    "flatten",
    "leaves_of",
    "loss_fn_input",
    "mapped",
    "slopes",
    "slopes_coroutine",
    "tensors_in",
]
