"""States of terms as JSON, and files of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.clients.term_states import decode_state, encode_state, read_states, write_states
from steelyard.errors import CheckpointError, StateError


def through_json(state: Any) -> Any:
    return decode_state("t", json.loads(json.dumps(encode_state("t", state))))


def test_plain_values_round_trip() -> None:
    state = {"a": 1, "b": 0.1, "c": [True, None, "x"], "d": {"e": math.inf}}
    assert through_json(state) == state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_tensors_round_trip_bit_for_bit(dtype: torch.dtype) -> None:
    tensor = (torch.randn(2, 3, generator=torch.Generator().manual_seed(0)) * 10).to(dtype)
    found = through_json({"x": [tensor]})["x"][0]
    assert found.dtype == dtype
    assert torch.equal(found, tensor)


def test_scalar_and_bool_tensors_round_trip() -> None:
    assert torch.equal(through_json(torch.tensor(2.5)), torch.tensor(2.5))
    assert torch.equal(through_json(torch.tensor([True])), torch.tensor([True]))


def test_arrays_round_trip() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3) / 7
    found = through_json({"x": array, "y": np.float64(0.1), "z": np.int64(3)})
    np.testing.assert_array_equal(found["x"], array, strict=True)
    assert (found["y"], found["z"]) == (0.1, 3)


def test_a_tuple_is_decoded_as_a_list() -> None:
    assert through_json((1, 2)) == [1, 2]


@pytest.mark.parametrize(
    "state",
    [
        {1: "a"},
        {"a": object()},
        [{1, 2}],
        torch.ones(2, dtype=torch.complex64),
        torch.eye(2).to_sparse(),
        np.ones(2, dtype=np.complex128),
        np.array([object()]),
        np.array([b"a"]),
        np.complex64(1),
    ],
)
def test_other_types_are_refused(state: Any) -> None:
    with pytest.raises(StateError, match="the state of 'ema' must be made of real numbers"):
        encode_state("ema", state)


def test_a_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_states(path, {"a": 1})
    write_states(path, {"a": 2})
    assert read_states(path) == {"a": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_states(tmp_path / "state.json", {"a": object()})
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must be written to"):
        write_states(tmp_path / "none" / "state.json", {})
    with pytest.raises(CheckpointError, match="that of a saved state"):
        read_states(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(CheckpointError, match="that of a saved state"):
        read_states(tmp_path / "bad.json")


@pytest.mark.parametrize("content", ["[]", "3", "null", "[" * 100_000, "\0"])
def test_other_contents_of_a_file_are_an_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "state.json"
    file.write_text(content)
    with pytest.raises(CheckpointError, match=r"that of a saved state.*state\.json"):
        read_states(file)


@pytest.mark.parametrize("path", ["a\0b", "~nobody_at_all/a", "", "/", "/dev/null/a", "x" * 5000])
def test_paths_of_no_file_are_an_error(path: str) -> None:
    with pytest.raises(CheckpointError, match="the state must be written to"):
        write_states(path, {})
    with pytest.raises(CheckpointError, match="that of a saved state"):
        read_states(path)


@pytest.mark.parametrize(
    "damaged",
    [
        {"__tensor__": {}},
        {"__tensor__": []},
        {"__tensor__": {"dtype": "float99", "shape": [1], "data": [1.0]}},
        {"__tensor__": {"dtype": "nn", "shape": [1], "data": [1.0]}},
        {"__tensor__": {"dtype": "float32", "shape": [2], "data": [1.0]}},
        {"__tensor__": {"dtype": "float32", "shape": "x", "data": [1.0]}},
        {"__tensor__": {"dtype": "float32", "shape": [1], "data": ["x"]}},
        {"__tensor__": {"dtype": "int8", "shape": [1], "data": [10**30]}},
        {"__array__": {"dtype": "float32", "shape": [2], "data": [1.0]}},
        {"__array__": {"dtype": "no", "shape": [1], "data": [1.0]}},
    ],
)
def test_a_damaged_tensor_is_an_error_that_names_the_term(damaged: Any) -> None:
    with pytest.raises(StateError, match="the state of 'ema' must hold tensors as they were saved"):
        decode_state("ema", {"average": [damaged]})
