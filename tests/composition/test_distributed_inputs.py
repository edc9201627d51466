"""Norms over several processes, against one process with the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process_group import run_group

from . import sharded_ranks


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_training_equals_one_process(kind: str, ranks: int, tmp_path: Path) -> None:
    run_group(sharded_ranks.check_training, tmp_path, kind, ranks=ranks)
