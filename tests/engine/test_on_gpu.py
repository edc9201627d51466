"""The engine on a GPU in bfloat16, against float32; `make test-gpu` runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steelyard.engine import LocalServiceClient
from steelyard.engine.attention import attend, packed_arguments
from steelyard.engine.fast_paths import FastPaths

from .data import LENGTHS, create, logprobs, ragged, train
from .reference_attention import grouped_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DATA = ragged(3, LENGTHS)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("shared", [1, 2, 4])
def test_attention_over_packed_sequences(window: int | None, shared: int) -> None:
    torch.manual_seed(0)
    shapes = [(1, heads, sum(LENGTHS), 16) for heads in (4, shared, shared)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    run: Any = attend
    reference: Any = grouped_attention
    on_gpu = [x.detach().cuda().bfloat16().requires_grad_() for x in inputs]
    given = packed_arguments(LENGTHS, torch.device("cuda"))
    mask = given.pop("attention_mask")
    found, _ = run(torch.nn.Module(), *on_gpu, mask, scaling=0.25, sliding_window=window, **given)
    ends = given["cu_seq_lens_q"].cpu()
    expected = reference(
        *(x[0].transpose(0, 1) for x in inputs),
        *(ends, ends, max(LENGTHS), max(LENGTHS)),
        scale=0.25,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
    )[None]
    torch.testing.assert_close(found.cpu().float(), expected, rtol=0.02, atol=0.02)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    gradients = torch.autograd.grad(found, on_gpu, upstream.cuda().bfloat16())
    for gradient, right in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient.cpu().float(), right, rtol=0.03, atol=0.05)


@pytest.mark.parametrize("train_unembed", [True, False])
def test_gradients_are_as_exact_as_those_of_plain_layers_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, train_unembed: bool
) -> None:
    weights, results = None, []
    fast = FastPaths.of(torch.device("cuda"), torch.bfloat16)
    for dtype, paths in (
        ("float32", FastPaths()),
        ("bfloat16", FastPaths()),
        ("bfloat16", fast),
    ):
        monkeypatch.setattr(FastPaths, "of", lambda *_, paths=paths: paths)
        with LocalServiceClient(device="cuda", dtype=dtype) as service:
            client = create(service, train_unembed=train_unembed)
            if weights is None:
                train(client)
                weights = client.weights()
            client._trainer.adapter.load(weights, None)
            rows = logprobs(client.forward_backward(DATA, "cross_entropy").result())
            gradient = torch.cat([g.flatten() for g in client.gradients().values()])
            results.append((torch.cat(rows), gradient))
            model = client._worker.model
    assert model.packs_in_one_row
    assert model.computes_without_logits
    assert model.fused_kinds == ["LlamaMLP", "LlamaRMSNorm", "LlamaRotaryEmbedding"]
    exact, plain, ours = results
    for i in range(2):
        errors = [float((found[i] - exact[i]).norm()) for found in (plain, ours)]
        assert 0 < errors[1] < 1.5 * errors[0] < 0.1 * float(exact[i].norm())
