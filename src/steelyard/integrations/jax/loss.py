"""Join a base loss and its penalties to one function that JAX can differentiate and compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from steelyard.errors import InputError
from steelyard.penalties.pipeline import PenaltyPipeline
from steelyard.spec.protocol import listed

PARAMS = "params"
# A tree of arrays has no static type in JAX.
Tree: TypeAlias = Any


def read_base(result: Any) -> tuple[jax.Array, Tree, Tree]:
    """Split the result of a base loss into its loss, its outputs for penalties, and its aux.

    Raises:
        InputError: it is a tuple of another length, or its loss is no floating-point scalar.
    """
    loss, outputs, aux = result, None, None
    if isinstance(result, tuple):
        if len(result) not in (2, 3):
            raise InputError(
                "base must return a loss, (loss, outputs) or (loss, outputs, aux), got a tuple of "
                f"{len(result)}."
            )
        loss, outputs, aux = (*result, None)[:3]
    if not hasattr(loss, "dtype") or loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        kind = f"{loss.dtype}{list(loss.shape)}" if hasattr(loss, "dtype") else type(loss).__name__
        raise InputError(
            f"base must return a floating-point scalar as its loss, got {kind}: reduce it, for "
            "example with jnp.mean."
        )
    return loss, outputs, aux


class PenaltyInputs:
    """Arrays that are available to penalties.

    Args:
        params: a tree of parameters, read as `params/…`; only its floating-point leaves, since
            modules also hold functions, counters and random keys.
        outputs: of the base: a dict of arrays, one array, or None.
    """

    def __init__(self, params: Tree, outputs: Tree) -> None:
        self._outputs = outputs
        self._leaves = {
            "/".join([PARAMS, *filter(None, [_path(path)])]): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
            if is_parameter(leaf)
        }

    def read(self, term: str, names: tuple[str, ...] | None) -> Tree:
        """Arrays that a penalty reads.

        Args:
            term: the name of the penalty.
            names: of its inputs; None: the base's outputs, or without any all parameters.

        Raises:
            InputError: there is no array of that name.
        """
        if names is not None:
            return {name: self._lookup(name, term) for name in names}
        # A dict is ambiguous here: the penalty that gets it raises, and lists its keys.
        return self._lookup(PARAMS, term) if self._outputs is None else self._outputs

    def _lookup(self, name: str, term: str) -> Any:
        """The output `name`; or one parameter in its shape, or several as one flat vector."""
        outputs = self._outputs if isinstance(self._outputs, Mapping) else {}
        if name in outputs:
            return outputs[name]
        matches = [
            leaf
            for path, leaf in self._leaves.items()
            if path == name
            or path.startswith(f"{name}/")
            or fnmatchcase(path, name)
            or fnmatchcase(path, f"{name}/*")
        ]
        if not matches:
            parameters = listed(dict.fromkeys([PARAMS, *self._leaves]))
            raise InputError(
                f"penalty {term!r} needs the input {name!r}, got from the base {listed(outputs)}; "
                f"parameters: {parameters}."
            )
        if len(matches) == 1:
            return jnp.asarray(matches[0])
        return jnp.concatenate([jnp.ravel(leaf) for leaf in matches])


def is_parameter(leaf: object) -> bool:
    """Check for a floating-point array or number, which has a gradient."""
    return isinstance(leaf, float) or (
        hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    )


def _path(path: Any) -> str:  # a tuple of JAX's kinds of keys
    return jax.tree_util.keystr(path, simple=True, separator="/")


def gradient_norms(
    values: Callable[[Tree], Mapping[str, jax.Array]],
    params: Tree,
    weights: Mapping[str, Any],  # numbers and traced scalars
) -> dict[str, jax.Array]:
    """Norm of each value's gradient with respect to `params`, and of their weighted sum.

    With K values v(θ) stacked to one vector `[K]`, row k of the Jacobian is ∂vₖ/∂θ = eₖᵀJ: the VJP
    of one evaluation, vmapped over the rows of the identity, gives all gradients. They exist at the
    same time, which takes memory for K copies of the parameters.

    Inside `jax.shard_map` vₖ is the mean over the devices on which it differs, and parameters that
    differ are shards of one tree: the norms are those of one device with the whole batch.

    Args:
        values: the values at given parameters, by name.
        params: a tree of arrays; other leaves, such as functions, and integers are constants.
        weights: one for each value.

    Returns:
        ‖∂vₖ/∂θ‖, unweighted, by name, and ‖Σₖ weightₖ ∂vₖ/∂θ‖ as `"total"`.
    """
    names: list[str] = []
    leaves, tree = jax.tree.flatten(params)
    free = [index for index, leaf in enumerate(leaves) if is_parameter(leaf)]

    def stacked(point: list[jax.Array]) -> jax.Array:
        placed = dict(zip(free, point, strict=True))
        whole = [placed.get(index, leaf) for index, leaf in enumerate(leaves)]
        by_name = values(jax.tree.unflatten(tree, whole))
        names[:] = by_name  # known once it is traced
        stack = jnp.stack([at_least_float32(value) for value in by_name.values()])
        axes = _varying_axes(stack)
        if not axes:
            return stack
        mean: jax.Array = jax.lax.pmean(stack, axes)  # type: ignore[no-untyped-call]
        return mean

    stack, vjp = jax.vjp(stacked, [leaves[index] for index in free])
    [gradients] = jax.vmap(vjp)(jnp.eye(len(names), dtype=stack.dtype))
    # [K, P] for each leaf of P parameters. The norm of the whole tree is that of its leaves' norms.
    rows = [at_least_float32(leaf).reshape(len(names), -1) for leaf in gradients]
    norms = _norm_of_norms([_whole_norm(row) for row in rows])
    factors = jnp.stack([jnp.asarray(weights[name], stack.dtype) for name in names])
    total = _norm_of_norms([_whole_norm(factors @ row) for row in rows])
    return {**dict(zip(names, norms, strict=True)), "total": total}


def at_least_float32(value: Any) -> jax.Array:  # an array, or what can be one
    """The value as an array, float16 and bfloat16 as float32."""
    array = jnp.asarray(value)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _whole_norm(row: jax.Array) -> jax.Array:
    """Norm over the last axis; of the whole leaf, if devices have shards of it."""
    local: jax.Array = jnp.linalg.norm(row, axis=-1)
    axes = _varying_axes(row)
    if not axes:
        return local
    squares: jax.Array = jax.lax.psum(jnp.square(local), axes)  # type: ignore[no-untyped-call]
    return jnp.sqrt(squares)


def _varying_axes(array: jax.Array) -> tuple[str, ...]:
    """Axes of the mesh of an enclosing `jax.shard_map` along which an array differs."""
    return tuple(jax.typeof(array).manual_axis_type.varying)


def _norm_of_norms(norms: list[jax.Array]) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(jnp.stack(norms)), axis=0))


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
