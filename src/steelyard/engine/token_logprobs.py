"""Log-probs of target tokens from hidden states and the output layer, without all logits.

With hidden states h_t, logits z_t = h_t W^T + b and the temperature T, the log-prob of token y is

    log p_t(y) = z_t(y) / T - logsumexp(z_t / T),
    d log p_t(y) / d z_t = (onehot(y) - softmax(z_t / T)) / T.

The logits of one chunk of tokens exist at a time, `[chunk, V]`, which the kernels of
`penalties.from_logits` read once and overwrite with that gradient.

**One target a token, frozen output layer.** log p_t depends on h_t alone. The forward pass stores

    J_t = d log p_t / d h_t = (onehot(y) - softmax(z_t / T)) W / T,   `[T, H]`,

and the gradient by the hidden states of any loss, d loss / d log p_t · J_t, scales its rows: a
backward pass needs no product with the output layer, however many terms there are.

**Several targets, or an output layer with LoRA.** The factors of the targets are known only in the
backward pass, and the gradient of LoRA's matrices sums over the tokens. The backward pass computes
the logits of each chunk again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from steelyard.penalties.from_logits._components import CROSS_ENTROPY, Component
from steelyard.penalties.from_logits._formulas import Wants
from steelyard.penalties.from_logits._torch_operators import run_sweep
from steelyard.penalties.from_logits.lm_head import factors

# Logits of a chunk: 0.5 GB in bfloat16 on a GPU, 16 MB in float32 on a CPU.
_CHUNK_GPU, _CHUNK_CPU = 2**28, 2**22
# A multiple of the tiles of a matrix product.
_TILE = 128


def token_logprobs(
    layer: Any, hidden: Tensor, targets: Tensor, temperature: float = 1.0, chunk: int | None = None
) -> Tensor:
    """Log-probs `[N, K]` of targets `[N, K]`, in float32 or float64; differentiable.

    Args:
        layer: the output layer: `torch.nn.Linear` with a frozen weight, or peft's LoRA of one.
        hidden: its input, `[N, H]`.
        targets: tokens.
        temperature: divides the logits.
        chunk: tokens whose logits exist at a time; None: as many as make up 0.5 GB on a GPU.
    """
    weight, bias, low_rank = factors(layer)
    # The engine applies one adapter at a time.
    a, b, scale = low_rank[0] if low_rank else (None, None, 1.0)
    if chunk is None:
        chunk = (_CHUNK_GPU if hidden.is_cuda else _CHUNK_CPU) // len(weight)
        chunk = chunk // _TILE * _TILE if chunk >= _TILE else max(chunk, 1)
    apply: Any = _TokenLogprobs.apply  # it has no types
    logprobs: Tensor = apply(hidden, weight, bias, a, b, targets, scale, temperature, chunk)
    return logprobs


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        targets: Tensor,
        scale: float,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        head = _Head(hidden, weight, bias, a, b, targets, scale, temperature, chunk)
        if ctx.needs_input_grad[0] and a is None and targets.shape[1] == 1:
            logprobs, slopes = head.logprobs_and_slopes()
            ctx.save_for_backward(slopes)
        else:
            logprobs, _ = head.logprobs_and_slopes(slopes=False)
            ctx.save_for_backward(hidden, weight, bias, a, b, targets)
            ctx.settings = (scale, temperature, chunk)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        saved, unused = ctx.saved_tensors, (None,) * 4
        if len(saved) == 1:
            (slopes,) = saved
            # In the precision of the factors; only the products are rounded to that of J.
            scaled = torch.mul(slopes, gradient, out=torch.empty_like(slopes))
            return (scaled, None, None, None, None, *unused)
        head = _Head(*saved, *ctx.settings)
        by_hidden, by_a, by_b = head.gradients(gradient)
        return (by_hidden, None, None, by_a, by_b, *unused)


class _Head:
    """Products with the output layer, a chunk of tokens at a time.

    Args:
        hidden: `[N, H]`.
        weight: W, `[V, H]`.
        bias: b, `[V]`, or None.
        a: A of LoRA, `[rank, H]`, or None.
        b: B of LoRA, `[V, rank]`, or None.
        targets: `[N, K]`.
        scale: of LoRA, `W + scale · B A`.
        temperature: divides the logits.
        chunk: tokens at a time.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        targets: Tensor,
        scale: float,
        temperature: float,
        chunk: int,
    ) -> None:
        self._hidden, self._weight, self._bias, self._targets = hidden, weight, bias, targets
        # LoRA's matrices may be wider than the model.
        self._a, self._b = (None if x is None else x.to(hidden.dtype) for x in (a, b))
        self._scale, self._temperature, self._chunk = scale, temperature, chunk
        self._wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self._component = Component(CROSS_ENTROPY, temperature)

    def logprobs_and_slopes(self, *, slopes: bool = True) -> tuple[Tensor, Tensor]:
        """Log-probs `[N, K]`, and J `[N, H]` of the first target; J is empty without `slopes`."""
        logprobs = self._hidden.new_empty(self._targets.shape, dtype=self._wide)
        by_hidden = torch.empty_like(self._hidden) if slopes else self._hidden.new_empty(0)
        for at in self._chunks():
            logits, _ = self._logits(at)
            targets = self._targets[at]
            others = logits.gather(-1, targets).to(self._wide) if targets.shape[1] > 1 else None
            # The weight -1 turns the gradient of the cross entropy into that of the log-prob.
            swept = self._sweep(logits, targets, None, Wants(logits=slopes))
            first = -swept.values[0][:, None]
            if others is None:
                logprobs[at] = first
            else:
                logprobs[at] = first + (others - others[:, :1]) / self._temperature
            if slopes:
                torch.mm(swept.logits, self._weight, out=by_hidden[at])
            del logits, swept  # frees the chunk before the next one is computed
        return logprobs, by_hidden

    def gradients(self, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients by hidden states, A and B, given that by the log-probs, `[N, K]`.

        With G the gradient by the logits: by h it is `G W + scale · G B A`, by B
        `scale · G^T (h A^T)`, and by A `scale · (G B)^T h`.
        """
        by_hidden = torch.empty_like(self._hidden)
        by_a = by_b = None
        if self._a is not None and self._b is not None:
            # Sums over all tokens: a 16-bit float would stop growing.
            by_a, by_b = (torch.zeros_like(x, dtype=self._wide) for x in (self._a, self._b))
        for at in self._chunks():
            logits, inner = self._logits(at)
            by_logits = self._gradient_by_logits(logits, self._targets[at], gradient[at])
            torch.mm(by_logits, self._weight, out=by_hidden[at])
            if inner is not None:
                by_b += self._scale * (by_logits.t() @ inner)  # type: ignore[operator]  # there is LoRA
                by_inner = self._scale * (by_logits @ self._b)  # type: ignore[operator]
                by_a += by_inner.t() @ self._hidden[at]  # type: ignore[operator]
                by_hidden[at].addmm_(by_inner, self._a)  # type: ignore[arg-type]
            del logits, by_logits
        return by_hidden, by_a, by_b

    def _chunks(self) -> Iterator[slice]:
        for start in range(0, len(self._hidden), self._chunk):
            yield slice(start, start + self._chunk)

    def _logits(self, at: slice) -> tuple[Tensor, Tensor | None]:
        """Logits of a chunk, and `h A^T` if there is LoRA."""
        hidden = self._hidden[at]
        if self._bias is None:
            logits = hidden @ self._weight.t()
        else:
            logits = torch.addmm(self._bias, hidden, self._weight.t())
        if self._a is None or self._b is None:
            return logits, None
        inner = hidden @ self._a.t()
        return logits.addmm_(inner, self._b.t(), alpha=self._scale), inner

    def _gradient_by_logits(self, logits: Tensor, targets: Tensor, gradient: Tensor) -> Tensor:
        """`sum_k g_k (onehot(y_k) - p) / T`; overwrites the logits.

        The sweep gives `s (onehot(y_1) - p) / T` with s the sum of the g_k.
        """
        total = gradient.sum(-1)
        swept = self._sweep(logits, targets, total, Wants(logits=True))
        by_logits: Tensor = swept.logits
        if targets.shape[1] > 1:
            moved = torch.cat([gradient[:, :1] - total[:, None], gradient[:, 1:]], 1)
            by_logits.scatter_add_(-1, targets, (moved / self._temperature).to(by_logits))
        return by_logits

    def _sweep(self, logits: Tensor, targets: Tensor, scale: Tensor | None, wants: Wants) -> Any:
        return run_sweep(
            logits,
            None,
            targets[:, 0].contiguous(),
            scale,
            [self._component],
            [-1.0],
            wants,
            in_place=True,
        )
