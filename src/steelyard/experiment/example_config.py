"""Example config files, with every table that most runs need."""

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
use = "entropy"                # over the whole vocabulary, which backend = "local" has
weight = 0.01
options = { mode = "bonus" }

[sinks]
tensorboard = false
"""

_ON_POLICY = """\
# The model answers prompts, rewards judge the answers, and it is trained on them. Needs a file
# prompts.jsonl with lines such as {"prompt": "Name a fruit."}, or as a chat:
# {"messages": [{"role": "user", "content": "Name a fruit."}]}

[model]
backend = "local"              # "local" | "tinker" (its key is in $TINKER_API_KEY)
base_model = "smollm2-135m"
rank = 16

[rollouts]
prompts = "prompts.jsonl"      # a line may have other fields, which the rewards read
per_step = 4                   # prompts a step
group_size = 8                 # answers to each
max_tokens = 64
temperature = 1.0
advantage = "grpo"             # "rloo" | "none"
held_out = 0.1                 # a fraction of the prompts, or a file

[train]
steps = 20
learning_rate = 1e-4           # or a schedule: { cosine = [1e-4, 1e-5, 20] }
seed = 0
save_every = 10
evaluate_every = 5

[loss]
use = "importance_sampling"    # "ppo", "cispo"
options = { reduction = "mean" }

[[rewards]]
use = "length"                 # a ready-made name, or "package.module:attr"
name = "short"
weight = 1.0                   # a number, a schedule, or { tune = [0.1, 10.0], log = true }
options = { min_words = 3, max_words = 12 }

[[regularizers]]
use = "kl_to_reference"
name = "kl"
weight = 0.1                   # or a bound: { at_most = 0.1 }
"""


def example_config(*, on_policy: bool = False) -> str:
    """Text of an example config file, as `steelyard config example` prints it.

    Args:
        on_policy: train on answers that the model samples, instead of lines of a file.
    """
    return _ON_POLICY if on_policy else _EXAMPLE
