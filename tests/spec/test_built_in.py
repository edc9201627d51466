from __future__ import annotations

from steelyard.spec import built_in, lookup_penalty


def test_every_penalty_there_is_has_a_function() -> None:
    for name in built_in.PENALTIES:
        assert callable(lookup_penalty(name))
