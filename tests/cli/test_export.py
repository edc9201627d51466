"""`steelyard export`: the folders that it writes, and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from .command import CommandRunner


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.tensor([[1, 2, 104, 7]])).logits
    return found


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_an_adapter_and_a_whole_model_have_the_same_logits(
    command: CommandRunner, trained_run: Path, tmp_path: Path
) -> None:
    done = command.run("export", str(trained_run), "adapter", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"Adapter after 3 steps: {tmp_path / 'adapter'}\n"
    done = command.run("export", str(trained_run), "whole", "--merge", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"Model after 3 steps: {tmp_path / 'whole'}\n"
    adapter = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(logits(whole), logits(adapter), rtol=0, atol=1e-4)
    base = transformers.AutoModelForCausalLM.from_pretrained(trained_run.parent / "base")
    assert (logits(whole) - logits(base)).abs().max() > 0.01


def test_a_step_and_a_dtype_can_be_chosen(
    command: CommandRunner, trained_run: Path, tmp_path: Path
) -> None:
    options = ("--merge", "--step", "2", "--dtype", "bfloat16")
    done = command.run("export", str(trained_run), "half", *options, cwd=tmp_path)
    assert "Model after 2 steps" in done.out
    config = transformers.AutoConfig.from_pretrained(tmp_path / "half")
    assert config.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("nowhere", "out"), "RunError: nowhere must be the folder of a run"),
        (("RUN", "full"), "InputError: the folder to export to must be new or empty"),
        (("RUN", "full/mine/out"), "InputError: the folder to export to must be one that can be"),
        (("RUN", "out", "--step", "7"), "RunError: step must be that of a checkpoint"),
        (("RUN", "out", "--merge", "--dtype", "int3"), "InputError: dtype must be one of"),
    ],
)
def test_errors_are_one_sentence(
    command: CommandRunner, trained_run: Path, tmp_path: Path, args: tuple[str, ...], error: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    named = [str(trained_run) if arg == "RUN" else arg for arg in args]
    done = command.run("export", *named, cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(error)
    assert done.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_full_disk_is_an_error_that_leaves_nothing(
    command: CommandRunner, trained_run: Path, tmp_path: Path
) -> None:
    # A limit on the size of files stands for it; every file of a merged model's weights is larger.
    done = command.run("export", str(trained_run), "out", "--merge", cwd=tmp_path, limit=50_000)
    assert (done.code, done.out) == (1, "")
    assert "InputError: the folder to export to must be one that can be written" in done.err
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir())
