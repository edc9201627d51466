"""The command `steelyard train`, run for real."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest
import safetensors.torch

from steelyard.experiment import RunFolder, read_config
from steelyard.experiment.data.base_model_outputs import share_reference_logprobs
from tests.regularizers.http_server import Server

from .command import CommandRunner, wait_for
from .project import assert_same, metrics_of, state_of, write_project


def test_a_run_folder_holds_config_metrics_samples_and_checkpoints(
    command: CommandRunner, project: Path
) -> None:
    done = command.run("train", "c.toml", "train.steps=4", "--run", "r", cwd=project)
    assert done.code == 0, done.err
    assert re.search(r"step 1 \(2/4\)  loss \d+\.\d+  base \d+\.\d+  kl \+0\.\d+", done.out)
    assert re.search(r"Held-out loss: \d+\.\d+ -> \d+\.\d+\.\nDone: 4 steps in r", done.out)
    run = project / "r"
    config = json.loads((run / "config.json").read_text())
    assert config["train"]["steps"] == 4
    assert config["train"]["keep"] == 2, "defaults are written out"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [("held_out/loss" in line) for line in lines] == [True, False, False, True]
    assert {
        "time", "seconds", "loss_total", "base_loss/value", "base_loss/grad_norm",
        "total_grad_norm", "regularizers/kl/value", "regularizers/kl/weight",
        "regularizers/kl/contribution", "regularizers/kl/grad_norm",
        "regularizers/kl/grad_norm_weighted", "regularizers/kl/duration", "cosines/base/kl",
        "cosines/kl/drift", "optim/unclipped_grad_l2:mean",
    } <= lines[0].keys()  # fmt: skip
    assert [line["regularizers/kl/weight"] for line in lines] == [0, 0.025, 0.05, 0.1 * 0.75]
    assert all(not isinstance(value, dict | list) for line in lines for value in line.values())
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [(s["when"], s["step"], s["prompt"]) for s in samples] == [
        ("before", 0, "3 plus"),
        ("before", 0, "One"),
        ("after", 4, "3 plus"),
        ("after", 4, "One"),
    ]
    assert "done after 4 steps" in (run / "log.txt").read_text()
    assert len(list(run.glob("checkpoints/step-*.json"))) == 2
    assert len(list(run.glob("checkpoints/*/weights/step-*"))) == 2
    assert not list(run.rglob("*.pkl")) + list(run.rglob("*.pt"))


def test_an_on_policy_run_prints_its_rewards(command: CommandRunner, project: Path) -> None:
    example = command.run("config", "example", "--on-policy", cwd=project).out
    (project / "on_policy.toml").write_text(example)
    (project / "prompts.jsonl").write_text('{"prompt": "Name a fruit."}\n' * 12)
    tiny = ["model.base_model=tiny-random", "model.rank=2", "rollouts.max_tokens=6"]
    done = command.run("train", "on_policy.toml", *tiny, "train.steps=2", "--run", "r", cwd=project)
    assert done.code == 0, done.err
    assert "sampling answers: 8 to each of 4 prompts a step\n" in done.out
    number = r"-?\d[\d.e+-]*"
    line = (
        rf"step 1 \(2/2\)  short {number} ± {number}  reward {number} ± {number}  groups without "
    )
    assert re.search(line + r"signal \d+%  tokens per answer \d\.\d  truncated \d+%", done.out)
    assert re.search(r"Held-out reward: \d\.\d+ -> \d\.\d+\.\nDone: 2 steps in r", done.out)
    assert "Held-out loss" not in done.out


def test_training_lowers_the_held_out_loss(command: CommandRunner, project: Path) -> None:
    command.run("train", "c.toml", "--run", "r", cwd=project)
    first, *_, last = metrics_of(project / "r")
    assert last["held_out/loss"] < first["held_out/loss"] - 1


def test_a_yaml_config_with_overrides(command: CommandRunner, project: Path) -> None:
    (project / "c.yaml").write_text(
        """
model: {base_model: tiny-random, rank: 4}
data: {path: train.jsonl, max_length: 48}
train: {steps: 2, batch_size: 3, learning_rate: 1e-2}
regularizers:
  - {use: kl_to_reference, name: kl, weight: {warmup: [0.1, 4]}}
  - {use: "own_terms:topics", name: topics, weight: 0.1}
