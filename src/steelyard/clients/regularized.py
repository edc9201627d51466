"""`regularize`: add named regularizers to the custom loss of any training client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from steelyard.clients import state_io
from steelyard.clients.client_pass import ClientPass, TwoPasses
from steelyard.composition import Pipeline
from steelyard.errors import InputError, SpecError, StateError
from steelyard.execution import Workers
from steelyard.output import CustomLossOutput
from steelyard.spec import BASE, Regularizer, RegularizerSpec, Stateful, TermFn, is_whole

# The name under which a client that can `attach` saves our state with its own checkpoints.
_ATTACHED_AS = "steelyard"


def regularize(
    client: Any,  # tinker's, the engine's, or anybody's
    *,
    max_concurrency: int | None = None,
    check_finite: bool = True,
    workers: Workers | None = None,
) -> RegularizedClient:
    """Wrap a training client so that its `forward_backward_custom` takes regularizers.

    Args:
        client: `tinker.TrainingClient`, `LocalTrainingClient`, or anything with `forward` and
            `forward_backward` as the SDK has them.
        max_concurrency: as in `Pipeline`.
        check_finite: treat a NaN or infinite value or gradient as a failure of its term.
        workers: the threads and processes that run terms; None: those that all pipelines of the
            process share.

    Raises:
        InputError: the client lacks a method.

    Example:
        >>> from tinker import types
        >>> from steelyard import RegularizerSpec, regularize
        >>> from steelyard.engine import LocalServiceClient
        >>> training = LocalServiceClient().create_lora_training_client("tiny-random", seed=0)
        >>> client = regularize(training)
        >>> datum = types.Datum(
        ...     model_input=types.ModelInput.from_ints([1, 2, 3]),
        ...     loss_fn_inputs={"target_tokens": [2, 3, 4]},
        ... )
        >>> def nll(data, logprobs):
        ...     return -sum(row.sum() for row in logprobs), {"tokens": 3.0}
        >>> def confidence(data, logprobs):
        ...     return sum(row.exp().sum() for row in logprobs)
        >>> penalty = RegularizerSpec(confidence, weight=0.1, name="confidence")
        >>> output = client.forward_backward_custom([datum], nll, regularizers=[penalty]).result()
        >>> round(output.regularizer_total / output.regularizers["confidence"].value, 6)
        0.1
        >>> sorted(output.server_metrics)
        ['loss:sum', 'surrogate_loss:sum']
    """
    if isinstance(client, RegularizedClient):
        return client
    missing = [name for name in ("forward", "forward_backward") if not hasattr(client, name)]
    if missing:
        raise InputError(
            f"client must have the methods forward and forward_backward, and "
            f"{type(client).__name__} has no {' and no '.join(missing)}."
        )
    return RegularizedClient(client, max_concurrency, check_finite, workers)


class RegularizedClient:
    """A training client with a pipeline of regularizers.

    Every attribute that it does not define is the wrapped client's. Terms never run on the SDK's
    event loop: they run in the caller's thread and where their specs say, so a term may block, or
    call the client.

    Attributes:
        client: the wrapped client.
        pipeline: the terms of the last call; None before the first.
        optim_steps: the number of optimizer steps made through this client: the step that
            schedules and `every` follow.
    """

    def __init__(
        self,
        client: Any,
        max_concurrency: int | None,
        check_finite: bool,
        workers: Workers | None,
    ) -> None:
        self.client = client
        self.pipeline: Pipeline | None = None
        self.optim_steps = 0
        self._client_settings = (max_concurrency, check_finite, workers)
        self._call_settings: tuple[bool, bool, float] | None = None  # of the last call
        self._stateful_terms: dict[str, Stateful] = {}
        # Loaded states, encoded, of terms that no call has mentioned since.
        self._pending_states: dict[str, Any] = {}
        # Terms built from registry names: {term: (registry name, options, function)}.
        self._built_terms: dict[str, tuple[object, object, Any]] = {}
        if hasattr(client, "attach"):
            client.attach(_ATTACHED_AS, self)

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` look up attributes before `client` is set: without this the line
        # below would recurse for ever.
        if name == "client":
            raise AttributeError(name)
        return getattr(self.client, name)

    def forward_backward_custom(
        self,
        data: Sequence[Any],
        loss_fn: TermFn | Regularizer | Any,
        regularizers: Iterable[RegularizerSpec | Mapping[str, Any]] = (),
        track_grad_norms: bool = False,
        parallel: bool = True,
        timeout: float = 30.0,
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
            regularizers: specs, or mappings with their fields.
            track_grad_norms: also compute each term's gradient norm and all cosines.
            parallel: let terms overlap.
            timeout: seconds each term may take, unless its spec says otherwise.
            step: the number of this step; None: `optim_steps`.
            loss_type_input: the SDK's; it has one value.

        Returns:
            A future of a `CustomLossOutput`; of the client's own output for a traced loss.

        Raises:
            SpecError: a spec breaks a rule, or needs an input that this client does not provide.
            InputError: the data break a rule.
            TermError: the base loss failed, or a term whose `on_error` is `"raise"`.
        """
        if _is_traced(loss_fn, regularizers):
            return self.client.forward_backward_custom(data, loss_fn)
        _check_input_type(loss_type_input)
        pipeline = self._update_pipeline(loss_fn, regularizers, track_grad_norms, parallel, timeout)
        step = self.optim_steps if step is None else step
        forward = self._open_pass(data, pipeline.needs(step))
        output = pipeline.compute(data, forward.logprobs, step, given=forward.given)
        return _submit_backward(forward, output)

    async def forward_backward_custom_async(
        self,
        data: Sequence[Any],
        loss_fn: TermFn | Regularizer | Any,
        regularizers: Iterable[RegularizerSpec | Mapping[str, Any]] = (),
        track_grad_norms: bool = False,
        parallel: bool = True,
        timeout: float = 30.0,  # noqa: ASYNC109 - it is each term's, not this coroutine's
        *,
        step: int | None = None,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> Any:
        """Do the same as `forward_backward_custom`, without blocking the event loop.

        If the caller is cancelled before the backward pass is submitted, none is.
        """
        if _is_traced(loss_fn, regularizers):
            return await self.client.forward_backward_custom_async(data, loss_fn)
        _check_input_type(loss_type_input)
        pipeline = self._update_pipeline(loss_fn, regularizers, track_grad_norms, parallel, timeout)
        step = self.optim_steps if step is None else step
        forward = await asyncio.to_thread(self._open_pass, data, pipeline.needs(step))
        output = await pipeline.acompute(data, forward.logprobs, step, given=forward.given)
        return _submit_backward(forward, output)

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
        terms = {
            name: state_io.encode(name, term.state_dict())
            for name, term in self._stateful_terms.items()
        }
        return {"optim_steps": self.optim_steps, "terms": {**self._pending_states, **terms}}

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
        self._pending_states = dict(terms)
        for name, term in self._stateful_terms.items():
            self._restore(name, term)

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
        if hasattr(self.client, "open_pass"):  # it keeps the graph for the backward pass
            forward: ClientPass = self.client.open_pass(data, needs)
            return forward
        return TwoPasses(self.client, data)

    def _update_pipeline(
        self,
        loss_fn: Any,
        regularizers: Iterable[RegularizerSpec | Mapping[str, Any]],
        track_grad_norms: bool,
        parallel: bool,
        timeout: float,
    ) -> Pipeline:
        """The pipeline of this call: the last one if nothing changed, else its successor."""
        specs = [self._to_spec(regularizer) for regularizer in regularizers]
        settings = (track_grad_norms, parallel, timeout)
        last = self.pipeline
        if (
            last is not None
            and self._call_settings == settings
            and _same_terms(last, loss_fn, specs)
        ):
            return last
        self._call_settings = settings
        pipeline = Pipeline(
            loss_fn,
            specs,
            *settings,
            *self._client_settings,
            gives=getattr(self.client, "gives", ()),
            after=last,
        )
        pipeline.model_id = getattr(self.client, "model_id", None)
        for name, term in [(BASE, loss_fn), *((spec.name, spec.fn) for spec in pipeline.specs)]:
            if isinstance(term, Stateful) and self._stateful_terms.get(name) is not term:
                self._restore(name, term)
                self._stateful_terms[name] = term
        self.pipeline = pipeline
        return pipeline

    def _to_spec(self, regularizer: RegularizerSpec | Mapping[str, Any]) -> RegularizerSpec:
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

    def _restore(self, name: str, term: Stateful) -> None:
        if name in self._pending_states:
            state = state_io.decode(name, self._pending_states[name])
            try:
                term.load_state_dict(state)
            except StateError:
                raise
            except Exception as error:  # a term is anyone's, and a damaged state may be anything
                raise StateError(
                    f"the state of {name!r} must be what its state_dict returned, and loading it "
                    f"failed: {type(error).__name__}: {error}"
                ) from error
            # Only here: a term whose state did not load must not run without it in the next call.
            del self._pending_states[name]


def _same_terms(pipeline: Pipeline, loss_fn: Any, specs: Sequence[RegularizerSpec]) -> bool:
    wanted = [loss_fn, *specs]
    current = [pipeline.loss_fn, *pipeline.specs]
    return len(wanted) == len(current) and all(a is b for a, b in zip(wanted, current, strict=True))


def _submit_backward(forward: ClientPass, output: CustomLossOutput) -> Any:
    def with_client_fields(result: Any) -> CustomLossOutput:
        metrics = dict(result.metrics)
        # The server's loss is the linear one whose gradient was sent; see `TwoPasses`.
        if "loss:sum" in metrics:
            metrics["surrogate_loss:sum"] = metrics["loss:sum"]
        metrics["loss:sum"] = output.loss_total
        return replace(
            output,
            loss_fn_outputs=result.loss_fn_outputs,
            loss_fn_output_type=result.loss_fn_output_type,
            server_metrics=metrics,
        )

    return forward.backward(output.gradients, output.extra_gradients, with_client_fields)


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
