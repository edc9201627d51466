from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.engine import LocalServiceClient, LocalTrainingClient
from steelyard.engine.packing import ROW, PackedSequence, Packing, pack

from .data import datum, logprobs, ragged, train

UNHURRIED = settings(max_examples=60, deadline=None)
LENGTHS = st.lists(st.integers(1, 700), min_size=1, max_size=30)
LIMITS = st.integers(1, 3000)
# Rows that are seldom full: there is padding.
WIDE = st.lists(st.integers(100, 500), min_size=1, max_size=8)


@given(LENGTHS, LIMITS)
@UNHURRIED
def test_every_sequence_is_packed_once_and_whole(lengths: list[int], limit: int) -> None:
    slots = [slot for packing in pack(lengths, limit) for slot in packing.sequences]
    assert sorted(slot.index for slot in slots) == list(range(len(lengths)))
    assert all(slot.stop - slot.start == lengths[slot.index] for slot in slots)


@given(LENGTHS, LIMITS)
@UNHURRIED
def test_sequences_do_not_overlap_and_stay_in_their_packing(lengths: list[int], limit: int) -> None:
    for packing in pack(lengths, limit):
        taken = torch.zeros(packing.rows, packing.length, dtype=torch.int64)
        for slot in packing.sequences:
            assert 0 <= slot.start < slot.stop <= packing.length
            assert 0 <= slot.row < packing.rows
            taken[slot.row, slot.start : slot.stop] += 1
        assert int(taken.max()) == 1


@given(LENGTHS, LIMITS)
@UNHURRIED
def test_a_packing_is_within_the_limit_unless_one_sequence_is_longer(
    lengths: list[int], limit: int
) -> None:
    for packing in pack(lengths, limit):
        if packing.rows * packing.length > limit:
            (alone,) = packing.sequences
            assert lengths[alone.index] == packing.length > limit


@given(LENGTHS, LIMITS)
@UNHURRIED
def test_rows_are_no_longer_than_they_need_be(lengths: list[int], limit: int) -> None:
    for packing in pack(lengths, limit):
        assert packing.length <= max(ROW, *lengths)
        assert packing.length == max(slot.stop for slot in packing.sequences)


@given(LENGTHS, LIMITS)
@UNHURRIED
def test_padding_is_less_than_the_tokens_and_one_row(lengths: list[int], limit: int) -> None:
    # First fit leaves at most one row half empty or more.
    packings = pack(lengths, limit)
    size = sum(packing.rows * packing.length for packing in packings)
    assert size <= 2 * sum(lengths) + max(ROW, *lengths)


def test_short_sequences_share_rows() -> None:
    assert pack([100] * 5, 10_000) == [
        Packing(1, 500, tuple(PackedSequence(i, 0, 100 * i, 100 * i + 100) for i in range(5)))
    ]


def test_sequences_that_fill_rows_evenly_need_no_padding() -> None:
    packings = pack([400, 390, 120, 110], 2000)
    assert [(packing.rows, packing.length) for packing in packings] == [(2, 510)]


@given(WIDE, st.integers(600, 3000))
@UNHURRIED
def test_fill_puts_each_sequence_in_its_place_and_the_value_elsewhere(
    lengths: list[int], limit: int
) -> None:
    tensors = [torch.full((length, 2), float(i)) for i, length in enumerate(lengths)]
    for packing in pack(lengths, limit):
        filled = packing.fill(tensors, value=-1)
        assert filled.shape == (packing.rows, packing.length, 2)
        for slot in packing.sequences:
            place = filled[slot.row, slot.start : slot.stop]
            assert torch.equal(place, tensors[slot.index])
        padding = filled.numel() - sum(2 * lengths[slot.index] for slot in packing.sequences)
        assert int((filled == -1).sum()) == padding


@given(WIDE, st.integers(600, 3000))
@UNHURRIED
def test_positions_start_at_0_with_each_sequence_and_with_the_padding(
    lengths: list[int], limit: int
) -> None:
    for packing in pack(lengths, limit):
        positions = packing.positions()
        assert positions.shape == (packing.rows, packing.length)
        for row in range(packing.rows):
            inside = sorted(
                (slot.start, slot.stop) for slot in packing.sequences if slot.row == row
            )
            expected = [p for start, stop in inside for p in range(stop - start)]
            expected += range(packing.length - len(expected))
            assert positions[row].tolist() == expected


def test_a_datum_has_the_same_logprobs_alone_and_packed(
    exact: LocalServiceClient,
) -> None:
    client = exact.create_lora_training_client("tiny-random", rank=4, seed=0)
    train(client)
    data = ragged(0, [7, 30, 1, 12, 5])
    together = logprobs(client.forward(data, "cross_entropy").result())
    for one, found in zip(data, together, strict=True):
        (alone,) = logprobs(client.forward([one], "cross_entropy").result())
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-6)


def test_a_packed_datum_does_not_attend_to_its_neighbours(client: LocalTrainingClient) -> None:
    train(client)
    middle = datum([3, 1, 4, 1, 5])
    found = []
    for neighbour in (10, 400):
        data = [datum([neighbour] * 6), middle, datum([neighbour] * 4)]
        assert len(pack([6, 5, 4], 1000)) == 1
        assert pack([6, 5, 4], 1000)[0].rows == 1
        found.append(logprobs(client.forward(data, "cross_entropy").result())[1])
    assert torch.equal(*found)


def test_a_packed_sequence_of_one_token_does_not_attend_to_its_neighbours(
    client: LocalTrainingClient,
) -> None:
    train(client)
    data = [datum([5]), datum([6]), datum([5])]
    first, second, third = logprobs(client.forward(data, "cross_entropy").result())
    torch.testing.assert_close(first, third, rtol=0, atol=1e-6)
    assert abs(float(first - second)) > 1e-6
