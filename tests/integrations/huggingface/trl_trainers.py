"""TRL's real trainers on a tiny model, and the completion of their batches, read by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from torch import distributed as dist

from steelyard.engine import tiny
from steelyard.integrations.huggingface import RegularizerMixin

from .training import FSDP, shard_on_cpu

END = 256
PROMPTS = ["The beam is", "A", "Two pounds of salt,", "Level:", "How", "Is it so?", "Weigh", "No"]
ANSWERS = [" level.", " weight slides along", " one.", " yes", " much", " so it is", " salt", ","]
OTHERS = [" not", " b", " and one of pepper", " no!", " many more of", " it", " it all", " but yes"]


def model(seed: int = 0, **changed: Any) -> Any:
    """A Llama of two layers; it ends a text after a few tokens, so that lengths differ."""
    sizes = {
        "vocab_size": 260,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }
    tokens = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": END}
    config = transformers.LlamaConfig(**(sizes | tokens | changed))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        built: Any = transformers.LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            built.lm_head.weight[END] *= 6
    return built


def mixture_of_experts(**changed: Any) -> Any:
    """A Mixtral of one layer with four experts."""
    config = transformers.MixtralConfig(
        vocab_size=260,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
        **changed,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.MixtralForCausalLM(config)  # type: ignore[no-untyped-call]


def scoring_model() -> Any:
    """The same, with one score for each sequence."""
    config = model().config
    config.num_labels = 1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForSequenceClassification(config)  # type: ignore[no-untyped-call]


def tokenizer() -> Any:
    made = tiny.tokenizer()
    made.pad_token = made.eos_token
    made.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] }}"
        "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    return made


def _settings(folder: Path, accumulation: int, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8 // accumulation,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 1,
        "logging_steps": 1,
        "learning_rate": 0.0,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "seed": 3,
        **more,
    }


def _pairs() -> Dataset:
    return Dataset.from_dict({"prompt": PROMPTS, "chosen": ANSWERS, "rejected": OTHERS})


def _messages() -> Dataset:
    return Dataset.from_dict(
        {
            "messages": [
                [{"role": "user", "content": p}, {"role": "assistant", "content": a}]
                for p, a in zip(PROMPTS, ANSWERS, strict=True)
            ]
        }
    )


def length_reward(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(text) % 3) for text in completions]


ONLINE = {"max_completion_length": 6, "num_generations": 4, "temperature": 0.7, "beta": 0.3}


@dataclass(frozen=True)
class Trained:
    """How to build a trainer.

    Attributes:
        path: the module and the class.
        data: builds its dataset.
        arguments: of its config.
        more: builds its other arguments.
        temperature: that its loss divides the logits by.
    """

    path: str
    data: Callable[[], Dataset]
    arguments: Mapping[str, Any]
    more: Callable[[], Mapping[str, Any]] = dict
    temperature: float = 1.0


def _of_prompts() -> Dataset:
    return Dataset.from_dict({"prompt": PROMPTS})


# Those with a completion.
TRAINERS = {
    "SFT": Trained(
        "trl.trainer.sft_trainer:SFTTrainer",
        lambda: Dataset.from_dict({"prompt": PROMPTS, "completion": ANSWERS}),
        {},
    ),
    "DPO": Trained(
        "trl.trainer.dpo_trainer:DPOTrainer", _pairs, {}, lambda: {"ref_model": model(1)}
    ),
    "KTO": Trained(
        "trl.trainer.kto_trainer:KTOTrainer",
        lambda: Dataset.from_dict(
            {"prompt": PROMPTS, "completion": ANSWERS, "label": [True, False] * 4}
        ),
        {},
        lambda: {"ref_model": model(1)},
    ),
    "GRPO": Trained(
        "trl.trainer.grpo_trainer:GRPOTrainer",
        _of_prompts,
        ONLINE,
        lambda: {"reward_funcs": length_reward},
        0.7,
    ),
    "RLOO": Trained(
        "trl.trainer.rloo_trainer:RLOOTrainer",
        _of_prompts,
        ONLINE,
        lambda: {"reward_funcs": length_reward},
        0.7,
    ),
    "ORPO": Trained("trl.experimental.orpo.orpo_trainer:ORPOTrainer", _pairs, {"max_length": 64}),
    "CPO": Trained("trl.experimental.cpo.cpo_trainer:CPOTrainer", _pairs, {"max_length": 64}),
    "GKD": Trained(
        "trl.experimental.gkd.gkd_trainer:GKDTrainer",
        _messages,
        {"max_length": 64, "lmbda": 0.0, "max_new_tokens": 6},
        lambda: {"teacher_model": model(1)},
    ),
    "Distillation": Trained(
        "trl.trainer.distillation_trainer:DistillationTrainer",
        _of_prompts,
        {"max_completion_length": 6, "temperature": 0.8},
        lambda: {"teacher_model": model(1)},
        0.8,
    ),
}


REWARD = Trained("trl.trainer.reward_trainer:RewardTrainer", _pairs, {})


def build(
    name: str,
    folder: Path,
    accumulation: int = 1,
    *,
    peft: bool = False,
    fsdp: bool = False,
    between: type | None = None,
    language_model: Any = None,
    **more: Any,
) -> Any:
    """Build a trainer of TRL with the mixin; `more` are arguments of its config, or the mixin's.

    Args:
        name: of the trainer.
        folder: that it writes to.
        accumulation: number of micro-batches.
        peft: train an adapter.
        fsdp: shard the model.
        between: a class between the mixin and the trainer.
        language_model: trained instead of `model()`.
        more: see above.
    """
    row = REWARD if name == "Reward" else TRAINERS[name]
    module, _, kind = row.path.partition(":")
    trainer_class = getattr(import_module(module), kind)
    config_class = getattr(
        import_module(module.replace("_trainer", "_config")), kind.replace("Trainer", "Config")
    )
    own = {key: more.pop(key) for key in ("terms", "term_options", "capture") if key in more}
    if fsdp:
        more |= {"fsdp": True, "fsdp_config": dict(FSDP)}
    config = config_class(**_settings(folder, accumulation, **{**row.arguments, **more}))
    if fsdp:
        shard_on_cpu()
    other = dict(row.more())
    if peft:
        other["peft_config"] = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        other.pop("ref_model", None)
    trained = language_model
    if trained is None:
        trained = scoring_model() if name == "Reward" else model()
    if other.get("reward_funcs") and config.beta and not peft:
        # These trainers load their reference from where the model came from.
        model(1).save_pretrained(folder / "reference")  # by the first of several processes
        if dist.is_initialized():
            dist.barrier()
        trained.config._name_or_path = str(folder / "reference")
    if between is not None:
        trainer_class = type(kind, (between, trainer_class), {})
    regularized = type(f"Regularized{kind}", (RegularizerMixin, trainer_class), {})
    return regularized(
        model=trained,
        args=config,
        train_dataset=row.data(),
        processing_class=tokenizer(),
        **other,
        **own,
    )


@dataclass(frozen=True)
class Tokens:
    """Tokens of one sequence without padding, and which of them count."""

    ids: Tensor
    counted: Tensor


def sequences(name: str, batch: Mapping[str, Any]) -> list[Tokens]:
    """Read the sequences of a batch by hand, without padding."""
    rows: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, attended, counted
    if name in ("SFT", "GKD"):
        labels = batch["labels"]
        rows = list(zip(batch["input_ids"], batch["attention_mask"], labels != -100, strict=True))
    elif name in ("DPO", "KTO"):
        fields = ("input_ids", "attention_mask", "completion_mask")
        rows = list(zip(*(batch[field] for field in fields), strict=True))
    elif name in ("ORPO", "CPO"):
        for side in ("chosen", "rejected"):
            fields = ("input_ids", "attention_mask", "labels")
            tokens, attended, labels = (batch[f"{side}_{field}"] for field in fields)
            rows += list(zip(tokens, attended, labels != -100, strict=True))
    else:
        nothing = torch.zeros_like(batch["prompt_mask"])
        tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        counted = torch.cat([nothing, batch["completion_mask"]], 1)
        rows = list(zip(tokens, attended, counted, strict=True))
    return [Tokens(ids[on == 1], kept[on == 1].bool()) for ids, on, kept in rows]


def predictions(
    language_model: Any, batch: Sequence[Tokens], temperature: float
) -> tuple[Tensor, Tensor]:
    """Logits of the tokens that count, `[N, V]`, one sequence at a time; the tokens, `[N]`."""
    rows, ids = [], []
    for sequence in batch:
        logits = language_model(input_ids=sequence.ids[None]).logits[0, :-1] / temperature
        rows.append(logits[sequence.counted[1:]])
        ids.append(sequence.ids[1:][sequence.counted[1:]])
    return torch.cat(rows), torch.cat(ids)
