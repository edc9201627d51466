"""Add terms to the loss of a Hugging Face trainer, with a mixin or with a callback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from steelyard._extras import cure as _cure
from steelyard._torch_internals import is_fully_sharded
from steelyard.composition.composite import CompositeLoss, TermLike
from steelyard.composition.input_names import itself, reads
from steelyard.composition.own_data import SeparateInputs
from steelyard.composition.run_recorder import RunRecorder
from steelyard.errors import CheckpointError, InputError
from steelyard.integrations.huggingface.accumulation import (
    StepState,
    divides_by,
    divisor_of,
    micro_batch_of,
)
from steelyard.integrations.huggingface.completion import Completion
from steelyard.integrations.huggingface.completion_inputs import (
    COMPLETION,
    REFERENCE,
    check_available,
    completion_inputs,
    completion_of,
    input_names,
    uncounted_inputs,
)
from steelyard.integrations.huggingface.duplicate_terms import check_duplicate_terms
from steelyard.integrations.huggingface.metrics import MetricAccumulator
from steelyard.integrations.huggingface.run_folder import (
    check_run,
    declared_config,
    evaluation_of,
    folder_of,
    logged_metrics,
)
from steelyard.integrations.huggingface.trainer_kinds import TrainerKind, kind_of
from steelyard.spec.regularizer import RegularizerSpec

try:
    from transformers import Trainer, TrainerCallback

    from steelyard.integrations.huggingface.forward_capture import ForwardCapture
    from steelyard.integrations.huggingface.own_batches import own_inputs
except ModuleNotFoundError as error:
    raise _cure("steelyard.integrations.huggingface", error, extra="hf") from error

_STATE_FILE = "steelyard.pt"
# What a state with NumPy's arrays and numbers is pickled with, and `weights_only` must allow.
_NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    *(value.__reduce__()[0] for value in (np.zeros(1), np.float64(0))),
    *{type(np.dtype(kind)) for kind in "?bhilqBHILQefd"},
]


class RegularizerCallback(TrainerCallback):
    """Adds terms to the loss of a trainer, and their values to its log.

    Attach it to a trainer object: `RegularizerCallback(terms).attach(trainer)`. The loss that the
    trainer computes is the base loss; that of an evaluation stays as it is. Schedules and `every`
    follow the optimizer's steps. Terms read these inputs, by name:

    * the fields of the model's output (`logits`, `hidden_states`, ...) and of the batch (`labels`,
      `input_ids`, ...)
    * `parameters`, by their name, and `activations` (see `capture`)
    * `data` and `logprobs`: each sequence, and the log-probs of its tokens
    * `completion_mask`, the tokens that the loss counts, `[B, W]`; `completion_logprobs` and
      `completion_entropy`, likewise, 0 where the mask is False; `completion_logits`, `[N, V]`
    * `projection`, which stands for the logits of these tokens, `[N, V]`; `targets`, the tokens,
      `[N]`; `mask`, their positions in the model's input, `[B, T]`. If a term reads `projection`
      and none reads `logits`, `Trainer` materializes no logits.
    * `reference_logprobs`, `[B, W]`, and `reference_logits`, `[N, V]`, where the trainer runs a
      reference model

    A term with data of its own reads these inputs of its own tokenized sequences, for which the
    model runs a second time; see `RegularizerSpec`. Their reference is the model without its
    adapter of peft, or the trainer's `ref_model`.

    Args:
        terms: as in `CompositeLoss`.
        capture: paths of modules whose outputs terms read as `activations`.
        run: a folder, new or empty, for what `steelyard watch`, `report` and `doctor` read; True
            is `steelyard` in the trainer's `output_dir`. The first process writes a line whenever
            the trainer logs its loss.
        options: the other arguments of `CompositeLoss`: `aux`, `track_grad_norms`, .... Gradients
            are compared with respect to the parameters of the trainer's model unless `wrt` is
            given.

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
        run: bool | str | Path | None = None,
        **options: Any,
    ) -> None:
        self._run = check_run(run)
        self._recorder: RunRecorder | None = None
        self._evaluated: dict[str, Any] = {}  # before the first step
        self.composite = CompositeLoss(reads(itself, "loss"), terms, **options)
        self.composite.step = 0  # that of the trainer: its calls are micro-batches
        aggregated = options.get("aggregate", "sum") != "sum"
        self._compares = bool(options.get("track_grad_norms")) or aggregated
        self._wrt_model = self._compares and options.get("wrt") is None
        paths = [capture] if isinstance(capture, str) else list(capture)
        # Norms and aggregators differentiate the loss once more than training does.
        self._forward_capture = ForwardCapture(paths, retain_graph=self._compares)
        self._metrics = MetricAccumulator()
        self._step_state = StepState(self.composite)
        self._unwrapped: dict[int, tuple[nn.Module, Any]] = {}
        # Whether the trainer's loss is divided by `num_items_in_batch`; None until it is known.
        self._counts_items: bool | None = None
        self._trainer: Any = None
        self._kind: TrainerKind | None = None

    def attach(self, trainer: Any) -> Self:
        """Add the terms to the loss of `trainer`, and this callback to its callbacks.

        Raises:
            InputError: it is attached already.
        """
        own: Callable[..., Any] = trainer.compute_loss
        self._bind(trainer, own)

        @wraps(own)
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            return self.compute_loss(own, *args, **kwargs)

        trainer.compute_loss = compute_loss
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
        options: dict[str, Any] = {
            "return_outputs": return_outputs,
            "num_items_in_batch": num_items_in_batch,
        }
        if not model.training or not torch.is_grad_enabled():
            return own(model, inputs, **options)
        step = self._trainer.state.global_step
        divisor = None
        if num_items_in_batch is not None and self._counts_items is None:
            if self._uses_model_loss(own):
                divisor = options["num_items_in_batch"] = divisor_of(num_items_in_batch)
            else:  # a trainer that takes the number says itself what its loss is
                self._counts_items = True
        all_due = [spec for spec in self.composite.specs if spec.due(step)]
        with_own_data = [spec for spec in all_due if spec.data is not None]
        due = [spec for spec in all_due if spec.data is None]
        required, names = input_names(due)
        if "hidden_states" in names:
            inputs = {**inputs, "output_hidden_states": True}
        batch = dict(inputs)  # before `own`, which may pop fields
        check_available(self._trainer, self._kind, required, batch.keys() | self._possible())
        captured = self._forward_capture.run(
            partial(own, model, inputs, **options),
            model,
            self._unwrap(model),
            projected="projection" in names,
            logit_free=not names & {"logits", "completion_logits"}
            and not return_outputs
            and self._uses_model_loss(own),
            reference=self._reference() if names & REFERENCE else None,
        )
        result = captured.result
        loss, *outputs = result if isinstance(result, tuple) else (result,)
        if divisor is not None:
            self._counts_items = divides_by(loss, divisor)
        completion = completion_of(self._trainer, self._kind, captured, batch, names)
        self.composite.unmeasured = self._unmeasured(due, completion, batch)
        if self.composite.unmeasured:
            measured = [spec for spec in due if spec.name not in self.composite.unmeasured]
            required, names = input_names(measured)
        term_inputs = {
            **captured.extra_inputs,
            **batch,
            **captured.model_inputs(names),
            **completion_inputs(completion, self._kind, captured, batch, names),
            "loss": loss,
        }
        check_available(self._trainer, self._kind, required, term_inputs.keys())
        if with_own_data:
            term_inputs["data"] = self._own_data(model, with_own_data, term_inputs.get("data", ()))
        self.composite.set_wrapper(model)
        total = self._compose(term_inputs, batch, num_items_in_batch)
        return (total, *outputs) if return_outputs else total

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the state of the terms, if a run is resumed.

        Raises:
            InputError: the callback is not attached.
            CheckpointError: terms have state, and the checkpoint has none for them.
            SpecError: a term is a loss that the trainer has already, such as a KL penalty.
            RunError: the run folder holds another run, or cannot be written.
        """
        if self._trainer is None:
            raise InputError(
                "a RegularizerCallback must be attached to its trainer, which callbacks=[...] "
                "does not do: call RegularizerCallback(terms).attach(trainer)."
            )
        of_batch = [spec for spec in self.composite.specs if spec.data is None]
        kind, names = self._kind, input_names(of_batch).all
        check_duplicate_terms(self._trainer, kind, self.composite)
        if kind is not None and kind.keep_reference is not None and names & REFERENCE:
            kind.keep_reference(self._trainer)
            self._kind = replace(kind, keep_reference=None)  # it is kept from now on
        # An earlier `train` may have left a step that was not logged, or one that failed.
        self._metrics = MetricAccumulator()
        self._step_state = StepState(self.composite)
        if state.global_step > 0:
            self._load(Path(args.output_dir) / f"checkpoint-{state.global_step}" / _STATE_FILE)
        if self._run and state.is_world_process_zero:
            config = declared_config(self._trainer, self.composite)
            folder = folder_of(self._run, args.output_dir)
            self._recorder = RunRecorder(folder, config, state.global_step)
            self._recorder.add(self._evaluated)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let the doctor read the last line: an evaluation may have added to it."""
        if self._recorder is not None:
            self._recorder.settle()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the run as done."""
        if self._recorder is not None:
            self._recorder.finish()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the step in the metrics, and move the state of the terms.

        Raises:
            InputError: the trainer did not call `compute_loss`.
        """
        if self._metrics.is_empty:
            raise InputError(
                f"terms are added in compute_loss, and {type(self._trainer).__name__} made an "
                f"optimizer step without calling it: its training_step computes the loss by "
                f"itself, and cannot be given terms."
            )
        self._metrics.end_step()
        self._step_state.end_step()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Add the components to a log line that has the loss."""
        if logs is None or "loss" not in logs:
            self._add_evaluation(logs or {})
            return
        names = [spec.name for spec in self.composite.specs]
        components = self._metrics.read(names)
        logs.update(components)
        state.log_history[-1].update(components)
        if self._recorder is not None:
            self._recorder.declare(declared_config(self._trainer, self.composite))
            self._recorder.write(state.global_step - 1, logged_metrics(logs, self._trainer))

    def _add_evaluation(self, logs: Mapping[str, Any]) -> None:
        evaluated = evaluation_of(logs)
        if self._recorder is not None:
            self._recorder.add(evaluated)
        else:
            self._evaluated |= evaluated

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save the state of the terms in the checkpoint."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if args.should_save and folder.is_dir():  # one process, or one of each node
            torch.save(self.composite.get_extra_state(), folder / _STATE_FILE)

    def _bind(self, trainer: Any, own: Callable[..., Any]) -> None:
        if self._trainer is not None:
            raise InputError("a RegularizerCallback serves one trainer, and this one has its own.")
        self._trainer = trainer
        self._kind = kind_of(own, getattr(trainer, "completion_like", None))
        if self._wrt_model:
            self.composite.compare_parameters(trainer.model)
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
        micro_batch = micro_batch_of(
            trainer, batch, num_items_in_batch, counts_items=self._counts_items is not False
        )
        composite.share = micro_batch.share
        self._step_state.begin_micro_batch()
        details = self._metrics.details
        # A step with one micro-batch has the norms of that one.
        accumulates = getattr(trainer, "current_gradient_accumulation_steps", 1) > 1
        composite.observer = details.observe if self._compares and accumulates else None
        total: Tensor = composite(term_inputs)
        self._step_state.end_micro_batch()
        results = composite.results
        self._metrics.add(results, *micro_batch)
        if self._compares or any(result.custom or result.bound for result in results):
            details.add(composite.output, float(micro_batch.share), micro_batch.divisor)
        return total

    def _own_data(
        self, model: nn.Module, specs: Sequence[RegularizerSpec], batch: Sequence[Any]
    ) -> SeparateInputs:
        """Data of the batch, and of terms' own, with the inputs from a pass for each such term."""
        if self.composite.step != self._trainer.state.global_step:
            self.composite.step = self._trainer.state.global_step
        own = self.composite.join(batch).own
        inputs = {
            spec.name: own_inputs(self._trainer, self._kind, model, spec, own[spec.name])
            for spec in specs
        }
        return SeparateInputs(batch, own, inputs)

    def _unmeasured(
        self,
        due: Sequence[RegularizerSpec],
        completion: Completion | None,
        batch: Mapping[str, Any],
    ) -> frozenset[str]:
        """Names of the terms that read only what a micro-batch without a counted token lacks."""
        uncounted = uncounted_inputs(self._trainer, completion, batch, input_names(due).all)
        if not uncounted:
            return uncounted
        several = self._trainer.args.world_size > 1
        # Sharded parameters are gathered by all processes together: none may leave a term out.
        if several and is_fully_sharded(self._trainer.model_wrapped):
            return frozenset()
        return frozenset(
            spec.name
            for spec in due
            if uncounted & input_names([spec]).required.keys()
            and not (several and spec.ranks == "one")
        )

    def _possible(self) -> frozenset[str]:
        """Inputs of the completion that the trainer may have."""
        if self._kind is None or self._kind.no_completion:
            return frozenset()
        return COMPLETION | REFERENCE | {"data", "logprobs"}

    def _reference(self) -> tuple[nn.Module, Any] | None:
        """Reference model, as the trainer calls it, and without its wrappers."""
        if self._kind is None or self._kind.reference_model is None:
            return None
        model = self._kind.reference_model(self._trainer)
        return None if model is None else (model, self._unwrap(model))

    def _unwrap(self, model: nn.Module) -> Any:
        """The model without the wrappers of data parallelism and of peft."""
        # Kept, because accelerate searches all modules for compiled ones; with the model, so that
        # its id stays taken.
        if id(model) not in self._unwrapped:
            unwrapped = self._trainer.accelerator.unwrap_model(model)
            peft = hasattr(unwrapped, "get_base_model")
            self._unwrapped[id(model)] = model, unwrapped.get_base_model() if peft else unwrapped
        return self._unwrapped[id(model)][1]

    def _load(self, path: Path) -> None:
        try:
            with torch.serialization.safe_globals(_NUMPY):
                state = torch.load(path, weights_only=True)
        except OSError as error:
            if self.composite.get_extra_state()["terms"]:
                raise CheckpointError(
                    f"a resumed run needs the state of its terms, and {path} cannot be read: "
                    f"resume from the run's own output_dir."
                ) from error
            return
        except Exception as error:  # torch and pickle raise many kinds for a damaged file
            raise CheckpointError(
                f"a resumed run needs the state of its terms, and {path} is damaged, or holds more "
                f"than numbers, strings, tensors, arrays, lists and mappings of them: {error}"
            ) from error
        self.composite.set_extra_state(state)


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
        completion_like: class attribute: the name of the trainer whose tokens count as this one's
            do, such as `"SFTTrainer"`, for a class with a `compute_loss` of its own.
    """

    completion_like: ClassVar[str | None]  # without a value, which would hide the trainer's

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
        own = super().compute_loss  # type: ignore[misc]  # the trainer comes after it
        self.regularizers._bind(self, own)  # noqa: SLF001 - the mixin overrides compute_loss itself

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
