"""Gradient norms inside the default `jax.shard_map`, beside those of the batch in one piece."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


@pytest.fixture(scope="module")
def printed() -> Any:
    """JAX counts its devices once: four of them need a process of their own."""
    command = [sys.executable, "-m", "tests.integrations.jax.sharded_norms"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("base", ["of each device", "averaged"])
def test_norms_are_those_of_the_batch_in_one_piece(base: str, printed: Any) -> None:
    assert printed["devices"] == 4
    assert printed["whole"]["total_grad_norm"] == pytest.approx(printed["gradient"], rel=1e-10)
    assert printed[base] == pytest.approx(printed["whole"], rel=1e-10)


def test_norms_are_those_of_whole_parameters(printed: Any) -> None:
    found = printed["sharded parameters"]["base_grad_norm"]
    assert found == pytest.approx(printed["whole"]["base_grad_norm"], rel=1e-10)
