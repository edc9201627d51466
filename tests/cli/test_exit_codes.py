"""Exit codes: many wrong configs with code 2 and the wrong key, errors of Steelyard and others."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard.cli.exit_codes import report_error
from steelyard.errors import ConfigError, RunError

from .command import CommandRunner

TERM = '[[regularizers]]\nuse = "l2"\nname = "first"\nweight = 0.1\n'


def term(line: str) -> str:
    return f'{TERM}[[regularizers]]\nuse = "l1"\n{line}\n'


WRONG = [
    (
        "[model]\nbackend = 'cloud'",
        "[model]: backend must be one of 'local' or 'tinker', got 'cloud'",
    ),
    ("[model]\nbase_model = ''", "[model]: base_model must be a non-empty string, got ''"),
    ("[model]\nbase_model = 'gpt-9'", "[model]: base_model must be a known name (smollm2-135m,"),
    ("[model]\nrank = 0", "[model]: rank must be >= 1, got 0"),
    ("[model]\nrank = 2.5", "[model]: rank must be a whole number, got 2.5"),
    ("[model]\nrank = true", "[model]: rank must be a whole number, got True"),
    ("[model]\nbase_url = 'ftp://x'", "[model]: base_url must be an http:// or https:// address"),
    ("[model]\nbase_url = 'https://me:pw@x'", "[model]: base_url must hold no user or password"),
    ("[model]\ndtype = 'int8'", "[model]: dtype must be one of"),
    ("[model]\nmax_tokens = 1", "[model]: max_tokens must be >= 64, got 1"),
    (
        "[model]\napi_key = 'tml-123456'",
        "[model]: api_key is not a key; known: backend, base_model",
    ),
    ("[train]\nsteps = 0", "[train]: steps must be >= 1, got 0"),
    ("[train]\nsteps = '5'", "[train]: steps must be a whole number, got '5'"),
    (
        "[train]\nstepz = 5",
        "[train]: stepz is not a key; did you mean steps? Known: steps, batch_size",
    ),
    ("[train]\nbatch_size = -4", "[train]: batch_size must be >= 1, got -4"),
    ("[train]\nlearning_rate = -1e-4", "[train]: learning_rate must be >= 0, got -0.0001"),
    ("[train]\nlearning_rate = { ramp = [1] }", "[train]: learning_rate must be a number >= 0"),
    ("[train]\nseed = -1", "[train]: seed must be >= 0, got -1"),
    ("[train]\ngrad_clip_norm = nan", "[train]: grad_clip_norm must be"),
    ("[train]\nsave_every = 1.5", "[train]: save_every must be a whole number, got 1.5"),
    ("[train]\nkeep = 0", "[train]: keep must be >= 1, got 0"),
    ("[train]\nsample_prompts = 'hello'", "[train]: sample_prompts must be a list, got 'hello'"),
    ("[train]\ntimeout = 900", "[train]: timeout must be <= 300, got 900"),
    ("[train]\ntrack_grad_norms = 1", "[train]: track_grad_norms must be true or false, got 1"),
    ("[loss]\nuse = 'cross_entrpy'", "got 'cross_entrpy'; did you mean 'cross_entropy'?"),
    (
        "[loss]\noptions = { reduction = 'max' }",
        "reduction must be one of 'mean' or 'sum', got 'max'",
    ),
    ("[loss]\noptions = { redction = 'sum' }", "[loss]: use: "),
    (term("weight = -1"), "[[regularizers]] #2: weight must be >= 0, got -1"),
    (term("weight = inf"), "[[regularizers]] #2: weight must be a number >= 0"),
    (term("weight = 'heavy'"), "[[regularizers]] #2: weight must be a number >= 0"),
    (
        term("weight = { warmup = [0.1] }"),
        "[[regularizers]] #2: weight must be { warmup = [v, steps] }",
    ),
    (
        term("weight = { warmup = [0.1, -3] }"),
        "[[regularizers]] #2: weight must be { warmup = [v, ste",
    ),
    (
        term("weight = { linear = [1, -1, 5] }"),
        "[[regularizers]] #2: weight must be a finite number >= 0",
    ),
    (
        term("weight = { tune = [1, 0] }"),
        "[[regularizers]] #2: weight must be { tune = [low, high]",
    ),
    (
        term("weight = { tune = [0.1, 1] }"),
        "[[regularizers]] #2: weight must be a number or a schedule",
    ),
    (term("name = 'x'"), "[[regularizers]] #2: weight must be given, got nothing"),
    (term("weight = 1\nname = 'first'"), "[[regularizers]]: names must be unique, and 'first'"),
    (term("weight = 1\nevery = 0"), "[[regularizers]] #2: every must be >= 1, got 0"),
    (term("weight = 1\nrun_in = 'gpu'"), "[[regularizers]] #2: run_in must be one of"),
    (term("weight = 1\ngradient = 'exact'"), "[[regularizers]] #2: gradient must be one of"),
    (term("weight = 1\non_error = 'ignore'"), "[[regularizers]] #2: on_error must be one of"),
    (term("weight = 1\ntimeout = 0"), "[[regularizers]] #2: timeout must be > 0, got 0"),
    (
        term("weight = 1\nrun_in = 'inline'\ntimeout = 3"),
        "[[regularizers]] #2: timeout cannot go with",
    ),
    (
        term("weight = 1\nwieght = 2"),
        "[[regularizers]] #2: wieght is not a key; did you mean weight? Known: use, name, weight",
    ),
    (
        term("weight = 1\noptions = { nrm = 2 }"),
        "[[regularizers]] #2: use: 'l1' cannot be made with the",
    ),
    (term("weight = 1\noptions = 3"), "[[regularizers]] #2: options must be a table, got 3"),
    (
        "[[regularizers]]\nuse = 'own_terms:gone'\nweight = 1",
        "[[regularizers]] #1: use: 'own_terms:gone'",
    ),
    ("[[regularizers]]\nweight = 1", "[[regularizers]] #1: use must be given, got nothing"),
    ("[sinks]\nwandb = { project = 'p', mode = 'on' }", "[sinks]: wandb.mode must be one of"),
    ("[tune]\ntrials = 0", "[tune]: trials must be >= 1, got 0"),
    ("[tune]\nobjective = {}", "[tune]: objective must be the key of a metric"),
    (
        "[trian]\nsteps = 5",
        "[trian] is not a key; did you mean train? Known: imports, python_path, model",
    ),
    ("imports = ['nowhere_at_all']", "imports must be modules, and 'nowhere_at_all' is none"),
    ("train = 5", "[train] must be a table, got 5"),
    ("[train\nsteps", "must be TOML, and it is not"),
]
DATA = '[data]\npath = "train.jsonl"\n'
OTHERS = [
    ("", "[data] must be given, got nothing"),
    ("[data]\nmax_length = 8", "[data]: path must be given, got nothing"),
    ("[data]\npath = 'gone.jsonl'", "[data]: path must be a file that exists, got"),
    (f"{DATA}held_out = 1.0", "[data]: held_out must be a fraction in [0, 1) or the path"),
    (f"{DATA}held_out = 'gone.jsonl'", "[data]: held_out must be a file that exists"),
    (f"{DATA}max_length = 1", "[data]: max_length must be >= 2, got 1"),
    (f"{DATA}skip_bad = 'yes'", "[data]: skip_bad must be true or false, got 'yes'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [*((f"{text}\n{DATA}", message) for text, message in WRONG), *OTHERS],
    ids=[message for _, message in [*WRONG, *OTHERS]],
)
def test_a_wrong_config_ends_with_2_and_names_its_key(
    command: CommandRunner, project: Path, text: str, message: str
) -> None:
    (project / "wrong.toml").write_text(text)
    done = command.run("train", "wrong.toml", "--run", "r", cwd=project)
    assert done.code == 2
    assert message in done.err
    assert done.err.startswith("ConfigError: ")
    assert "Traceback" not in done.err
    assert "123456" not in done.err
    assert not (project / "r").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "an override must look like train.steps=5, got 'train.steps'"),
        ("train.steps=x", "[train]: steps must be a whole number, got 'x'"),
        ("regularizers.gone.weight=1", "must name one of ['kl', 'drift', 'noise', 'steady']"),
        ("regularizers.kl.weight=-1", "[[regularizers]] #1: weight must be >= 0, got -1"),
        ("train.steps.x=1", "the override train.steps.x must name a key of a table"),
        ("nothing=1", "nothing] is not a key"),
    ],
)
def test_a_wrong_override_ends_with_2_and_names_its_key(
    command: CommandRunner, project: Path, override: str, message: str
) -> None:
    done = command.run("config", "check", "c.toml", override, cwd=project)
    assert done.code == 2
    assert message in done.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("train",), "Missing argument 'CONFIG'"),
        (("trian",), "No such command 'trian'"),
        (("train", "c.txt"), "a config must be a .toml, .yaml, .yml or .json file"),
        (("train", "gone.toml"), "a config must be a file that can be read"),
        (("train", "c.toml", "--rnu", "x"), "No such option: --rnu"),
        (("ablate", "c.toml", "--jobs", "0"), "Invalid value for '--jobs'"),
        (("tune", "c.toml"), "weight must be { tune = [low, high] } for at least one, got none"),
    ],
)
def test_bad_usage_ends_with_2(
    command: CommandRunner, project: Path, args: tuple[str, ...], message: str
) -> None:
    done = command.run(*args, cwd=project)
    assert done.code == 2
    assert message in done.err


def test_a_folder_without_a_run_cannot_be_resumed(command: CommandRunner, project: Path) -> None:
    done = command.run("resume", "nowhere", cwd=project)
    assert done.code == 1
    assert "nowhere must be the folder of a run, with a config.json, and it is none" in done.err
    assert not (project / "nowhere").exists()


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--run", "taken"), 1, "RunError: taken must be a folder that can be written: File exi"),
        (("model.device=cuda:99",), 2, "ConfigError: [model]: device must be on this machine, go"),
        (("imports=['failing']",), 2, "ConfigError: imports: 'failing' cannot be imported: Synt"),
        (("regularizers.kl.use=failing:f",), 2, "ConfigError: [[regularizers]] #1: use: 'failin"),
    ],
)
def test_a_start_that_fails_says_so_in_one_line_and_makes_no_folder(
    command: CommandRunner, project: Path, args: tuple[str, ...], code: int, message: str
) -> None:
    (project / "taken").touch()
    (project / "failing.py").write_text("def f(:\n")
    done = command.run("train", "c.toml", *args, cwd=project)
    assert done.code == code
    assert done.err.startswith(message)
    assert done.err.count("\n") == 1
    assert not (project / "runs").exists()


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("steps must be >= 1."), 2), (RunError("r is taken."), 1)]
)
def test_an_error_of_steelyard_is_one_line(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_error(error) == code
    assert capsys.readouterr().err == f"{type(error).__name__}: {error}\n"


def test_the_notes_of_an_error_are_indented_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    error = RunError("r is taken.")
    error.add_note("(on the node 10.0.0.7)")
    error.add_note('  File "t.py", line 3, in own\n    return 1 / 0')
    report_error(error)
    assert capsys.readouterr().err == (
        "RunError: r is taken.\n"
        "  (on the node 10.0.0.7)\n"
        '  File "t.py", line 3, in own\n    return 1 / 0\n'
    )


def test_another_error_has_a_traceback_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-s3cr3t")
    with pytest.raises(OSError, match="refused") as caught:
        raise OSError("refused tml-s3cr3t")
    assert report_error(caught.value) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback (most recent call last):\n")
    assert printed.endswith("OSError: refused ***\n")
    assert "s3cr3t" not in printed
