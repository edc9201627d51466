"""The command `steelyard sample`: answers of a trained model to prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from steelyard.cli.train import SkipBad
from steelyard.cli.trained_run import (
    BaseUrl,
    Checkpoint,
    MaxTokens,
    Run,
    Seed,
    Step,
    System,
    Temperature,
    TopP,
    chosen_checkpoint,
    opened_model,
    printable,
)


def sample(
    run: Run,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help='Prompts: one a line, or JSON Lines with "prompt" or "messages"; -: stdin.',
        ),
    ] = None,
    count: Annotated[int, typer.Option("-n", min=1, help="Answers to each prompt.")] = 1,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    seed: Seed = None,
    system: System = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--plain",
            help="Whether a prompt is a message of a chat or a text to continue; default: as in "
            "the run's data.",
        ),
    ] = None,
    base: Annotated[
        bool, typer.Option("--base", help="Show the base model's answers too.")
    ] = False,
    step: Step = None,
    checkpoint: Checkpoint = None,
    base_url: BaseUrl = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON Lines.")] = False,
    skip_bad: SkipBad = False,
) -> None:
    """Answer prompts with the model of a run."""
    texts = _read_prompts(prompt or [], file, skip_bad=skip_bad)
    if system is not None and (chat is False or any(not isinstance(each, str) for each in texts)):
        raise typer.BadParameter(
            "--system must be given with texts that are messages of a chat, not with --plain; in a "
            'file of JSON Lines, write it into the "messages" of each line.'
        )
    with opened_model(run, chosen_checkpoint(step, checkpoint), base_url) as model:
        is_chat = model.is_chat if chat is None else chat
        prompts = [_record(each, system, is_chat=is_chat or system is not None) for each in texts]
        params = model.params(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed
        )
        found = {"trained": model.sample(prompts, params, count=count)}
        if base:
            found["base"] = model.sample(prompts, params, count=count, base=True)
        rows = [
            {
                **each,
                **({"model": name} if base else {}),
                "step": model.checkpoint.step if name == "trained" else 0,
                "sample": number,
                "completion": answer.text,
                "stop_reason": answer.stop_reason,
                "tokens": answer.tokens,
            }
            for index, each in enumerate(prompts)
            for name, answers in found.items()
            for number, answer in enumerate(answers[index])
        ]
    for row in rows:
        typer.echo(json.dumps(row, ensure_ascii=False) if as_json else _text(row, len(rows)))


def _read_prompts(
    texts: list[str], file: Path | None, *, skip_bad: bool
) -> list[Mapping[str, Any] | str]:
    from steelyard.experiment import read_open_prompts  # noqa: PLC0415 - takes seconds

    if not texts and file is None:
        raise typer.BadParameter("give --prompt TEXT or --file FILE.")
    if any(not text.strip() for text in texts):
        raise typer.BadParameter("--prompt must be a text, and it is empty.")
    prompts: list[Mapping[str, Any] | str] = list(texts)
    if file is not None:
        found, skipped = read_open_prompts(
            "/dev/stdin" if str(file) == "-" else file, skip_bad=skip_bad
        )
        for error in skipped:
            typer.echo(f"left out: {error}", err=True)
        prompts += found
    return prompts


def _record(
    prompt: Mapping[str, Any] | str, system: str | None, *, is_chat: bool
) -> Mapping[str, Any]:
    if not isinstance(prompt, str):
        return prompt
    if not is_chat:
        return {"prompt": prompt}
    before = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*before, {"role": "user", "content": prompt}]}


def _text(row: Mapping[str, Any], count: int) -> str:
    if count == 1:
        return printable(row["completion"])
    question = row["messages"][-1]["content"] if "messages" in row else row["prompt"]
    heading = f"{question} [{row['sample'] + 1}]"
    if "model" in row:
        heading += f" ({row['model']})"
    return printable(f"> {heading}\n{row['completion']}\n")
