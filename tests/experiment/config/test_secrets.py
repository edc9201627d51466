"""Secrets from the environment and from files, and runs whose secrets were redacted."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from steelyard.errors import ConfigError
from steelyard.experiment import Config, RunFolder, ablate, read_config, resume, train, tune
from steelyard.experiment.config.reading import restore_secrets
from steelyard.experiment.config.secrets import (
    literal_secrets,
    redacted_keys,
    resolve_secrets,
    secret_sources,
)
from steelyard.experiment.training.terms import check_config
from tests.experiment.small_runs import Recorder, small_config

SEEN: list[dict[str, Any]] = []


def keyed(data: Any, logprobs: list[Tensor], **options: Any) -> Tensor:
    """A term that records the options it is called with."""
    SEEN.append(options)
    return logprobs[0].square().mean()


def use(**options: Any) -> dict[str, Any]:
    return {"use": f"{__name__}:keyed", "name": "keyed", "weight": 0.1, "options": options}


def test_a_secret_comes_from_the_environment_or_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYED_TOKEN", "env-6101")
    (folder / "token.txt").write_text("file-6102\n")
    config = small_config(
        folder, regularizers=[use(a={"env": "KEYED_TOKEN"}, b=[{"file": "token.txt"}])]
    )
    written = config.model_dump(mode="json")["regularizers"][0]["options"]
    assert written == {"a": {"env": "KEYED_TOKEN"}, "b": [{"file": str(folder / "token.txt")}]}
    (spec,) = check_config(config).specs
    assert spec.options == {"a": "env-6101", "b": ["file-6102"]}


def test_a_runtime_env_may_hold_secrets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYED_TOKEN", "env-6111")
    (folder / "token.txt").write_text("file-6112")
    variables = {"A": {"env": "KEYED_TOKEN"}, "B": {"file": "token.txt"}}
    entry = use() | {"run_in": "ray", "resources": {"runtime_env": {"env_vars": variables}}}
    config = small_config(folder, regularizers=[entry])
    written = config.model_dump(mode="json")["regularizers"][0]["resources"]
    assert written["runtime_env"]["env_vars"]["B"] == {"file": str(folder / "token.txt")}
    (spec,) = check_config(config).specs
    assert spec.resources == {"runtime_env": {"env_vars": {"A": "env-6111", "B": "file-6112"}}}
    literal = {"runtime_env": {"env_vars": {"API_KEY": 6113}}}
    config = small_config(folder, regularizers=[{**entry, "resources": literal}])
    (key,) = literal_secrets(config.model_dump(mode="json"))
    assert key == "regularizers.keyed.resources.runtime_env.env_vars.API_KEY"


@pytest.mark.parametrize("table", ["regularizers", "rewards", "evaluations"])
def test_secrets_of_every_table_start_from_the_folder_and_are_given_again_by_name(
    folder: Path, table: str
) -> None:
    (folder / "prompts.jsonl").write_text("")
    entry: dict[str, Any] = {"use": "package.module:attr", "name": "probe"}
    raw: dict[str, Any] = {"rollouts": {"prompts": "prompts.jsonl"}, "rewards": [{"use": "length"}]}
    entry |= {"weight": 0.1} if table == "regularizers" else {}
    raw[table] = [{**entry, "options": {"key": {"file": "key.txt"}}}]
    (read,) = getattr(read_config(raw, folder=folder), table)
    assert read.options == {"key": {"file": str(folder / "key.txt")}}
    raw[table] = [{**entry, "options": {"api_key": "s-6108"}}]
    literal = read_config(raw, folder=folder)
    key = f"{table}.probe.options.api_key"
    assert literal_secrets(literal.model_dump(mode="json")) == {key: "s-6108"}
    with pytest.raises(ConfigError, match=f"^{key} must be given again"):
        read_config(raw, [f"{key}=***"], folder=folder)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ({"env": "KEYED_UNSET"}, "in the environment variable 'KEYED_UNSET', and that is not set"),
        ({"env": "KEYED_EMPTY"}, "in the environment variable 'KEYED_EMPTY', and that is empty"),
        ({"file": "missing.txt"}, "in the file '.*missing.txt', and there is none"),
        ({"file": "."}, "in the file '.*', and there is none"),
        ({"file": "empty.txt"}, "in the file '.*empty.txt', and that is empty"),
        ({"file": "binary"}, "in the file '.*binary', and that cannot be read: it is not UTF-8"),
    ],
)
def test_a_missing_secret_is_an_error_before_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, str], message: str
) -> None:
    monkeypatch.setenv("KEYED_EMPTY", "")
    (folder / "empty.txt").write_text("\n")
    (folder / "binary").write_bytes(b"\xff\xfe")
    config = small_config(folder, regularizers=[use(headers={"X.Token": reference})])
    with pytest.raises(
        ConfigError,
        match=rf'^\[\[regularizers\]\] #1: options\.headers\."X\.Token" must be {message}',
    ):
        train(config, folder / "run")
    assert not RunFolder(folder / "run").holds_run


@pytest.mark.parametrize("reference", [{"env": ""}, {"file": ""}])
def test_an_empty_reference_is_refused(folder: Path, reference: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"#1: options must take a from \{ env = "):
        small_config(folder, regularizers=[use(a=reference)])


def test_the_variables_and_files_of_secrets_are_listed() -> None:
    options = {"a": {"env": "A"}, "b": [{"file": "/b"}, {"env": "C", "more": 1}]}
    assert secret_sources({"regularizers": [{"options": options}]}) == (["A"], ["/b"])


def test_other_tables_are_no_references() -> None:
    options = {"a": {"env": 3}, "b": {"env": "A", "file": "B"}, "c": {"other": "A"}}
    assert resolve_secrets(options) == options


def test_the_schema_knows_the_form() -> None:
    jsonschema = importlib.import_module("jsonschema")
    schema = Config.model_json_schema()
    text = json.dumps(schema["$defs"]["TermConfig"]["properties"]["options"])
    assert "env" in text
    assert "file" in text
    entry = use(headers={"Authorization": {"env": "NAME"}}, a={"file": "PATH"})
    jsonschema.validate({"data": {"path": "x"}, "regularizers": [entry]}, schema)


@pytest.fixture
def interrupted(folder: Path) -> Path:
    """A run with literal secrets that was stopped after one step."""
    entry = use(
        headers={"Authorization": "Bearer literal-6201"},
        url="http://me:password-6202@host/",
        urls=["http://a/", "http://me:password-6203@b/"],
        plain="*** not a secret",
        repeated="with literal-6201 again",
    )
    config = small_config(folder, regularizers=[entry])
    answers = iter([False, True])
    assert train(config, folder / "run", stop=lambda: next(answers)).status == "interrupted"
    return folder / "run"


KEYS = ["headers.Authorization", "url", "urls", "repeated"]
OVERRIDES = [
    "regularizers.keyed.options.headers.Authorization=Bearer literal-6201",
    "regularizers.keyed.options.url=http://me:password-6202@host/",
    'regularizers.keyed.options.urls=["http://a/", "http://me:password-6203@b/"]',
    "regularizers.keyed.options.repeated=with literal-6201 again",
]


def test_a_resume_without_its_literal_secret_names_the_key_and_the_cure(interrupted: Path) -> None:
    assert b"-620" not in (interrupted / "config.json").read_bytes()
    raw = json.loads((interrupted / "config.json").read_text())
    assert redacted_keys(raw) == [f"regularizers.keyed.options.{key}" for key in KEYS]
    key = "regularizers.keyed.options.headers.Authorization"
    with pytest.raises(ConfigError) as caught:
        resume(interrupted)
    assert str(caught.value) == (
        f"{key} must be given again, since secrets are not written to files and this config has "
        f'*** there: put {{ env = "NAME" }} or {{ file = "PATH" }} in its place, or add '
        f"{key}=VALUE to the command."
    )
    with pytest.raises(ConfigError, match="must be given again"):
        read_config(interrupted / "config.json")


def test_a_run_is_resumed_with_the_secrets_as_overrides(interrupted: Path) -> None:
    SEEN.clear()
    assert resume(interrupted, OVERRIDES).status == "done"
    assert SEEN[0]["headers"] == {"Authorization": "Bearer literal-6201"}
    assert SEEN[0]["urls"] == ["http://a/", "http://me:password-6203@b/"]
    assert SEEN[0]["plain"] == "*** not a secret"
    assert SEEN[0]["repeated"] == "with literal-6201 again"
    assert resume(interrupted).status == "done", "a finished run needs no secrets"
    assert b"-620" not in (interrupted / "config.json").read_bytes()


def test_a_reference_in_place_of_the_secret_cures_it(
    interrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYED_TOKEN", "Bearer again-6204")
    file = interrupted / "config.json"
    reference = '"Authorization": {"env": "KEYED_TOKEN"}'
    file.write_text(file.read_text().replace('"Authorization": "***"', reference))
    SEEN.clear()
    assert resume(interrupted, OVERRIDES[1:]).status == "done"
    assert SEEN[0]["headers"] == {"Authorization": "Bearer again-6204"}


def test_only_secrets_are_given_again(interrupted: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"an override must give a secret again .*got train\.steps"
    ):
        resume(interrupted, ["train.steps=9"])


def test_a_run_with_references_just_resumes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYED_TOKEN", "env-6301")
    config = small_config(folder, regularizers=[use(a={"env": "KEYED_TOKEN"})])
    answers = iter([False, True])
    train(config, folder / "run", stop=lambda: next(answers))
    assert resume(folder / "run").status == "done"


def test_a_name_with_a_dot_is_quoted_in_the_key(folder: Path) -> None:
    entry = {**use(password="dotted-6401"), "name": ""}  # its name is then `use`, with dots
    config = small_config(folder, regularizers=[entry])
    ((key, secret),) = literal_secrets(config.model_dump(mode="json")).items()
    assert (key, secret) == (f'regularizers."{__name__}:keyed".options.password', "dotted-6401")
    run = RunFolder(folder / "run")
    with run.locked():
        run.begin(config)
    assert restore_secrets(run.config(), [f"{key}=dotted-6401"]) == config
    assert restore_secrets(run.config(), {key: "dotted-6401", "other": 3}) == config


def test_an_interrupted_ablation_and_search_go_on_with_literal_secrets(folder: Path) -> None:
    """The files of the runs hold no secrets; see test_parallel_runs for those in processes."""
    entry = use(password="literal-6501")
    config = small_config(folder, regularizers=[entry])
    answers = iter([False, False, True, True])
    assert not ablate(config, folder / "a", stop=lambda: next(answers)).done
    assert ablate(config, folder / "a").done
    assert not [
        f for f in (folder / "a").rglob("*") if f.is_file() and b"literal-6501" in f.read_bytes()
    ]
    ranged = {**entry, "weight": {"tune": [0.1, 0.2]}}
    search = small_config(folder, "tune.trials=1", regularizers=[ranged])
    stops = iter([False, False, True, True])
    assert not tune(search, folder / "t", stop=lambda: next(stops)).done
    assert tune(search, folder / "t").done
    with pytest.raises(ConfigError, match=r"keyed\.options\.password must be given again"):
        read_config(folder / "t" / "best.json")


def test_an_invalid_config_does_not_show_its_secrets(folder: Path) -> None:
    raw = {"data": {"path": "train.jsonl"}}
    for entry in (
        {"use": "l2", "weight": 1, "options": [{"password": "shown-6601" + 80 * "x"}]},
        {"use": "l2", "weight": 1, "options": {"password": "shown-6601"}},
        {"use": "l2", "weight": 1, "every": "http://me:shown-6601@host/"},
    ):
        with pytest.raises(ConfigError) as caught:
            check_config(read_config({**raw, "regularizers": [entry]}, folder=folder))
        assert "shown-66" not in str(caught.value)
        with pytest.raises(ValueError) as plain:
            check_config(Config.model_validate({**raw, "regularizers": [entry]}))
        assert "shown-66" not in str(plain.value)
    (folder / "c.yaml").write_text("data: {password: shown-6602, path: [}\n")
    with pytest.raises(ConfigError, match="at line 1, column ") as caught:
        read_config(folder / "c.yaml")
    assert "shown-66" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"got 'a\.\.b=…'"):
        read_config(raw, ["a..b=shown-6603"], folder=folder)


def test_the_repr_of_a_config_holds_no_secret(folder: Path) -> None:
    config = small_config(folder, regularizers=[use(password="repr-6701", url="http://a:b-6702@c")])
    assert "-670" not in repr(config)
    assert config.regularizers[0].options["password"] == "repr-6701"


def test_a_reason_with_a_secret_is_redacted_for_watchers_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYED_TOKEN", "reason-6801")
    entry = {**use(key={"env": "KEYED_TOKEN"}), "use": f"{__name__}:leaky", "on_error": "skip"}
    watch = Recorder()
    train(small_config(folder, regularizers=[entry]), folder / "run", watch=watch)
    assert any("refused: ***" in message for message in watch.messages)
    assert "reason-6801" not in json.dumps([watch.messages, watch.steps])


def leaky(data: Any, logprobs: list[Tensor], key: str) -> Tensor:
    raise RuntimeError(f"refused: {key}")
