from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pytest
import safetensors.torch

from steelyard import __version__

from .command import Kitchen
from .project import assert_same, metrics_of, state_of

STEELYARD = Path(sys.executable).with_name("steelyard")
TERMINAL = {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def wait_for(path: Path, lines: int = 0) -> None:
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        time.sleep(0.005)


def test_a_run_folder_holds_what_it_should(kitchen: Kitchen, project: Path) -> None:
    done = kitchen.run("train", "c.toml", "train.steps=4", "--run", "r", cwd=project)
    assert done.code == 0, done.err
    assert re.search(r"step 2/4  loss \d+\.\d+  base \d+\.\d+  kl \+0\.\d+", done.out)
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


def test_training_lowers_the_held_out_loss(kitchen: Kitchen, project: Path) -> None:
    kitchen.run("train", "c.toml", "--run", "r", cwd=project)
    first, *_, last = metrics_of(project / "r")
    assert last["held_out/loss"] < first["held_out/loss"] - 1


def test_yaml_and_overrides_say_the_same(kitchen: Kitchen, project: Path) -> None:
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
    done = kitchen.run("train", "c.yaml", *changed, "--run", "r", cwd=project)
    assert done.code == 0, done.err
    weights = [line["regularizers/kl/weight"] for line in metrics_of(project / "r")]
    assert weights == [1.0, 0.75, 0.5]


def test_preferences_are_trained_with_dpo(kitchen: Kitchen, project: Path) -> None:
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
    done = kitchen.run("train", "dpo.toml", "--run", "r", cwd=project)
    assert done.code == 0, done.err
    first, *_, last = metrics_of(project / "r")
    assert first["margin"] == 0, "the reference is the base model, which is where it begins"
    assert last["margin"] > 0
    assert last["held_out/loss"] < first["held_out/loss"]


def test_the_reference_is_computed_for_the_lines_a_run_comes_by(
    kitchen: Kitchen, project: Path
) -> None:
    done = kitchen.run("train", "c.toml", "train.steps=2", "--run", "r", cwd=project)
    assert done.code == 0, done.err
    assert "22 lines to train on, 2 held out" in done.out
    kept = safetensors.torch.load((project / "r" / "reference.safetensors").read_bytes())
    assert len(kept["lengths"]) == 2 * 3 + 2
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


def test_a_malformed_line_is_named_before_training(kitchen: Kitchen, project: Path) -> None:
    data = project / "train.jsonl"
    data.write_text(data.read_text() + BAD)
    done = kitchen.run("train", "c.toml", "--run", "r", cwd=project)
    assert done.code == 1
    assert f"DataError: {data}:25: must be JSON, and it is not" in done.err
    assert "(6 more lines are wrong.)" in done.err
    assert not (project / "r" / "metrics.jsonl").exists()
    data.write_text(data.read_text().replace(BAD, ""))
    mended = kitchen.run("resume", "r", cwd=project)
    assert mended.code == 0, mended.err


def test_bad_lines_can_be_left_out(kitchen: Kitchen, project: Path) -> None:
    data = project / "train.jsonl"
    good = kitchen.run("train", "c.toml", "train.steps=2", "--run", "good", cwd=project)
    data.write_text(data.read_text() + BAD)
    done = kitchen.run("train", "c.toml", "train.steps=2", "--skip-bad", "--run", "r", cwd=project)
    assert (good.code, done.code) == (0, 0), done.err
    assert f"7 bad lines left out, the first: {data}:25: must be JSON" in done.out
    assert_same(project / "r", project / "good")


def test_a_second_run_in_one_folder_refuses(kitchen: Kitchen, project: Path) -> None:
    slow = ("regularizers.noise.use=own_terms:slow", "--run", "r")
    first = kitchen.start("train", "c.toml", *slow, cwd=project)
    wait_for(project / "r" / "metrics.jsonl", lines=1)
    for command in (("train", "c.toml", "--run", "r"), ("resume", "r")):
        done = kitchen.run(*command, cwd=project)
        assert done.code == 1
        assert "RunError: r must be used by one process at a time" in done.err
    assert first.wait().code == 0
    done = kitchen.run("train", "c.toml", "--run", "r", cwd=project)
    assert done.code == 1
    assert "r must be empty or new, and it holds a run: go on with 'steelyard resume r'" in done.err


def test_ctrl_c_finishes_the_step_and_the_run_goes_on(kitchen: Kitchen, project: Path) -> None:
    slow = "regularizers.noise.use=own_terms:slow"
    whole = kitchen.run("train", "c.toml", slow, "--run", "whole", cwd=project)
    started = kitchen.start("train", "c.toml", slow, "--run", "r", cwd=project)
    wait_for(project / "r" / "metrics.jsonl", lines=2)
    started.kill(signal.SIGINT)
    done = started.wait()
    assert (whole.code, done.code) == (0, 130)
    assert "Finishing this step, then saving. Ctrl-C again ends at once." in done.out
    found = re.search(r"Stopped after (\d) steps, and saved. Go on with:\n  (.*)\n", done.out)
    assert found is not None
    assert found[2] == "steelyard resume r"
    assert len(metrics_of(project / "r")) == int(found[1]) < 8
    assert kitchen.run("resume", "r", cwd=project).code == 0
    assert_same(project / "r", project / "whole")


def test_a_second_ctrl_c_ends_at_once(kitchen: Kitchen, project: Path) -> None:
    stuck = ("regularizers.noise.use=own_terms:stuck", "regularizers.noise.timeout=300")
    started = kitchen.start("train", "c.toml", *stuck, "--run", "r", cwd=project)
    wait_for(project / "stuck")
    started.kill(signal.SIGINT)
    wait_for(started.out, lines=4)
    started.kill(signal.SIGINT)
    # Had it waited for the term, the error of the term would have ended it, with code 1.
    assert started.wait().code == 130


def test_a_full_disk_keeps_the_old_checkpoint(kitchen: Kitchen, project: Path) -> None:
    run = project / "r"
    kitchen.run("train", "c.toml", "train.steps=3", "--run", "r", cwd=project)
    kitchen.run("train", "c.toml", "--run", "whole", cwd=project)
    (run / "result.json").unlink()
    config = json.loads((run / "config.json").read_text())
    config["train"]["steps"] = 8
    (run / "config.json").write_text(json.dumps(config))
    before = state_of(run)
    done = kitchen.run("resume", "r", cwd=project, limit=40_000)
    assert done.code == 1
    assert "CheckpointError: the checkpoint 'step-00000006' must be written to" in done.err
    assert "File too large" in done.err
    assert "nothing was changed" in done.err
    assert "CheckpointError" in (run / "log.txt").read_text()
    after = state_of(run)
    assert all(before[key].equal(after[key]) for key in before)
    assert kitchen.run("resume", "r", cwd=project).code == 0
    ended, whole = state_of(run), state_of(project / "whole")
    assert all(ended[key].equal(whole[key]) for key in whole)


def test_a_term_that_fails_ends_the_run_and_is_named(kitchen: Kitchen, project: Path) -> None:
    done = kitchen.run(
        "train", "c.toml", "regularizers.noise.use=own_terms:broken", "--run", "r", cwd=project
    )
    assert done.code == 1
    assert "regularizer 'noise' failed: RuntimeError: the knowledge base is down" in done.err


SKIPPING = ("regularizers.noise.use=own_terms:broken", "regularizers.noise.on_error=skip")


def test_a_skipped_term_is_told_counted_and_reported(kitchen: Kitchen, project: Path) -> None:
    done = kitchen.run("train", "c.toml", *SKIPPING, "train.steps=3", "--run", "s", cwd=project)
    assert done.code == 0, done.err
    assert "step 1: noise was skipped: " in done.out
    assert re.search(r"^step 2/3  loss .*  noise skipped", done.out, re.MULTILINE)
    lines = metrics_of(project / "s")
    assert [line["skipped/noise"] for line in lines] == [1.0, 1.0, 1.0]
    for line in lines:
        assert line["skipped/noise/reason"].endswith("RuntimeError: the knowledge base is down")
        assert "regularizers/noise/value" not in line
    assert kitchen.run("report", "s", cwd=project).code == 0
    page = (project / "s" / "report.html").read_text()
    said = "“noise” was skipped at 3 of 3 steps: RuntimeError: the knowledge base is down."
    assert said in page


def test_a_run_with_skipped_terms_goes_on(kitchen: Kitchen, project: Path) -> None:
    kitchen.run("train", "c.toml", *SKIPPING, "train.steps=5", "--run", "whole", cwd=project)
    kitchen.run("train", "c.toml", *SKIPPING, "train.steps=5", "--run", "r", cwd=project)
    (project / "r" / "result.json").unlink()
    max((project / "r").glob("checkpoints/step-*.json")).unlink()
    assert kitchen.run("resume", "r", cwd=project).code == 0
    assert_same(project / "r", project / "whole")


def test_a_term_without_a_gradient_is_flagged_and_warned_of(
    kitchen: Kitchen, project: Path
) -> None:
    done = kitchen.run(
        "train", "c.toml", "regularizers.noise.use=own_terms:constant", "train.steps=2",
        "--run", "r", cwd=project,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "noise +0.0100 (no gradient)" in done.out
    assert done.out.count("DetachedTermWarning") == 1


def test_the_api_key_is_nowhere(kitchen: Kitchen, project: Path) -> None:
    key = "tml-very-secret-0123"
    done = kitchen.run(
        "train", "c.toml", "regularizers.noise.use=own_terms:leaky", "--run", "r",
        f"train.sample_prompts=['{key}']", cwd=project, env={"TINKER_API_KEY": key},
    )  # fmt: skip
    assert done.code == 1
    assert "refused: ***" in done.err
    files = [file for file in (project / "r").rglob("*") if file.is_file()]
    assert len(files) > 3
    assert key not in done.out + done.err
    assert not [file for file in files if key.encode() in file.read_bytes()]
    done = kitchen.run(
        "train", "c.toml", "regularizers.noise.use=own_terms:leaky", "--run", "s", "train.steps=2",
        "regularizers.noise.on_error=skip", cwd=project, env={"TINKER_API_KEY": key},
    )  # fmt: skip
    assert done.code == 0
    assert metrics_of(project / "s")[0]["skipped/noise/reason"].endswith("refused: ***")
    files = [file for file in (project / "s").rglob("*") if file.is_file()]
    assert key not in done.out + done.err
    assert not [file for file in files if key.encode() in file.read_bytes()]


def test_tensorboard_has_every_number_once(kitchen: Kitchen, project: Path) -> None:
    args = ("c.toml", "train.steps=3", *SKIPPING, "sinks.tensorboard=true", "--run", "r")
    done = kitchen.run("train", *args, cwd=project)
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


def test_weights_and_biases_works_offline(kitchen: Kitchen, project: Path) -> None:
    args = ("c.toml", "train.steps=2", *SKIPPING, "sinks.wandb={project = 'p'}", "--run", "r")
    done = kitchen.run("train", *args, cwd=project, env={"WANDB_SILENT": "true"})
    assert done.code == 0, done.err
    (file,) = (project / "r" / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"regularizers/kl/contribution" in content
    assert b"skipped/noise" in content
    assert b"skipped/noise/reason" not in content


@pytest.fixture
def terminal(project: Path) -> Path:
    """A project with a slow term, in a process, so that Ctrl-C reaches that process too."""
    config = (project / "c.toml").read_text()
    slow = (
        '[[regularizers]]\nuse = "own_terms:slow"\nname = "slow"\nweight = 0.1\nrun_in = "process"'
    )
    (project / "c.toml").write_text(f"{config}\n{slow}\n")
    return project


def test_a_terminal_shows_a_bar_and_a_table_and_hears_ctrl_c(terminal: Path) -> None:
    child = pexpect.spawn(
        str(STEELYARD),
        ["train", "c.toml", "train.steps=40", "--run", "r"],
        cwd=terminal,
        timeout=600,
        dimensions=(50, 140),
        env={**TERMINAL, "PATH": str(STEELYARD.parent)},
        encoding="utf-8",
        codec_errors="replace",  # Ctrl-C makes the terminal drop what it holds, mid-letter too
    )
    for words in ("loading tiny-random", "loss \\d+", "1/40", "left", "\\d:\\d\\d:\\d\\d"):
        child.expect(words)
    child.expect("┏")
    for column in ("term", "value", "weight", "adds", "pulls", "share", "cosine", "time"):
        child.expect(column)
    child.expect("│ base ")
    child.expect(" \\d+% │")
    child.expect("fights the base loss")
    child.sendintr()
    child.expect("Finishing this step")
    child.expect("steelyard resume r")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    made = len(metrics_of(terminal / "r"))
    assert 0 < made < 40
    assert "WorkerDied" not in (terminal / "r" / "log.txt").read_text()


@pytest.mark.parametrize("command", [[STEELYARD], [sys.executable, "-m", "steelyard"]])
def test_the_version(command: list[str]) -> None:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"steelyard {__version__}\n")


def test_configs_can_be_had_and_checked(kitchen: Kitchen, project: Path) -> None:
    schema = json.loads(kitchen.run("config", "schema", cwd=project).out)
    assert set(schema["properties"]) >= {"model", "data", "train", "loss", "regularizers"}
    example = kitchen.run("config", "example", cwd=project).out
    (project / "example.toml").write_text(example)
    done = kitchen.run("config", "check", "example.toml", cwd=project)
    assert (done.code, done.out) == (
        0,
        "example.toml: good. Loss: cross_entropy. Regularizers: kl, entropy.\n",
    )
    ranges = "regularizers.kl.weight={tune = [0.1, 1.0]}"
    assert kitchen.run("config", "check", "example.toml", ranges, cwd=project).code == 0


def test_models_are_listed_and_pulled(kitchen: Kitchen, project: Path) -> None:
    env = {"STEELYARD_CACHE": str(project / "cache")}
    listed = kitchen.run("models", "list", cwd=project, env=env)
    assert re.search(r"smollm2-135m +context +8192 +not fetched yet", listed.out)
    assert re.search(r"tiny-random +context +512 +built in", listed.out)
    pulled = kitchen.run("models", "pull", "tiny-random", cwd=project, env=env)
    assert pulled.code == 0
    assert "tiny-random is here: " in pulled.out
    unknown = kitchen.run("models", "pull", "gpt-9", cwd=project, env=env)
    assert unknown.code == 1
    assert "base_model must be a known name" in unknown.err
