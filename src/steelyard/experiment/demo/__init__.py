"""Demo: fine-tune a small model with five kinds of terms, in a few minutes.

`config.toml` is its config, `data.jsonl` and `held_out.jsonl` are its data. `claims` and
`validator` are the checks behind two of its terms; `driver` runs the demo.
"""

from steelyard.experiment.demo.driver import Demo, run_demo

__all__ = ["Demo", "run_demo"]
