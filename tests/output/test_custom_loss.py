from __future__ import annotations

import json
import math
import pickle
from collections import Counter
from dataclasses import FrozenInstanceError, replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import BaseLossOutput, CustomLossOutput, RegularizerOutput

PLAIN = CustomLossOutput(
    loss_total=2.724,
    base_loss=BaseLossOutput(2.5, custom={"perplexity": 12.2}),
    regularizers={"l1": RegularizerOutput("l1", 22.4, 0.01, 0.224, custom={"mean": 1.4})},
    regularizer_total=0.224,
)
TRACKED = CustomLossOutput(
    loss_total=2.75,
    base_loss=BaseLossOutput(2.5, 3.0, {"perplexity": 12.2}),
    regularizers={
        "l1": RegularizerOutput("l1", 20.0, 0.01, 0.2, 7.0, 0.07, {"mean": 1.4}, 0.5),
        "kl": RegularizerOutput("kl", 0.5, 0.1, 0.05, 2.0, 0.2, {}, 0.25, "logits"),
    },
    regularizer_total=0.25,
    total_grad_norm=5.5,
    gradients=[np.array([1.0, 2.0])],
    cosines={("base", "l1"): 0.5, ("base", "kl"): -1.0, ("l1", "kl"): 0.0},
    skipped={"judge": "TermTimeoutError: it ran longer than 1 s"},
    not_run=("sleepy", "rare"),
)


def test_what_was_not_tracked_skipped_or_left_out_has_no_key() -> None:
    assert PLAIN.to_dict() == {
        "loss_total": 2.724,
        "base_loss": {"value": 2.5, "custom": {"perplexity": 12.2}},
        "regularizers": {
            "l1": {
                "name": "l1",
                "value": 22.4,
                "weight": 0.01,
                "contribution": 0.224,
                "custom": {"mean": 1.4},
                "duration": 0.0,
            }
        },
        "regularizer_total": 0.224,
    }


def test_everything_else_has_one_and_cosines_nest() -> None:
    values = TRACKED.to_dict()
    assert set(values) - set(PLAIN.to_dict()) == {
        "total_grad_norm",
        "grad_space",
        "cosines",
        "skipped",
        "not_run",
    }
    assert values["total_grad_norm"] == 5.5
    assert values["cosines"] == {"base": {"l1": 0.5, "kl": -1.0}, "l1": {"kl": 0.0}}
    assert values["skipped"] == {"judge": "TermTimeoutError: it ran longer than 1 s"}
    assert values["not_run"] == ["sleepy", "rare"]
    assert values["base_loss"]["grad_norm"] == 3.0
    assert values["regularizers"]["kl"]["grad_space"] == "logits"
    assert values["regularizers"]["l1"]["grad_norm_weighted"] == 0.07


def test_a_total_norm_of_zero_is_tracked() -> None:
    assert replace(PLAIN, total_grad_norm=0.0).to_dict()["total_grad_norm"] == 0.0


def test_gradients_are_never_serialised() -> None:
    assert TRACKED.gradients is not None
    assert "gradients" not in TRACKED.to_dict()
    assert "gradients" not in TRACKED.to_json()
    assert "gradients" not in TRACKED.metrics
    assert CustomLossOutput.from_dict(TRACKED.to_dict()).gradients is None


def test_gradients_are_neither_compared_nor_printed() -> None:
    assert replace(TRACKED, gradients=None) == TRACKED
    assert "gradients" not in repr(TRACKED)


def test_metrics_are_flat_with_the_bases_own_keys_bare() -> None:
    assert TRACKED.metrics == {
        "perplexity": 12.2,
        "loss_total": 2.75,
        "base_loss/value": 2.5,
        "base_loss/grad_norm": 3.0,
        "regularizers/l1/value": 20.0,
        "regularizers/l1/weight": 0.01,
        "regularizers/l1/contribution": 0.2,
        "regularizers/l1/grad_norm": 7.0,
        "regularizers/l1/grad_norm_weighted": 0.07,
        "regularizers/l1/share": 0.07 / 3.07,
        "regularizers/l1/custom/mean": 1.4,
        "regularizers/l1/duration": 0.5,
        "regularizers/kl/value": 0.5,
        "regularizers/kl/weight": 0.1,
        "regularizers/kl/contribution": 0.05,
        "regularizers/kl/grad_norm": 2.0,
        "regularizers/kl/grad_norm_weighted": 0.2,
        "regularizers/kl/duration": 0.25,
        "regularizer_total": 0.25,
        "total_grad_norm": 5.5,
        "cosines/base/l1": 0.5,
        "cosines/base/kl": -1.0,
        "cosines/l1/kl": 0.0,
        "skipped/judge": 1.0,
    }


@pytest.mark.parametrize(
    ("base", "space", "shares"),
    [
        (3.0, "logprobs", {"l1": 0.07 / 3.27, "kl": 0.2 / 3.27}),
        (3.0, "logits", {"l1": 0.07 / 3.07}),
        (None, "logprobs", {}),
        (math.inf, "logprobs", {}),
    ],
)
def test_shares_are_of_the_norms_in_the_space_of_the_base_loss(
    base: float | None, space: str, shares: dict[str, float]
) -> None:
    terms = {**TRACKED.regularizers, "kl": replace(TRACKED.regularizers["kl"], grad_space=space)}
    output = replace(TRACKED, base_loss=BaseLossOutput(2.5, base), regularizers=terms)
    found = {key.split("/")[1]: v for key, v in output.metrics.items() if key.endswith("/share")}
    assert found == pytest.approx(shares)


