"""Time of a step of TRL's `GRPOTrainer` with terms, against the plain step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from datasets import Dataset
from torch import Tensor
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from benchmarks.measure import Timing, against, in_turn, show
from steelyard import RegularizerSpec
from steelyard.engine import tiny
from steelyard.integrations import term
from steelyard.integrations.huggingface import RegularizerMixin
from steelyard.penalties import from_logits

SEQUENCES, PROMPT, COMPLETION, WIDTH, LAYERS = 8, 16, 32, 128, 2
STEPS = {512: 40, 32_000: 10}  # by vocabulary


class RegularizedGRPOTrainer(RegularizerMixin, GRPOTrainer):
    """GRPO with terms."""


def surprise(completion_logprobs: Tensor, completion_mask: Tensor) -> Tensor:
    return completion_logprobs.square().sum() / completion_mask.sum()


def spread(completion_entropy: Tensor, completion_mask: Tensor) -> Tensor:
    return completion_entropy.sum() / completion_mask.sum()


def decay(parameters: Mapping[str, Tensor]) -> Tensor:
    return parameters["model.norm.weight"].square().sum()


def z(completion_logits: Tensor) -> Tensor:
    return completion_logits.logsumexp(-1).square().mean()


TERMS: dict[str, list[RegularizerSpec]] = {
    "completion_logprobs": [term(surprise, 0.01)],
    "completion_entropy": [term(spread, 0.01)],
    "parameters": [term(decay, 0.01)],
    "all three": [term(surprise, 0.01), term(spread, 0.01), term(decay, 0.01)],
    "completion_logits": [term(z, 0.01)],
    "projection": [term(from_logits.z_loss, 0.01, inputs="projection")],
}
AT_MOST = dict.fromkeys(("completion_logprobs", "completion_entropy", "parameters"), 1.05)


def model(vocabulary: int) -> Any:
    """Build a Llama of two layers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=256,
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def stepper(
    folder: str, vocabulary: int, terms: Sequence[RegularizerSpec] | None, **changed: Any
) -> Callable[[], None]:
    """Make a training step of a trainer, without terms if they are None; completions are reused.

    `changed` are arguments of its config.
    """
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    settings: dict[str, Any] = {
        "model": model(vocabulary),
        "reward_funcs": lambda completions, **_: [float(len(text)) for text in completions],
        "args": GRPOConfig(
            folder,
            per_device_train_batch_size=SEQUENCES,
            num_generations=SEQUENCES,
            num_iterations=10**6,  # generate once
            max_completion_length=COMPLETION,
            generation_kwargs={"min_new_tokens": COMPLETION},
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            **changed,
        ),
        "train_dataset": Dataset.from_dict({"prompt": ["x" * PROMPT]}),
        "processing_class": tokenizer,
    }
    trainer: Any = (
        GRPOTrainer(**settings)
        if terms is None
        else RegularizedGRPOTrainer(**settings, terms=terms)
    )
    trainer.current_gradient_accumulation_steps = 1
    optimizer = trainer.create_optimizer()
    trained = trainer.accelerator.prepare(trainer.model)
    batch = [{"prompt": "x" * PROMPT}] * SEQUENCES

    def step() -> None:
        trainer.training_step(trained, batch, None)
        optimizer.step()
        optimizer.zero_grad()
        trainer.callback_handler.on_step_end(trainer.args, trainer.state, trainer.control)

    return step


def measure(vocabulary: int, repeats: int) -> dict[str, Timing]:
    """Time the plain step and those with terms in turn."""
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "plain": stepper(folder, vocabulary, None),
            "entropy_coef": stepper(folder, vocabulary, None, entropy_coef=0.01),
        }
        ways |= {name: stepper(folder, vocabulary, terms) for name, terms in TERMS.items()}
        return in_turn(ways, repeats=repeats, warmup=3)


def main() -> None:
    """Measure and print."""
    for vocabulary, repeats in STEPS.items():
        timings = measure(vocabulary, repeats)
        show(
            f"GRPO, V = {vocabulary:,}",
            f"A step of TRL's GRPOTrainer without generation: {LAYERS} layers of {WIDTH}, "
            f"{SEQUENCES} × ({PROMPT} + {COMPLETION}) tokens",
            [
                against("plain", timings["plain"]),
                against("TRL's own entropy bonus, entropy_coef", timings["entropy_coef"]),
                *(against(f"terms over {n}", timings[n], AT_MOST.get(n)) for n in TERMS),
            ],
            repeats=str(repeats),
        )


if __name__ == "__main__":
    main()
