"""Plain formulas of the components: value and gradient by row, on any kind of array.

Every kind has one entry in `_FORMULAS`. The values are differentiable by the backend's autograd
(JAX); the gradients are in closed form, without autograd (NumPy, torch, and norms in JAX).

With `a = log p`, `b = log q`, `p = softmax(logits / T)` and `q` of the reference, a function f of a
and b has the gradient `(∂f/∂a - p · Σ ∂f/∂a) / T` by the logits, and the same with b and q by the
reference.

A gradient's function is a generator: it yields its sums over the classes, receives them back, and
returns the result. Where a process has some of the classes only, the sums are added up over the
processes in between, those of all components together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from steelyard.penalties._arrays import (
    Array,
    Namespace,
    clamp,
    constant,
    gram_of_rows,
    is_torch,
    log_softmax,
    logaddexp,
    widen,
)
from steelyard.penalties.divergences import LOG_ZERO, js_rows, kl_rows, negative_entropy_rows
from steelyard.penalties.from_logits._components import (
    CROSS_ENTROPY,
    ENTROPY,
    FORWARD,
    JS,
    REVERSE,
    Z_LOSS,
    Component,
)

ELEMENTS = 2**20  # in a block of rows: 4 MB in float32

# Values by row, and the gradients by the logits and by the reference; None stands for 0 (`Array` is
# `Any`, which includes None).
ComponentGradients: TypeAlias = tuple[Array, Array, Array]
GradientSteps: TypeAlias = Generator[Sequence[Array], Sequence[Array], ComponentGradients]


class Block:
    """Inputs of a block of rows, with the log-probabilities that several components share."""

    def __init__(
        self, xp: Namespace, logits: Array, reference: Array | None, targets: Array | None
    ) -> None:
        self.xp, self.logits = xp, logits
        # None if no component needs them, and then not read.
        self.reference: Array = reference
        self.targets: Array = targets
        self._finite: dict[tuple[bool, float], Array] = {}
        self._logs: dict[tuple[bool, float], Array] = {}

    def log_p(self, component: Component) -> Array:
        return self._log_probs(self.logits, False, component.temperature)

    def log_q(self, component: Component) -> Array:
        return self._log_probs(self.reference, True, component.temperature)

    def finite_log_p(self, component: Component) -> Array:
        """As `log_p`, with a large negative number for a class at -inf."""
        return self._finite_log_probs(self.logits, False, component.temperature)

    def log_sum(self, component: Component) -> Array:
        """`logsumexp(logits / T)` of each row; -inf for a row of all -inf."""
        return log_sum(self.xp, self.logits, component.temperature)

    def target_logprob(self, logs: Array) -> Array:
        """Entry of each row's target; NaN for a target that is no class."""
        return _target_logprob(self.xp, logs, self.targets)

    def is_target(self, like: Array) -> Array:
        """Whether a class is the row's target, in the shape of `like`."""
        classes = self.xp.arange(like.shape[-1], device=_device(like))
        return classes[None, :] == self.targets[:, None]

    def _log_probs(self, x: Array, of_reference: bool, temperature: float) -> Array:
        key = (of_reference, temperature)
        if key not in self._logs:
            finite = self._finite_log_probs(x, of_reference, temperature)
            # -inf is put back as a constant, so its gradient is 0 and not NaN.
            self._logs[key] = self.xp.where(x == -math.inf, -math.inf, finite)
        return self._logs[key]

    def _finite_log_probs(self, x: Array, of_reference: bool, temperature: float) -> Array:
        key = (of_reference, temperature)
        if key not in self._finite:
            self._finite[key] = finite_log_probs(self.xp, x, temperature)
        return self._finite[key]


class _Formula(NamedTuple):
    values: Callable[[Block, Component], Array]
    gradients: Callable[[Block, Component], GradientSteps]


