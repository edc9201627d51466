"""Data of a term's own in a config: read, checked, split, with the base model's log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard.composition.call_seeds import CallSeed
from steelyard.errors import ConfigError, DataError, RunError
from steelyard.experiment import RunFolder, read_config
from steelyard.experiment.config.schema import Config
from steelyard.experiment.data.encoding import Encoder
from steelyard.experiment.data.term_data import load_term_data, read_term_files
from steelyard.experiment.model.backend import Backend
from steelyard.experiment.training.terms import Terms, build_terms
from tests.experiment.small_runs import KL, L2, lines, small_config, write_data

KEEP = {"use": "nll", "name": "keep", "weight": 0.5, "data": "other.jsonl"}


def other(folder: Path, rows: Any = None, name: str = "other.jsonl") -> Path:
    return write_data(folder / name, lines(8) if rows is None else rows)


def load(
    folder: Path, backend: Backend, *entries: Any, overrides: tuple[str, ...] = ()
) -> tuple[Terms, list[str]]:
    messages: list[str] = []
    config = small_config(folder, *overrides, regularizers=entries)
    run = RunFolder(folder / "run")
    with run.locked():
        run.begin(config)
        terms = load_term_data(config, build_terms(config), backend, run, messages.append)
    return terms, messages


def test_a_path_is_relative_to_the_config_and_a_table_has_more(folder: Path) -> None:
    other(folder)
    table = {"path": "other.jsonl", "held_out": 0.25, "max_length": 20}
    config = small_config(folder, regularizers=[KEEP, {**KEEP, "name": "b", "data": table}])
    first, second = (entry.data for entry in config.regularizers)
    assert first is not None
    assert second is not None
    assert first.path == second.path == str(folder / "other.jsonl")
    assert (first.held_out, first.max_length, second.held_out, second.max_length) == (
        0.1, None, 0.25, 20,
    )  # fmt: skip
    assert Config.model_validate(config.model_dump(mode="json")) == config
    assert config.data_files == [str(folder / "train.jsonl"), str(folder / "other.jsonl")]
    changed = small_config(folder, "regularizers.keep.per_step=7", regularizers=[KEEP])
    assert changed.regularizers[0].per_step == 7


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"data": "none.jsonl"}, r"\[\[regularizers\]\] #2: data.path must be a file that exists"),
        (
            {"data": {"path": "other.jsonl", "held_out": "none.jsonl"}},
            r"\[\[regularizers\]\] #2: data.held_out must be a file that exists",
        ),
        ({"data": {"path": "other.jsonl", "size": 4}}, r"#2: data.size is not a key; known: path"),
        ({"data": 7}, r"#2: data must be a table, got 7"),
        ({"per_step": 0}, r"#2: per_step must be >= 1, got 0"),
        ({"per_step": 9, "data": None}, r"#2 must have data with per_step"),
    ],
)
def test_errors_name_the_entry_the_key_and_the_rule(folder: Path, entry: Any, message: str) -> None:
    other(folder)
    with pytest.raises(ConfigError, match=message):
        small_config(folder, regularizers=[L2, {**KEEP, **entry}])


def test_the_lines_are_split_and_carry_where_they_come_from(folder: Path, backend: Backend) -> None:
    other(folder)
    entry = {**KEEP, "data": {"path": "other.jsonl", "held_out": 0.25}, "per_step": 3}
    terms, messages = load(folder, backend, L2, entry)
    data = terms.data["keep"]
    assert terms.with_own_data == {"keep"}
    assert terms.specs[0].data is None
    assert terms.specs[1].data == data.items
    assert (len(data.train), len(data.held_out)) == (6, 2)
    found = [data.origins[id(datum)] for group in data.train for datum in group]
    held_out = data.batch(data.held_out)
    assert {line for _, line, _ in found} | {line for line, _ in held_out.origins} == set(
        range(1, 9)
    )
    assert held_out.file == "other.jsonl"
    assert held_out.add_line("bad.", 1).endswith(f"line {held_out.origins[1][0]} of other.jsonl.)")
    assert "keep: 3 of 6 lines of other.jsonl beside each batch, 2 held out" in messages


def test_the_split_is_that_of_the_first_seed_and_a_file_is_not_split(
    folder: Path, backend: Backend
) -> None:
    other(folder)
    other(folder, lines(3), "more.jsonl")
    table = {"path": "other.jsonl", "held_out": "more.jsonl"}
    terms, _ = load(folder, backend, {**KEEP, "data": table})
    assert (len(terms.data["keep"].train), len(terms.data["keep"].held_out)) == (8, 3)
    assert terms.data["keep"].batch(terms.data["keep"].held_out).file == "more.jsonl"


def test_pairs_stay_together(folder: Path, backend: Backend) -> None:
    rows = [{"prompt": f"{n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(6)]
    other(folder, rows)
    entry = {"use": "dpo", "name": "prefer", "weight": 0.1, "data": "other.jsonl", "per_step": 2}
    terms, _ = load(folder, backend, entry)
    (spec,) = terms.specs
    drawn = CallSeed(0).data_of(spec, step=0)
    assert len(drawn) == 4
    assert [part for _, part in terms.data["prefer"].batch(drawn).origins] == [
        "chosen", "rejected", "chosen", "rejected",
    ]  # fmt: skip
    other(folder, lines(4))
    config = small_config(folder, regularizers=[entry])
    with pytest.raises(DataError, match=r"other.jsonl must have pairs for regularizer 'prefer'"):
        read_term_files(config, build_terms(config), backend.tokenizer)


def test_lines_are_checked_for_the_term_that_reads_them_alone(folder: Path, plain: Encoder) -> None:
    """The batch need not have what a term reads in its own data, and the other way round."""
    other(folder, [{**line, "margin": 1.0} for line in lines(3)])
    own = {**KL, "options": {"reference": "margin"}, "data": "other.jsonl"}
    config = small_config(folder, regularizers=[own])
    assert read_term_files(config, build_terms(config), plain.tokenizer)["kl"].main.lines == [
        1, 2, 3,
    ]  # fmt: skip
    other(folder, [{**line, "margin": 1.0} for line in lines(2)] + lines(1))
    with pytest.raises(DataError, match=r"other.jsonl:3: must have the field 'margin'"):
        read_term_files(config, build_terms(config), plain.tokenizer)


def test_bad_lines_are_errors_or_skipped_as_in_the_run(folder: Path, backend: Backend) -> None:
    other(folder, [*lines(3), {"text": "no"}])
    config = small_config(folder, regularizers=[KEEP])
    with pytest.raises(DataError, match=r"other.jsonl:4: must have the keys of .*or {\"prompt\"}"):
        read_term_files(config, build_terms(config), backend.tokenizer)
    terms, messages = load(folder, backend, KEEP, overrides=("data.skip_bad=true",))
    assert len(terms.data["keep"].train) + len(terms.data["keep"].held_out) == 3
    assert messages[0].startswith("1 bad line left out, the first: ")


def test_two_kinds_do_not_mix(folder: Path, plain: Encoder) -> None:
    other(folder, [*lines(1), {"prompt": "alone"}])
    config = small_config(folder, regularizers=[KEEP])
    with pytest.raises(DataError, match="one kind with line 1, completion, got prompt"):
        read_term_files(config, build_terms(config), plain.tokenizer)
    other(folder)
    pair = [{"chosen": "a", "rejected": "b"}]
    other(folder, pair, "pairs.jsonl")
    table = {"path": "other.jsonl", "held_out": "pairs.jsonl"}
    config = small_config(folder, regularizers=[{**KEEP, "data": table}])
    with pytest.raises(DataError, match=r"of one kind with .*other.jsonl, completion, got pref"):
        read_term_files(config, build_terms(config), plain.tokenizer)


def test_the_length_and_the_template_are_those_of_the_run_unless_given(
    folder: Path, backend: Backend, chat: Encoder
) -> None:
    other(folder, [{"prompt": "hello", "completion": "x" * 90}])
    lengths = {}
    for length in (None, 16):
        table = {"path": "other.jsonl", "max_length": length}
        config = small_config(folder, regularizers=[{**KEEP, "data": table}])
        (group,) = read_term_files(config, build_terms(config), backend.tokenizer)[
            "keep"
        ].main.groups
        lengths[length] = group[0].model_input.length + 1
    assert lengths == {None: 48, 16: 16}
    texts = []
    for template in (None, False):
        table = {"path": "other.jsonl", "chat": template}
        config = small_config(folder, regularizers=[{**KEEP, "data": table}])
        (group,) = read_term_files(config, build_terms(config), chat.tokenizer)["keep"].main.groups
        texts.append(chat.tokenizer.decode(group[0].model_input.to_ints()))
    assert texts[0].startswith("<user>hello</><assistant>")
    assert texts[1].startswith("helloxxx")


def test_reference_logprobs_are_computed_for_the_data_that_need_them(
    folder: Path, backend: Backend
) -> None:
    """Of a term's own data, those that a step draws and the held-out ones; not of the batch."""
    other(folder, lines(30))
    tokens = {"estimator": "k2"}  # reads log-probs, where the default reads whole distributions
    entries = (
        {**KL, "name": "tokens", "data": "other.jsonl", "per_step": 2, "options": tokens},
        {**KL, "name": "whole", "data": "other.jsonl"},
    )
    terms, messages = load(folder, backend, *entries)
    assert not terms.reads_reference
    assert messages.count("computing the base model's log-probs") == 2  # to draw, and held out
    whole, own = terms.data["whole"], terms.data["tokens"]
    fields = [d.loss_fn_inputs for g in whole.train for d in g]
    fields += [d.loss_fn_inputs for d in whole.held_out]
    assert not any("reference_logprobs" in inputs for inputs in fields)
    have = [g[0] for g in own.train if "reference_logprobs" in g[0].loss_fn_inputs]
    assert len(have) == 6  # 3 steps of 2
    spec = terms.specs[0]
    for step in range(3):
        for datum in CallSeed(0).data_of(spec, step):
            expected = backend.logprobs([datum])[0]
            got = datum.loss_fn_inputs["reference_logprobs"].to_torch()
            torch.testing.assert_close(got, expected)
    assert all("reference_logprobs" in d.loss_fn_inputs for d in own.held_out)
    drift = {"use": "ema_drift", "name": "drift", "weight": 0.1, "data": "other.jsonl"}
    config = small_config(folder, regularizers=[drift])
    assert not build_terms(config).measures_reference


