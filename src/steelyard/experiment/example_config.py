"""Example config file, with every table that most runs need."""

from __future__ import annotations

_EXAMPLE = """\
[model]
backend = "local"              # "local" | "tinker" (its key is in $TINKER_API_KEY)
base_model = "smollm2-135m"
rank = 16

[data]
path = "train.jsonl"           # {"prompt", "completion"}, {"messages"} or {"chosen", "rejected"}
max_length = 128
held_out = 0.1                 # a fraction, or a file

[train]
steps = 20
batch_size = 4
learning_rate = 1e-4           # or a schedule: { cosine = [1e-4, 1e-5, 20] }
seed = 0
save_every = 10
sample_prompts = ["The capital of France is"]

[loss]
use = "cross_entropy"          # "dpo", a registered name, or "package.module:attr"
options = { reduction = "sum" }

[[regularizers]]
use = "kl_to_reference"
name = "kl"
weight = { warmup = [0.1, 10] } # a number, a schedule, or { tune = [1e-4, 1.0], log = true }

[[regularizers]]
use = "entropy"
weight = 0.01
options = { mode = "bonus" }

[sinks]
tensorboard = false
"""


def example_config() -> str:
    """Text of an example config file, as `steelyard config example` prints it."""
    return _EXAMPLE
