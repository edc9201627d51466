"""Join a base loss and its penalties to one function that JAX can differentiate and compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from steelyard.errors import InputError
from steelyard.integrations.jax.grad_norms import at_least_float32, gradient_norms
from steelyard.integrations.jax.penalty_inputs import PenaltyInputs, Tree, read_base
from steelyard.penalties import PenaltyPipeline
from steelyard.spec import listed


class LossFunction(Protocol):
    """Type of what `loss_with_penalties` returns; the arguments are the base's, hence `Any`."""

    def __call__(
        self, params: Tree, *args: Any, step: Any = None, **kwargs: Any
    ) -> tuple[jax.Array, dict[str, Any]]:
        """The total and the metrics."""


def loss_with_penalties(
    base: Callable[..., Any],
    pipeline: PenaltyPipeline,
    *,
    schedules: Mapping[str, Callable[[Any], Any]] | None = None,
    track_grad_norms: bool = False,
) -> LossFunction:
    """Join a base loss and penalties: `total = base + Σ weightᵢ · penaltyᵢ`.

    The result is a loss for `jax.value_and_grad(…, has_aux=True)`, inside `jax.jit` or not.

    Args:
        base: `base(params, *args, **kwargs)` returns a scalar loss; or `(loss, outputs)`, where
            `outputs`, an array or a dict of arrays, is available to penalties; or
            `(loss, outputs, aux)`, where `aux` is any tree and is returned as `metrics["aux"]`.
        pipeline: The penalties. Their `inputs` name outputs of the base, or parameters:
            `"params"` is all of them as one vector, `"params/dense/kernel"` one,
            `"params/dense"` those below it, `"params/*/kernel"` those that match or lie below one
            that does; leaves that are not floating-point are left out. A penalty
            without `inputs` reads the base's one output, or without any all parameters. Weights
            may be schedules: those of `steelyard.schedules` and of optax work on a traced step.
        schedules: Schedules in place of the pipeline's weights, `{name: step -> weight}`.
        track_grad_norms: Add the norms of the gradients with respect to the parameters. It
            costs one more backward pass for the base and for each term, run as one vmapped pass,
            and memory for as many copies of the parameters.

    Returns:
        A function of the base's arguments, and of `step=` for the schedules, that returns the
        total and the metrics, which are arrays: `base`, `name` (raw), `name_weighted`, `total`;
        if norms are tracked, also `base_grad_norm`, `name_grad_norm` (unweighted) and
        `total_grad_norm` (of the weighted total). A penalty with `differentiable=False` has no
        norm.

    Raises:
        InputError: An argument breaks its rule. While tracing: an input is missing, the base
            or a penalty returns no scalar, a schedule cannot be traced or lacks its `step`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from steelyard.penalties import PenaltyPipeline
        >>> def base(params, x, y):
        ...     hidden = jnp.tanh(x @ params["dense"]["kernel"])
        ...     return jnp.mean((hidden.sum(-1) - y) ** 2), {"hidden": hidden}
        >>> pipeline = PenaltyPipeline([
        ...     ("l2", {"weight": 0.5, "inputs": "params/*/kernel"}),
        ...     ("l1", {"weight": 0.1, "inputs": "hidden", "reduction": "mean"}),
        ... ])
        >>> loss = loss_with_penalties(base, pipeline)
        >>> params = {"dense": {"kernel": jnp.ones((3, 2))}}
        >>> x, y = jnp.zeros((4, 3)), jnp.ones(4)
        >>> (total, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        ...     params, x, y
        ... )
        >>> {name: float(value) for name, value in metrics.items()}  # jit sorts them
        {'base': 1.0, 'l1': 0.0, 'l1_weighted': 0.0, 'l2': 6.0, 'l2_weighted': 3.0, 'total': 4.0}
    """
    _check_pipeline(pipeline)
    if not callable(base):
        raise InputError(f"base must be a function of the parameters, got {base!r}.")
    if not isinstance(track_grad_norms, bool):
        raise InputError(f"track_grad_norms must be True or False, got {track_grad_norms!r}.")
    pipeline = _scheduled(pipeline, schedules or {})
    terms = pipeline.terms

    def values(params: Tree, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Tree]:
        loss, outputs, aux = read_base(base(params, *args, **kwargs))
        inputs = PenaltyInputs(params, outputs)
        by_name = {
            term.name: jnp.asarray(term.evaluate(inputs.read(term.name, term.inputs)))
            for term in terms
        }
        return {"base": loss, **by_name}, aux

    # `step` is taken from `kwargs`: nnx.grad refuses functions with keyword-only parameters.
    def loss(params: Tree, *args: Any, **kwargs: Any) -> tuple[jax.Array, dict[str, Any]]:
        weights = pipeline.weights(kwargs.pop("step", None))
        # Copied before the base changes the state of a module that holds some, as nnx's do.
        before = _stop_gradient((params, args, kwargs)) if track_grad_norms else None
        by_name, aux = values(params, *args, **kwargs)
        # Summed in float32, rounded to the base's dtype once at the end: in bfloat16 the sum
        # 256 + 0.5 + 0.5 would be 256.
        total = at_least_float32(by_name["base"])
        for name, weight in weights.items():
            total = total + weight * at_least_float32(by_name[name])
        total = total.astype(by_name["base"].dtype)
        norms: dict[str, jax.Array] = {}
        if before is not None:
            point, constant_args, constant_kwargs = before
            tracked = ["base", *(term.name for term in terms if term.differentiable)]

            def tracked_values(params: Tree) -> dict[str, Any]:
                all_values, _ = values(params, *constant_args, **constant_kwargs)
                return {name: all_values[name] for name in tracked}

            norms = gradient_norms(tracked_values, point, {"base": 1.0, **weights})
        metrics = pipeline.metrics(by_name, weights, norms, total)
        return total, metrics if aux is None else {**metrics, "aux": aux}

    return loss


def _stop_gradient(tree: Tree) -> Tree:
    """Detach all arrays: norms are metrics, and `jax.grad` must not differentiate them again."""
    return jax.tree.map(
        lambda leaf: jax.lax.stop_gradient(leaf) if isinstance(leaf, jax.Array) else leaf, tree
    )


def _check_pipeline(pipeline: PenaltyPipeline) -> None:
    if not isinstance(pipeline, PenaltyPipeline):
        raise InputError(
            "pipeline must be a steelyard.penalties.PenaltyPipeline, got "
            f"{type(pipeline).__qualname__}: write PenaltyPipeline([('l2', {{'weight': 0.1}})])."
        )
    for name in ("base", "aux"):
        if name in pipeline.names:
            raise InputError(
                f"a penalty must not be called {name!r}, which the metrics have for the base: "
                "set the option 'name'."
            )


def _scheduled(pipeline: PenaltyPipeline, schedules: Any) -> PenaltyPipeline:
    """Copy of the pipeline in which the schedules replace the weights of their penalties."""
    if not isinstance(schedules, Mapping):
        raise InputError(
            f"schedules must map names of penalties to functions of the step, got {schedules!r}."
        )
    for name, schedule in schedules.items():
        if name not in pipeline.names:
            raise InputError(
                f"schedules must name penalties, got {name!r}; there are: {listed(pipeline.names)}."
            )
        if not callable(schedule):
            raise InputError(
                f"the schedule of {name!r} must be a function of the step, got {schedule!r}: a "
                "number belongs in the pipeline, as weight."
            )
        pipeline = pipeline.update_weight(name, schedule)
    return pipeline
