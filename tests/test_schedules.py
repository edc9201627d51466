"""`steelyard.schedules`, the public module; `tests/spec/test_schedules.py` has the laws."""

from __future__ import annotations

import subprocess
import sys

import pytest

import steelyard.spec.schedules
from steelyard import RegularizerSpec, schedules


def test_it_exports_the_schedules_of_spec() -> None:
    for name in schedules.__all__:
        assert getattr(schedules, name) is getattr(steelyard.spec.schedules, name)


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, steelyard.schedules; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_spec_follows_a_schedule() -> None:
    by_hand = {0: 0.0, 25: 0.05, 50: 0.1, 500: 0.1}
    spec = RegularizerSpec(print, schedules.warmup(0.1, steps=50), "warm")
    assert {step: spec.weight_at(step) for step in by_hand} == pytest.approx(by_hand)


def test_schedules_nest() -> None:
    # Epochs of 10 steps: 0.4, 0.2, 0.1, ...
    halved = schedules.by_epoch(schedules.exponential(0.4, 0.5), steps_per_epoch=10)
    spec = RegularizerSpec(print, halved, "halved")
    found = [spec.weight_at(step) for step in (0, 9, 10, 19, 20)]
    assert found == pytest.approx([0.4, 0.4, 0.2, 0.2, 0.1])
