"""Public names of `steelyard.penalties`, and their documentation."""

from __future__ import annotations

import pytest

from steelyard import penalties


def test_public_names() -> None:
    assert penalties.__all__ == sorted(penalties.__all__)
    assert set(penalties.__all__) == {
        "PenaltyPipeline",
        "consistency",
        "elastic_net",
        "entropy",
        "gradient_penalty",
        "interpolated_gradient_penalty",
        "js_divergence",
        "kl_divergence",
        "l1",
        "l2",
        "orthogonality",
        "output_magnitude_penalty",
        "validate",
    }
    modules = {"constraints", "divergences", "gradient_penalties"}
    modules |= {"pipeline", "primitives"}
    # `from_logits` is an attribute only after it was imported.
    public = {name for name in vars(penalties) if not name.startswith("_")} - {"from_logits"}
    assert public == {*penalties.__all__, *modules}


@pytest.mark.parametrize("name", penalties.__all__)
def test_every_name_is_documented(name: str) -> None:
    doc = getattr(penalties, name).__doc__
    for section in ("Args:", "Raises:", "Example:", ">>> ", "References:"):
        assert section in doc