def test_a_file_that_has_changed_is_noticed(folder: Path, backend: Backend) -> None:
    other(folder)
    load(folder, backend, KEEP)
    other(folder, lines(9))
    config = small_config(folder, regularizers=[KEEP])
    run = RunFolder(folder / "run")
    with pytest.raises(RunError, match=r"other.jsonl must be as it was when the run began"):
        load_term_data(config, build_terms(config), backend, run, lambda _: None)


def test_a_config_without_such_terms_reads_nothing(folder: Path, backend: Backend) -> None:
    terms, messages = load(folder, backend, L2)
    assert messages == []
    assert terms.data == {}


def test_the_files_of_a_rollouts_config_are_listed(folder: Path) -> None:
    other(folder)
    write_data(folder / "prompts.jsonl", [{"prompt": "a"}])
    raw = {
        "model": {"base_model": "tiny-random"},
        "rollouts": {"prompts": "prompts.jsonl", "held_out": "other.jsonl"},
        "rewards": [{"use": "length"}],
        "regularizers": [{**KEEP, "data": {"path": "other.jsonl", "held_out": "train.jsonl"}}],
    }
    names = [Path(file).name for file in read_config(raw, folder=folder).data_files]
    assert names == ["prompts.jsonl", "other.jsonl", "train.jsonl"]
