"""Rules of the config schema."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from steelyard.experiment import Config


def validate(**tables: Any) -> Config:
    return Config.model_validate({"data": {"path": "train.jsonl"}, **tables})


def test_only_the_data_file_is_required() -> None:
    config = validate()
    assert (config.train.steps, config.train.batch_size, config.train.save_every) == (20, 4, 10)
    assert (config.model.base_model, config.model.rank) == ("smollm2-135m", 16)
    assert (config.loss.use, config.regularizers) == ("cross_entropy", [])
    with pytest.raises(ValidationError, match="data"):
        Config.model_validate({})


@pytest.mark.parametrize(
    ("table", "values", "message"),
    [
        ("data", {"path": "x", "held_out": 1.0}, r"must be a fraction in \[0, 1\) or the path"),
        ("data", {"path": "x", "held_out": ""}, r"must be a fraction in \[0, 1\) or the path"),
        ("data", {"path": "x", "held_out": True}, r"must be a fraction in \[0, 1\) or the path"),
        ("model", {"base_url": "ftp://host"}, "must be an http:// or https:// address"),
        ("model", {"base_url": "http://me:pw@host"}, "must hold no user or password"),
        ("loss", {"reduction": "max"}, "'mean' or 'sum'"),
        ("loss", {"use": "ppo", "options": {"reduction": "max"}}, "'mean' or 'sum'"),
        ("loss", {"use": "a:b", "reduction": "sum"}, "must have reduction with a ready-made loss"),
        ("tune", {"objective": ""}, "must be the key of a metric, or a table of keys"),
        ("tune", {"objective": {}}, "must be the key of a metric, or a table of keys"),
        ("tune", {"objective": {"loss": "1"}}, "must be the key of a metric, or a table of keys"),
        (
            "train",
            {"learning_rate": {"tune": [0, 1]}},
            r"must be a number >= 0 or a schedule such as { warmup = \[0.1, 10\] }; schedules: ",
        ),
        (
            "train",
            {"learning_rate": {"linear": [0.1, -0.1, 4]}, "steps": 5},
            "must have a learning_rate >= 0 at every step, got -0.05 at step 3",
        ),
        ("train", {"timeout": 301}, "less than or equal to 300"),
        ("train", {"track_every": 0}, "greater than or equal to 1"),
        ("train", {"measure_progress": -1}, "greater than or equal to 0"),
        ("train", {"grad_space": "logits"}, "'logprobs' or 'parameters'"),
        ("train", {"steps": "5"}, "valid integer"),
    ],
)
def test_invalid_values_are_refused(table: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        validate(**{table: values})


def test_base_losses_are_means_and_options_of_0_1_0_say_so_too() -> None:
    assert validate().loss.reduction == "mean"
    assert validate(loss={"use": "ppo", "reduction": "sum"}).loss.reduction == "sum"
    old = validate(loss={"options": {"reduction": "sum"}}).loss
    assert (old.reduction, old.options) == ("sum", {})
    own = validate(loss={"use": "own:loss", "options": {"reduction": "sum"}}).loss
    assert own.options == {"reduction": "sum"}, "an option of its own"


def test_a_tinker_service_has_no_parameters_here() -> None:
    train = {"grad_space": "parameters"}
    assert validate(train=train).train.grad_space == "parameters"
    with pytest.raises(
        ValidationError,
        match=r"train.grad_space = 'parameters' needs model.backend = 'local', where the model is",
    ):
        validate(train=train, model={"backend": "tinker"})


def test_valid_values_are_kept() -> None:
    config = validate(
        data={"path": "x", "held_out": "other.jsonl"},
        model={"base_url": "https://host/api"},
        tune={"objective": {"held_out/loss": 1.0, "nll": -0.5}},
        train={"learning_rate": {"cosine": [1e-4, 0, 10]}},
    )
    assert config.source.held_out == "other.jsonl"
    assert config.model.base_url == "https://host/api"
    assert config.tune.objective == {"held_out/loss": 1.0, "nll": -0.5}
    assert config.train.learning_rate == {"cosine": [1e-4, 0, 10]}


def test_the_schema_describes_the_forms_of_a_weight() -> None:
    weight = Config.model_json_schema()["$defs"]["TermConfig"]["properties"]["weight"]
    number, schedule, tuned, bound = weight["anyOf"]
    assert number == {"type": "number", "minimum": 0}
    assert {"type": "object", "properties": {"warmup": {}}, "required": ["warmup"]} in (
        schedule["anyOf"]
    )
    assert tuned["required"] == ["tune"]
    assert [each["required"] for each in bound["anyOf"]] == [["at_most"], ["at_least"]]


@pytest.mark.parametrize("value", ["", 3, {}, {"use": 3}, ["upgrad"], None])
def test_an_aggregator_is_a_name_or_a_table_with_one(value: Any) -> None:
    with pytest.raises(ValidationError, match="must be 'sum', the name of a TorchJD weighting"):
        validate(loss={"aggregate": value})
    assert validate(loss={"aggregate": "upgrad"}).loss.aggregate == "upgrad"
    text, table = Config.model_json_schema()["$defs"]["LossConfig"]["properties"]["aggregate"][
        "anyOf"
    ]
    assert (text["type"], table["required"]) == ("string", ["use"])
