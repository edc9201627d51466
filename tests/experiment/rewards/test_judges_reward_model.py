"""Rewards from tiny models with random weights, saved to a folder."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from steelyard.engine.tiny import tokenizer
from steelyard.errors import SpecError, TermError
from steelyard.experiment.rewards import judges
from steelyard.experiment.rewards.judges import RewardModel
from steelyard.experiment.rewards.reward import Reward, Score
from steelyard.experiment.rewards.scoring import AnsweredRecord, score

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
LONG = 300.0
SIZES = {
    "vocab_size": 257,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
}


def save(folder: Path, family: Any, config: Any, template: str | None = None) -> Any:
    """Save a model with random weights and its tokenizer, and return the model."""
    torch.manual_seed(0)
    model = family(config).eval()
    model.save_pretrained(folder)
    saved = tokenizer()
    saved.chat_template = template
    saved.save_pretrained(folder)
    return model


def save_bert(folder: Path, labels: int = 1) -> Any:
    config: Any = BertConfig(**SIZES)  # type: ignore[arg-type]  # numbers
    config.num_labels = labels
    return save(folder, BertForSequenceClassification, config)


def save_llama(folder: Path) -> Any:
    config: Any = LlamaConfig(**SIZES, num_key_value_heads=1)  # type: ignore[arg-type]  # numbers
    config.num_labels = 1
    return save(folder, LlamaForSequenceClassification, config, TEMPLATE)


def logit(model: Any, text: str, *, last: int | None = None) -> float:
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    ids = ids if last is None else ids[-last:]
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits[0, 0])


@pytest.fixture(autouse=True)
def _free_models() -> Iterator[None]:
    yield
    judges._loaded.clear()


def test_a_pair_of_texts_by_a_bert(tmp_path: Path) -> None:
    model = save_bert(tmp_path)
    reward = RewardModel(model=str(tmp_path), device="cpu")
    for answer in ("yes", "no", ""):
        expected = logit(model, f"Is it?{answer}")
        assert reward({"prompt": "Is it?"}, answer) == pytest.approx(expected, abs=1e-6)
    assert reward({"prompt": "Is it?"}, "yes") != reward({"prompt": "Is it?"}, "no")
    said = {"messages": [{"role": "user", "content": "Is"}, {"role": "user", "content": "it?"}]}
    assert reward(said, "yes") == pytest.approx(logit(model, "Is\nit?yes"), abs=1e-6)


def test_a_chat_by_a_llama(tmp_path: Path) -> None:
    model = save_llama(tmp_path)
    reward = RewardModel(model=str(tmp_path), device="cpu")
    expected = logit(model, "<user>Is it?</><assistant>yes</>")
    assert reward({"prompt": "Is it?"}, "yes") == pytest.approx(expected, abs=1e-6)
    said = {"messages": [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hm"}]}
    expected = logit(model, "<system>Be.</><user>Hm</><assistant>yes</>")
    assert reward(said, "yes") == pytest.approx(expected, abs=1e-6)
    plain = RewardModel(model=str(tmp_path), device="cpu", chat=False)
    expected = logit(model, "Is it?yes")
    assert plain({"prompt": "Is it?"}, "yes") == pytest.approx(expected, abs=1e-6)


def test_long_texts_lose_their_beginning(tmp_path: Path) -> None:
    model = save_llama(tmp_path)
    text = f"<user>{'long ' * 40}</><assistant>yes</>"
    record = {"prompt": "long " * 40}
    reward = RewardModel(model=str(tmp_path), device="cpu")
    assert reward(record, "yes") == pytest.approx(logit(model, text, last=64), abs=1e-6)
    short = RewardModel(model=str(tmp_path), device="cpu", max_length=9)
    assert short(record, "yes") == pytest.approx(logit(model, text, last=9), abs=1e-6)


def test_a_model_scores_the_answers_of_a_step(tmp_path: Path) -> None:
    model = save_bert(tmp_path)
    reward = Reward("rm", RewardModel(model=str(tmp_path), device="cpu"))
    answers: list[AnsweredRecord] = [({"prompt": "?"}, str(number)) for number in range(8)]
    scored = score([reward], answers, timeout=LONG)["rm"]
    assert [each.value for each in scored] == [
        pytest.approx(logit(model, f"?{number}"), abs=1e-6) for number in range(8)
    ]
    assert len(judges._loaded) == 1
    reward.fn.close()  # type: ignore[attr-defined]  # a RewardModel
    assert judges._loaded == {}


def test_copies_in_a_worker_process_share_the_model(tmp_path: Path) -> None:
    save_bert(tmp_path)
    reward = RewardModel(model=str(tmp_path), device="cpu")
    reward.load()
    (loaded,) = judges._loaded.values()
    sent = pickle.dumps(reward)
    assert len(sent) < 1000, "the model is not sent along"
    pickle.loads(sent).load()
    assert list(judges._loaded.values()) == [loaded]


def test_loading_does_not_count_towards_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bert(tmp_path)
    load, threads = judges._load, []

    def watched(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return load(*given)

    monkeypatch.setattr(judges, "_load", watched)
    reward = Reward("rm", RewardModel(model=str(tmp_path), device="cpu"))
    score([reward], [({"prompt": "?"}, "")] * 2, timeout=LONG)
    assert threads == [threading.current_thread()]


def test_a_model_that_cannot_be_loaded_fails_the_run(tmp_path: Path) -> None:
    reward = Reward("rm", RewardModel(model=str(tmp_path), device="cpu"))
    with pytest.raises(TermError) as caught:
        score([reward], [({"prompt": "?"}, "")], timeout=LONG)
    assert str(caught.value).startswith(
        f"reward 'rm' must be loaded before it scores answers, and that failed: ModelError: model "
        f"must be a folder or a Hub id of a reward model, got {str(tmp_path)!r}, which cannot be "
        f"loaded: "
    )


def test_a_model_with_two_labels_is_no_reward_model(tmp_path: Path) -> None:
    save_bert(tmp_path, labels=2)
    with pytest.raises(TermError, match="model must have one label, whose logit is the reward"):
        score([Reward("rm", RewardModel(model=str(tmp_path)))], [], timeout=LONG)


def test_a_missing_chat_template_is_an_error(tmp_path: Path) -> None:
    save_bert(tmp_path)
    with pytest.raises(TermError, match="chat = true needs a tokenizer with a chat template"):
        score([Reward("rm", RewardModel(model=str(tmp_path), chat=True))], [], timeout=LONG)


def test_a_record_without_a_prompt_drops_the_answer(tmp_path: Path) -> None:
    save_bert(tmp_path)
    reward = Reward("rm", RewardModel(model=str(tmp_path), device="cpu"))
    scored = score([reward], [({"question": "?"}, "")], timeout=LONG)["rm"]
    assert scored == [Score(error="KeyError: 'prompt'")]


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("model", "", "a non-empty string"),
        ("device", 0, "a non-empty string"),
        ("max_length", 0, "a whole number >= 1"),
        ("chat", "yes", "True or False"),
    ],
)
def test_an_invalid_option(option: str, value: Any, rule: str) -> None:
    with pytest.raises(SpecError) as caught:
        RewardModel(**{"model": "m", option: value})
    assert str(caught.value) == f"{option} must be {rule}, got {value!r} (reward 'reward_model')."
