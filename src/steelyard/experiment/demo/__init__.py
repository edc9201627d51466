"""The demo: a real model, a small data set and five terms of five kinds, in a few minutes.

`config.toml` is the experiment, `data.jsonl` and `held_out.jsonl` its data; `claims` and
`validator` are what two of its terms ask; `driver` puts them together.
"""

from steelyard.experiment.demo.driver import Demo, run_demo

__all__ = ["Demo", "run_demo"]
