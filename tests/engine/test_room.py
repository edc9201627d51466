from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from steelyard.engine import LocalServiceClient, LocalTrainingClient
from steelyard.engine.model import Model
from steelyard.engine.room import Room

from .data import close, ragged, same, train

LENGTHS = [40, 7, 33, 25, 12, 40, 3]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the tokens that the model is called with."""
    seen: list[tuple[int, ...]] = []
    call = Model.__call__

    def counting(self: Model, *args: Any, **inputs: Any) -> Any:
        seen.append(tuple(inputs["input_ids"].shape))
        return call(self, *args, **inputs)

    monkeypatch.setattr(Model, "__call__", counting)
    return seen


def limited(max_tokens: int | None) -> LocalServiceClient:
    return LocalServiceClient(dtype="float64", max_tokens=max_tokens)


def create(service: LocalServiceClient) -> LocalTrainingClient:
    return service.create_lora_training_client("tiny-random", rank=4, seed=0)


def loss(data: Any, rows: Any) -> tuple[torch.Tensor, dict[str, float]]:
    return torch.cat(rows).square().sum(), {}


CALLS: dict[str, Callable[[LocalTrainingClient], Any]] = {
    "forward": lambda client: client.forward(ragged(0, LENGTHS), "cross_entropy"),
    "forward_backward": lambda client: client.forward_backward(ragged(0, LENGTHS), "cross_entropy"),
    "custom": lambda client: client.forward_backward_custom(ragged(0, LENGTHS), loss),
}


@pytest.mark.parametrize("limit", [40, 64, 100])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_limit_that_was_set_is_kept(
    sizes: list[tuple[int, ...]], call: Callable[[LocalTrainingClient], Any], limit: int
) -> None:
    with limited(limit) as service:
        call(create(service)).result()
    assert len(sizes) > 1
    assert all(rows * length <= limit for rows, length in sizes)


def test_a_datum_longer_than_the_limit_goes_alone(sizes: list[tuple[int, ...]]) -> None:
    with limited(30) as service:
        CALLS["forward_backward"](create(service)).result()
    assert {size for size in sizes if size[0] * size[1] > 30} == {(1, 40), (1, 33)}


@pytest.mark.parametrize(("limit", "passes"), [(1000, 1), (None, 1)])
def test_a_custom_loss_that_fits_goes_forward_once(
    sizes: list[tuple[int, ...]], limit: int | None, passes: int
) -> None:
    with limited(limit) as service:
        client = create(service)
        client.forward(ragged(0, [3]), "cross_entropy").result()  # a found limit is found
        sizes.clear()
        CALLS["custom"](client).result()
    assert len(sizes) == passes


def test_a_custom_loss_that_does_not_fit_goes_forward_twice(sizes: list[tuple[int, ...]]) -> None:
    with limited(64) as service:
        CALLS["custom"](create(service)).result()
    half = len(sizes) // 2
    assert half > 1
    assert sizes[:half] == sizes[half:]


def test_a_found_limit_is_sane(sizes: list[tuple[int, ...]]) -> None:
    with limited(None) as service:
        client = create(service)
        room, adapter = client._host.room, client._trainer.adapter
        free = psutil.virtual_memory().available
        tokens = client._host.later(room.tokens, adapter).result()
        assert sizes == [(1, 32)]
        # The logits alone take 512 numbers of 8 bytes for each token; a graph of two layers
        # keeps no more than a hundred times that.
        assert 0.25 * free / (100 * 512 * 8) < tokens < free / (512 * 8)
        assert client._host.later(room.tokens, adapter).result() == tokens
        assert len(sizes) == 1


def test_finding_a_limit_leaves_the_client_as_it_was() -> None:
    with limited(None) as service:
        client = create(service)
        weights = client.weights()
        client._host.later(client._host.room.tokens, client._trainer.adapter).result()
        assert same(client.weights(), weights)
        assert not any(bool(gradient.any()) for gradient in client.gradients().values())


def test_a_larger_model_has_room_for_fewer_tokens() -> None:
    # Each kept number takes twice the memory in float64.
    rooms = []
    for dtype in ("float32", "float64"):
        with LocalServiceClient(dtype=dtype) as service:
            client = create(service)
            room, adapter = client._host.room, client._trainer.adapter
            rooms.append(client._host.later(room.tokens, adapter).result())
    assert 1.5 < rooms[0] / rooms[1] < 2.5


# There is no GPU here, and torch.OutOfMemoryError comes from GPUs alone: it is raised by hand.


class Full:
    """A memory that has room for so many tokens at once."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.refused = 0
        self._call = Model.__call__

    def __call__(self, model: Model, *args: Any, **inputs: Any) -> Any:
        if inputs["input_ids"].numel() > self.tokens:
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self._call(model, *args, **inputs)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def call(model: Model, *args: Any, **inputs: Any) -> Any:
            return self(model, *args, **inputs)

        monkeypatch.setattr(Model, "__call__", call)


@pytest.mark.parametrize("name", ["forward", "forward_backward", "custom"])
def test_a_limit_that_was_too_much_is_halved(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    call = CALLS[name]
    with limited(300) as service, limited(None) as plenty:
        clients = create(service), create(plenty)
        for client in clients:
            train(client)
        tight, free = clients
        expected = call(free).result().metrics
        memory = Full(80)
        memory.install(monkeypatch)
        found = call(tight).result().metrics
        assert found == {key: pytest.approx(value, rel=1e-10) for key, value in expected.items()}
        assert memory.refused == 2  # 300 and 150 are too many, 75 are not
        assert tight._host.room.tokens(tight._trainer.adapter) == 75
        if name != "forward":
            close(tight.gradients(), free.gradients(), 1e-10)
        call(tight).result()
        assert memory.refused == 2


def test_a_memory_that_has_no_room_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with limited(300) as service:
        client = create(service)
        client.forward_backward(ragged(0, [5]), "cross_entropy").result()
        before = client.gradients()
        with monkeypatch.context() as patch:
            memory = Full(10)
            memory.install(patch)
            with pytest.raises(torch.OutOfMemoryError):
                CALLS["forward_backward"](client).result()
        assert memory.refused == 4  # 300, 150, 75 and the least, 64
        assert same(client.gradients(), before)
        CALLS["forward_backward"](client).result()


def test_another_error_is_not_answered_by_halving() -> None:
    def broken(_: int) -> None:
        raise KeyError("mine")

    with limited(300) as service:
        client = create(service)
        room: Room = client._host.room
        with pytest.raises(KeyError, match="mine"):
            room.within(client._trainer.adapter, broken)
        assert room.tokens(client._trainer.adapter) == 300
