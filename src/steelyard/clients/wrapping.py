"""`regularize`: add named regularizers to the losses of any training client."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import Any

from steelyard.clients.client_settings import ClientSettings, GradSpace
from steelyard.clients.one_pass.one_pass import OnePass, ServerSide
from steelyard.clients.regularized import RegularizedClient
from steelyard.clients.term_states import TermLike
from steelyard.composition.weightings import AggregatorLike
from steelyard.errors import InputError, SpecError
from steelyard.execution.workers import Workers
from steelyard.spec.protocol import listed


def regularize(
    client: Any,  # tinker's, the engine's, or anybody's
    regularizers: Iterable[TermLike] = (),
    track_grad_norms: bool = False,
    parallel: bool = True,
    timeout: float = 30.0,
    *,
    max_concurrency: int | None = None,
    check_finite: bool = True,
    workers: Workers | None = None,
    aggregate: AggregatorLike = "sum",
    grad_space: GradSpace = "logprobs",
    track_every: int = 1,
    seed: int | None = None,
    measure_progress: int = 0,
    temperature: float = 1.0,
    service: Any = None,
    server_side: ServerSide = "auto",
) -> RegularizedClient:
    """Wrap a training client so that its losses take regularizers.

    Regularizers given here stay: they count in every call of `forward_backward` and
    `forward_backward_custom`, and of their async forms. A custom loss takes more for one call.

    Args:
        client: `tinker.TrainingClient`, `LocalTrainingClient`, or anything with `forward` and
            `forward_backward` as the SDK has them.
        regularizers: the terms that stay; specs, or mappings with their fields.
        track_grad_norms: also compute each term's gradient norm and all cosines, unless a call
            says otherwise.
        parallel: let terms overlap, unless a call says otherwise.
        timeout: seconds each term may take, unless its spec or a call says otherwise.
        max_concurrency: as in `Pipeline`.
        check_finite: treat a NaN or infinite value or gradient as a failure of its term.
        workers: the threads and processes that run terms; None: those that all pipelines of the
            process share.
        aggregate: as in `Pipeline`.
        grad_space: what gradient norms and cosines are with respect to: the log-probs, or the
            parameters that are trained. The latter takes one backward pass for each term at each
            step that is tracked, and a client that runs the model in this process.
        track_every: compute norms and cosines at steps that this divides.
        seed: of the random numbers that terms draw, as in `Pipeline`.
        measure_progress: at steps that this divides, run the model forward once more after the
            optimizer step, on the same batch, to measure what the step did to each term; see
            `RegularizedClient.progress`. 0: never.
        temperature: of the policy: the temperature that the data were sampled at. Log-probs, and
            the ratios and terms of them, are those of softmax(logits / temperature). Other than 1,
            it needs the engine, `steelyard serve` or a server that does the same.
        service: the `ServiceClient` that made the client, to upload losses through; None: through
            the client itself, if it is one of the SDK.
        server_side: `"auto"` lets the server run base and terms as one uploaded loss, in one pass,
            where it can and every term can; `True` insists on it; `False` never does.

    Raises:
        InputError: the client lacks a method.
        SpecError: a spec or a setting breaks a rule, a term needs an input that the client does not
            provide, or the client is wrapped already, and there are terms or settings.

    Example:
        >>> from tinker import types
        >>> from steelyard import RegularizerSpec, regularize
        >>> from steelyard.engine import LocalServiceClient
        >>> training = LocalServiceClient().create_lora_training_client("tiny-random", seed=0)
        >>> def confidence(data, logprobs):
        ...     return sum(row.exp().sum() for row in logprobs)
        >>> penalty = RegularizerSpec(confidence, weight=0.1, name="confidence")
        >>> client = regularize(training, [penalty])
        >>> datum = types.Datum(
        ...     model_input=types.ModelInput.from_ints([1, 2, 3]),
        ...     loss_fn_inputs={"target_tokens": [2, 3, 4]},
        ... )
        >>> output = client.forward_backward([datum], "cross_entropy").result()
        >>> round(output.regularizer_total / output.regularizers["confidence"].value, 6)
        0.1
        >>> def nll(data, logprobs):
        ...     return -sum(row.sum() for row in logprobs), {"tokens": 3.0}
        >>> custom = client.forward_backward_custom([datum], nll).result()
        >>> round(custom.loss_total / output.loss_total, 6)
        1.0
        >>> sorted(output.server_metrics)
        ['loss:sum', 'surrogate_loss:sum']
    """
    arguments = dict(locals())
    standing = list(regularizers)
    if isinstance(client, RegularizedClient):
        defaults = {
            name: parameter.default for name, parameter in signature(regularize).parameters.items()
        }
        given = {**arguments, "client": defaults["client"], "regularizers": tuple(standing)}
        changed = [name for name, value in given.items() if value != defaults[name]]
        if changed:
            raise SpecError(
                f"client must be a plain client if there are regularizers or settings, got a "
                f"wrapped one and {listed(changed)}: give them all in one call of regularize."
            )
        return client
    missing = [name for name in ("forward", "forward_backward") if not hasattr(client, name)]
    if missing:
        raise InputError(
            f"client must have the methods forward and forward_backward, and "
            f"{type(client).__name__} has no {' and no '.join(missing)}."
        )
    settings = ClientSettings(
        track_grad_norms,
        parallel,
        timeout,
        max_concurrency,
        check_finite,
        workers,
        aggregate,
        track_every,
        seed,
        grad_space,
        measure_progress,
        temperature,
    )
    return RegularizedClient(client, standing, settings, OnePass(client, service, server_side))
