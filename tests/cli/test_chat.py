"""`steelyard chat` on a real terminal and on a pipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.experiment.trained_runs import train_on_chats

from .command import CommandRunner, Spawn

CTRL_C, CTRL_D = "\x03", "\x04"


@pytest.fixture(scope="module")
def endless_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model repeats the last token of a prompt, `]`, until its limit."""
    folder = tmp_path_factory.mktemp("endless")
    overrides = ("train.steps=1", "train.learning_rate=0")
    return train_on_chats(folder, *overrides, std=0.5, context=30_000)


def test_ctrl_c_ends_the_answer_and_at_the_prompt_the_chat(spawn: Spawn, endless_run: Path) -> None:
    screen, chat = spawn("chat", str(endless_run), "--max-tokens", "20000", "--temperature", "0")
    screen.expect("trained for 1 of 1 steps")
    screen.expect("Ctrl-C ends an answer")
    for text in ("hello", "/new", "", "again"):
        screen.expect("> ")
        screen.sendline(text)
        if text.isalpha():
            screen.expect("]]]]")  # streamed, long before the answer's end
            screen.send(CTRL_C)
            screen.expect(r"\[stopped\]")
    screen.expect("> ")
    screen.send(CTRL_C)
    assert chat.wait_for_code() == 0


def test_commands_are_answered_and_not_sent_to_the_model(spawn: Spawn, endless_run: Path) -> None:
    screen, chat = spawn("chat", str(endless_run), "--max-tokens", "4", "--temperature", "0")
    screen.expect("/new starts another one")
    for text, answer in {
        "/help": "Ctrl-C ends an answer, Ctrl-D or /quit the chat; /new starts another one.",
        "/system be brief": "/system is no command; there are /help, /new and /quit.",
        " /system": r"\]{4}\r",
        "/etc/hosts": r"\]{4}\r",
    }.items():
        screen.expect("> ")
        screen.sendline(text)
        screen.expect(answer)
    screen.expect("> ")
    screen.sendline("/reset")
    screen.expect("> ")
    screen.sendline("/Quit")
    assert chat.wait_for_code() == 0


def test_a_terminal_shows_the_base_model_beside_the_trained_one(
    spawn: Spawn, endless_run: Path
) -> None:
    screen, chat = spawn(
        "chat", str(endless_run), "--base", "--max-tokens", "30", "--temperature", "0"
    )
    screen.expect("> ")
    screen.sendline("hello")
    for heading in ("┃", "trained", "┃", "base", "┃"):
        screen.expect(heading)
    screen.expect(r"│ \]{30} +│ \]{30} +│")
    screen.expect("> ")
    screen.send(CTRL_D)
    assert chat.wait_for_code() == 0


def test_an_answer_that_cannot_be_given_does_not_end_the_chat(
    spawn: Spawn, trained_run: Path
) -> None:
    screen, chat = spawn("chat", str(trained_run), "--max-tokens", "2")
    screen.expect("> ")
    screen.sendline("e" * 600)
    screen.expect("prompt must hold 1 to 512 tokens")
    screen.expect("> ")
    screen.send(CTRL_D)
    assert chat.wait_for_code() == 0


def test_a_pipe_gets_the_answers_alone(
    command: CommandRunner, endless_run: Path, tmp_path: Path
) -> None:
    typed = tmp_path / "typed"
    typed.write_text("hello\n\nagain")
    args = ("chat", str(endless_run), "--max-tokens", "5", "--temperature", "0")
    done = command.run(*args, cwd=tmp_path, stdin=typed)
    assert (done.code, done.out) == (0, "]]]]]\n]]]]]\n")
    assert done.err == f"{endless_run.parent / 'base'}, trained for 1 of 1 steps\n"
    typed.write_text("/help\nhello\n/reset\n/quit\nagain\n")
    done = command.run(*args, cwd=tmp_path, stdin=typed)
    assert (done.code, done.out) == (0, "]]]]]\n")
    assert "/new starts another one." in done.err
    typed.write_text("hello\n")
    done = command.run(*args, "--base", cwd=tmp_path, stdin=typed)
    assert done.out == "trained: ]]]]]\nbase: ]]]]]\n"


def test_a_pipe_that_cannot_be_answered_is_an_error(
    command: CommandRunner, trained_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "typed").write_text("e" * 600)
    done = command.run("chat", str(trained_run), cwd=tmp_path, stdin=tmp_path / "typed")
    assert (done.code, done.out) == (1, "")
    assert "InputError: prompt must hold 1 to 512 tokens" in done.err