"""
    )
    changed = ["train.steps=3", "regularizers.kl.weight={linear = [1.0, 0.5, 2]}"]
    done = command.run("train", "c.yaml", *changed, "--run", "r", cwd=project)
    assert done.code == 0, done.err
    weights = [line["regularizers/kl/weight"] for line in metrics_of(project / "r")]
    assert weights == [1.0, 0.75, 0.5]


def test_preferences_are_trained_with_dpo(command: CommandRunner, project: Path) -> None:
    lines = [
        json.dumps({"prompt": f"{n} is", "chosen": " a number", "rejected": " a fish"})
        for n in range(6)
    ]
    (project / "pairs.jsonl").write_text("\n".join(lines))
    (project / "dpo.toml").write_text(
        '[model]\nbase_model = "tiny-random"\n[data]\npath = "pairs.jsonl"\n'
        '[train]\nsteps = 3\nbatch_size = 2\nlearning_rate = 0.01\n[loss]\nuse = "dpo"\n'
        "options = { beta = 0.5 }\n"
    )
    done = command.run("train", "dpo.toml", "--run", "r", cwd=project)
    assert done.code == 0, done.err
    first, *_, last = metrics_of(project / "r")
    assert first["margin"] == 0, "the reference is the base model, which is where it begins"
    assert last["margin"] > 0
    assert last["held_out/loss"] < first["held_out/loss"]


def test_reference_logprobs_are_computed_for_the_lines_of_the_run(
    command: CommandRunner, project: Path
) -> None:
    done = command.run("train", "c.toml", "train.steps=2", "--run", "r", cwd=project)
    assert done.code == 0, done.err
    assert "22 lines to train on, 2 held out" in done.out
    kept = safetensors.torch.load((project / "r" / "reference.safetensors").read_bytes())
    assert len(kept) == 2 * 3 + 2
    (line, *_) = metrics_of(project / "r")
    assert line["regularizers/kl/value"] == 0, "a fresh adapter is the base model"


BAD = (
    "{not json\n"
    '{"prompt": "a"}\n'
    '["a"]\n'
    '{"prompt": "a", "completion": ""}\n'
    '{"prompt": "a", "completion": " b", "weights": [1]}\n'
    '{"prompt": "' + "long " * 30 + '", "completion": " b"}\n'
    '{"messages": [{"role": "user", "content": "hi"}]}\n'
)


def test_a_malformed_line_is_named_before_training(command: CommandRunner, project: Path) -> None:
    data = project / "train.jsonl"
    data.write_text(data.read_text() + BAD)
    done = command.run("train", "c.toml", "--run", "r", cwd=project)
    assert done.code == 1
    assert f"DataError: {data}:25: must be JSON, and it is not" in done.err
    assert "(6 more lines are wrong.)" in done.err
    assert "loading" not in done.out
    assert not (project / "r").exists()
    data.write_text(data.read_text().replace(BAD, ""))
    mended = command.run("train", "c.toml", "--run", "r", cwd=project)
    assert mended.code == 0, mended.err


def test_bad_lines_can_be_left_out(command: CommandRunner, project: Path) -> None:
    data = project / "train.jsonl"
    good = command.run("train", "c.toml", "train.steps=2", "--run", "good", cwd=project)
    data.write_text(data.read_text() + BAD)
    done = command.run("train", "c.toml", "train.steps=2", "--skip-bad", "--run", "r", cwd=project)
    assert (good.code, done.code) == (0, 0), done.err
    assert f"7 bad lines left out, the first: {data}:25: must be JSON" in done.out
    assert_same(project / "r", project / "good")


def test_a_second_run_in_the_same_folder_is_refused(command: CommandRunner, project: Path) -> None:
    slow = ("regularizers.noise.use=own_terms:slow", "--run", "r")
    first = command.start("train", "c.toml", *slow, cwd=project)
    wait_for(project / "r" / "metrics.jsonl", lines=1)
    for args in (("train", "c.toml", "--run", "r"), ("resume", "r")):
        done = command.run(*args, cwd=project)
        assert done.code == 1
        assert "RunError: r must be used by one process at a time" in done.err
    (project / "hurry").touch()
    assert first.wait().code == 0
    done = command.run("train", "c.toml", "--run", "r", cwd=project)
    assert done.code == 1
    assert "r must be empty or new, and it holds a run: go on with 'steelyard resume r'" in done.err


def test_a_full_disk_keeps_the_old_checkpoint(command: CommandRunner, project: Path) -> None:
    run = project / "r"
    # Three steps read fewer data than eight, and on some processors the base model's log-probs of
    # a datum depend, in the last digit, on those that it is computed with: one cache for both runs.
    share_reference_logprobs(project)
    for args in (("train.steps=3", "--run", "r"), ("--run", "whole")):
        done = command.run("train", "c.toml", *args, cwd=project)
        assert done.code == 0, done.err
    (run / "result.json").unlink()
    config = json.loads((run / "config.json").read_text())
    config["train"]["steps"] = 8
    (run / "config.json").write_text(json.dumps(config))
    before = state_of(run)
    done = command.run("resume", "r", cwd=project, limit=40_000)
    assert done.code == 1
    assert "CheckpointError: the checkpoint 'step-00000006' must be written to" in done.err
    assert "File too large" in done.err
    assert "nothing was changed" in done.err
    assert "CheckpointError" in (run / "log.txt").read_text()
    after = state_of(run)
    assert all(before[key].equal(after[key]) for key in before)
    resumed = command.run("resume", "r", cwd=project)
    assert resumed.code == 0, resumed.err
    assert metrics_of(run)[3:] == metrics_of(project / "whole")[3:]
    ended, whole = state_of(run), state_of(project / "whole")
    assert all(ended[key].equal(whole[key]) for key in whole)


def test_a_full_disk_between_checkpoints_is_named_and_costs_no_step(
    command: CommandRunner, project: Path
) -> None:
    """The metrics of a step cannot be written; the run goes on from its last checkpoint."""
    command.run("train", "c.toml", "--run", "whole", cwd=project)
    size = (project / "whole" / "metrics.jsonl").stat().st_size
    args = ("train", "c.toml", "--run", "r", "train.save_every=8")
    done = command.run(*args, cwd=project, limit=size // 2)
    assert done.code == 1
    assert "Traceback" not in done.err
    assert "File too large" in done.err
    assert "RunError: r must be writable, and that failed" in done.err
    assert len((project / "r" / "metrics.jsonl").read_text().splitlines()) > 1
    resumed = command.run("resume", "r", cwd=project)
    assert resumed.code == 0, resumed.err
    ended, whole = state_of(project / "r"), state_of(project / "whole")
    assert all(ended[key].equal(whole[key]) for key in whole)


def test_a_term_that_fails_ends_the_run_and_is_named(command: CommandRunner, project: Path) -> None:
    done = command.run(
        "train", "c.toml", "regularizers.noise.use=own_terms:broken", "--run", "r", cwd=project
    )
    line = (project / "own_terms.py").read_text().splitlines().index("def broken(data, logprobs):")
    assert done.code == 1
    assert done.err == (
        "TermError: regularizer 'noise' failed: RuntimeError: the knowledge base is down\n"
        f'  File "{project}/own_terms.py", line {line + 2}, in broken\n'
        '    raise RuntimeError("the knowledge base is down")\n'
        "  The whole traceback is in r/log.txt.\n"
    )
    assert "Traceback (most recent call last):" in (project / "r" / "log.txt").read_text()


SKIPPING = ("regularizers.noise.use=own_terms:broken", "regularizers.noise.on_error=skip")


def test_a_skipped_term_is_printed_counted_and_reported(
    command: CommandRunner, project: Path
) -> None:
    done = command.run("train", "c.toml", *SKIPPING, "train.steps=3", "--run", "s", cwd=project)
    assert done.code == 0, done.err
    assert "step 1: noise was skipped: " in done.out
    assert re.search(r"^step 1 \(2/3\)  loss .*  noise skipped", done.out, re.MULTILINE)
    lines = metrics_of(project / "s")
    assert [line["skipped/noise"] for line in lines] == [1.0, 1.0, 1.0]
    for line in lines:
        assert line["skipped/noise/reason"].endswith("RuntimeError: the knowledge base is down")
        assert "regularizers/noise/value" not in line
    assert command.run("report", "s", cwd=project).code == 0
    page = (project / "s" / "report.html").read_text()
    sentence = "“noise” was skipped at 3 of 3 steps: RuntimeError: the knowledge base is down."
    assert sentence in page


def test_a_run_with_skipped_terms_can_be_resumed(command: CommandRunner, project: Path) -> None:
    command.run("train", "c.toml", *SKIPPING, "train.steps=5", "--run", "whole", cwd=project)
    command.run("train", "c.toml", *SKIPPING, "train.steps=5", "--run", "r", cwd=project)
    (project / "r" / "result.json").unlink()
    max((project / "r").glob("checkpoints/step-*.json")).unlink()
    assert command.run("resume", "r", cwd=project).code == 0
    assert_same(project / "r", project / "whole")


def test_a_term_without_a_gradient_is_a_problem(command: CommandRunner, project: Path) -> None:
    done = command.run(
        "train", "c.toml", "regularizers.noise.use=own_terms:constant", "train.steps=7",
        "--run", "r", cwd=project,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.out.count("problem: Regularizer 'noise' has no gradient") == 1
    assert done.out.count("DetachedTermWarning") == 1


def test_the_api_key_is_in_no_file_and_no_output(command: CommandRunner, project: Path) -> None:
    key = "tml-very-secret-0123"
    done = command.run(
        "train", "c.toml", "regularizers.noise.use=own_terms:leaky", "--run", "r",
        f"train.sample_prompts=['{key}']", cwd=project, env={"TINKER_API_KEY": key},
    )  # fmt: skip
    assert done.code == 1
    assert "refused: ***" in done.err
    files = [file for file in (project / "r").rglob("*") if file.is_file()]
    assert len(files) >= 3
    assert key not in done.out + done.err
    assert not [file for file in files if key.encode() in file.read_bytes()]
    done = command.run(
        "train", "c.toml", "regularizers.noise.use=own_terms:leaky", "--run", "s", "train.steps=2",
        "regularizers.noise.on_error=skip", cwd=project, env={"TINKER_API_KEY": key},
    )  # fmt: skip
    assert done.code == 0
    assert metrics_of(project / "s")[0]["skipped/noise/reason"].endswith("refused: ***")
    files = [file for file in (project / "s").rglob("*") if file.is_file()]
    assert key not in done.out + done.err
    assert not [file for file in files if key.encode() in file.read_bytes()]


def test_tensorboard_has_every_number_once(command: CommandRunner, project: Path) -> None:
    args = ("c.toml", "train.steps=3", *SKIPPING, "sinks.tensorboard=true", "--run", "r")
    done = command.run("train", *args, cwd=project)
    assert done.code == 0, done.err
    from tensorboardX.proto import event_pb2  # noqa: PLC0415 - slow, and for this test

    (file,) = (project / "r" / "tensorboard").iterdir()
    content, seen = file.read_bytes(), []
    while content:
        length = int.from_bytes(content[:8], "little")
        event = event_pb2.Event.FromString(content[12 : 12 + length])
        seen += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
        content = content[16 + length :]
    losses = [value for tag, _, value in seen if tag == "loss_total"]
    written = [line["loss_total"] for line in metrics_of(project / "r")]
    assert losses == pytest.approx(written)
    skips = [(tag, step, value) for tag, step, value in seen if tag.startswith("skipped/")]
    assert skips == [("skipped/noise", step, 1.0) for step in range(3)]


def test_weights_and_biases_works_offline(command: CommandRunner, project: Path) -> None:
    args = ("c.toml", "train.steps=2", *SKIPPING, "sinks.wandb={project = 'p'}", "--run", "r")
    done = command.run("train", *args, cwd=project, env={"WANDB_SILENT": "true"})
    assert done.code == 0, done.err
    (file,) = (project / "r" / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"regularizers/kl/contribution" in content
    assert b"skipped/noise" in content
    assert b"skipped/noise/reason" not in content


# Secrets.

SECRETS = {
    "url": "url-password-7101",
    "query": "query-key-7102",
    "header": "header-token-7103",
    "cookie": "cookie-7104",
    "environment": "environment-7105",
    "file": "file-7106",
    "override": "override-7107",
    "basic": base64.b64encode(b"me:url-password-7101").decode(),
}
TOKEN = {"JUDGE_TOKEN": SECRETS["environment"], "WANDB_SILENT": "true"}
LEAKY = """
def leaky(data, logprobs, **options):
    raise RuntimeError(f"refused: {options}")
