"""Checks of a run before its model is loaded: sinks, services that terms call, and data."""

from __future__ import annotations

from steelyard.experiment.backend import check_service
from steelyard.experiment.build_terms import Terms
from steelyard.experiment.config import Config
from steelyard.experiment.dataset import DataFiles, read_data_files
from steelyard.experiment.encoding import Encoder
from steelyard.experiment.rollouts import check_prompts
from steelyard.experiment.sinks import check_installed


def check_start(config: Config, terms: Terms) -> DataFiles | None:
    """Check what a run needs beside its model; return its data, if they could be encoded.

    The tokenizer of a Tinker service is known when it is connected: its data are read then.

    Raises:
        MissingExtraError: the package of a sink is not installed.
        DataError: a line is malformed, or lacks a field that a term or a reward reads.
        ConfigError: a term reads pairs, and the run trains on answers to prompts.
        TermError: a service that a term or a reward calls is not there, or a reward cannot be
            loaded.
        ModelError: the tokenizer cannot be loaded.
        RunError: the Tinker service is not there, or rejects the API key.
    """
    check_installed(config.sinks)
    check_service(config.model)
    called = [fn for _, fn in terms.required()] + [reward.fn for reward in terms.rewards]
    for fn in called:
        if hasattr(fn, "check_ready"):
            fn.check_ready()
    for reward in terms.rewards:
        reward.load()
    if config.model.backend != "local":
        return None
    from steelyard.engine import find_model  # noqa: PLC0415 - takes seconds

    tokenizer = find_model(config.model.base_model).tokenizer()
    if config.rollouts is not None:
        check_prompts(config.rollouts, Encoder(tokenizer, 0, config.rollouts.chat), terms)
        return None
    return read_data_files(config, terms, tokenizer)
