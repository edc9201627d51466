"""Ready-made regularizers over `(data, logprobs)`.

Each docstring states the formula and whether the gradient is exact or an estimate. All take
keyword options, checked when they are built, and can be named in config files:
`{"fn": "kl_to_reference", "weight": 0.1, "options": {"estimator": "k3"}}`. Importing this
package loads neither torch nor an extra; a module is loaded when one of its classes is first used.

For a batch in which no token counts `compute` returns None, and the term is left out. It is typed
`... | Any`, as in typeshed, since most callers know that there are such tokens: with `| None` each
of them would have to check.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from steelyard._extras import cure as _cure

if TYPE_CHECKING:
    from steelyard.regularizers.entropy import ConfidencePenalty, Entropy
    from steelyard.regularizers.external_validation import ExternalValidation
    from steelyard.regularizers.fairness import DemographicParity, EqualizedOdds
    from steelyard.regularizers.importance import (
        MaskedImportanceSampling,
        TruncatedImportanceSampling,
    )
    from steelyard.regularizers.length import OverlongPenalty, RelativeLength
    from steelyard.regularizers.likelihood import NLL
    from steelyard.regularizers.logic import LogicalConsistency
    from steelyard.regularizers.preference import DPO, ChosenNLL, SquaredLogRatio
    from steelyard.regularizers.reference import Consistency, JSToReference, KLToReference
    from steelyard.regularizers.sparsity import L1, L2, ElasticNet
    from steelyard.regularizers.stateful import Adaptive, EMADrift
    from steelyard.regularizers.topology import TopologicalConsistency
    from steelyard.regularizers.vocabulary import WholeVocabulary

__all__ = [  # noqa: RUF022 - sorted as Python sorts
    "Adaptive",
    "ChosenNLL",
    "ConfidencePenalty",
    "Consistency",
    "DPO",
    "DemographicParity",
    "EMADrift",
    "ElasticNet",
    "Entropy",
    "EqualizedOdds",
    "ExternalValidation",
    "JSToReference",
    "KLToReference",
    "L1",
    "L2",
    "LogicalConsistency",
    "MaskedImportanceSampling",
    "NLL",
    "OverlongPenalty",
    "RelativeLength",
    "SquaredLogRatio",
    "TopologicalConsistency",
    "TruncatedImportanceSampling",
    "WholeVocabulary",
]

_CLASSES_OF = {
    "entropy": ("ConfidencePenalty", "Entropy"),
    "external_validation": ("ExternalValidation",),
    "fairness": ("DemographicParity", "EqualizedOdds"),
    "importance": ("MaskedImportanceSampling", "TruncatedImportanceSampling"),
    "length": ("OverlongPenalty", "RelativeLength"),
    "logic": ("LogicalConsistency",),
    "likelihood": ("NLL",),
    "preference": ("ChosenNLL", "DPO", "SquaredLogRatio"),
    "reference": ("Consistency", "JSToReference", "KLToReference"),
    "sparsity": ("ElasticNet", "L1", "L2"),
    "stateful": ("Adaptive", "EMADrift"),
    "topology": ("TopologicalConsistency",),
    "vocabulary": ("WholeVocabulary",),
}
_MODULE_OF = {name: module for module, names in _CLASSES_OF.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'steelyard.regularizers' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"steelyard.regularizers.{_MODULE_OF[name]}")
    except ModuleNotFoundError as error:
        raise _cure(f"steelyard.regularizers.{name}", error) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
