"""Experiments: a config becomes a run, a run a folder; ablations and searches are made of runs.

A run goes this way: `reading` makes a `config` of a file (`weights` and `complaints` are its
rules and its voice); `terms` builds the loss and the regularizers; `backend` opens a training
client; `records` and `encoding` turn lines into data, `batches` puts them in order, `reference`
adds what the base model says of them (`material` is all of that); `loop` makes the steps, with
`held_out` beside it; `folder`, `saving` and `sinks` keep what comes of it. `ablation` (with
`side_by_side`) and `tuning` make many runs; `checking` makes none. `step_metrics` reads a line of
metrics, and `flags` says what in it asks for a second look; the display and `report` use both.
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.experiment.ablation import Ablation, ablate
    from steelyard.experiment.config import Config
    from steelyard.experiment.config_check import check_config
    from steelyard.experiment.config_io import read_config
    from steelyard.experiment.example_config import example_config
    from steelyard.experiment.flags import flags_of
    from steelyard.experiment.run_dir import RunFolder
    from steelyard.experiment.secrets import redact
    from steelyard.experiment.step_metrics import (
        gradient_shares,
        short_reason,
        skipped_terms,
        terms_that_ran,
    )
    from steelyard.experiment.training_loop import Outcome, Watcher, resume, train
    from steelyard.experiment.tuning import Tuned, tune
except ModuleNotFoundError as error:
    raise _cure("steelyard.experiment", error, extra="cli") from error

__all__ = [
    "Ablation",
    "Config",
    "Outcome",
    "RunFolder",
    "Tuned",
    "Watcher",
    "ablate",
    "check_config",
    "example_config",
    "flags_of",
    "gradient_shares",
    "read_config",
    "redact",
    "resume",
    "short_reason",
    "skipped_terms",
    "terms_that_ran",
    "train",
    "tune",
]
