"""The model of a run: its answers, as text and as a stream, and what can be wrong with a run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from steelyard.errors import CheckpointError, DataError, InputError, RunError
from steelyard.experiment import RunFolder, open_trained_model, resume, train
from steelyard.experiment.model.trained_model import TrainedModel, read_open_prompts
from steelyard.experiment.run.checkpoints import find_checkpoint
from tests.engine.server.wire_client import start
from tests.experiment.small_runs import small_config, write_data
from tests.experiment.trained_runs import train_on_chats, train_plain

ASKED = {"messages": [{"role": "user", "content": "3 plus one?"}]}


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_plain(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_on_chats(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def model(chat_run: Path) -> Iterator[TrainedModel]:
    with open_trained_model(chat_run) as opened:
        yield opened


def greedy(folder: Path, tokens: list[int], count: int, *, adapter: Path | None) -> list[int]:
    """Likeliest tokens by transformers and peft, without the engine."""
    net: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        net = peft.PeftModel.from_pretrained(net, adapter)
    with torch.no_grad():
        for _ in range(count):
            tokens = [*tokens, int(net(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())]
    return tokens[-count:]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("base", [False, True])
def test_answers_are_those_of_the_adapter_in_the_run_folder(
    model: TrainedModel, chat_run: Path, base: bool
) -> None:
    prompt = model.encode(ASKED)
    text = model.backend.tokenizer.decode(prompt.to_ints())
    assert text == "[user]3 plus one?<|end|>[assistant]"
    params = model.params(max_tokens=6, temperature=0.0)
    ((answer,),) = model.sample([ASKED], params, base=base)
    folder = chat_run.parent / "base"
    expected = greedy(
        folder, prompt.to_ints(), answer.tokens, adapter=None if base else chat_run / "adapter"
    )
    assert answer.text == model.backend.tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.tokens == 6 or (answer.stop_reason == "stop" and expected[-1] == 256)


def test_an_answer_is_the_one_that_the_run_recorded(model: TrainedModel, chat_run: Path) -> None:
    recorded = [s for s in RunFolder(chat_run).samples() if s["when"] == "after"]
    ((answer,),) = model.sample([ASKED], model.params(max_tokens=8, temperature=0.0))
    assert [answer.text] == [sample["completion"] for sample in recorded]


@pytest.mark.parametrize("base", [False, True])
def test_the_pieces_of_a_stream_make_the_answer(model: TrainedModel, base: bool) -> None:
    most = 0
    for seed in range(3):
        params = model.params(max_tokens=40, temperature=1.5, seed=seed)
        ((answer,),) = model.sample([ASKED], params, base=base)
        pieces = list(model.stream(model.encode(ASKED), params, base=base))
        assert "".join(pieces) == answer.text
        most = max(most, len(pieces))
    assert most > 1


def test_a_character_of_several_tokens_comes_in_one_piece(model: TrainedModel) -> None:
    tokens = model.backend.tokenizer.encode("a–日b")
    assert len(tokens) == 8
    assert list(model._decode(tokens)) == ["a", "–", "日", "b", ""]
    assert "".join(model._decode(tokens[:3])) == "a\ufffd", "the end is not withheld"


def test_several_answers_differ(model: TrainedModel) -> None:
    params = model.params(max_tokens=12, temperature=1.5, seed=0)
    groups = model.sample([ASKED, {"prompt": "One"}], params, count=3)
    assert [len({answer.text for answer in group}) for group in groups] == [3, 3]
    assert groups == model.sample([ASKED, {"prompt": "One"}], params, count=3)


def test_a_text_is_read_as_in_the_training_data(
    model: TrainedModel, plain_run: Path, chat_run: Path, tmp_path: Path
) -> None:
    assert model.is_chat
    with open_trained_model(plain_run) as plain:
        assert not plain.has_chat_template
        assert not plain.is_chat
        with pytest.raises(InputError, match=r"^messages needs a model with a chat template"):
            plain.encode(ASKED)
    data = chat_run.parent / "train.jsonl"
    with open_trained_model(chat_run) as opened:
        data.rename(tmp_path / "away.jsonl")
        assert opened.is_chat, "the data are gone: by the template"
    os.mkfifo(data)
    with open_trained_model(chat_run) as opened:
        assert opened.is_chat, "nobody writes to the pipe, and nobody waits for it"
    data.unlink()
    with open_trained_model(chat_run) as opened:
        write_data(data, [{"prompt": "", "text": "no prompt", "chosen": "a"}])
        assert opened.is_chat, "a line with a prompt is a question"
    with open_trained_model(chat_run) as opened:
        write_data(data, [{"chosen": "One", "rejected": "two"}])
        assert not opened.is_chat
    config = json.loads((chat_run / "config.json").read_text())
    write_data(data, [{"prompt": "One", "completion": " two"}])
    for chat in (None, False):
        config["data"]["chat"] = chat
        (chat_run / "config.json").write_text(json.dumps(config))
        with open_trained_model(chat_run) as opened:
            assert opened.is_chat == (chat is None)
    del config["data"]["chat"]  # a run of 0.1.0 was trained on raw text
    (chat_run / "config.json").write_text(json.dumps(config))
    with open_trained_model(chat_run) as opened:
        assert not opened.is_chat


def test_another_checkpoint_is_opened_by_its_step(chat_run: Path) -> None:
    with open_trained_model(chat_run, 2) as earlier:
        assert (earlier.checkpoint.step, earlier.is_finished) == (2, True)
    with pytest.raises(RunError, match=r"step must be that of a checkpoint of .*, 2 or 3, got 9"):
        open_trained_model(chat_run, 9)


def test_a_run_that_was_stopped_is_opened_at_its_last_checkpoint(tmp_path: Path) -> None:
    answers = iter([False, False, True])
    train(small_config(tmp_path), tmp_path / "run", stop=lambda: next(answers))
    with open_trained_model(tmp_path / "run") as model:
        assert (model.checkpoint.step, model.is_finished) == (2, False)


def test_a_folder_without_a_run_or_a_checkpoint_is_an_error(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="must be the folder of a run"):
        open_trained_model(tmp_path / "nowhere")
    with pytest.raises(RunError, match="must hold a checkpoint, and it has none yet"):
        open_trained_model(run.path)


def test_a_base_model_that_is_gone_is_an_error(chat_run: Path, tmp_path: Path) -> None:
    shutil.copytree(chat_run, tmp_path / "run", symlinks=True)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["model"]["base_model"] = gone = str(tmp_path / "gone")
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match=f"was trained on the model '{gone}', and it is not there"):
        open_trained_model(tmp_path / "run")


def test_a_damaged_checkpoint_is_an_error(plain_run: Path, tmp_path: Path) -> None:
    shutil.copytree(plain_run, tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged"):
        open_trained_model(tmp_path / "run")


def test_a_run_on_a_gpu_is_opened_on_a_machine_without_one(
    plain_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(plain_run, tmp_path / "run", symlinks=True)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["model"]["device"] = "cuda"
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with open_trained_model(tmp_path / "run") as model:
        ((answer,),) = model.sample([{"prompt": "One"}], model.params(max_tokens=2))
    assert answer.tokens <= 2


def test_a_run_on_a_service_is_sampled_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    prompts = [{"prompt": "3 plus one is"}]
    with start(tmp_path / "served") as running:
        remote = ["model.backend=tinker", f"model.base_url={running.base_url}"]
        train(small_config(tmp_path, *remote), tmp_path / "run")
        assert not (tmp_path / "run" / "adapter").exists()
        with open_trained_model(tmp_path / "run") as model:
            params = model.params(max_tokens=6, temperature=0.0)
            ((far,),) = model.sample(prompts, params)
            ((base,),) = model.sample(prompts, params, base=True)
            streamed = list(model.stream(model.encode(prompts[0]), params))
        assert streamed == [far.text]
        shutil.rmtree(tmp_path / "served")
        with pytest.raises(RunError, match=r"the Tinker service must load the checkpoint tinker:"):
            open_trained_model(tmp_path / "run")
    train(small_config(tmp_path), tmp_path / "here")
    with open_trained_model(tmp_path / "here") as model:
        assert model.sample(prompts, params) == [[far]]
        assert model.sample(prompts, params, base=True) == [[base]]
    assert far != base


def test_the_checkpoint_of_a_run_that_goes_on_may_be_replaced_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, True])
    config = small_config(tmp_path, "train.keep=1")
    train(config, tmp_path / "run", stop=lambda: next(answers))
    found = []

    def find_and_go_on(run: RunFolder, step: int | None = None) -> Any:
        found.append(find_checkpoint(run, step))
        if len(found) == 1:  # read, and not loaded yet
            assert resume(run.path).status == "done"
        return found[-1]

    monkeypatch.setattr("steelyard.experiment.run.checkpoints.find_checkpoint", find_and_go_on)
    with open_trained_model(tmp_path / "run") as model:
        assert model.checkpoint.step == 3
    assert found[0].step == 1


def test_prompts_are_read_from_lines_or_json(tmp_path: Path) -> None:
    texts = tmp_path / "prompts.txt"
    texts.write_text("One plus\n\n  Two {x}\n")
    assert read_open_prompts(texts) == (["One plus", "Two {x}"], [])
    lines = write_data(tmp_path / "prompts.jsonl", [{"prompt": "One", "id": 3}, ASKED])
    assert read_open_prompts(lines) == ([{"prompt": "One", "id": 3}, ASKED], [])
    lines.write_text('{"prompt": "One"}\n{"text": "Two"}\nThree\n')
    with pytest.raises(DataError, match=r"jsonl:2: must have the keys of .* \(1 more line"):
        read_open_prompts(lines)
    found, errors = read_open_prompts(lines, skip_bad=True)
    assert (found, len(errors)) == ([{"prompt": "One"}], 2)
    texts.write_text("\n")
    with pytest.raises(DataError, match="at least one usable line"):
        read_open_prompts(texts)
