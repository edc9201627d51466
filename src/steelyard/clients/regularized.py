"""`RegularizedClient`: a training client whose losses have named regularizers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

from torch import Tensor

from steelyard.clients.blocking import Action, Steps, run, run_async
from steelyard.clients.client_pass import (
    ClientPass,
    TwoPasses,
    at_temperature,
    check_temperature,
    tensor_like,
)
from steelyard.clients.client_settings import CallSettings, ClientSettings
from steelyard.clients.one_pass.one_pass import Explanation, OnePass
from steelyard.clients.one_pass.results import TwoPassCall
from steelyard.clients.step_progress import StepProgress, reads_reference
from steelyard.clients.term_states import (
    BuiltTerms,
    TermLike,
    TermStates,
    read_states,
    write_states,
)
from steelyard.composition.inputs import ParameterGradients
from steelyard.composition.named_losses import (
    TEMPERATURE,
    NamedBaseLoss,
    loss_names,
    split_temperature,
)
from steelyard.composition.own_data import JoinedData, batch_of
from steelyard.composition.pipeline import Pipeline
from steelyard.errors import InputError, SpecError, StateError
from steelyard.output.custom_loss import CustomLossOutput
from steelyard.spec.checks import is_whole
from steelyard.spec.protocol import Regularizer, TermFn
from steelyard.spec.regularizer import (
    REFERENCE_INPUTS,
    ComposedLoss,
    RegularizerSpec,
    split_loss,
)

# The name under which a client that can `attach` saves our state with its own checkpoints.
_ATTACHED_AS = "steelyard"
_LOSS = "elementwise_loss"  # of each token, among the outputs of a datum


class RegularizedClient:
    """A training client with a pipeline of regularizers.

    Every attribute that it does not define is the wrapped client's. Terms never run on the SDK's
    event loop: they run in the caller's thread and where their specs say, so a term may block, or
    call the client.

    Attributes:
        client: the wrapped client.
        optim_steps: the number of optimizer steps made through this client: the step that
            schedules and `every` follow.
        last_data: data of the last call; a `JoinedData` if terms have data of their own.
    """

    def __init__(
        self,
        client: Any,
        regularizers: Iterable[TermLike],
        settings: ClientSettings,
        one_pass: OnePass,
    ) -> None:
        self.client = client
        self._one_pass = one_pass
        self.optim_steps = 0
        self.last_data: Any = ()
        self._settings = settings
        self._states = TermStates()
        self._built_terms = BuiltTerms()
        specs = [self._built_terms.spec_of(regularizer) for regularizer in regularizers]
        # Any base loss does: each call brings its own.
        pipeline = self._build(NamedBaseLoss.of("cross_entropy"), specs, settings, after=None)
        self._states.add_all(pipeline.stateful)
        # The base loss and the specs whose states are kept.
        self._with_state: list[Any] = [pipeline.loss_fn, *specs]
        # Of the last call: its pipeline, its settings, and the names of the terms that it added.
        # One attribute, because calls in several threads must see the three together.
        self._last: tuple[Pipeline, ClientSettings, frozenset[str]] = (
            pipeline,
            settings,
            frozenset(),
        )
        # Of the last call, if its step is to be measured; and of the last step.
        self._has_temperature = False  # whether the client was seen to obey one
        self._measurable: StepProgress | None = None
        self._measuring: StepProgress | None = None
        if hasattr(client, "attach"):
            client.attach(_ATTACHED_AS, self)

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` look up attributes before `client` is set: without this the line
        # below would recurse for ever.
        if name == "client":
            raise AttributeError(name)
        return getattr(self.client, name)

    @property
    def pipeline(self) -> Pipeline:
        """The terms of the last call; before the first, those that stay.

        Its `add`, `remove`, `set_weight` and `set_enabled` change those that stay, from the next
        call on.
        """
        return self._last[0]

    @property
    def regularizers(self) -> tuple[RegularizerSpec, ...]:
        """Specs of the terms that stay, as they are now."""
        return _standing(*self._last)

    def forward_backward(
        self,
        data: Sequence[Any],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Any:
        """Accumulate the gradient of a loss that the client knows by name, and of the terms.

        Without terms that stay, the call is the client's own. With them, the named loss is the base
        loss, and the call does what `forward_backward_custom` does.

        Args:
            data: the SDK's.
            loss_fn: `"cross_entropy"`, `"importance_sampling"`, `"ppo"`, `"cispo"`, `"dro"` or
                `"gspo"`; without terms any that the client knows.
            loss_fn_config: its settings; `"temperature"` instead of that of `regularize`.

        Returns:
            A future of a `CustomLossOutput`; of the client's own output without terms.

        Raises:
            SpecError: there are terms, and the loss is another one; or the client computes
                log-probs at temperature 1 alone, and another one is asked for.
            InputError: the data or the settings break a rule.
            TermError: the base loss failed, or a term whose `on_error` is `"raise"`.
        """
        if not self.regularizers:
            config = self._own_config(loss_fn_config)
            return self.client.forward_backward(data, loss_fn, *config)
        base, temperature = _named_base(data, loss_fn, loss_fn_config)
        return self.forward_backward_custom(data, base, temperature=temperature)

    async def forward_backward_async(
        self,
        data: Sequence[Any],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Any:
        """Do the same as `forward_backward`, without blocking the event loop."""
        if not self.regularizers:
            config = await asyncio.to_thread(self._own_config, loss_fn_config)
            return await self.client.forward_backward_async(data, loss_fn, *config)
        base, temperature = _named_base(data, loss_fn, loss_fn_config)
        return await self.forward_backward_custom_async(data, base, temperature=temperature)

    def forward_backward_custom(
        self,
        data: Sequence[Any],
        loss_fn: TermFn | Regularizer | Any,
        regularizers: Iterable[TermLike] = (),
        *,
        step: int | None = None,
        share: Mapping[str, float] | None = None,
        loss_type_input: Literal["logprobs"] | None = None,
        **settings: Unpack[CallSettings],
    ) -> Any:
        """Compose the loss of a batch and submit its gradient.

        Returns once the backward pass is submitted, so that an `optim_step` called right after
        it runs after it. If a term with `on_error="raise"` fails, nothing is submitted.

        Args:
            data: the SDK's. Fields beside `target_tokens` reach the terms and are not sent; in one
                pass those that terms read are, as numbers without their names.
            loss_fn: the base loss, as the SDK takes it, or a traced loss.
            regularizers: terms of this call, beside those that stay; specs, or mappings with their
                fields.
            step: the number of this step; None: `optim_steps`.
            share: the part of the optimizer step's batch that this call has, for each term by name,
                `"base"` for the base loss: a factor >= 0 on its weight, which lets the calls before
                an `optim_step` add up to one loss that is a mean; {} if all terms are sums. The
                outputs can then be combined, see `Pipeline.compute`.
            loss_type_input: the SDK's; it has one value.
            settings: `track_grad_norms`, `parallel`, `timeout`, `grad_space`, `track_every`,
                `measure_progress` and `temperature` of this call; without one, or with None, as
                `regularize` was told, which explains them.

        Returns:
            A future of a `CustomLossOutput`; of the client's own output for a traced loss.

        Raises:
            SpecError: a spec or a setting breaks a rule, a spec has the name of another, or needs
                an input that this client does not provide; or the client computes log-probs at
                temperature 1 alone, and another one is asked for.
            InputError: the data break a rule.
            TermError: the base loss failed, or a term whose `on_error` is `"raise"`.
        """
        _check_input_type(loss_type_input)
        return run(self._custom(data, loss_fn, list(regularizers), step, share, settings))

    async def forward_backward_custom_async(
        self,
        data: Sequence[Any],
        loss_fn: TermFn | Regularizer | Any,
        regularizers: Iterable[TermLike] = (),
        *,
        step: int | None = None,
        share: Mapping[str, float] | None = None,
        loss_type_input: Literal["logprobs"] | None = None,
        **settings: Unpack[CallSettings],
    ) -> Any:
        """Do the same as `forward_backward_custom`, without blocking the event loop.

        If the caller is cancelled before the backward pass is submitted, none is.
        """
        _check_input_type(loss_type_input)
        steps = self._custom(data, loss_fn, list(regularizers), step, share, settings)
        return await run_async(steps)

    def check_temperature(self, temperature: float) -> None:
        """Check that the client computes log-probs at a temperature, as the calls do by themselves.

        Another client than the engine's is asked once, in two small forward requests.

        Raises:
            SpecError: it computes log-probs at temperature 1 alone.
        """
        if temperature != 1 and not self._has_temperature:
            check_temperature(self.client, temperature)
            self._has_temperature = True

    def explain(self) -> Explanation:
        """Explain how the last call ran: in one pass or in two, and why, by term."""
        # A client that keeps the graph of its forward pass needs no other way to one pass.
        return Explanation(1) if hasattr(self.client, "open_pass") else self._one_pass.explanation

    def optim_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the client's `optim_step`, and count it."""
        future = self.client.optim_step(*args, **kwargs)
        self.optim_steps += 1
        self._begin_measuring()
        return future

    async def optim_step_async(self, *args: Any, **kwargs: Any) -> Any:
        """Call the client's `optim_step_async`, and count it."""
        future = await self.client.optim_step_async(*args, **kwargs)
        self.optim_steps += 1
        await asyncio.to_thread(self._begin_measuring)
        return future

    def progress(self) -> dict[str, float]:
        """Change of each term by the last optimizer step: its value after it minus that before.

        Both are values on the batch of the last call before that step; `"base"` is the base loss.
        Waits for the forward pass that measures it. Empty if the step was not measured.
        """
        return {} if self._measuring is None else self._measuring.changes()

    def state_dict(self) -> dict[str, Any]:
        """The number of optimizer steps and the state of every stateful term, ready for JSON.

        Raises:
            StateError: the state of a term holds something that JSON cannot.
        """
        return {"optim_steps": self.optim_steps, "terms": self._states.encoded()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        The state of a term that no call has mentioned yet is restored when one does.

        Raises:
            StateError: it is not what `state_dict` returns.
        """
        fields = state if isinstance(state, Mapping) else {}
        terms, steps = fields.get("terms"), fields.get("optim_steps")
        if not isinstance(terms, Mapping) or not is_whole(steps, at_least=0):
            raise StateError(
                f"state must hold 'optim_steps' and 'terms', as state_dict gives them, "
                f"got {state!r}."
            )
        self.optim_steps = int(steps)  # type: ignore[arg-type]  # whole
        self._states.load(terms)

    def save_pipeline_state(self, path: str | Path) -> None:
        """Write `state_dict` to a file, for a client that cannot save it with its checkpoints.

        Raises:
            CheckpointError: the file cannot be written.
        """
        write_states(path, self.state_dict())

    def load_pipeline_state(self, path: str | Path) -> None:
        """Restore the file that `save_pipeline_state` wrote.

        Raises:
            CheckpointError: the file cannot be read, or is not JSON.
            StateError: it is not what `state_dict` returns.
        """
        self.load_state_dict(read_states(path))

    def _is_traced(
        self, loss_fn: Any, regularizers: Iterable[Any], temperature: float | None
    ) -> bool:
        """Report whether the loss is one that `create_custom_loss` has traced.

        Raises:
            SpecError: it is, and there are regularizers, or a temperature other than 1.
        """
        traced = hasattr(loss_fn, "graph") and hasattr(loss_fn, "loss_id")
        if traced and regularizers:
            raise SpecError(
                f"a traced loss runs as a whole, by itself, and cannot have regularizers beside "
                f"it: pass the plain function instead of the handle {loss_fn.name!r}."
            )
        temperature = self._settings.temperature if temperature is None else temperature
        if traced and temperature != 1:
            raise SpecError(
                f"temperature must be 1 for a traced loss, got {temperature!r}: pass the plain "
                f"function instead of the handle {loss_fn.name!r}."
            )
        return traced

    def _own_config(
        self, loss_fn_config: Mapping[str, float | str] | None
    ) -> tuple[Mapping[str, float | str], ...]:
        """The argument `loss_fn_config` of a call without terms, as given if there is one."""
        temperature = self._settings.temperature
        if temperature == 1 or TEMPERATURE in (loss_fn_config or {}):
            return () if loss_fn_config is None else (loss_fn_config,)
        self.check_temperature(temperature)
        return ({**(loss_fn_config or {}), TEMPERATURE: temperature},)

    def _begin_measuring(self) -> None:
        self._measuring, self._measurable = self._measurable, None
        if self._measuring is not None:
            self._measuring.begin(self.client)

    def _custom(
        self,
        data: Sequence[Any],
        loss_fn: Any,
        regularizers: Sequence[TermLike],
        step: int | None,
        share: Mapping[str, float] | None,
        asked: CallSettings,
    ) -> Steps[Any]:
        """Steps of `forward_backward_custom` and of its async form."""
        traced = self._is_traced(
            loss_fn, [*self.regularizers, *regularizers], asked.get("temperature")
        )
        if traced:
            client = self.client
            return (
                yield Action(
                    lambda: client.forward_backward_custom(data, loss_fn),
                    lambda: client.forward_backward_custom_async(data, loss_fn),
                )
            )
        step = self.optim_steps if step is None else step
        if (type(step) is not int and not is_whole(step, at_least=0)) or step < 0:
            raise InputError(f"step must be a whole number >= 0, got {step!r}.")
        pipeline, settings = self._update_pipeline(loss_fn, regularizers, asked)
        self.last_data = pipeline.join(data, step)
        call = _CustomCall(self.client, pipeline, settings, self.last_data, step, share)
        yield Action(lambda: self.check_temperature(settings.temperature))
        if not call.has_open_pass:
            again = call.in_two_passes(lambda: self.optim_steps)
            future = yield from self._one_pass.submit(
                pipeline, call.data, step, again, call.why_two_passes(), settings.temperature
            )
            if future is not None:
                self._measurable = None
                return future
        forward, inputs = yield Action(call.open_pass)
        output = yield Action(
            lambda: pipeline.compute(call.data, forward.logprobs, step, **inputs),
            lambda: pipeline.acompute(call.data, forward.logprobs, step, **inputs),
        )
        self._measurable = call.measurement(forward, output)
        return call.submit_backward(forward, output)

    def _update_pipeline(
        self, loss_fn: Any, regularizers: Iterable[TermLike], asked: CallSettings
    ) -> tuple[Pipeline, ClientSettings]:
        """The pipeline of a call, the last one if nothing changed; and its settings."""
        if isinstance(loss_fn, ComposedLoss):
            loss_fn, regularizers = split_loss(loss_fn, regularizers)
        given = [
            like if isinstance(like, RegularizerSpec) else self._built_terms.spec_of(like)
            for like in regularizers
        ]
        last = pipeline, last_settings, _ = self._last
        specs = [*_standing(*last), *given]
        changes: Any = {key: value for key, value in asked.items() if value is not None}
        settings = replace(self._settings, **changes) if changes else self._settings
        if isinstance(loss_fn, NamedBaseLoss) and loss_fn == pipeline.loss_fn:
            loss_fn = pipeline.loss_fn
        if settings != last_settings or not _same(
            [loss_fn, *specs], [pipeline.loss_fn, *pipeline.specs]
        ):
            pipeline = self._build(loss_fn, specs, settings, after=pipeline)
        if not _same([loss_fn, *specs], self._with_state):  # `pipeline.add` may have brought one
            self._states.add_all(pipeline.stateful)
            self._with_state = [loss_fn, *specs]
        self._last = pipeline, settings, frozenset(spec.name for spec in given)
        return pipeline, settings

    def _build(
        self,
        loss_fn: Any,
        specs: Sequence[RegularizerSpec],
        settings: ClientSettings,
        after: Pipeline | None,
    ) -> Pipeline:
        gives = getattr(self.client, "gives", ())
        if settings.grad_space == "parameters" and "parameters" not in gives:
            raise SpecError(
                f"grad_space='parameters' needs a client that runs the model in this process, and "
                f"{type(self.client).__name__} does not: train on steelyard.engine, or use "
                f"measure_progress, which measures what each step did to each term."
            )
        pipeline = Pipeline.of(loss_fn, specs, settings, gives=gives, after=after)
        pipeline.model_id = getattr(self.client, "model_id", None)
        return pipeline


def _standing(
    pipeline: Pipeline, _: ClientSettings, given: frozenset[str]
) -> tuple[RegularizerSpec, ...]:
    """Specs of the terms of a pipeline, without those that its call added."""
    return tuple(spec for spec in pipeline.specs if spec.name not in given)


def _same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))


def _named_base(
    data: Sequence[Any], loss_fn: Any, loss_fn_config: Mapping[str, float | str] | None
) -> tuple[NamedBaseLoss, float | None]:
    """The base loss of that name, once the data have the fields that it reads.

    Also the temperature of the policy, if the settings have one.

    Raises:
        SpecError: it has no definition here.
        InputError: the settings or the data break a rule.
    """
    if loss_fn not in loss_names():
        raise SpecError(
            f"loss_fn must be one of {', '.join(loss_names())} for a client with regularizers, got "
            f"{loss_fn!r}, which has no definition here: use client.client, which has no "
            f"regularizers, or forward_backward_custom with a function."
        )
    temperature, settings = split_temperature(loss_fn_config)
    base = NamedBaseLoss.of(loss_fn, settings)
    base.check(data)
    return base, temperature if TEMPERATURE in (loss_fn_config or {}) else None


def _check_input_type(loss_type_input: str | None) -> None:
    if loss_type_input not in (None, "logprobs"):
        raise InputError(f"loss_type_input must be 'logprobs' or None, got {loss_type_input!r}.")


@dataclass(frozen=True)
class _CustomCall:
    """A call of a custom loss.

    Attributes:
        client: the wrapped client.
        pipeline: the base loss and the terms.
        settings: of the terms.
        data: the batch; or a `JoinedData` if terms have data of their own.
        step: the number of the step.
        share: the part of the optimizer step's batch that this call has, by term.
    """

    client: Any
    pipeline: Pipeline
    settings: ClientSettings
    data: Any
    step: int
    share: Mapping[str, float] | None

    @property
    def has_open_pass(self) -> bool:
        """Whether the client keeps the graph of a forward pass for the backward pass."""
        return hasattr(self.client, "open_pass")

    def why_two_passes(self) -> str | None:
        """Reason for which a server cannot run the call in one pass, whatever its terms."""
        if self.settings.grad_space != "logprobs":
            return f"gradients are compared with respect to the {self.settings.grad_space}"
        if self._is_measured:
            return "measure_progress needs the log-probs before the optimizer step is submitted"
        if self.share:
            return "the share of an accumulated mean changes from call to call"
        return None

    def in_two_passes(self, optim_steps: Callable[[], int]) -> TwoPassCall:
        """The call in two passes, for a request in one that fails.

        Args:
            optim_steps: gives the number of optimizer steps so far.
        """

        def evaluate() -> tuple[ClientPass, CustomLossOutput]:
            forward, inputs = self.open_pass()
            return forward, self.pipeline.compute(self.data, forward.logprobs, self.step, **inputs)

        return TwoPassCall(
            evaluate,
            lambda evaluated: self.submit_backward(*evaluated),
            optim_steps,
            partial(_with_client_fields, batch_of(self.data), self.pipeline.loss_fn),
        )

    def open_pass(self) -> tuple[ClientPass, dict[str, Any]]:
        """The forward pass, and what `Pipeline.compute` takes of it beside the log-probs."""
        forward, parameter_gradients = self._open_pass()
        return forward, {
            "given": forward.given,
            "parameter_gradients": parameter_gradients,
            "share": self.share,
        }

    def _open_pass(self) -> tuple[ClientPass, ParameterGradients | None]:
        """The forward pass, and its `parameter_gradients` if gradients are compared there."""
        data = self.data.data if isinstance(self.data, JoinedData) else self.data
        if not self.has_open_pass:
            return TwoPasses(self.client, data, self.settings.temperature), None
        needs = self.pipeline.needs(self.step, self.data)
        at: dict[str, Any] = at_temperature(self.settings.temperature)
        if not set(REFERENCE_INPUTS).isdisjoint(needs):
            at["reference_of"] = self._reads_reference()
        compares = self.settings.compares_gradients(self.step)
        if self.settings.grad_space == "logprobs" or not compares:
            return self.client.open_pass(data, needs, **at), None
        needs = tuple(dict.fromkeys((*needs, "parameters")))
        forward = self.client.open_pass(data, needs, per_term=True, **at)
        return forward, forward.parameter_gradients

    def _reads_reference(self) -> list[int]:
        """Indices of the data for which a term reads what the base model computes."""
        due = self.pipeline.due(self.step, self.data)
        return reads_reference([term.spec for term in due], self.data)

    def measurement(self, forward: ClientPass, output: CustomLossOutput) -> StepProgress | None:
        """Measurement of the optimizer step that follows; None if it is not to be measured."""
        if not self._is_measured:
            return None
        specs = [term.spec for term in self.pipeline.due(self.step, self.data)]
        return StepProgress(self.data, forward.logprobs, specs, output, self.settings)

    def submit_backward(
        self,
        forward: Any,  # a ClientPass; only the engine's takes a total
        output: CustomLossOutput,
    ) -> Any:
        """Submit the backward pass; its future has the output with the client's own fields."""
        output = replace(output, passes=1 if self.has_open_pass else 2)
        extra = output.extra_gradients
        # Compared with respect to the parameters, the gradient is whole: no pass is left to run.
        whole = {"total": extra.get("parameters")} if output.grad_space == "parameters" else {}
        data, loss_fn = batch_of(self.data), self.pipeline.loss_fn
        return forward.backward(
            output.gradients,
            extra,
            lambda result: _with_client_fields(data, loss_fn, output, result, forward.logprobs),
            **whole,
        )

    @property
    def _is_measured(self) -> bool:
        every = self.settings.measure_progress
        return bool(every) and self.step % every == 0


def _with_client_fields(
    data: Sequence[Any],
    loss_fn: Any,
    output: CustomLossOutput,
    result: Any,
    logprobs: Sequence[Tensor] | None,
) -> CustomLossOutput:
    """The output with the fields of the client's own, for the batch."""
    metrics, outputs = dict(result.metrics), result.loss_fn_outputs[: len(data)]
    # The server's loss is a linear one with the same gradient; see `TwoPasses`.
    if "loss:sum" in metrics:
        metrics.setdefault("surrogate_loss:sum", metrics["loss:sum"])
    metrics["loss:sum"] = output.loss_total
    if isinstance(loss_fn, NamedBaseLoss) and logprobs is not None:
        losses = loss_fn.elementwise(data, list(logprobs[: len(data)]))
        outputs = _with_losses(outputs, losses)
    return replace(
        output,
        loss_fn_outputs=outputs,
        loss_fn_output_type=result.loss_fn_output_type,
        server_metrics=metrics,
    )


def _with_losses(outputs: Sequence[Any], losses: Sequence[Tensor]) -> list[Any]:
    """Outputs in which the loss of each token is the base loss's, not that of the linear loss."""
    return [
        {**output, _LOSS: tensor_like(output[_LOSS], values)} if _LOSS in output else output
        for output, values in zip(outputs, losses, strict=True)
    ]
