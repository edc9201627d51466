"""The names of the library's own regularizers, found without loading them."""

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
    "squared_log_ratio": "SquaredLogRatio",
    "topological_consistency": "TopologicalConsistency",
    "whole_vocabulary": "WholeVocabulary",
}
BUILT_IN = {name: f"steelyard.regularizers:{cls}" for name, cls in _CLASSES.items()}
