"""Terms over whole distributions on the engine: fused, over logits and over a projection."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tinker import types
from torch import Tensor

from steelyard import RegularizerSpec, regularize
from steelyard.composition.evaluate import Evaluator
from steelyard.engine import LocalServiceClient
from steelyard.regularizers import WholeVocabulary
from tests.fused import count_together

from .data import close, ragged, train

DATA = ragged(3, [23, 4, 40, 9])
KINDS: list[Any] = ["entropy", "z_loss", "cross_entropy"]


def nll(_: object, logprobs: list[Tensor]) -> Tensor:
    return -torch.cat(logprobs).mean()


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return count_together(monkeypatch)


def gradients(client: Any, of: Any, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    terms = [RegularizerSpec(WholeVocabulary(kind=kind, of=of), 0.5) for kind in KINDS]
    called = regularize(client).forward_backward_custom(DATA, nll, regularizers=terms, **settings)
    output, found = called.result(), client.gradients()
    client.optim_step(types.AdamParams(learning_rate=0.0)).result()
    return output, found


def test_terms_fused_separate_and_over_a_projection_have_the_same_gradients(
    together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = LocalServiceClient(dtype="float64")
    client = service.create_lora_training_client("tiny-random", rank=3, seed=1)
    train(client)
    output, found = gradients(client, "logits", track_grad_norms=True)
    likely = output.regularizers["whole_cross_entropy"]
    assert likely.value == pytest.approx(output.base_loss.value, rel=1e-6)
    lean, projected = gradients(client, "projection")
    assert together == [3, 3]
    monkeypatch.setattr(Evaluator, "_groups", lambda *_args, **_kwargs: [])
    wanted, alone = gradients(client, "logits", track_grad_norms=True)
    assert len(together) == 2
    close(found, alone, 1e-10)
    close(projected, alone, 1e-10)
    assert lean.loss_total == pytest.approx(wanted.loss_total, rel=1e-6)
    assert output.cosines == pytest.approx(wanted.cosines, abs=1e-6)
    for name, term in wanted.regularizers.items():
        assert output.regularizers[name].grad_norm == pytest.approx(term.grad_norm, rel=1e-6)
