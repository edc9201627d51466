"""Settings of the terms of a client."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.clients.client_settings import ClientSettings
from steelyard.composition.aggregate import WeightedSum
from steelyard.errors import SpecError


def settings_of(**own: Any) -> ClientSettings:
    return ClientSettings(
        track_grad_norms=False,
        parallel=True,
        timeout=30.0,
        max_concurrency=None,
        check_finite=True,
        workers=None,
        aggregate=WeightedSum(),
        **own,
    )


def test_settings_of_the_client_are_checked() -> None:
    settings_of(grad_space="parameters", measure_progress=5)
    with pytest.raises(SpecError, match=r"^measure_progress must be a whole number >= 0, got -1"):
        settings_of(measure_progress=-1)
    with pytest.raises(SpecError, match=r"^grad_space must be 'logprobs' or .*, got 'weights'"):
        settings_of(grad_space="weights")