def test_metrics_of_steps_add_up_to_how_often_a_term_was_skipped() -> None:
    steps = [TRACKED, PLAIN, replace(PLAIN, skipped={"judge": "OSError: away", "l2": "…"})]
    counts = Counter[str]()
    for output in steps:
        skipped = {k: v for k, v in output.metrics.items() if k.startswith("skipped/")}
        counts.update(skipped)
    assert counts == {"skipped/judge": 2, "skipped/l2": 1}


def test_a_metric_of_the_base_does_not_hide_the_total() -> None:
    output = replace(PLAIN, base_loss=BaseLossOutput(2.5, custom={"loss_total": -1.0}))
    assert output.metrics["loss_total"] == 2.724


def test_loss_is_the_total() -> None:
    assert PLAIN.loss == 2.724


def test_json_options_are_passed_on() -> None:
    text = TRACKED.to_json(indent=2, sort_keys=True)
    assert text.startswith('{\n  "base_loss"')
    assert json.loads(text) == TRACKED.to_dict()


def test_a_sparse_mapping_is_enough() -> None:
    assert CustomLossOutput.from_dict(
        {"loss_total": 1.0, "base_loss": {"value": 1.0}}
    ) == CustomLossOutput(1.0, BaseLossOutput(1.0))


def test_a_regularizer_may_leave_its_name_to_its_key() -> None:
    # The schema of the seeds has the name as the key alone.
    values = PLAIN.to_dict()
    del values["regularizers"]["l1"]["name"]
    assert CustomLossOutput.from_dict(values) == PLAIN


def test_from_dict_leaves_its_argument_alone() -> None:
    values = TRACKED.to_dict()
    CustomLossOutput.from_dict(values)
    assert values == TRACKED.to_dict()


@pytest.mark.parametrize("field", ["loss_total", "regularizers", "gradients", "invented"])
def test_it_is_frozen(field: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(PLAIN, field, 0.0)


@pytest.mark.parametrize("output", [PLAIN, TRACKED], ids=["plain", "tracked"])
def test_it_pickles(output: CustomLossOutput) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        twin = pickle.loads(pickle.dumps(output, protocol))
        assert twin == output
        assert twin.metrics == output.metrics


numbers = st.floats(allow_nan=False, allow_infinity=False)
names = st.text(min_size=1, max_size=8)
customs = st.dictionaries(names, numbers, max_size=3)


@st.composite
def outputs(draw: st.DrawFn) -> CustomLossOutput:
    tracked = draw(st.booleans())

    def norm() -> float | None:
        return draw(numbers) if tracked else None

    def term(name: str) -> RegularizerOutput:
        spaces = st.sampled_from(["logprobs", "logits"]) if tracked else st.just("logprobs")
        value, weight, contribution, duration = draw(st.tuples(*[numbers] * 4))
        return RegularizerOutput(
            name,
            value,
            weight,
            contribution,
            norm(),
            norm(),
            draw(customs),
            duration,
            draw(spaces),
        )

    terms = {name: term(name) for name in draw(st.lists(names, unique=True, max_size=4))}
    pairs = list(combinations(["base", *(name for name in terms if name != "base")], 2))
    return CustomLossOutput(
        draw(numbers),
        BaseLossOutput(draw(numbers), norm(), draw(customs)),
        terms,
        draw(numbers),
        norm(),
        cosines={pair: draw(numbers) for pair in pairs} if tracked else {},
        skipped=draw(st.dictionaries(names, st.text(), max_size=2)),
        not_run=tuple(draw(st.lists(names, max_size=3))),
    )


@given(outputs())
def test_round_trips_keep_every_number_and_the_order(output: CustomLossOutput) -> None:
    for values in (output.to_dict(), json.loads(output.to_json())):
        twin = CustomLossOutput.from_dict(values)
        assert twin == output
        assert list(twin.regularizers) == list(output.regularizers)
        assert list(twin.cosines) == list(output.cosines)


def leaves(nested: Any) -> list[float]:
    if isinstance(nested, dict):
        return [leaf for value in nested.values() for leaf in leaves(value)]
    return [nested] if isinstance(nested, float) else []


@given(outputs())
def test_metrics_hold_only_numbers_that_are_in_the_mapping(output: CustomLossOutput) -> None:
    known, metrics = leaves(output.to_dict()), output.metrics
    skipped = {name: metrics.pop(f"skipped/{name}") for name in output.skipped}
    assert skipped == dict.fromkeys(output.skipped, 1.0)
    shares = [metrics.pop(f"regularizers/{name}/share", 0.0) for name in output.regularizers]
    assert sum(shares) <= 1 + 1e-12
    assert all(value in known for value in metrics.values())
    assert set(output.base_loss.custom) <= set(output.metrics)
    assert output.metrics["regularizer_total"] == output.regularizer_total
    for name, term in output.regularizers.items():
        assert output.metrics[f"regularizers/{name}/contribution"] == term.contribution
