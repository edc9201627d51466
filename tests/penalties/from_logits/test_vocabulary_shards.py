"""Logits whose classes are spread over processes, against whole logits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process_group import run_group

from . import sharded_ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_values_and_gradients(ranks: int, tmp_path: Path) -> None:
    run_group(sharded_ranks.check_terms, tmp_path, ranks=ranks)


def test_composed_terms(tmp_path: Path) -> None:
    run_group(sharded_ranks.check_composed, tmp_path)


def test_a_composite(tmp_path: Path) -> None:
    run_group(sharded_ranks.check_composite, tmp_path)


def test_a_projection(tmp_path: Path) -> None:
    run_group(sharded_ranks.check_projection, tmp_path)
