"""`steelyard sample`: prompts from options, files and a pipe; answers as text and as JSON."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from steelyard.experiment import RunFolder

from .command import CommandRunner, Done, wait_for

GREEDY = ("--temperature", "0", "--max-tokens", "8")


def rows(done: Done) -> list[dict[str, Any]]:
    assert done.code == 0, done.err
    return [json.loads(line) for line in done.out.splitlines()]


def test_one_answer_is_printed_alone(command: CommandRunner, trained_run: Path) -> None:
    prompt = ("--prompt", "3 plus one?")
    done = command.run("sample", str(trained_run), *prompt, *GREEDY, cwd=trained_run)
    (expected,) = [s for s in RunFolder(trained_run).samples() if s["when"] == "after"]
    assert done.code == 0
    assert done.out.rstrip("\n") == expected["completion"].rstrip("\n")
    base = trained_run.parent / "base"
    assert done.err == f"{base}, trained for 3 of 3 steps\n"


def test_several_answers_have_headings(command: CommandRunner, trained_run: Path) -> None:
    options = ("-p", "One?", "-p", "Two?", "-n", "2", "--base", "--seed", "0", *GREEDY)
    done = command.run("sample", str(trained_run), *options, cwd=trained_run)
    headings = [line for line in done.out.splitlines() if line.startswith("> ")]
    assert headings == [
        f"> {prompt} [{number}] ({name})"
        for prompt in ("One?", "Two?")
        for name in ("trained", "base")
        for number in (1, 2)
    ]


def test_a_file_of_json_is_answered_in_json(
    command: CommandRunner, trained_run: Path, tmp_path: Path
) -> None:
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "One?"}]
    lines = [{"prompt": "One plus", "id": 3}, {"messages": chat}]
    (tmp_path / "p.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    options = ("--file", "p.jsonl", "--json", "--seed", "1", "--max-tokens", "5", "--top-p", "0.9")
    first = rows(command.run("sample", str(trained_run), *options, "-n", "2", cwd=tmp_path))
    keys = {"step": 3, "id": 3, "prompt": "One plus"}
    assert [{key: row.get(key) for key in keys} for row in first[:2]] == [keys, keys]
    assert [row.get("messages") for row in first] == [None, None, chat, chat]
    assert [row["sample"] for row in first] == [0, 1, 0, 1]
    assert all(row["tokens"] <= 5 and row["stop_reason"] in ("stop", "length") for row in first)
    again = rows(command.run("sample", str(trained_run), *options, "-n", "2", cwd=tmp_path))
    assert again == first, "by the seed"


def test_a_prompt_is_a_message_or_a_text(command: CommandRunner, trained_run: Path) -> None:
    def sent(*options: str) -> dict[str, Any]:
        args = ("sample", str(trained_run), "-p", "One", "--json", "--max-tokens", "2", *options)
        (row,) = rows(command.run(*args, cwd=trained_run))
        return {key: row[key] for key in ("prompt", "messages") if key in row}

    said = {"role": "user", "content": "One"}
    assert sent() == {"messages": [said]}
    assert sent("--plain") == {"prompt": "One"}
    assert sent("--system", "S") == {"messages": [{"role": "system", "content": "S"}, said]}


def test_prompts_come_from_standard_input(
    command: CommandRunner, trained_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "typed").write_text("One?\nTwo?\n")
    options = ("--file", "-", "--json", "--max-tokens", "2")
    done = command.run("sample", str(trained_run), *options, cwd=tmp_path, stdin=tmp_path / "typed")
    assert [row["messages"][0]["content"] for row in rows(done)] == ["One?", "Two?"]


@pytest.mark.parametrize(
    ("args", "code", "error"),
    [
        ((), 2, "give --prompt TEXT or --file FILE"),
        (("-p", " "), 2, "--prompt must be a text, and it is empty"),
        (("-p", "x", "--temperature", "-1"), 2, "for '--temperature'"),
        (("-p", "x", "--top-p", "0"), 1, "InputError: request 0: top_p must be above 0"),
        (("-p", "x" * 600), 1, "prompt must hold 1 to 512 tokens"),
        (("--file", "nowhere.txt"), 1, "DataError: nowhere.txt must be a file that can be read"),
        (("--file", "bad.jsonl"), 1, "DataError: bad.jsonl:2: must have the keys of"),
        (("-p", "x", "--plain", "--system", "Be brief."), 2, "--system must be given with texts"),
        (("-f", "good.jsonl", "--system", "Be brief."), 2, "--system must be given with texts"),
        (("-p", "x", "--step", "9"), 1, "RunError: step must be that of a checkpoint"),
    ],
)
def test_bad_input_is_an_error(
    command: CommandRunner,
    trained_run: Path,
    tmp_path: Path,
    args: tuple[str, ...],
    code: int,
    error: str,
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "One"}\n{"text": "Two"}\n')
    (tmp_path / "good.jsonl").write_text('{"prompt": "One"}\n')
    done = command.run("sample", str(trained_run), *args, cwd=tmp_path)
    assert (done.code, done.out) == (code, "")
    assert error in done.err
    assert "Traceback" not in done.err


def test_bad_lines_can_be_left_out(
    command: CommandRunner, trained_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "One"}\n{"text": "Two"}\n')
    args = ("--file", "bad.jsonl", "--skip-bad", "--json", "--max-tokens", "2")
    done = command.run("sample", str(trained_run), *args, cwd=tmp_path)
    assert [row["prompt"] for row in rows(done)] == ["One"]
    assert "left out: bad.jsonl:2: must have the keys of" in done.err


def test_ctrl_c_does_not_wait_for_the_answers(command: CommandRunner, trained_run: Path) -> None:
    """All answers would take minutes."""
    args = ("-p", "x", "-n", "2000", "--max-tokens", "400", "--temperature", "9")
    started = command.start("sample", str(trained_run), *args, cwd=trained_run)
    wait_for(started.err, lines=1)  # says which checkpoint, then samples
    begun = time.monotonic()
    started.kill(signal.SIGINT)
    done = started.wait()
    assert (done.code, done.out) == (130, "")
    assert time.monotonic() - begun < 60
