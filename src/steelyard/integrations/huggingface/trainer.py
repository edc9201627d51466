"""Add terms to the loss of a Hugging Face trainer, with a mixin or with a callback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from steelyard._extras import cure as _cure
from steelyard.composition import CompositeLoss, Reads, TermLike, itself, reads
from steelyard.errors import CheckpointError, InputError
from steelyard.integrations.huggingface.causal_lm import token_count
from steelyard.integrations.huggingface.metric_accumulator import MetricAccumulator

try:
    from transformers import Trainer, TrainerCallback

    from steelyard.integrations.huggingface.forward_capture import ForwardCapture
except ModuleNotFoundError as error:
    raise _cure("steelyard.integrations.huggingface", error, extra="hf") from error

_STATE_FILE = "steelyard.pt"


class RegularizerCallback(TrainerCallback):
    """Adds terms to the loss of a trainer, and their values to its log.

    Attach it to a trainer object: `RegularizerCallback(terms).attach(trainer)`. The loss that the
    trainer computes is the base loss; that of an evaluation stays as it is. Schedules and `every`
    follow the optimizer's steps. Terms read these inputs, by name:

    * the fields of the model's output (`logits`, `hidden_states`, ...) and of the batch (`labels`,
      `input_ids`, ...)
    * `parameters`, by their name, and `activations` (see `capture`)
    * `data` and `logprobs`: each sequence, and the log-probs of its tokens
    * `projection`, which stands for the logits of the positions whose label is not -100, `[N, V]`;
      `targets`, these labels, `[N]`; `mask`, their positions, `[B, T]`. If a term reads
      `projection` and none reads `logits`, no logits are materialized.

    Args:
        terms: as in `CompositeLoss`.
        capture: paths of modules whose outputs terms read as `activations`.
        options: the other arguments of `CompositeLoss`: `aux`, `track_grad_norms`, ....

    Attributes:
        composite: the loss with its terms; weights may be changed while training.

    Raises:
        SpecError: an argument breaks a rule.
    """

    def __init__(
        self,
        terms: Iterable[TermLike] | Mapping[str, Iterable[TermLike]] = (),
        *,
        capture: str | Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.composite = CompositeLoss(reads(itself, "loss"), terms, **options)
        paths = [capture] if isinstance(capture, str) else list(capture)
        # Tracked norms differentiate the loss once for each term.
        retain_graph = bool(options.get("track_grad_norms"))
        self._forward_capture = ForwardCapture(paths, retain_graph=retain_graph)
        self._metrics = MetricAccumulator()
        self._trainer: Any = None

    def attach(self, trainer: Any) -> Self:
        """Add the terms to the loss of `trainer`, and this callback to its callbacks.

        Raises:
            InputError: it is attached already.
        """
        self._bind(trainer)
        own: Callable[..., Any] = trainer.compute_loss
        trainer.compute_loss = lambda *args, **kwargs: self.compute_loss(own, *args, **kwargs)
        return self

    def compute_loss(
        self,
        own: Callable[..., Any],
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute the trainer's loss, and add the terms while it trains.

        Args:
            own: the trainer's own `compute_loss`.
            model: the model, as the trainer calls it.
            inputs: the batch.
            return_outputs: whether to return the model's outputs too.
            num_items_in_batch: the tokens of the whole step, if the trainer counts them.
        """
        options = {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
        if not model.training or not torch.is_grad_enabled():
            return own(model, inputs, **options)
        names = self._input_names()
        if "hidden_states" in names:
            inputs = {**inputs, "output_hidden_states": True}
        batch = dict(inputs)  # before `own`, which may pop fields
        captured = self._forward_capture.run(
            partial(own, model, inputs, **options),
            model,
            _unwrap(self._trainer, model),
            projected="projection" in names,
            logit_free="logits" not in names and not return_outputs and self._uses_model_loss(own),
        )
        result = captured.result
        loss, *outputs = result if isinstance(result, tuple) else (result,)
        read = captured.term_inputs(batch, names, shifted=_shifts_labels(self._trainer))
        term_inputs = {**captured.extra_inputs, **batch, **read, "loss": loss}
        total = self._compose(term_inputs, batch, num_items_in_batch)
        return (total, *outputs) if return_outputs else total

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the state of the terms, if a run is resumed.

        Raises:
            InputError: the callback is not attached.
            CheckpointError: terms have state, and the checkpoint has none for them.
        """
        if self._trainer is None:
            raise InputError(
                "a RegularizerCallback must be attached to its trainer, which callbacks=[...] "
                "does not do: call RegularizerCallback(terms).attach(trainer)."
            )
        if state.global_step > 0:
            self._load(Path(args.output_dir) / f"checkpoint-{state.global_step}" / _STATE_FILE)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the step in the metrics."""
        self._metrics.end_step()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Add the components to a log line that has the loss."""
        if logs is None or "loss" not in logs:
            return
        names = [spec.name for spec in self.composite.specs]
        components = self._metrics.read(names)
        logs.update(components)
        state.log_history[-1].update(components)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save the state of the terms in the checkpoint."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            torch.save(self.composite.get_extra_state(), folder / _STATE_FILE)

    def _bind(self, trainer: Any) -> None:
        if self._trainer is not None:
            raise InputError("a RegularizerCallback serves one trainer, and this one has its own.")
        self._trainer = trainer
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)  # its `on_log` adds to the logs before reporters read them

    def _uses_model_loss(self, own: Callable[..., Any]) -> bool:
        """True if the trainer takes the model's own loss; any other loss may read the logits."""
        trainer = self._trainer
        return (
            getattr(own, "__func__", None) is Trainer.compute_loss
            and trainer.compute_loss_func is None
            and trainer.label_smoother is None
        )

    def _compose(
        self,
        term_inputs: Mapping[str, Any],
        batch: Mapping[str, Any],
        num_items_in_batch: Tensor | int | None,
    ) -> Tensor:
        trainer, composite = self._trainer, self.composite
        if composite.step != trainer.state.global_step:
            composite.step = trainer.state.global_step
        share = _share(trainer, batch, num_items_in_batch)
        composite.share = 1.0 if share is None else share
        total: Tensor = composite(term_inputs)
        self._metrics.add(composite.results, share)
        return total

    def _input_names(self) -> set[str]:
        """Names of all inputs that terms read, without what follows a dot."""
        names: set[str] = set()
        for spec in self.composite.specs:
            fn = spec.fn
            read = (*fn.required, *fn.optional) if isinstance(fn, Reads) else ("data", "logprobs")
            names |= {name.partition(".")[0] for name in (*read, *spec.needs)}
            if "projection" in spec.needs:
                raise InputError(
                    f"a term that needs a projection for each datum must run on steelyard.engine; "
                    f"here read that of the batch, term(..., inputs='projection') "
                    f"(regularizer {spec.name!r})."
                )
        return names

    def _load(self, path: Path) -> None:
        try:
            self.composite.set_extra_state(torch.load(path, weights_only=True))
        except OSError as error:
            if self.composite.get_extra_state()["terms"]:
                raise CheckpointError(
                    f"a resumed run needs the state of its terms, and {path} cannot be read: "
                    f"resume from the run's own output_dir."
                ) from error


class RegularizerMixin:
    """Adds terms to the loss of a trainer class: `class MyTrainer(RegularizerMixin, Trainer): ...`.

    Args:
        args: the trainer's.
        terms: as in `CompositeLoss`.
        capture: paths of modules whose outputs terms read as `activations`.
        term_options: the other arguments of `CompositeLoss`: `aux`, `track_grad_norms`, ....
        kwargs: the trainer's.

    Attributes:
        regularizers: the `RegularizerCallback` that does the work.
    """

    def __init__(
        self,
        *args: Any,
        terms: Iterable[TermLike] | Mapping[str, Iterable[TermLike]] = (),
        capture: str | Sequence[str] = (),
        term_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.regularizers = RegularizerCallback(terms, capture=capture, **(term_options or {}))
        self.regularizers._bind(self)  # noqa: SLF001 - the mixin overrides compute_loss itself

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute the trainer's loss, and add the terms while it trains."""
        own = super().compute_loss  # type: ignore[misc]  # the trainer comes after it
        return self.regularizers.compute_loss(
            own, model, inputs, return_outputs, num_items_in_batch
        )


def _unwrap(trainer: Any, model: nn.Module) -> Any:
    """The model without the wrappers of data parallelism and of peft."""
    unwrapped = trainer.accelerator.unwrap_model(model)
    return unwrapped.get_base_model() if hasattr(unwrapped, "get_base_model") else unwrapped


def _shifts_labels(trainer: Any) -> bool:
    shifts: bool = trainer._loss_shifts_labels  # noqa: SLF001 - the trainer has no public name
    return shifts


def _share(
    trainer: Any, batch: Mapping[str, Any], num_items_in_batch: Tensor | int | None
) -> Tensor | None:
    """Fraction of the step's tokens that this micro-batch has: tokens / num_items_in_batch.

    None if the trainer divides the loss by the number of micro-batches instead.
    """
    scaled = trainer.loss_is_scaled_for_ga
    if scaled is None:
        scaled = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    tokens = token_count(batch, shifted=_shifts_labels(trainer))
    if num_items_in_batch is None or not scaled or tokens is None:
        return None
    share: Tensor = tokens / num_items_in_batch
    if trainer.args.average_tokens_across_devices:
        # The trainer counts the tokens of all processes, whose gradients are averaged: it
        # multiplies its loss by their number, and so the terms are.
        share = share * (trainer.accelerator.num_processes // trainer.get_tp_size())
    return share