def block_rows(classes: int) -> int:
    return max(ELEMENTS // max(classes, 1), 1)


def component_values(
    xp: Namespace,
    components: Sequence[Component],
    logits: Array,
    reference: Array | None,
    targets: Array | None,
) -> list[Array]:
    """Values by row for each component, differentiable where the arrays are.

    Args:
        xp: Namespace of the arrays.
        components: Components to compute.
        logits: `[rows, classes]`.
        reference: The same shape, for the components that need it.
        targets: `[rows]`, for the components that need them.
    """
    block = Block(xp, logits, reference, targets)
    return [_FORMULAS[component.kind].values(block, component) for component in components]


def component_gradients(
    xp: Namespace,
    components: Sequence[Component],
    logits: Array,
    reference: Array | None,
    targets: Array | None,
) -> list[ComponentGradients]:
    """Value and gradients by row for each component; arguments as in `component_values`."""
    block = Block(xp, logits, reference, targets)
    # One after the other, so that only one component's temporaries exist at a time.
    return [gradients_of_block(block, [component], list)[0] for component in components]


def gradients_of_block(
    block: Block,
    components: Sequence[Component],
    add_up: Callable[[Sequence[Array]], Sequence[Array]],
) -> list[ComponentGradients]:
    """Value and gradients by row for each component.

    Args:
        block: The inputs.
        components: Components to compute.
        add_up: Maps the sums over the classes of the block, each `[rows]`, to those over all
            classes; called once.
    """
    steps = [_FORMULAS[component.kind].gradients(block, component) for component in components]
    sums = [next(step) for step in steps]
    totals = iter(add_up([total for own in sums for total in own]))
    return [
        _result(step, [next(totals) for _ in own]) for step, own in zip(steps, sums, strict=True)
    ]


def _result(steps: GradientSteps, totals: Sequence[Array]) -> ComponentGradients:
    try:
        steps.send(totals)
    except StopIteration as stop:
        gradients: ComponentGradients = stop.value
        return gradients
    raise AssertionError("a gradient has one round of sums")  # pragma: no cover


def finite_log_probs(xp: Namespace, x: Array, temperature: float) -> Array:
    """`log_softmax(x / T)` along the last axis; a class at -inf stays a constant far below."""
    return log_softmax(xp, _scaled(xp, x, x == -math.inf, temperature), -1)


def log_sum(xp: Namespace, x: Array, temperature: float) -> Array:
    """`logsumexp(x / T)` along the last axis; -inf for a row of all -inf."""
    no_mass = x == -math.inf
    scaled = _scaled(xp, x, no_mass, temperature)
    if is_torch(x):
        rows = scaled.logsumexp(-1)
    else:
        most = constant(xp.max(scaled, axis=-1, keepdims=True))
        rows = most[..., 0] + xp.log(xp.sum(xp.exp(scaled - most), axis=-1))
    return xp.where(xp.all(no_mass, axis=-1), -math.inf, rows)


def _scaled(xp: Namespace, x: Array, no_mass: Array, temperature: float) -> Array:
    return xp.where(no_mass, LOG_ZERO, x if temperature == 1 else x / temperature)


# Entropy: H = -Σ p · a.


def _entropy_values(block: Block, component: Component) -> Array:
    return -negative_entropy_rows(block.xp, block.log_p(component), 1.0, -1)


def _entropy_gradients(block: Block, component: Component) -> GradientSteps:
    """Gradient by the logits: -p · (a + H) / T."""
    xp, a = block.xp, block.log_p(component)
    p = xp.exp(a)
    a = clamp(xp, a, LOG_ZERO)
    [value] = yield [-xp.sum(p * a, axis=-1)]
    return value, -p * (a + value[:, None]) / component.temperature, None


# Forward KL(p‖q) and reverse KL(q‖p).


def _kl_values(block: Block, component: Component) -> Array:
    direction = "forward" if component.kind == FORWARD else "reverse"
    limit = None if component.limit == math.inf else component.limit
    a, b = block.log_p(component), block.log_q(component)
    return kl_rows(block.xp, a, b, direction, -1, limit)


def _kl_gradients(block: Block, component: Component) -> GradientSteps:
    a, b = block.log_p(component), block.log_q(component)
    if component.kind == FORWARD:
        value, by_a, by_b = yield from _kl(block.xp, a, b, component.limit)
    else:
        value, by_b, by_a = yield from _kl(block.xp, b, a, component.limit)
    return value, by_a / component.temperature, by_b / component.temperature


def _kl(xp: Namespace, a: Array, b: Array, limit: float) -> GradientSteps:
    """KL = Σ p · ratio with its gradients, where ratio = a - b, clamped to ±limit.

    `inside` is 1 where the clamp passes a gradient, and `mass = Σ p · inside` (1 without a limit):

        by a:  p · (ratio + inside - KL - mass)        by b:  q · mass - p · inside
    """
    p, q = xp.exp(a), xp.exp(b)
    known = clamp(xp, a, LOG_ZERO)
    if limit == math.inf:
        ratio = xp.where((p == 0) & ~xp.isnan(b), 0.0, known - b)
        inside = xp.ones_like(p)
    else:
        exact = known - clamp(xp, b, LOG_ZERO)
        ratio = clamp(xp, exact, -limit, limit)
        inside = xp.astype(ratio == exact, p.dtype)
    value, mass = yield [xp.sum(p * ratio, axis=-1), xp.sum(p * inside, axis=-1)]
    by_a = p * (ratio + inside - (value + mass)[:, None])
    return value, by_a, q * mass[:, None] - p * inside


# Jensen-Shannon: JS = (Σ p · (a - m) + Σ q · (b - m)) / 2 with m = log((p + q) / 2).


def _js_values(block: Block, component: Component) -> Array:
    return js_rows(block.xp, block.log_p(component), block.log_q(component), -1)


def _js_gradients(block: Block, component: Component) -> GradientSteps:
    """Gradient by the logits: p · (a - m - Σ p · (a - m)) / 2T; the reference's with q and b.

    The derivative of m drops out, since Σ (p + q) / 2 is constant.
    """
    xp, a, b = block.xp, block.log_p(component), block.log_q(component)
    p, q = xp.exp(a), xp.exp(b)
    a, b = clamp(xp, a, LOG_ZERO), clamp(xp, b, LOG_ZERO)
    middle = logaddexp(xp, a, b) - math.log(2)
    from_p, from_q = yield [
        xp.sum(p * (a - middle), axis=-1),
        xp.sum(q * (b - middle), axis=-1),
    ]
    by_a = 0.5 * p * (a - middle - from_p[:, None])
    by_b = 0.5 * q * (b - middle - from_q[:, None])
    value = clamp(xp, 0.5 * (from_p + from_q), 0.0)
    return value, by_a / component.temperature, by_b / component.temperature


# z-loss: the square of lse = logsumexp(logits / T).


def _z_loss_values(block: Block, component: Component) -> Array:
    return block.log_sum(component) ** 2


def _z_loss_gradients(block: Block, component: Component) -> GradientSteps:
    """Gradient by the logits: 2 · lse · p / T; 0 for a row of all -inf, whose value is infinite."""
    xp, temperature = block.xp, component.temperature
    level = block.log_sum(component)
    yield []
    factor = xp.where(level == -math.inf, 0.0, 2.0 * level / temperature)
    return level**2, factor[:, None] * xp.exp(block.log_p(component)), None


# Cross-entropy: -a[target].


def _cross_entropy_values(block: Block, component: Component) -> Array:
    """Values whose gradient is (p - onehot(target)) / T, also for a target at -inf.

    There the value is infinite, and the gradient is the limit for a logit that falls to -inf: by
    the target -1/T, taken from its logit, and by the other classes p/T, taken from `finite`.
    """
    xp, targets = block.xp, block.targets
    finite = _target_logprob(xp, block.finite_log_p(component), targets)
    own = _target_logprob(xp, block.logits, targets) / component.temperature
    return -xp.where(own == -math.inf, own + (finite - constant(finite)), finite)


def _cross_entropy_gradients(block: Block, component: Component) -> GradientSteps:
    """Gradient by the logits: (p - onehot(target)) / T."""
    xp, a = block.xp, block.log_p(component)
    p = xp.exp(a)
    [logprob] = yield [block.target_logprob(a)]
    by_logits = (p - xp.astype(block.is_target(a), p.dtype)) / component.temperature
    return -logprob, by_logits, None


def _target_logprob(xp: Namespace, logs: Array, targets: Array) -> Array:
    """Log-probability of each row's target; NaN for a target that is no class."""
    is_class = (targets >= 0) & (targets < logs.shape[-1])
    index = xp.where(is_class, targets, 0)
    index = xp.astype(index, xp.int64) if is_torch(index) else index  # torch gathers by no other
    logprob = xp.take_along_axis(logs, index[..., None], axis=-1)[..., 0]
    return xp.where(is_class, logprob, math.nan)


def _device(x: Array) -> object:
    """Device for another array; None for a traced JAX array, which has none."""
    return x.device if hasattr(type(x), "__torch_function__") else None


_FORMULAS: Mapping[int, _Formula] = {
    ENTROPY: _Formula(_entropy_values, _entropy_gradients),
    FORWARD: _Formula(_kl_values, _kl_gradients),
    REVERSE: _Formula(_kl_values, _kl_gradients),
    JS: _Formula(_js_values, _js_gradients),
    Z_LOSS: _Formula(_z_loss_values, _z_loss_gradients),
    CROSS_ENTROPY: _Formula(_cross_entropy_values, _cross_entropy_gradients),
}


class Wants(NamedTuple):
    """Outputs of a sweep beside the values.

    Attributes:
        logits: The gradient of the weighted total by the logits.
        reference: The gradient by the reference.
        gram: The inner products of the components' gradients by the logits.
    """

    logits: bool = False
    reference: bool = False
    gram: bool = False

    @property
    def any(self) -> bool:
        return self.logits or self.reference or self.gram


class SweepResult(NamedTuple):
    """Result of a sweep; outputs that were not wanted are None.

    Attributes:
        values: `[components + 1 or more, rows]`, times each row's scale: the components, then rows
            that add up to the weighted total (the kernels store the share of JS separately).
        logits: Σ weight · scale · gradient by the logits, in their dtype.
        reference: The same by the reference.
        gram: `[components, components]`: inner products of the components' scaled gradients by the
            logits, summed over all rows, in float64.
    """

    values: Array
    logits: Array | None
    reference: Array | None
    gram: Array | None


def sweep(
    xp: Namespace,
    logits: Array,
    reference: Array | None,
    targets: Array | None,
    scale: Array | None,
    components: Sequence[Component],
    weights: Sequence[float],
    wants: Wants,
) -> SweepResult:
    """Compute values and gradients of NumPy arrays or torch tensors by the plain formulas.

    Rows are independent, so only one block's temporaries exist at a time.

    Args:
        xp: The namespace of the arrays.
        logits: `[rows, classes]`.
        reference: The same shape, or None if no component needs it.
        targets: `[rows]`, or None.
        scale: `[rows]`: factor of each row; a row of factor 0 is not read. None is 1.
        components: Components to compute.
        weights: Weight of each component in the total.
        wants: Outputs to compute beside the values.
    """
    rows, classes = logits.shape
    wide = widen(xp, logits[:0]).dtype
    values = _new(xp, logits, (len(components) + 1, rows), wide)
    values[-1, :] = 0.0
    by_logits = xp.empty_like(logits) if wants.logits else None
    by_reference = xp.empty_like(reference) if wants.reference else None
    products = _new(xp, logits, (len(components), len(components)), xp.float64)
    products[...] = 0.0
    size = block_rows(classes)
    for start in range(0, rows, size):
        at = slice(start, start + size)
        share = None if scale is None else scale[at]
        z, r, t = (masked_block(xp, x, at, share) for x in (logits, reference, targets))
        if not wants.any:
            of_components = component_values(xp, components, z, r, t)
            gradients: list[ComponentGradients] = []
        else:
            gradients = component_gradients(xp, components, z, r, t)
            of_components = [gradient[0] for gradient in gradients]
        for i, (value, weight) in enumerate(zip(of_components, weights, strict=True)):
            values[i, at] = _scaled_sum(xp, value, share)
            values[-1, at] += weight * values[i, at]
        if by_logits is not None:
            by_logits[at] = _weighted(
                xp, [gradient[1] for gradient in gradients], weights, share, z
            )
        if by_reference is not None:
            by_reference[at] = _weighted(
                xp, [gradient[2] for gradient in gradients], weights, share, r
            )
        if wants.gram:
            flat = [
                xp.reshape(_scaled_sum(xp, gradient[1], share), (-1,)) for gradient in gradients
            ]
            products += xp.astype(gram_of_rows(xp, xp.stack(flat)), xp.float64)
    return SweepResult(values, by_logits, by_reference, products if wants.gram else None)


def _new(xp: Namespace, like: Array, shape: tuple[int, ...], dtype: object) -> Array:
    return xp.empty(shape, dtype=dtype, device=like.device if is_torch(like) else None)


def masked_block(xp: Namespace, x: Array | None, at: slice, share: Array | None) -> Array | None:
    """Rows `at` of an array, widened, with 0 where the factor `share` of the row is 0."""
    if x is None:
        return None
    part = x[at]
    if share is not None:  # masked before the formula, since 0 · NaN is NaN
        counts = share != 0
        part = xp.where(counts[:, None] if part.ndim > 1 else counts, part, xp.zeros_like(part))
    return widen(xp, part)


def _scaled_sum(xp: Namespace, x: Array, share: Array | None) -> Array:
    if share is None:
        return x
    factor = xp.astype(share, x.dtype)
    if x.ndim > 1:
        factor = factor[:, None]
    return xp.where(factor != 0, x * factor, 0.0)


def _weighted(
    xp: Namespace,
    gradients: Sequence[Array | None],
    weights: Sequence[float],
    share: Array | None,
    like: Array,
) -> Array:
    total = xp.zeros_like(like)
    for gradient, weight in zip(gradients, weights, strict=True):
        if gradient is not None:
            total = total + weight * gradient
    return _scaled_sum(xp, total, share)
