"""Runs on a Ray cluster: each is an actor, whose run folder is copied here while it trains.

- Before: `cluster` connects to Ray; `package` collects the modules and data that nodes need.
- On this machine: `remote_run` starts the actor of a run, writes the files that arrive, and starts
  it again if its node dies; `together` trains several runs at once.
- On a node: `node_run` trains, and sends what changes in the run folder.
- `folder_changes` finds and applies changes of a folder, on both sides.
"""

from steelyard.experiment.on_ray.cluster import RayCluster
from steelyard.experiment.on_ray.remote_run import RayRuns, open_runs
from steelyard.experiment.on_ray.together import run_together

__all__ = ["RayCluster", "RayRuns", "open_runs", "run_together"]
