"""A sequence of training requests: odd sequence ids are batches, even ones optimizer steps."""

from __future__ import annotations

from tests.engine.data import datum, ragged

from .wire_client import Wire

STEPS = 4
BAD_BATCH = [datum([1, 2], [1, 512])]


def send(wire: Wire, model: str, seq_id: int) -> dict[str, str]:
    """Send the request with a sequence id, and return its future."""
    step = (seq_id - 1) // 2
    if seq_id % 2:
        response = wire.batch(model, seq_id, ragged(step, [4, 3]))
    else:
        response = wire.step(model, seq_id)
    assert response.status_code == 200, response.text
    future: dict[str, str] = response.json()
    return future


def send_step(wire: Wire, model: str, seq_id: int) -> dict[str, str]:
    """Send an optimizer step that changes nothing."""
    future: dict[str, str] = wire.step(model, seq_id, rate=0.0).json()
    return future


def losses_of(wire: Wire, futures: dict[int, dict[str, str]]) -> list[float]:
    """Losses of the batches, in order."""
    return [
        wire.result(futures[seq_id]).metrics["loss:sum"] for seq_id in range(1, 2 * STEPS + 1, 2)
    ]
