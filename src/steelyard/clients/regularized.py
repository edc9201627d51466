"""`RegularizedClient`: a training client whose losses have named regularizers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from steelyard.clients import state_io
from steelyard.clients.client_pass import ClientPass, TwoPasses, tensor_like
from steelyard.clients.one_pass import Explanation, OnePass, TwoPassCall
from steelyard.clients.term_states import TermStates
from steelyard.composition import Aggregator, NamedBaseLoss, Pipeline, loss_names
from steelyard.errors import InputError, SpecError, StateError
from steelyard.execution import Workers
from steelyard.output import CustomLossOutput
from steelyard.spec import Regularizer, RegularizerSpec, TermFn, is_whole

# The name under which a client that can `attach` saves our state with its own checkpoints.
_ATTACHED_AS = "steelyard"
_LOSS = "elementwise_loss"  # of each token, among the outputs of a datum

TermLike = RegularizerSpec | Mapping[str, Any]


@dataclass(frozen=True)
class TermSettings:
    """Settings of a pipeline, in the order of its arguments."""

    track_grad_norms: bool
    parallel: bool
    timeout: float
    max_concurrency: int | None
    check_finite: bool
    workers: Workers | None
    aggregate: str | Aggregator


class RegularizedClient:
    """A training client with a pipeline of regularizers.

    Every attribute that it does not define is the wrapped client's. Terms never run on the SDK's
    event loop: they run in the caller's thread and where their specs say, so a term may block, or
    call the client.

    Attributes:
        client: the wrapped client.
        optim_steps: the number of optimizer steps made through this client: the step that
            schedules and `every` follow.
    """

    def __init__(
        self,
        client: Any,
        regularizers: Iterable[TermLike],
        settings: TermSettings,
        one_pass: OnePass,
    ) -> None:
        self.client = client
        self._one_pass = one_pass
        # It keeps the graph of a forward pass, and needs no other way to one pass.
        self._has_open_pass = hasattr(client, "open_pass")
        self.optim_steps = 0
        self._settings = settings
        self._states = TermStates()
        # Terms built from registry names: {term: (registry name, options, function)}.
        self._built_terms: dict[str, tuple[object, object, Any]] = {}
        specs = [self._to_spec(regularizer) for regularizer in regularizers]
        # Any base loss does: each call brings its own.
        pipeline = self._build(NamedBaseLoss.of("cross_entropy"), specs, settings, after=None)
        # Of the last call: its pipeline, its settings, and the names of the terms that it added.
        # One attribute, because calls in several threads must see the three together.
        self._last: tuple[Pipeline, TermSettings, frozenset[str]] = pipeline, settings, frozenset()
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
        pipeline, _, given = self._last
        return tuple(spec for spec in pipeline.specs if spec.name not in given)

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
            loss_fn: `"cross_entropy"`, `"importance_sampling"`, `"ppo"`, `"cispo"` or `"dro"`;
                without terms any that the client knows.
            loss_fn_config: its settings.

        Returns:
            A future of a `CustomLossOutput`; of the client's own output without terms.

        Raises:
            SpecError: there are terms, and the loss is another one.
            InputError: the data or the settings break a rule.
            TermError: the base loss failed, or a term whose `on_error` is `"raise"`.
        """
        if not self.regularizers:
            config = () if loss_fn_config is None else (loss_fn_config,)
            return self.client.forward_backward(data, loss_fn, *config)
        return self.forward_backward_custom(data, _named_base(data, loss_fn, loss_fn_config))

    async def forward_backward_async(
        self,
        data: Sequence[Any],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Any:
        """Do the same as `forward_backward`, without blocking the event loop."""
        if not self.regularizers:
            config = () if loss_fn_config is None else (loss_fn_config,)
            return await self.client.forward_backward_async(data, loss_fn, *config)
        base = _named_base(data, loss_fn, loss_fn_config)
        return await self.forward_backward_custom_async(data, base)

    def forward_backward_custom(
        self,
        data: Sequence[Any],
        loss_fn: TermFn | Regularizer | Any,
        regularizers: Iterable[TermLike] = (),
        track_grad_norms: bool | None = None,
        parallel: bool | None = None,
        timeout: float | None = None,
        *,
        step: int | None = None,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> Any:
        """Compose the loss of a batch and submit its gradient.

        Returns once the backward pass is submitted, so that an `optim_step` called right after
        it runs after it. If a term with `on_error="raise"` fails, nothing is submitted.

        Args:
            data: the SDK's. Fields beside `target_tokens` reach the terms and are not sent.
            loss_fn: the base loss, as the SDK takes it, or a traced loss.
            regularizers: terms of this call, beside those that stay; specs, or mappings with their
                fields.
            track_grad_norms: also compute each term's gradient norm and all cosines; None, here and
                below: as `regularize` was told.
            parallel: let terms overlap.
            timeout: seconds each term may take, unless its spec says otherwise.
            step: the number of this step; None: `optim_steps`.
            loss_type_input: the SDK's; it has one value.

        Returns:
            A future of a `CustomLossOutput`; of the client's own output for a traced loss.

        Raises:
            SpecError: a spec breaks a rule, has the name of another, or needs an input that this
                client does not provide.
            InputError: the data break a rule.
            TermError: the base loss failed, or a term whose `on_error` is `"raise"`.
        """
        regularizers = list(regularizers)
        if _is_traced(loss_fn, [*self.regularizers, *regularizers]):
            return self.client.forward_backward_custom(data, loss_fn)
        _check_input_type(loss_type_input)
        pipeline = self._update_pipeline(loss_fn, regularizers, track_grad_norms, parallel, timeout)
        step = self.optim_steps if step is None else step
        if not self._has_open_pass:
            again = self._two_passes(pipeline, data, step)
            future = self._one_pass.submit(pipeline, data, step, again)
            if future is not None:
                return future
        forward = self._open_pass(data, pipeline.needs(step))
        output = pipeline.compute(data, forward.logprobs, step, given=forward.given)
        return self._submit_backward(forward, data, pipeline.loss_fn, output)

    async def forward_backward_custom_async(
        self,
        data: Sequence[Any],
        loss_fn: TermFn | Regularizer | Any,
        regularizers: Iterable[TermLike] = (),
        track_grad_norms: bool | None = None,
        parallel: bool | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - it is each term's, not this coroutine's
        *,
        step: int | None = None,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> Any:
        """Do the same as `forward_backward_custom`, without blocking the event loop.

        If the caller is cancelled before the backward pass is submitted, none is.
        """
        regularizers = list(regularizers)
        if _is_traced(loss_fn, [*self.regularizers, *regularizers]):
            return await self.client.forward_backward_custom_async(data, loss_fn)
        _check_input_type(loss_type_input)
        pipeline = self._update_pipeline(loss_fn, regularizers, track_grad_norms, parallel, timeout)
        step = self.optim_steps if step is None else step
        if not self._has_open_pass:
            again = self._two_passes(pipeline, data, step)
            future = await self._one_pass.submit_async(pipeline, data, step, again)
            if future is not None:
                return future
        forward = await asyncio.to_thread(self._open_pass, data, pipeline.needs(step))
        output = await pipeline.acompute(data, forward.logprobs, step, given=forward.given)
        return self._submit_backward(forward, data, pipeline.loss_fn, output)

    def explain(self) -> Explanation:
        """How the last call ran: in one pass or in two, and why, by term."""
        return Explanation(1) if self._has_open_pass else self._one_pass.explanation

    def optim_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the client's `optim_step`, and count it."""
        future = self.client.optim_step(*args, **kwargs)
        self.optim_steps += 1
        return future

    async def optim_step_async(self, *args: Any, **kwargs: Any) -> Any:
        """Call the client's `optim_step_async`, and count it."""
        future = await self.client.optim_step_async(*args, **kwargs)
        self.optim_steps += 1
        return future

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
        found = state if isinstance(state, Mapping) else {}
        terms, steps = found.get("terms"), found.get("optim_steps")
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
        state_io.write(path, self.state_dict())

    def load_pipeline_state(self, path: str | Path) -> None:
        """Restore the file that `save_pipeline_state` wrote.

        Raises:
            CheckpointError: the file cannot be read, or is not JSON.
            StateError: it is not what `state_dict` returns.
        """
        self.load_state_dict(state_io.read(path))

    def _open_pass(self, data: Sequence[Any], needs: Sequence[str]) -> ClientPass:
        if self._has_open_pass:
            forward: ClientPass = self.client.open_pass(data, needs)
            return forward
        return TwoPasses(self.client, data)

    def _two_passes(self, pipeline: Pipeline, data: Sequence[Any], step: int) -> TwoPassCall:
        """The call in two passes, for a request in one that fails."""

        def evaluate() -> tuple[ClientPass, CustomLossOutput]:
            forward = self._open_pass(data, pipeline.needs(step))
            return forward, pipeline.compute(data, forward.logprobs, step)

        return TwoPassCall(
            evaluate,
            lambda found: self._submit_backward(found[0], data, pipeline.loss_fn, found[1]),
            lambda: self.optim_steps,
            partial(_with_client_fields, data, pipeline.loss_fn),
        )

    def _submit_backward(
        self, forward: ClientPass, data: Sequence[Any], loss_fn: Any, output: CustomLossOutput
    ) -> Any:
        """Submit the backward pass; its future has the output with the client's own fields."""
        output = replace(output, passes=1 if self._has_open_pass else 2)
        return forward.backward(
            output.gradients,
            output.extra_gradients,
            lambda result: _with_client_fields(data, loss_fn, output, result, forward.logprobs),
        )

    def _update_pipeline(
        self,
        loss_fn: Any,
        regularizers: Iterable[TermLike],
        track_grad_norms: bool | None,
        parallel: bool | None,
        timeout: float | None,
    ) -> Pipeline:
        """The pipeline of this call: the last one if nothing changed, else its successor."""
        given = [self._to_spec(regularizer) for regularizer in regularizers]
        specs = [*self.regularizers, *given]
        asked = {"track_grad_norms": track_grad_norms, "parallel": parallel, "timeout": timeout}
        changes: Any = {key: value for key, value in asked.items() if value is not None}
        settings = replace(self._settings, **changes)
        pipeline, last_settings, _ = self._last
        if isinstance(loss_fn, NamedBaseLoss) and loss_fn == pipeline.loss_fn:
            loss_fn = pipeline.loss_fn
        if settings != last_settings or not _same_terms(pipeline, loss_fn, specs):
            pipeline = self._build(loss_fn, specs, settings, after=pipeline)
        self._last = pipeline, settings, frozenset(spec.name for spec in given)
        return pipeline

    def _build(
        self,
        loss_fn: Any,
        specs: Sequence[RegularizerSpec],
        settings: TermSettings,
        after: Pipeline | None,
    ) -> Pipeline:
        gives = getattr(self.client, "gives", ())
        values = [getattr(settings, field.name) for field in fields(settings)]
        pipeline = Pipeline(loss_fn, specs, *values, gives=gives, after=after)
        pipeline.model_id = getattr(self.client, "model_id", None)
        for name, term in pipeline.stateful.items():
            self._states.add(name, term)
        return pipeline

    def _to_spec(self, regularizer: TermLike) -> RegularizerSpec:
        """The spec of a regularizer.

        A mapping that gives its `fn` as a registry name, with the same options as in an earlier
        call, gets the object built then, so that a stateful term keeps its state from call to call.
        """
        if isinstance(regularizer, RegularizerSpec):
            return regularizer
        spec = RegularizerSpec.of(regularizer)
        if not isinstance(regularizer["fn"], str):
            return spec
        fn, options = regularizer["fn"], regularizer.get("options")
        built = self._built_terms.get(spec.name)
        if built is not None and built[:2] == (fn, options):
            return replace(spec, fn=built[2])
        self._built_terms[spec.name] = (fn, options, spec.fn)
        return spec


def _same_terms(pipeline: Pipeline, loss_fn: Any, specs: Sequence[RegularizerSpec]) -> bool:
    wanted = [loss_fn, *specs]
    current = [pipeline.loss_fn, *pipeline.specs]
    return len(wanted) == len(current) and all(a is b for a, b in zip(wanted, current, strict=True))


def _with_client_fields(
    data: Sequence[Any],
    loss_fn: Any,
    output: CustomLossOutput,
    result: Any,
    logprobs: Sequence[Tensor] | None,
) -> CustomLossOutput:
    """The output with the fields of the client's own."""
    metrics, outputs = dict(result.metrics), result.loss_fn_outputs
    # The server's loss is a linear one with the same gradient; see `TwoPasses`.
    if "loss:sum" in metrics:
        metrics.setdefault("surrogate_loss:sum", metrics["loss:sum"])
    metrics["loss:sum"] = output.loss_total
    if isinstance(loss_fn, NamedBaseLoss) and logprobs is not None:
        outputs = _with_losses(outputs, loss_fn.elementwise(data, list(logprobs)))
    return replace(
        output,
        loss_fn_outputs=outputs,
        loss_fn_output_type=result.loss_fn_output_type,
        server_metrics=metrics,
    )


def _with_losses(outputs: Sequence[Any], losses: Sequence[Tensor]) -> list[Any]:
    """Outputs in which the loss of each token is the base loss's, not that of the linear loss."""
    return [
        {**each, _LOSS: tensor_like(each[_LOSS], values)} if _LOSS in each else each
        for each, values in zip(outputs, losses, strict=True)
    ]


def _named_base(
    data: Sequence[Any], loss_fn: Any, loss_fn_config: Mapping[str, float | str] | None
) -> NamedBaseLoss:
    """The base loss of that name, once the data have the fields that it reads.

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
    base = NamedBaseLoss.of(loss_fn, loss_fn_config)
    base.check(data)
    return base


def _is_traced(loss_fn: Any, regularizers: Iterable[Any]) -> bool:
    """Report whether the loss is one that `create_custom_loss` has traced.

    Raises:
        SpecError: it is, and there are regularizers.
    """
    traced = hasattr(loss_fn, "graph") and hasattr(loss_fn, "loss_id")
    if traced and regularizers:
        raise SpecError(
            f"a traced loss runs as a whole, by itself, and cannot have regularizers beside it: "
            f"pass the plain function instead of the handle {loss_fn.name!r}."
        )
    return traced


def _check_input_type(loss_type_input: str | None) -> None:
    if loss_type_input not in (None, "logprobs"):
        raise InputError(f"loss_type_input must be 'logprobs' or None, got {loss_type_input!r}.")
