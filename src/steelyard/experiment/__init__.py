"""Experiments: train from a config into a run folder; ablate terms; tune their weights.

The modules, in the order in which a run uses them:

- Config: `config_io` reads a file into a `Config` (`config`, with the tables of `config_train` and
  `config_rollouts` and the types of `config_types`); `config_weights` checks weights and
  schedules, `config_secrets` finds secrets in the environment and in files, `config_errors`
  formats validation errors; `config_check` checks without training.
- Terms and model: `build_terms` builds the base loss and the regularizers, `rewards` the rewards
  (`build_parts` has what both need), `backend` opens the training client.
- Data: a `DataSource` (`data_source`) yields the data of each step. Lines of a file: `data_files`
  reads JSON Lines, `encoding` tokenizes them, `reference_logprobs` adds the base model's log-probs;
  `dataset` combines these, and `batching` orders, splits and batches them. Answers that the model
  samples: `rollouts`.
- Training: `training_loop` begins and ends a run, `training_steps` makes its steps: `accumulation`
  weighs the calls of a step, `learning_rate` has its rate, `held_out` evaluates on held-out data,
  `evaluations` calls the user's functions, `driver_records` finds the data that drive each term,
  `run_goals` finds the best step and when to stop. `run_dir`, `checkpointing` and `sinks` write
  files, checkpoints and metrics; `secrets` redacts secrets in all of them.
- While a run goes on: `run_changes` takes requests to change or pause it, `run_settings` has what
  can be changed, `run_state` says whether a process trains it. A `Watcher` (`watcher`) is told of
  each step.
- Use: `trained_model` opens the model of a run at a checkpoint and samples from it, `chat` keeps a
  conversation with it, `export` writes it for other libraries.
- Several runs: `ablation` (with `parallel_runs`) and `tuning`, which `search` reads back; `on_ray`
  trains their runs on a Ray cluster; `train_or_resume` trains or resumes one, `seeds` repeats a
  config, `paired_differences` compares values over seeds, `overall_progress` counts the steps of
  all runs.
- Display: `step_metrics` reads a line of metrics, `flags` marks conspicuous terms; the terminal
  display and `report` use both. `watch` is the live page.
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.experiment.ablation import Ablation, ablate
    from steelyard.experiment.chat import Chat
    from steelyard.experiment.config import Config
    from steelyard.experiment.config_check import check_config, check_terms
    from steelyard.experiment.config_io import read_config
    from steelyard.experiment.evaluations import Evaluation
    from steelyard.experiment.example_config import example_config
    from steelyard.experiment.export import export_run
    from steelyard.experiment.flags import flags_of
    from steelyard.experiment.on_ray import RayCluster
    from steelyard.experiment.paired_differences import Comparison, Estimate, conclusions
    from steelyard.experiment.run_changes import (
        continue_run,
        describe_settings,
        pause_run,
        request_settings,
    )
    from steelyard.experiment.run_dir import RunFolder
    from steelyard.experiment.search import Search, TrialResult
    from steelyard.experiment.secrets import redact
    from steelyard.experiment.step_metrics import (
        Gradient,
        gradients,
        reward_names,
        short_reason,
        skipped_terms,
        space_label,
        terms_that_ran,
    )
    from steelyard.experiment.trained_model import (
        TrainedModel,
        open_trained_model,
        read_open_prompts,
    )
    from steelyard.experiment.training_loop import Outcome, resume, train
    from steelyard.experiment.tuning import Tuned, tune
    from steelyard.experiment.watcher import Watcher
except ModuleNotFoundError as error:
    raise _cure("steelyard.experiment", error, extra="cli") from error

__all__ = [
    "Ablation",
    "Chat",
    "Comparison",
    "Config",
    "Estimate",
    "Evaluation",
    "Gradient",
    "Outcome",
    "RayCluster",
    "RunFolder",
    "Search",
    "TrainedModel",
    "TrialResult",
    "Tuned",
    "Watcher",
    "ablate",
    "check_config",
    "check_terms",
    "conclusions",
    "continue_run",
    "describe_settings",
    "example_config",
    "export_run",
    "flags_of",
    "gradients",
    "open_trained_model",
    "pause_run",
    "read_config",
    "read_open_prompts",
    "redact",
    "request_settings",
    "resume",
    "reward_names",
    "short_reason",
    "skipped_terms",
    "space_label",
    "terms_that_ran",
    "train",
    "tune",
]
