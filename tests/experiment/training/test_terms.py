"""Terms built from a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard.composition.aggregate import WeightedSum
from steelyard.composition.weightings import GramWeighting
from steelyard.errors import ConfigError
from steelyard.experiment import read_config
from steelyard.experiment.training.terms import build_terms


@pytest.mark.parametrize(
    ("use", "options", "reads"),
    [
        ("kl_to_reference", {}, True),
        ("kl_to_reference", {"reference": "other"}, False),
        ("squared_log_ratio", {}, True),
        ("adaptive", {"regularizer": "kl_to_reference", "target": 1.0}, True),
        ("adaptive", {"regularizer": "l2", "target": 1.0}, False),
        ("l2", {}, False),
    ],
)
def test_terms_that_read_reference_logprobs_are_recognised(
    folder: Path, use: str, options: dict[str, Any], reads: bool
) -> None:
    raw = {
        "data": {"path": "train.jsonl"},
        "regularizers": [{"use": use, "weight": 1, "options": options}],
    }
    assert build_terms(read_config(raw, folder=folder)).reads_reference is reads


@pytest.mark.parametrize(
    ("use", "options", "measures"),
    [
        ("ema_drift", {}, True),
        ("adaptive", {"regularizer": "ema_drift", "target": 1.0}, True),
        ("kl_to_reference", {}, False),
    ],
)
def test_terms_that_are_measured_against_the_base_model_are_recognised(
    folder: Path, use: str, options: dict[str, Any], measures: bool
) -> None:
    terms = build(folder, {"use": use, "weight": 1, "options": options})
    assert terms.measures_reference is measures


def test_a_custom_loss_takes_options(folder: Path) -> None:
    (folder / "own_loss_of_mine.py").write_text(
        "def scaled(data, logprobs, by):\n    return by * -sum(lp.sum() for lp in logprobs)\n"
    )
    loss = {"use": "own_loss_of_mine:scaled", "options": {"by": 2}}
    config = read_config({"data": {"path": "train.jsonl"}, "loss": loss}, folder=folder)
    assert build_terms(config).loss([], [torch.tensor([-1.0])]) == 2
    wrong = {"use": "own_loss_of_mine:scaled", "options": {"buy": 2}}
    config = read_config({"data": {"path": "train.jsonl"}, "loss": wrong}, folder=folder)
    with pytest.raises(ConfigError, match=r"^\[loss\]: fn must accept"):
        build_terms(config)


@pytest.mark.parametrize(
    ("use", "end"),
    [
        ("cross_entrop", "got 'cross_entrop'; did you mean 'cross_entropy'?"),
        ("importance_samplin", "did you mean 'importance_sampling'?"),
        ("dpoo", "did you mean 'dpo'?"),
        ("qqqq", "got 'qqqq'."),
    ],
)
def test_an_unknown_loss_lists_the_known_ones_and_hints_at_the_nearest(
    folder: Path, use: str, end: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(folder, loss={"use": use})
    assert str(caught.value).startswith(
        "[loss]: use must be cross_entropy, importance_sampling, ppo, cispo, dro, gspo, a "
        "registered name or 'package.module:attr', got "
    )
    assert str(caught.value).endswith(end)


def test_a_reward_among_the_regularizers_is_sent_to_its_table(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build(folder, {"use": "exact_match", "weight": 1})
    assert str(caught.value) == (
        "[[regularizers]] #1: use must be a regularizer, got the reward 'exact_match': "
        "put it in [[rewards]]"
    )


def build(folder: Path, *entries: dict[str, Any], **tables: Any) -> Any:
    raw = {"data": {"path": "train.jsonl"}, "regularizers": list(entries), **tables}
    return build_terms(read_config(raw, folder=folder))


def test_specs_have_the_settings_of_their_entries(folder: Path) -> None:
    entry = {"use": "l2", "weight": {"linear": [1.0, 0.0, 4]}, "every": 2, "on_error": "skip"}
    terms = build(folder, entry, {"use": "entropy", "name": "e", "weight": 2, "enabled": False})
    first, second = terms.specs
    assert [first.weight_at(step) for step in (0, 1, 4)] == [1.0, 0.75, 0.0]
    assert (first.name, first.every, first.on_error, first.enabled) == ("l2", 2, "skip", True)
    assert (second.name, second.weight, second.enabled) == ("e", 2.0, False)
    assert terms.loss.name == "cross_entropy"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"use": "l9", "weight": 1}], r"^\[\[regularizers\]\] #1: use: "),
        ([{"use": "l2", "weight": 1, "options": {"x": 1}}], r"^\[\[regularizers\]\] #1: "),
        ([{"use": "l2", "weight": {"tune": [0, 1]}}], r"#1: weight must be a number or a schedule"),
        ([{"use": "l2", "weight": 1}] * 2, r"^\[\[regularizers\]\]: .*unique"),
    ],
)
def test_errors_name_the_entry(folder: Path, entries: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(folder, *entries)


def test_a_schedule_that_turns_negative_is_refused_before_training(folder: Path) -> None:
    entry = {"use": "l2", "weight": {"exponential": [1.0, -1.0]}}
    with pytest.raises(ConfigError, match=r"#1: weight must be a finite number >= 0, got -1"):
        build(folder, entry, train={"steps": 2})
    assert build(folder, entry, train={"steps": 1}).specs[0].weight_at(0) == 1


def test_a_backend_without_logits_refuses_a_term_that_needs_them(folder: Path) -> None:
    (folder / "terms_from_logits.py").write_text("def f(data, logprobs, logits):\n    return 0.0\n")
    entry = {"use": "terms_from_logits:f", "name": "f", "weight": 1, "needs": ["logits"]}
    assert build(folder, entry).specs[0].needs == ("logits",)
    with pytest.raises(ConfigError, match=r"^\[\[regularizers\]\]: .*logits"):
        build(folder, entry, model={"backend": "tinker"})


def test_imports_must_be_modules(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^imports must be modules, and 'no_such_module' is none"
    ):
        build(folder, imports=["no_such_module"])


def test_closing_reaches_the_terms_that_can_be_closed(folder: Path) -> None:
    entry = {"use": "external_validation", "weight": 1, "options": {"url": "http://127.0.0.1:9/"}}
    terms = build(folder, {"use": "l2", "weight": 1}, entry)
    terms.close()
    closed: list[str] = []
    object.__setattr__(terms.specs[1].fn, "close", lambda: closed.append("external_validation"))
    terms.close()
    assert closed == ["external_validation"]


def test_the_aggregator_of_a_config(folder: Path) -> None:
    entry = {"use": "l2", "weight": 1, "anchor": True}
    terms = build(folder, entry)
    assert isinstance(terms.aggregator, WeightedSum)
    assert terms.specs[0].anchor
    assert isinstance(build(folder, loss={"aggregate": {"use": "sum"}}).aggregator, WeightedSum)
    named = build(folder, loss={"aggregate": "mgda"}).aggregator
    assert isinstance(named, GramWeighting)
    assert named.name == "mgda"
    tuned = build(folder, loss={"aggregate": {"use": "mgda", "max_iters": 7}}).aggregator
    assert tuned.weighting.max_iters == 7


def test_the_aggregator_draws_with_the_seed_of_the_run(folder: Path) -> None:
    def draw(run_seed: int, **options: Any) -> list[float]:
        loss = {"aggregate": {"use": "random", **options}}
        aggregator = build(folder, loss=loss, train={"seed": run_seed}).aggregator
        return list(aggregator.factors([1.0, 1.0], [1.0, 1.0], [[1.0, 0.0], [0.0, 1.0]]))

    assert draw(1) == draw(1) != draw(2)
    assert draw(1, seed=2) == draw(2)


@pytest.mark.parametrize(
    ("aggregate", "message"),
    [
        ("upgrade", r"^\[loss\]: aggregate must be one of 'sum', .*'upgrad', .*'upgrade'"),
        ({"use": "mgda", "c": 1}, r"^\[loss\]: the options of aggregate='mgda' must be among"),
        ("fairgrad", r"^\[loss\]: the options of aggregate='fairgrad'.*'alpha'"),
    ],
)
def test_an_aggregator_that_does_not_exist(folder: Path, aggregate: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(folder, loss={"aggregate": aggregate})
