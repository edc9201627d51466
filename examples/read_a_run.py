"""Read a run folder with pandas: `metrics.jsonl` has one line per step.

The example first trains a tiny model for a few steps to create the folder. Needs `steelyard[cli]`
and pandas.
"""

import json
import tempfile
from pathlib import Path

import pandas as pd

from steelyard.experiment import read_config, train


def make_a_run(folder: Path) -> Path:
    lines = [{"prompt": f"{n} plus one is", "completion": f" {n + 1}"} for n in range(16)]
    (folder / "train.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    config = {
        "model": {"base_model": "tiny-random", "rank": 8},
        "data": {"path": "train.jsonl", "held_out": 0.25},
        "train": {
            "steps": 21,
            "learning_rate": 0.003,
            "evaluate_every": 10,
            "grad_space": "parameters",  # the entropy of fixed data is not one of their log-probs
        },
        "loss": {"use": "cross_entropy"},
        "regularizers": [
            {"use": "kl_to_reference", "name": "kl", "weight": {"warmup": [0.2, 10]}},
            {"use": "entropy", "weight": 0.01, "options": {"mode": "bonus"}},
        ],
    }
    train(read_config(config, folder=folder), folder / "run")
    return folder / "run"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = make_a_run(Path(folder))
        steps = pd.read_json(run / "metrics.jsonl", lines=True).set_index("step")
    added = steps.filter(regex=r"^regularizers/.*/contribution$")
    added.columns = pd.Index([name.split("/")[1] for name in added.columns])
    table = pd.concat([steps["base_loss/value"].rename("base"), added], axis=1)
    print(table.iloc[::4].round(3).to_string())
    held_out = steps["held_out/loss"].dropna()
    print(f"\nheld-out loss: {held_out.iloc[0]:.2f} before, {held_out.iloc[-1]:.2f} after")
    opposes = steps.filter(regex="^cosines/base/").lt(-0.3).mean()
    print("share of steps in which a term opposes the base loss:")
    print(opposes.rename(lambda name: name.rsplit("/", 1)[1]).round(2).to_string())


if __name__ == "__main__":
    main()
