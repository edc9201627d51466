"""`RegularizerCallback`: add terms to the loss of a LightningModule without changing its code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any

from torch import Tensor

from steelyard.composition.auxiliary_losses import collect_aux
from steelyard.composition.composite import CompositeLoss, TermLike
from steelyard.composition.input_names import itself, reads
from steelyard.errors import InputError
from steelyard.gradients.sharded import named_shards
from steelyard.integrations.lightning.steps import (
    Callback,
    LightningModule,
    Trainer,
    batch_fields,
    check_log_settings,
    follow_trainer,
    log_components,
    merge_sources,
    unlabelled_terms,
)
from steelyard.integrations.torch.activations import Captured, hooked
from steelyard.spec.protocol import Schedule


class RegularizerCallback(Callback):
    """Adds terms to the loss that `training_step` returns, and logs every component.

    Lightning has no callback hook that can change the loss, so the module's `training_step` is
    wrapped from the beginning of `fit` to its end. Terms read, by name: the fields of the batch,
    what `training_step` returns beside its `"loss"`, captured activations, `aux`, `parameters` (all
    of the module, by name) and `loss` itself. A name that two of them have is read as `batch.x`,
    `outputs.x` or `activations.x`.

    The step and the state of the terms are saved with the trainer's checkpoints.

    Args:
        terms: as for `CompositeLoss`.
        aux: the weights of auxiliary losses, by name.
        capture: paths of modules whose outputs terms read, with wildcards.
        batch: names for the items of a batch that is a tuple, or the name of one that is a tensor.
        log: arguments for `log_dict`; `sync_dist` is on unless they say otherwise.
        settings: the other arguments of `CompositeLoss`, such as `run`, a run folder.

    Attributes:
        composite: the loss; its base is what `training_step` returns.

    Raises:
        SpecError: an argument breaks a rule.

    Example:
        >>> from steelyard.integrations import term
        >>> callback = RegularizerCallback(
        ...     [term(lambda hidden: hidden.abs().mean(), 0.1, "sparse", inputs="net.1")],
        ...     capture="net.1",
        ... )
        >>> callback.composite.specs[0].name  # now Trainer(callbacks=[callback])
        'sparse'
    """

    def __init__(
        self,
        terms: Iterable[TermLike] | Mapping[str, Iterable[TermLike]] = (),
        *,
        aux: Mapping[str, float | Schedule] | None = None,
        capture: str | Sequence[str] = (),
        batch: str | Sequence[str] = (),
        log: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.composite = CompositeLoss(reads(itself, "loss"), terms, aux=aux, **settings)
        self._capture = capture
        self._batch_names = (batch,) if isinstance(batch, str) else tuple(batch)
        self._log_settings = check_log_settings(log or {})
        self._cleanup = ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the module's `training_step`.

        Raises:
            InputError: the module uses manual optimization, or a path matches no module.
        """
        if not pl_module.automatic_optimization:
            raise InputError(
                f"RegularizerCallback adds to the loss that training_step returns, and "
                f"{type(pl_module).__name__} optimizes by itself (automatic_optimization=False): "
                f"compose in the step, with RegularizedModule."
            )
        activations = self._cleanup.enter_context(hooked(pl_module, self._capture))
        self._wrap(trainer, pl_module, activations)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Write the step to the run folder, if the optimizer has made it."""
        if trainer.global_step != self.composite.step:
            self.composite.record_step()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002 - the signature is Lightning's
        """Restore the module's own `training_step`."""
        self._cleanup.close()

    def on_exception(
        self,
        trainer: Trainer,  # noqa: ARG002 - the signature is Lightning's
        pl_module: LightningModule,  # noqa: ARG002
        exception: BaseException,  # noqa: ARG002
    ) -> None:
        """Restore the module's own `training_step` after an error."""
        self._cleanup.close()

    def state_dict(self) -> dict[str, Any]:
        """The step, and the state of the terms."""
        return self.composite.get_extra_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.composite.set_extra_state(state_dict)

    def _wrap(self, trainer: Trainer, module: LightningModule, activations: Captured) -> None:
        step = module.training_step
        parameters = named_shards(module)

        @wraps(step)
        def regularized_step(*args: Any, **kwargs: Any) -> Any:
            with collect_aux() as aux:
                activations.begin()
                try:
                    returned = step(*args, **kwargs)
                finally:
                    activations.end()
            outputs = {"loss": returned} if isinstance(returned, Tensor) else returned
            if not isinstance(outputs, Mapping) or outputs.get("loss") is None:
                return returned  # a batch that is skipped, or an error that Lightning explains
            sources = {
                "batch": batch_fields(args[0], self._batch_names),
                "outputs": outputs,
                "activations": activations.values,
            }
            inputs = {**merge_sources(sources), "parameters": parameters, "loss": outputs["loss"]}
            if aux:
                inputs["aux"] = aux
            follow_trainer(self.composite, trainer, module)
            self.composite.unmeasured = unlabelled_terms(self.composite.specs, inputs, module)
            total = self.composite(inputs)  # as a mapping: a batch may hold any names
            activations.values.clear()
            log_components(module, self.composite, self._log_settings)
            return total if isinstance(returned, Tensor) else {**outputs, "loss": total}

        # `torch.compile` puts a step of its own on the instance, which hides that of the class.
        instance_step = vars(module).get("training_step")
        module.training_step = regularized_step  # type: ignore[method-assign]
        if instance_step is None:
            self._cleanup.callback(delattr, module, "training_step")
        else:
            self._cleanup.callback(setattr, module, "training_step", instance_step)
