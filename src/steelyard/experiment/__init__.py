"""Experiments: train from a config into a run folder; ablate terms; tune their weights.

`config/` is what a run is told to do, `data/` the lines that it reads. `training/` makes its steps
with the model of `model/`, on these lines or on the answers of `rollouts/` that `rewards/` score;
`run/` writes its folder. `compare/` has ablations and searches, `page/` shows runs, live or in a
file, `demo/` is an example.
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.experiment.compare.ablation import ablate
    from steelyard.experiment.compare.ray_cluster import RayCluster
    from steelyard.experiment.compare.tuning import tune
    from steelyard.experiment.config.reading import read_config
    from steelyard.experiment.config.schema import Config
    from steelyard.experiment.model.trained_model import export_run, open_trained_model
    from steelyard.experiment.run.changes import continue_run, pause_run, request_settings
    from steelyard.experiment.run.folder import RunFolder
    from steelyard.experiment.run.log import Watcher
    from steelyard.experiment.training.evaluations import Evaluation
    from steelyard.experiment.training.loop import resume, train
except ModuleNotFoundError as error:
    raise _cure("steelyard.experiment", error, extra="cli") from error

__all__ = [
    "Config",
    "Evaluation",
    "RayCluster",
    "RunFolder",
    "Watcher",
    "ablate",
    "continue_run",
    "export_run",
    "open_trained_model",
    "pause_run",
    "read_config",
    "request_settings",
    "resume",
    "train",
    "tune",
]
