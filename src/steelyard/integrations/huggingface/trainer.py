"""The callback and the mixin that put terms into the loss of a Hugging Face trainer."""

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
    """Adds terms to the loss of a trainer, and each one's numbers to its log.

    Terms read by name what the model returns (`logits`, `hidden_states`, ...) and was given
    (`labels`, `input_ids`, ...), `parameters` by name, `activations` (see `capture`), and for
    terms over `(data, logprobs)` each sequence and the log-probs of its tokens. `projection`
    stands for the logits of the positions whose label counts, `targets` are these labels, and
    `mask` says where they are; where no term reads `logits`, none are made then. The loss that
    the trainer computes is the base loss; that of an evaluation is left as it is. Schedules and
    `every` follow the optimizer's steps.

    Attach it to a trainer that is built: `RegularizerCallback(terms).attach(trainer)`.

    Args:
        terms: as in `CompositeLoss`.
        capture: paths of modules whose outputs terms read as `activations`.
        options: the other arguments of `CompositeLoss`: `aux`, `track_grad_norms`, ....

    Attributes:
        composite: the terms; weights may be changed while training.

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
        self._passes = ForwardCapture(paths, often=bool(options.get("track_grad_norms")))
        self._tally = MetricAccumulator()
        self._trainer: Any = None

    def attach(self, trainer: Any) -> Self:
        """Put the terms into the loss of `trainer`, and the callback before those that report.

        Raises:
            InputError: it is attached already.
        """
        self._hold(trainer)
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
        """What the trainer's `own` method gives, with the terms added while it trains."""
        call = {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
        if not model.training or not torch.is_grad_enabled():
            return own(model, inputs, **call)
        inner = _inner(self._trainer, model)
        asked = self._asked()
        if "hidden_states" in asked:
            inputs = {**inputs, "output_hidden_states": True}
        batch = dict(inputs)
        passed = self._passes.run(
            partial(own, model, inputs, **call),
            model,
            inner,
            projected="projection" in asked,
            lean="logits" not in asked and not return_outputs and self._is_plain(own),
        )
        loss, *outputs = passed.result if isinstance(passed.result, tuple) else (passed.result,)
        read = passed.readable(batch, asked, shifted=_shifts(self._trainer))
        named = {**passed.beside, **batch, **read, "loss": loss}
        total = self._weigh(named, batch, num_items_in_batch)
        return (total, *outputs) if return_outputs else total

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take back what the terms remembered, if a run is resumed."""
        if self._trainer is None:
            raise InputError(
                "a RegularizerCallback must be attached to its trainer, which callbacks=[...] "
                "does not do: call RegularizerCallback(terms).attach(trainer)."
            )
        if state.global_step > 0:
            self._load(Path(args.output_dir) / f"checkpoint-{state.global_step}" / _STATE_FILE)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The optimizer has stepped."""
        self._tally.end_step()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Put the components beside the loss."""
        if logs is None or "loss" not in logs:
            return
        names = [spec.name for spec in self.composite.specs]
        components = self._tally.read(names)
        logs.update(components)
        state.log_history[-1].update(components)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save what the terms remember beside the model."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            torch.save(self.composite.get_extra_state(), folder / _STATE_FILE)

    def _hold(self, trainer: Any) -> None:
        if self._trainer is not None:
            raise InputError("a RegularizerCallback serves one trainer, and this one has its own.")
        self._trainer = trainer
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)

    def _is_plain(self, own: Callable[..., Any]) -> bool:
        """Whether the loss is the one the model gives: another may read the logits it returns."""
        trainer = self._trainer
        return (
            getattr(own, "__func__", None) is Trainer.compute_loss
            and trainer.compute_loss_func is None
            and trainer.label_smoother is None
        )

    def _weigh(
        self, named: Mapping[str, Any], batch: Mapping[str, Any], items: Tensor | int | None
    ) -> Tensor:
        trainer, composite = self._trainer, self.composite
        if composite.step != trainer.state.global_step:
            composite.step = trainer.state.global_step
        share = _share(trainer, batch, items)
        composite.share = 1.0 if share is None else share
        total: Tensor = composite(named)
        self._tally.add(composite.results, share)
        return total

    def _asked(self) -> set[str]:
        """The first names of everything that terms read."""
        asked: set[str] = set()
        for spec in self.composite.specs:
            fn = spec.fn
            names = (*fn.required, *fn.optional) if isinstance(fn, Reads) else ("data", "logprobs")
            asked |= {name.partition(".")[0] for name in (*names, *spec.needs)}
            if "projection" in spec.needs:
                raise InputError(
                    f"a term that needs a projection for each datum must run on steelyard.engine; "
                    f"here read that of the batch, term(..., inputs='projection') "
                    f"(regularizer {spec.name!r})."
                )
        return asked

    def _load(self, path: Path) -> None:
        try:
            self.composite.set_extra_state(torch.load(path, weights_only=True))
        except OSError as error:
            if self.composite.get_extra_state()["terms"]:
                raise CheckpointError(
                    f"a resumed run needs what its terms remember, and {path} cannot be read: "
                    f"resume from the run's own output_dir."
                ) from error


class RegularizerMixin:
    """Terms in the loss of a trainer: `class MyTrainer(RegularizerMixin, Trainer): ...`.

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
        self.regularizers._hold(self)  # noqa: SLF001 - the mixin is its other half

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The trainer's own loss, with the terms added while it trains."""
        own = super().compute_loss  # type: ignore[misc]  # the trainer comes after it
        return self.regularizers.compute_loss(
            own, model, inputs, return_outputs, num_items_in_batch
        )


def _inner(trainer: Any, model: nn.Module) -> Any:
    """The model without what data parallelism and adapters wrap around it."""
    inner = trainer.accelerator.unwrap_model(model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def _shifts(trainer: Any) -> bool:
    """Whether the loss compares with the label of the next position."""
    shifts: bool = trainer._loss_shifts_labels  # noqa: SLF001 - nothing public says it
    return shifts


def _share(trainer: Any, batch: Mapping[str, Any], items: Tensor | int | None) -> Tensor | None:
    """The micro-batch's part of the step, if its loss is divided by the tokens of the whole step.

    Else the trainer itself divides by the number of micro-batches.
    """
    scaled = trainer.loss_is_scaled_for_ga
    if scaled is None:
        scaled = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    tokens = token_count(batch, shifted=_shifts(trainer))
    if items is None or not scaled or tokens is None:
        return None
    share: Tensor = tokens / items
    if trainer.args.average_tokens_across_devices:
        share = share * (trainer.accelerator.num_processes // trainer.get_tp_size())
    return share
