from __future__ import annotations

from steelyard.spec import registry
from steelyard.spec.registry import lookup_penalty


def test_every_penalty_there_is_has_a_function() -> None:
    for name in registry.PENALTIES:
        assert callable(lookup_penalty(name))
