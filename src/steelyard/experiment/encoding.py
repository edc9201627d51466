"""From a line of data to tokens, targets and weights, with its other fields beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import numpy as np
from tinker import types

from steelyard.experiment.data_files import Group, Kind

Piece: TypeAlias = tuple[str, bool]  # text, and whether it is what the model shall learn

_RESERVED = ("target_tokens", "weights")
_OWN = {"prompt", "completion", "messages", "chosen", "rejected"}


class EncodedRecord(types.Datum):
    """A datum that remembers the line it came from.

    Numbers of the line are fields of `loss_fn_inputs`; `record` is all of it, text included. It
    stays on this machine.
    """

    record: ClassVar[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True)
class Encoder:
    """Turns lines into data.

    Attributes:
        tokenizer: the base model's.
        max_length: the most tokens of an example.
    """

    tokenizer: Any  # transformers has no types worth the name
    max_length: int

    def encode(self, kind: Kind, record: dict[str, Any]) -> Group:
        """The data of a line.

        Raises:
            ValueError: it breaks a rule; the message is the rule.
        """
        if kind == "completion":
            pieces = [_plain(_text(record, "prompt"), _text(record, "completion"))]
        elif kind == "messages":
            pieces = [self._chat(record["messages"], "messages")]
        else:
            pieces = [self._answer(record, key) for key in ("chosen", "rejected")]
        return [self._datum(each, record) for each in pieces]

    def prompt(self, text: str, kind: Kind) -> types.ModelInput:
        """A prompt to sample from, in the form of the data."""
        if kind == "messages":
            text = self._render([{"role": "user", "content": text}], open_end=True)
        return types.ModelInput.from_ints(self._tokens(text) or [self._end])

    @property
    def _end(self) -> int:
        end: int = self.tokenizer.eos_token_id
        return end

    def _answer(self, record: dict[str, Any], key: str) -> list[Piece]:
        if isinstance(record[key], list):
            return self._chat(record[key], key)
        prompt = _text(record, "prompt") if "prompt" in record else ""
        return _plain(prompt, _text(record, key))

    def _chat(self, messages: Any, key: str) -> list[Piece]:
        rule = f"{key} must be a list of {{'role', 'content'}} with an answer of the assistant"
        if not isinstance(messages, list) or not all(_is_message(m) for m in messages):
            raise ValueError(f"{rule}, got {_short(messages)}")
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise ValueError(f"{rule}, got none")
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"{key} needs a model with a chat template, and this one has none: "
                f'use {{"prompt", "completion"}}'
            )
        pieces: list[Piece] = []
        done = ""
        for index in answers:
            before = self._render(messages[:index], open_end=True) if index else ""
            after = self._render(messages[: index + 1])
            if not before.startswith(done) or not after.startswith(before):
                raise ValueError(f"{key} must be a chat that the model's template writes in order")
            pieces += [(before[len(done) :], False), (after[len(before) :], True)]
            done = after
        return pieces

    def _render(self, messages: Sequence[Any], *, open_end: bool = False) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=open_end
            )
        except Exception as error:  # a template is a program of the model's
            raise ValueError(f"the chat template refuses: {error}") from error
        return text

    def _datum(self, pieces: Sequence[Piece], record: dict[str, Any]) -> types.Datum:
        tokens: list[int] = []
        learned: list[float] = []
        for text, learn in pieces:
            found = self._tokens(text)
            tokens += found
            learned += [float(learn)] * len(found)
        if tokens and learned[-1] and tokens[-1] != self._end:
            tokens.append(self._end)
            learned.append(1.0)
        tokens, learned = tokens[: self.max_length], learned[: self.max_length]
        if not any(learned[1:]):
            raise ValueError(
                f"max_length must leave a token to learn, and its {self.max_length} tokens are "
                f"taken up by the prompt"
            )
        fields: dict[str, Any] = {"target_tokens": tokens[1:], "weights": learned[1:]}
        example = EncodedRecord(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={**fields, **_numbers(record)},
        )
        object.__setattr__(example, "record", record)
        return example

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens


def _plain(prompt: str, completion: str) -> list[Piece]:
    return [(prompt, False), (completion, True)]


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record[key]
    if not isinstance(value, str) or (not value and key != "prompt"):
        raise ValueError(f"{key} must be a non-empty string, got {_short(value)}")
    return value


def _numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a line that are numbers, or lists of them, as arrays."""
    found = {}
    for key, value in record.items():
        if key in _OWN or not isinstance(value, int | float | list):
            continue
        if key in _RESERVED:
            raise ValueError(f"{key} is made from the text, and a line may not have it")
        try:
            array = np.atleast_1d(np.asarray(value))
        except (OverflowError, ValueError):  # lists of unequal length
            continue
        if array.dtype.kind not in "bif" or not array.size:
            continue
        if not np.isfinite(array).all():
            raise ValueError(f"{key} must be finite, got {_short(value)}")
        found[key] = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
    return found


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )


def _short(value: Any, longest: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= longest else f"{text[:longest]}…"
