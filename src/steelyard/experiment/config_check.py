"""Checks a config as far as that needs no data and no training."""

from __future__ import annotations

from steelyard.experiment.backend import check_model
from steelyard.experiment.build_terms import build_terms
from steelyard.experiment.config import Config
from steelyard.experiment.tuning import open_weights, with_weights
from steelyard.spec import RegularizerSpec


def check_config(config: Config) -> tuple[RegularizerSpec, ...]:
    """Check the base model's name and build the terms; return the regularizers.

    A weight that is left open for a search stands at the low end of its range.

    Raises:
        ConfigError: the base model is unknown, or a term breaks a rule.
    """
    check_model(config.model)
    low = {name: span["tune"][0] for name, span in open_weights(config).items()}
    return build_terms(with_weights(config, low)).specs