"""


def write_secrets(folder: Path, url: str) -> Path:
    """A project with a secret of each kind: a validator that gets them, and a term that fails."""
    (folder / "signature.txt").write_text(f"{SECRETS['file']}\n")
    url = url.replace("//", f"//me:{SECRETS['url']}@") + f"?key={SECRETS['query']}"
    options = f"""{{ url = "{url}", headers = {{ Authorization = "Bearer {SECRETS["header"]}", \
Cookie = "session={SECRETS["cookie"]}", X-Vault-Token = {{ env = "JUDGE_TOKEN" }}, \
X-Sig = {{ file = "signature.txt" }} }} }}"""
    terms = f"""
[[regularizers]]
use = "external_validation"
name = "judge"
weight = {{ tune = [0.01, 0.02] }}
options = {options}
[[regularizers]]
use = "own_terms:leaky"
name = "leaky"
weight = 0.1
on_error = "skip"
options = {options}
[train]
steps = 2
batch_size = 2
sample_prompts = ["see {url}"]
sample_tokens = 2
[model]
base_model = "tiny-random"
rank = 2
[data]
path = "train.jsonl"
max_length = 48
[sinks]
tensorboard = true
"""
    write_project(folder, terms)
    with (folder / "own_terms.py").open("a") as file:
        file.write(LEAKY)
    return folder


def files_with_a_secret(folder: Path) -> list[tuple[str, str]]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 10
    return [
        (str(file.relative_to(folder)), kind)
        for file in files
        for kind, secret in SECRETS.items()
        if secret.encode() in file.read_bytes()
    ]


def test_no_file_and_no_output_holds_a_secret(command: CommandRunner, tmp_path: Path) -> None:
    weight = "regularizers.judge.weight=0.01"
    override = f"regularizers.judge.options.headers.X-Api-Key={SECRETS['override']}"
    wandb = "sinks.wandb={project = 'p'}"  # takes seconds, so in one run
    with Server() as server:
        project = write_secrets(tmp_path, server.url("check"))
        commands = [
            ("config", "check", "c.toml", override),
            ("train", "c.toml", override, weight, wandb, "--run", "runs/r"),
            ("ablate", "c.toml", override, weight, "--run", "runs/a"),
            ("tune", "c.toml", override, "--trials", "1", "--run", "runs/t"),
            ("report", "runs/r", "--output", "runs/r.html"),
            ("report", "runs/a", "--output", "runs/a.html"),
        ]
        for args in commands:
            done = command.run(*args, cwd=project, env=TOKEN)
            assert done.code == 0, done.err
            assert not [s for s in SECRETS.values() if s in done.out + done.err], args
    assert server.headers, "and yet the service gets them"
    for headers in server.headers:
        assert headers["authorization"].startswith("basic ")  # httpx: the password of the URL
        assert headers["cookie"] == f"session={SECRETS['cookie']}"
        assert headers["x-vault-token"] == SECRETS["environment"]
        assert headers["x-sig"] == SECRETS["file"]
        assert headers["x-api-key"] == SECRETS["override"]
    assert files_with_a_secret(project / "runs") == []
    lines = metrics_of(project / "runs" / "r")
    assert all("refused: {" in line["skipped/leaky/reason"] for line in lines)


def test_a_redacted_secret_is_given_again(command: CommandRunner, tmp_path: Path) -> None:
    with Server() as server:
        project = write_secrets(tmp_path, server.url("check"))
        settings = ["regularizers.judge.weight=0.01", "regularizers.leaky.options={}"]
        run = RunFolder(project / "r")
        with run.locked():
            run.begin(read_config(project / "c.toml", settings))
        key = "regularizers.judge.options.url"
        done = command.run("resume", "r", cwd=project, env=TOKEN)
        assert done.code == 2
        assert done.err.startswith(f"ConfigError: {key} must be given again, since secrets are")
        assert done.err.count("\n") == 1
        overrides = [
            f"{key}={server.url('check')}",
            f"regularizers.judge.options.headers.Authorization=Bearer {SECRETS['header']}",
            f"regularizers.judge.options.headers.Cookie=session={SECRETS['cookie']}",
        ]
        done = command.run("resume", "r", *overrides, cwd=project, env=TOKEN)
        assert done.code == 0, done.err
    assert server.headers[0]["authorization"] == f"bearer {SECRETS['header']}"
    assert files_with_a_secret(run.path) == []
