"""Reward from a model with one output: `AutoModelForSequenceClassification`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from steelyard._extras import require
from steelyard.errors import ModelError
from steelyard.spec import OptionChecks, describe, title

_CHECKS = OptionChecks("reward")
# By model and device, for all rewards of the process: a worker process gets a copy of the reward
# with each answer, and must not load the model each time.
_loaded: dict[tuple[str, str | None], _Scorer] = {}
_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """Reward an answer by the output of a reward model, the logit of its single label.

    The model reads the prompt and the answer as a chat, if its tokenizer has a chat template, and
    as a pair of texts otherwise. It scores one answer at a time, in a thread, and is loaded before
    the first one, outside of the timeout; in a process (`run_in = "process"`), within it.

    Args:
        model: the folder or the Hub id of a model with one label.
        device: `"cpu"`, `"cuda"` …; None: a GPU if there is one.
        max_length: the largest number of tokens; longer texts lose tokens at their beginning. None:
            that of the model.
        chat: whether to use the chat template; None: if there is one.

    Raises:
        SpecError: an option is invalid.
        MissingExtraError: transformers is not installed.
    """

    model: str
    device: str | None = None
    max_length: int | None = None
    chat: bool | None = None
    name: ClassVar[str] = "reward_model"
    concurrency: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _CHECKS.text("model", self.model, self.name)
        if self.device is not None:
            _CHECKS.text("device", self.device, self.name)
        if self.max_length is not None:
            _CHECKS.whole("max_length", self.max_length, 1, self.name)
        if self.chat is not None:
            _CHECKS.flag("chat", self.chat, self.name)
        require("transformers", title(self.name, "reward"))

    def load(self) -> None:
        """Load the model and its tokenizer, if that has not been done.

        Raises:
            ModelError: it cannot be loaded, has several labels, or no chat template though it is
                to be used.
        """
        with _lock:
            self._scorer()

    def __call__(self, record: Mapping[str, Any], answer: str) -> float:
        """Reward of an answer."""
        with _lock:  # a tokenizer is not safe for threads
            return self._scorer().score(record, answer, self.max_length, self.chat)

    def close(self) -> None:
        """Free the model. A later call loads it again."""
        with _lock:
            _loaded.pop((self.model, self.device), None)

    def _scorer(self) -> _Scorer:
        key = (self.model, self.device)
        if key not in _loaded:
            _loaded[key] = _load(self.model, self.device)
        scorer = _loaded[key]
        if self.chat and scorer.tokenizer.chat_template is None:
            raise ModelError(
                f"chat = true needs a tokenizer with a chat template, and that of {self.model!r} "
                f"has none (reward {self.name!r}): leave chat out."
            )
        return scorer


@dataclass(frozen=True)
class _Scorer:
    """A loaded model and its tokenizer."""

    model: Any
    tokenizer: Any

    def score(
        self, record: Mapping[str, Any], answer: str, limit: int | None, chat: bool | None
    ) -> float:
        import torch  # noqa: PLC0415 - as transformers

        longest = getattr(self.model.config, "max_position_embeddings", None)
        longest = min(longest or self.tokenizer.model_max_length, self.tokenizer.model_max_length)
        settings = {
            "truncation": True,
            "max_length": limit or longest,
            "return_tensors": "pt",
        }
        if self.tokenizer.chat_template is not None and chat is not False:
            messages = [*_messages(record), {"role": "assistant", "content": answer}]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            # The template has written the special tokens.
            inputs = self.tokenizer(text, add_special_tokens=False, **settings)
        else:
            prompt = "\n".join(message["content"] for message in _messages(record))
            inputs = self.tokenizer(prompt, answer, **settings)
        with torch.inference_mode():
            logits = self.model(**inputs.to(self.model.device)).logits
        return float(logits[0, 0])


def _messages(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "messages" in record:
        return list(record["messages"])
    return [{"role": "user", "content": record["prompt"]}]


def _load(name: str, device: str | None) -> _Scorer:
    import torch  # noqa: PLC0415 - as transformers
    from transformers import (  # noqa: PLC0415 - takes seconds
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, truncation_side="left")
        model = AutoModelForSequenceClassification.from_pretrained(name)
        model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ModelError(
            f"model must be a folder or a Hub id of a reward model, got {name!r}, which cannot be "
            f"loaded: {describe(error)} (reward 'reward_model')."
        ) from error
    if model.config.num_labels != 1:
        raise ModelError(
            f"model must have one label, whose logit is the reward, got {name!r} with "
            f"{model.config.num_labels} (reward 'reward_model')."
        )
    return _Scorer(model.eval(), tokenizer)
