"""`steelyard chat` on a real terminal and on a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from tests.experiment.trained_runs import train_on_chats

ENVIRONMENT = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def endless_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model repeats the last token of a prompt, `]`, until its limit."""
    folder = tmp_path_factory.mktemp("endless")
    overrides = ("train.steps=1", "train.learning_rate=0")
    return train_on_chats(folder, *overrides, std=0.5, context=30_000)


@pytest.fixture
def spawn() -> Iterator[object]:
    children = []

    def start(*args: str) -> pexpect.spawn:
        child = pexpect.spawn(
            sys.executable,
            ["-m", "steelyard", "chat", *args],
            timeout=600,
            dimensions=(40, 100),
            env=ENVIRONMENT,
            encoding="utf-8",
            codec_errors="replace",
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.close(force=True)


def test_ctrl_c_ends_the_answer_and_at_the_prompt_the_chat(spawn: Any, endless_run: Path) -> None:
    child = spawn(str(endless_run), "--max-tokens", "20000", "--temperature", "0")
    child.expect("trained for 1 of 1 steps")
    child.expect("Ctrl-C ends an answer")
    child.expect("> ")
    child.sendline("hello")
    child.expect("]]]]")  # streamed, long before the answer's end
    child.sendintr()
    child.expect(r"\[stopped\]")
    child.expect("> ")
    child.sendline("/new")
    child.expect("> ")
    child.sendline("")
    child.expect("> ")
    child.sendline("again")
    child.expect("]]]]")
    child.sendintr()
    child.expect(r"\[stopped\]")
    child.expect("> ")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert (child.exitstatus, child.signalstatus) == (0, None)


def test_a_terminal_shows_the_base_model_beside_the_trained_one(
    spawn: Any, endless_run: Path
) -> None:
    child = spawn(str(endless_run), "--base", "--max-tokens", "30", "--temperature", "0")
    child.expect("> ")
    child.sendline("hello")
    child.expect(r"┃ *trained *┃ *base *┃")
    child.expect(r"│ \]{30} +│ \]{30} +│")
    child.expect("> ")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def piped(text: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "steelyard", "chat", *args],
        input=text,
        capture_output=True,
        text=True,
        check=True,
        env=ENVIRONMENT,
    )


def test_a_pipe_gets_the_answers_alone(endless_run: Path) -> None:
    options = ("--max-tokens", "5", "--temperature", "0")
    done = piped("hello\n\nagain", str(endless_run), *options)
    assert done.stdout == "]]]]]\n]]]]]\n"
    assert done.stderr.splitlines() == [f"{endless_run.parent / 'base'}, trained for 1 of 1 steps"]
    done = piped("hello\n", str(endless_run), "--base", *options)
    assert done.stdout == "trained: ]]]]]\nbase: ]]]]]\n"
