"""The run folder of a trainer: what its config declares, and a line from what it logs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steelyard.composition.composite import CompositeLoss
from steelyard.doctor.declaration import declared_terms
from steelyard.errors import SpecError

_UNDER_OUTPUT = "steelyard"  # `output_dir` itself may get the config.json of a model
_EVALUATION = "eval_"
_SPACE = "parameters"  # of norms
_SPEED = ("_runtime", "_samples_per_second", "_steps_per_second")
# What the trainers of transformers and TRL log, under the keys of `metrics.jsonl`.
_KEYS = {
    "loss": "loss_total",
    "learning_rate": "optim/learning_rate",
    "grad_norm": "optim/unclipped_grad_l2:mean",
    "reward": "rollouts/reward",
    "reward_std": "rollouts/reward_std",
    "frac_reward_zero_std": "rollouts/no_signal",
    "completions/clipped_ratio": "rollouts/truncated",
    "completions/mean_length": "rollouts/answer_tokens",
}


def check_run(run: object) -> bool | str | Path | None:
    """Return the argument `run` of a callback.

    Raises:
        SpecError: it is neither a path nor True, False or None.
    """
    if run is None or isinstance(run, bool | Path) or (isinstance(run, str) and run):
        return run
    raise SpecError(f"run must be a path, or True for a folder in output_dir, got {run!r}.")


def folder_of(run: bool | str | Path, output_dir: str) -> Path:
    """Run folder of a trainer: the given one, or for True `steelyard` in its output_dir."""
    return Path(output_dir) / _UNDER_OUTPUT if run is True else Path(str(run))


def declared_config(trainer: Any, composite: CompositeLoss) -> dict[str, Any]:
    """Declaration of a trainer's run, in the form of a config of `steelyard train`."""
    args, model = trainer.args, trainer.model
    config: dict[str, Any] = {
        "trainer": type(trainer).__name__,
        "model": {"base_model": str(getattr(model, "name_or_path", "") or "")},
        "loss": _declared_loss(trainer),
        "train": {
            "steps": trainer.state.max_steps,
            "batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "learning_rate": float(args.learning_rate),
            "grad_clip_norm": float(args.max_grad_norm or 0.0),
            "weight_decay": float(args.weight_decay),
            "warmup_steps": args.warmup_steps,
            "logging_steps": args.logging_steps,
            "processes": args.world_size,
            "seed": args.seed,
            "grad_space": _SPACE,
        },
        "regularizers": declared_terms(composite.specs),
    }
    names = getattr(trainer, "reward_func_names", None)
    if names:
        weights = [float(weight) for weight in trainer.reward_weights]
        config["rewards"] = [
            {"use": name, "name": name, "weight": weight}
            for name, weight in zip(names, weights, strict=True)
        ]
        config["rollouts"] = _declared_rollouts(args)
    return config


def logged_metrics(logs: Mapping[str, Any], trainer: Any) -> dict[str, Any]:
    """Metrics of a line from what a trainer logs beside the loss."""
    metrics = {
        _KEYS.get(key, key): value
        for key, value in logs.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    if "rollouts/reward" in metrics:
        if "entropy" in metrics:
            metrics["rollouts/entropy"] = metrics.pop("entropy")
        names = getattr(trainer, "reward_func_names", None) or ()  # any trainer may log a reward
        weights = zip(names, trainer.reward_weights if names else (), strict=True)
        metrics |= {f"rewards/{name}/weight": float(weight) for name, weight in weights}
    norms = [key for key in metrics if key.endswith("/grad_norm") and "/custom/" not in key]
    return metrics | {f"{key.removesuffix('norm')}space": _SPACE for key in norms}


def evaluation_of(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of an evaluation that a trainer logs: `held_out/loss`, and `eval/...`."""
    metrics = {
        key.removeprefix(_EVALUATION): value
        for key, value in logs.items()
        if key.startswith(_EVALUATION) and isinstance(value, int | float)
        if not key.endswith(_SPEED)
    }
    return {"held_out/loss" if key == "loss" else f"eval/{key}": x for key, x in metrics.items()}


def _declared_loss(trainer: Any) -> dict[str, Any]:
    """The base loss: cross-entropy where the trainer's class or the model's says so."""
    own = getattr(getattr(trainer.model, "loss_function", None), "__name__", "")
    is_language_model = own == "ForCausalLMLoss" and type(trainer).__module__.startswith(
        "transformers."
    )
    sft = any(cls.__name__ == "SFTTrainer" for cls in type(trainer).__mro__)
    if sft or is_language_model:
        return {"use": "cross_entropy", "reduction": "mean"}
    return {"use": type(trainer).__name__}


def _declared_rollouts(args: Any) -> dict[str, Any]:
    answers = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    advantage = {"group": "grpo", None: "rloo"}.get(getattr(args, "scale_rewards", None), "none")
    if getattr(args, "multi_objective_aggregation", "") == "normalize_then_sum":
        advantage = "gdpo"
    return {
        "per_step": max(1, answers // args.num_generations),
        "group_size": args.num_generations,
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "advantage": advantage,
        "substeps": getattr(args, "num_iterations", 1) or 1,
    }
