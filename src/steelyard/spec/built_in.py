"""Names of the built-in regularizers and penalties, without importing them."""

from __future__ import annotations

_CLASSES = {
    "adaptive": "Adaptive",
    "chosen_nll": "ChosenNLL",
    "confidence_penalty": "ConfidencePenalty",
    "consistency": "Consistency",
    "demographic_parity": "DemographicParity",
    "dpo": "DPO",
    "elastic_net": "ElasticNet",
    "ema_drift": "EMADrift",
    "entropy": "Entropy",
    "equalized_odds": "EqualizedOdds",
    "external_validation": "ExternalValidation",
    "js_to_reference": "JSToReference",
    "kl_to_reference": "KLToReference",
    "l1": "L1",
    "l2": "L2",
    "logical_consistency": "LogicalConsistency",
    "masked_importance_sampling": "MaskedImportanceSampling",
    "overlong_penalty": "OverlongPenalty",
    "relative_length": "RelativeLength",
    "squared_log_ratio": "SquaredLogRatio",
    "topological_consistency": "TopologicalConsistency",
    "truncated_importance_sampling": "TruncatedImportanceSampling",
    "whole_vocabulary": "WholeVocabulary",
}
# The short names that penalties over arrays have.
SHORT = {"js": "js_to_reference", "kl": "kl_to_reference"}
_CLASSES |= {short: _CLASSES[name] for short, name in SHORT.items()}
BUILT_IN = {name: f"steelyard.regularizers:{cls}" for name, cls in _CLASSES.items()}

# In the order in which messages list them.
_FUNCTIONS = {
    "l1": "l1",
    "l2": "l2",
    "elastic_net": "elastic_net",
    "kl": "kl_divergence",
    "js": "js_divergence",
    "entropy": "entropy",
    "orthogonality": "orthogonality",
    "consistency": "consistency",
    "output_magnitude": "output_magnitude_penalty",
}
PENALTIES = {name: f"steelyard.penalties:{fn}" for name, fn in _FUNCTIONS.items()}
