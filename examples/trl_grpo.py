"""TRL's `GRPOTrainer` with a KL term: a tiny Llama learns to write vowels, and drifts less.

Run it with `python examples/trl_grpo.py`; it needs `steelyard[engine,hf]` and `trl`, and takes
about 10 seconds for each of its two runs.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from steelyard import RegularizerSpec
from steelyard.engine import tiny
from steelyard.integrations.huggingface import RegularizerMixin
from steelyard.regularizers import KLToReference

STEPS = 20


class RegularizedGRPOTrainer(RegularizerMixin, GRPOTrainer):
    """The class that replaces `GRPOTrainer` in a training script."""


def vowels(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward: the fraction of tokens that are a vowel, in the alphabet of the tokenizer."""
    wanted = set(tiny.tokenizer()("aeiouAEIOU")["input_ids"])
    return [sum(token in wanted for token in ids) / len(ids) for ids in completion_ids]


def train(folder: Path, weight: float) -> list[dict[str, float]]:
    """Train with a weight of the KL term, and return the log of each step."""
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tiny.build(torch.float32).save_pretrained(folder / "model")
    trainer = RegularizedGRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=vowels,
        args=GRPOConfig(
            str(folder / "out"),
            # TRL computes the reference only if beta is not 0; the KL itself is the term's.
            beta=1e-9,
            max_steps=STEPS,
            per_device_train_batch_size=32,
            num_generations=16,
            max_completion_length=8,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            seed=0,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["Sing:", "A song."] * 8}),
        processing_class=tokenizer,
        terms=[RegularizerSpec(KLToReference(), weight, "kl")],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [log for log in trainer.state.log_history if "base_loss/value" in log]


def average(logs: list[dict[str, float]], key: str) -> float:
    return sum(log[key] for log in logs) / len(logs)


def main() -> None:
    drifts = []  # a term with weight 0 is measured and has no effect
    for weight in (0.0, 0.3):
        with tempfile.TemporaryDirectory() as folder:
            logs = train(Path(folder), weight)
        first, last = (average(part, "reward") for part in (logs[:3], logs[-3:]))
        drifts.append(average(logs[-3:], "regularizers/kl/value"))
        print(f"weight {weight}: reward {first:.2f} to {last:.2f}, KL {drifts[-1]:.2f}")
        print(f"the reward rose: {last > 2 * first}")
    print(f"less drift with the KL term: {drifts[1] < 0.7 * drifts[0]}")


if __name__ == "__main__":
    main()
