"""`regularize`: any training client, with named regularizers in its custom loss."""

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

_COMPANION = "steelyard"


def regularize(
    client: Any,  # tinker's, the engine's, or anybody's
    *,
    max_concurrency: int | None = None,
    check_finite: bool = True,
    workers: Workers | None = None,
) -> RegularizedClient:
    """A training client whose `forward_backward_custom` takes regularizers.

    Args:
        client: `tinker.TrainingClient`, `LocalTrainingClient`, or anything with `forward` and
            `forward_backward` as the SDK has them.
        max_concurrency: see `Pipeline`; so the next two.
        check_finite: treat a NaN or infinite value or gradient as a failure of its term.
        workers: what terms run on; None is what all pipelines of the process share.

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
    """A training client and a pipeline; what it does not define goes to the client untouched.

    Terms never run on the SDK's event loop: they run in the caller's thread and where their
    specs say, so a term may block, or call the client.

    Attributes:
        client: the client underneath.
        pipeline: the terms of the last call, and what is known of them; None before the first.
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
        self._settings = (max_concurrency, check_finite, workers)
        self._asked: tuple[bool, bool, float] | None = None
        self._stateful: dict[str, Stateful] = {}
        self._waiting: dict[str, Any] = {}
        self._named: dict[str, tuple[object, object, Any]] = {}
        if hasattr(client, "attach"):
            client.attach(_COMPANION, self)

    def __getattr__(self, name: str) -> Any:
        if name == "client":  # not there yet: copied, or half made
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

        Returns once the backward pass is submitted, so that an `optim_step` made right after
        lands after it. If a term fails and may not, nothing is submitted.

        Args:
            data: the SDK's. Fields beside `target_tokens` reach the terms and are not sent.
            loss_fn: the base loss, as the SDK takes it, or a traced loss.
            regularizers: specs, or mappings with their fields.
            track_grad_norms: also compute each term's gradient norm and all cosines.
            parallel: let terms overlap.
            timeout: seconds each term may take, unless its spec says otherwise.
            step: the number of this step; None is `optim_steps`.
            loss_type_input: the SDK's; it has one value.

        Returns:
            A future of a `CustomLossOutput`; of the client's own output for a traced loss.

        Raises:
            SpecError: a spec breaks a rule, or needs what this client does not give.
            InputError: the data break a rule.
            TermError: the base loss failed, or a term whose `on_error` is `"raise"`.
        """
        if _is_traced(loss_fn, regularizers):
            return self.client.forward_backward_custom(data, loss_fn)
        _check_input_type(loss_type_input)
        pipeline = self._renewed(loss_fn, regularizers, track_grad_norms, parallel, timeout)
        due = self.optim_steps if step is None else step
        opened = self._open_pass(data, pipeline.needs(due))
        output = pipeline.compute(data, opened.logprobs, due, given=opened.given)
        return _submitted(opened, output)

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
        """As `forward_backward_custom`, without blocking the event loop.

        If the caller is cancelled before the backward pass is submitted, it is not.
        """
        if _is_traced(loss_fn, regularizers):
            return await self.client.forward_backward_custom_async(data, loss_fn)
        _check_input_type(loss_type_input)
        pipeline = self._renewed(loss_fn, regularizers, track_grad_norms, parallel, timeout)
        due = self.optim_steps if step is None else step
        opened = await asyncio.to_thread(self._open_pass, data, pipeline.needs(due))
        output = await pipeline.acompute(data, opened.logprobs, due, given=opened.given)
        return _submitted(opened, output)

    def optim_step(self, *args: Any, **kwargs: Any) -> Any:
        """The client's own; counted."""
        future = self.client.optim_step(*args, **kwargs)
        self.optim_steps += 1
        return future

    async def optim_step_async(self, *args: Any, **kwargs: Any) -> Any:
        """The client's own; counted."""
        future = await self.client.optim_step_async(*args, **kwargs)
        self.optim_steps += 1
        return future

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, and what the terms remember; ready for JSON.

        Raises:
            StateError: a term remembers something that JSON cannot hold.
        """
        terms = {name: state_io.encode(name, t.state_dict()) for name, t in self._stateful.items()}
        return {"optim_steps": self.optim_steps, "terms": {**self._waiting, **terms}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; a term that comes later has its state then.

        Raises:
            StateError: it is something else.
        """
        terms, steps = state.get("terms"), state.get("optim_steps")
        if not isinstance(terms, Mapping) or not is_whole(steps, at_least=0):
            raise StateError(
                f"state must hold 'optim_steps' and 'terms', as state_dict gives them, "
                f"got {dict(state)!r}."
            )
        self.optim_steps = int(steps)  # type: ignore[arg-type]  # whole
        self._waiting = dict(terms)
        for name, term in self._stateful.items():
            self._restore(name, term)

    def save_pipeline_state(self, path: str | Path) -> None:
        """Write `state_dict` to a file, for a client that cannot keep it with its own state.

        Raises:
            CheckpointError: the disk refuses.
        """
        state_io.write(path, self.state_dict())

    def load_pipeline_state(self, path: str | Path) -> None:
        """Take back what `save_pipeline_state` wrote.

        Raises:
            CheckpointError: it is not there, or is something else.
        """
        self.load_state_dict(state_io.read(path))

    def _open_pass(self, data: Sequence[Any], needs: Sequence[str]) -> ClientPass:
        """A forward pass of the client: one that it keeps open, or the first of two."""
        if hasattr(self.client, "open_pass"):
            opened: ClientPass = self.client.open_pass(data, needs)
            return opened
        return TwoPasses(self.client, data)

    def _renewed(
        self,
        loss_fn: Any,
        regularizers: Iterable[RegularizerSpec | Mapping[str, Any]],
        track_grad_norms: bool,
        parallel: bool,
        timeout: float,
    ) -> Pipeline:
        specs = [self._spec(given) for given in regularizers]
        settings = (track_grad_norms, parallel, timeout)
        last = self.pipeline
        if last is not None and self._asked == settings and _holds(last, loss_fn, specs):
            return last
        self._asked = settings
        pipeline = Pipeline(
            loss_fn,
            specs,
            *settings,
            *self._settings,
            gives=getattr(self.client, "gives", ()),
            after=last,
        )
        pipeline.model_id = getattr(self.client, "model_id", None)
        for name, term in [(BASE, loss_fn), *((spec.name, spec.fn) for spec in pipeline.specs)]:
            if isinstance(term, Stateful) and self._stateful.get(name) is not term:
                self._stateful[name] = term
                self._restore(name, term)
        self.pipeline = pipeline
        return pipeline

    def _spec(self, given: RegularizerSpec | Mapping[str, Any]) -> RegularizerSpec:
        """The spec; a mapping that names its `fn` has the one that was made of it before."""
        if isinstance(given, RegularizerSpec):
            return given
        spec = RegularizerSpec.of(given)
        if not isinstance(given["fn"], str):
            return spec
        fn, options = given["fn"], given.get("options")
        known = self._named.get(spec.name)
        if known is not None and known[:2] == (fn, options):
            return replace(spec, fn=known[2])
        self._named[spec.name] = (fn, options, spec.fn)
        return spec

    def _restore(self, name: str, term: Stateful) -> None:
        if name in self._waiting:
            term.load_state_dict(state_io.decode(self._waiting.pop(name)))


def _holds(pipeline: Pipeline, loss_fn: Any, specs: Sequence[RegularizerSpec]) -> bool:
    """Whether a pipeline is made of exactly these things."""
    given = [loss_fn, *specs]
    there = [pipeline.loss_fn, *pipeline.specs]
    return len(given) == len(there) and all(a is b for a, b in zip(given, there, strict=True))


def _submitted(opened: ClientPass, output: CustomLossOutput) -> Any:
    def finished(given: Any) -> CustomLossOutput:
        """The output with every field of the client's."""
        metrics = dict(given.metrics)
        if "loss:sum" in metrics:
            metrics["surrogate_loss:sum"] = metrics["loss:sum"]
        metrics["loss:sum"] = output.loss_total
        return replace(
            output,
            loss_fn_outputs=given.loss_fn_outputs,
            loss_fn_output_type=given.loss_fn_output_type,
            server_metrics=metrics,
        )

    return opened.backward(output.gradients, output.beyond, finished)


def _is_traced(loss_fn: Any, regularizers: Iterable[Any]) -> bool:
    """Whether the loss is one that `create_custom_loss` has traced.

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
