"""Check a config without reading data and without training."""

from __future__ import annotations

from steelyard.experiment.backend import check_model
from steelyard.experiment.build_terms import Terms, build_terms
from steelyard.experiment.config import Config
from steelyard.experiment.tuning import weight_ranges, with_weights
from steelyard.spec import RegularizerSpec


def check_config(config: Config) -> tuple[RegularizerSpec, ...]:
    """Check the base model's name and build the terms; return the regularizers.

    A weight that is a range to tune is set to the low end of the range.

    Raises:
        ConfigError: the base model is unknown, or a term or a reward is invalid.
    """
    return check_terms(config).specs


def check_terms(config: Config) -> Terms:
    """Check a config as `check_config` does; return base loss, regularizers and rewards."""
    check_model(config.model)
    low = {name: span["tune"][0] for name, span in weight_ranges(config).items()}
    return build_terms(with_weights(config, low))
