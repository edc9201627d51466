"""Allowlist of uploaded losses: functions, methods and attributes by their names.

No entry reads or writes files, executes code or changes a tensor in place. Some entries can make
a tensor larger than their inputs (broadcasting, `expand`, `arange`); the interpreter checks the
size of every result before it computes it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import _get_qualified_name as qualified_name

# Both functions of torch and methods of tensors.
_BOTH = """
    abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square sigmoid logit tanh sin cos tan atan
    erf neg negative positive reciprocal relu sign floor ceil round trunc frac clamp clip clamp_min
    clamp_max minimum maximum fmin fmax where lerp add sub subtract mul multiply div divide
    true_divide floor_divide remainder fmod pow float_power atan2 hypot xlogy logaddexp logaddexp2
    eq ne lt le gt ge logical_and logical_or logical_not logical_xor isfinite isinf isnan nan_to_num
    isclose sum nansum mean nanmean prod amax amin max min argmax argmin std var norm logsumexp
    softmax log_softmax cumsum cumprod cummax cummin logcumsumexp diff all any count_nonzero median
    quantile sort argsort topk flip roll gather take_along_dim index_select masked_fill dot inner mv
    mm bmm matmul outer reshape flatten unflatten squeeze unsqueeze transpose t permute movedim
    narrow select chunk split unbind tril triu diagonal clone detach numel broadcast_to
"""
_FUNCTIONS = "arange cat stack concat zeros_like ones_like full_like dist cosine_similarity"
_METHODS = """
    view view_as expand expand_as size dim ndimension contiguous type_as float double long int bool
    half bfloat16 to masked_select new_zeros new_ones
"""
_NN_FUNCTIONS = """
    softplus logsigmoid gelu silu elu leaky_relu hardtanh softmin huber_loss smooth_l1_loss mse_loss
    l1_loss kl_div binary_cross_entropy_with_logits cosine_similarity normalize softmax log_softmax
    relu sigmoid tanh pad
"""
_OPERATORS = """
    add sub mul truediv floordiv mod pow neg pos abs eq ne lt le gt ge and_ or_ xor invert inv not_
    getitem matmul
"""
_MATH = "sqrt log log2 log10 log1p exp expm1 floor ceil fabs tanh isfinite isnan isinf"


def _by_name(module: Any, names: str) -> dict[str, Callable[..., Any]]:
    """Functions of a module, by the names with which the SDK serializes them."""
    functions = [getattr(module, name) for name in names.split()]
    return {qualified_name(fn).replace("_operator.", "operator."): fn for fn in functions}


FUNCTIONS = {
    **_by_name(torch, _BOTH + _FUNCTIONS),
    **_by_name(torch.nn.functional, _NN_FUNCTIONS),
    **_by_name(operator, _OPERATORS),
    **_by_name(math, _MATH),
}
METHODS = frozenset((_BOTH + _METHODS).split())
ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "T", "mT"})
# Fields of the named tuples that sort, max, min, topk, median and the like return.
RESULT_FIELDS = frozenset({"values", "indices"})
DTYPES = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "int32", "int64", "bool")
}
