"""Encode lines of data: tokens, targets and weights, with the line's other fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from tinker import types

from steelyard.spec.error_messages import shorten

Kind: TypeAlias = Literal["completion", "messages", "preference", "prompt"]
# Data of one line: one datum, or a chosen and a rejected one.
Group: TypeAlias = list[types.Datum]
TextPart: TypeAlias = tuple[str, bool]  # text, and whether its tokens are trained on

_MAX_SHOWN = 60  # characters of a value in a message
_RESERVED = ("target_tokens", "weights")
_TEXT_KEYS = {"prompt", "completion", "messages", "chosen", "rejected"}


class EncodedRecord(types.Datum):
    """A datum with the line that it was encoded from.

    Numeric fields of the line are in `loss_fn_inputs`; `record` is the whole line, with its text.
    The record is not sent to a service.
    """

    record: ClassVar[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True)
class Encoder:
    """Encodes lines as data.

    Attributes:
        tokenizer: tokenizer of the base model.
        max_length: maximum tokens of an example.
        chat: whether a line with a prompt is a chat: a question of the user, and its answer. None:
            if the tokenizer has a chat template. True needs one; False is raw text.
    """

    tokenizer: Any  # transformers' tokenizers are not usefully typed
    max_length: int
    chat: bool | None = None

    @property
    def is_chat(self) -> bool:
        """Return whether a line with a prompt is a chat."""
        return bool(self.tokenizer.chat_template) if self.chat is None else self.chat

    def encode(self, kind: Kind, record: dict[str, Any]) -> Group:
        """Encode a line: one datum, or the chosen and the rejected one of a preference.

        The datum of a prompt has its tokens and fields; `with_answer` makes data of it.

        Raises:
            ValueError: the line is invalid; the message is the rule.
        """
        if kind == "prompt":
            return [self._open_datum(record)]
        if kind == "completion":
            examples = [self._answered(_text(record, "prompt"), _text(record, "completion"))]
        elif kind == "messages":
            examples = [self._chat(record["messages"], "messages")]
        else:
            examples = [self._preference(record, key) for key in ("chosen", "rejected")]
        return [self._datum(pieces, record) for pieces in examples]

    def prompt(self, text: str, kind: Kind) -> types.ModelInput:
        """Encode a prompt to sample from, in the format of the data.

        Raises:
            ValueError: it is a chat, and the model has no chat template; the message is the rule.
        """
        if kind == "messages" or (self.is_chat and text):
            self._check_template("prompt", "chat = false")
            text = self._render([{"role": "user", "content": text}], generation_prompt=True)
        return types.ModelInput.from_ints(self._tokens(text) or [self._end])

    def open_prompt(self, record: Mapping[str, Any]) -> types.ModelInput:
        """Encode a line that has a prompt and no answer: `"prompt"`, or `"messages"`.

        Raises:
            ValueError: the line is invalid; the message is the rule.
        """
        if "messages" not in record:
            return self.prompt(_text(record, "prompt"), "completion")
        messages = record["messages"]
        if not _is_chat(messages) or not messages or messages[-1]["role"] == "assistant":
            raise ValueError(
                f"messages must be a list of {{'role', 'content'}} that ends before an answer of "
                f"the assistant, got {_short(messages)}"
            )
        self._check_template("messages", '{"prompt"}')
        text = self._render(messages, generation_prompt=True)
        return types.ModelInput.from_ints(self._tokens(text))

    @property
    def _end(self) -> int:
        end: int = self.tokenizer.eos_token_id
        return end

    def _preference(self, record: dict[str, Any], key: str) -> list[TextPart]:
        if isinstance(record[key], list):
            return self._chat(record[key], key)
        prompt = _text(record, "prompt") if "prompt" in record else ""
        return self._answered(prompt, _text(record, key))

    def _answered(self, prompt: str, answer: str) -> list[TextPart]:
        """Pieces of a prompt and its answer; without a prompt there is nobody to answer."""
        if not self.is_chat or not prompt:
            return [(prompt, False), (answer, True)]
        messages = [("user", prompt), ("assistant", answer)]
        return self._chat([{"role": role, "content": text} for role, text in messages], "prompt")

    def _chat(self, messages: Any, key: str) -> list[TextPart]:
        rule = f"{key} must be a list of {{'role', 'content'}} with an answer of the assistant"
        if not _is_chat(messages):
            raise ValueError(f"{rule}, got {_short(messages)}")
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise ValueError(f"{rule}, got none")
        alternative = "chat = false" if key == "prompt" else '{"prompt", "completion"}'
        self._check_template(key, alternative)
        # Render the chat up to each answer of the assistant, and with it: the difference is what
        # to train on. It needs a template whose text for a prefix of the messages is a prefix of
        # its text for all of them.
        pieces: list[TextPart] = []
        rendered = ""
        for index in answers:
            before = self._render(messages[:index], generation_prompt=True) if index else ""
            after = self._render(messages[: index + 1])
            if not before.startswith(rendered) or not after.startswith(before):
                raise ValueError(f"{key} must be a chat that the model's template writes in order")
            pieces += [(before[len(rendered) :], False), (after[len(before) :], True)]
            rendered = after
        return pieces

    def _check_template(self, key: str, alternative: str) -> None:
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"{key} needs a model with a chat template, and this one has none: "
                f"use {alternative}"
            )

    def _render(self, messages: Sequence[Any], *, generation_prompt: bool = False) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as error:  # a template is code, and may raise anything
            raise ValueError(f"the chat template refuses: {error}") from error
        return text

    def _datum(self, pieces: Sequence[TextPart], record: dict[str, Any]) -> types.Datum:
        tokens: list[int] = []
        weights: list[float] = []
        for text, trained in pieces:
            encoded = self._tokens(text)
            tokens += encoded
            weights += [float(trained)] * len(encoded)
        if tokens and weights[-1] and tokens[-1] != self._end:
            tokens.append(self._end)
            weights.append(1.0)
        tokens, weights = tokens[: self.max_length], weights[: self.max_length]
        if not any(weights[1:]):
            raise ValueError(
                f"max_length must leave a token to learn, and its {self.max_length} tokens are "
                f"taken up by the prompt"
            )
        return _datum_of(tokens, weights, numeric_fields(record), record)

    def _open_datum(self, record: dict[str, Any]) -> types.Datum:
        prompt = self.open_prompt(record)
        if prompt.length >= self.max_length:
            raise ValueError(
                f"max_length must leave a token for the answer, and its {self.max_length} tokens "
                f"are taken up by the prompt"
            )
        return _with_record(
            EncodedRecord(model_input=prompt, loss_fn_inputs=numeric_fields(record)), record
        )

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens


def with_answer(datum: types.Datum, tokens: Sequence[int], text: str) -> types.Datum:
    """Datum of a prompt and an answer to it, whose tokens count; from the datum of the prompt."""
    prompt = datum.model_input.to_ints()
    weights = [0.0] * len(prompt) + [1.0] * len(tokens)
    record = {**getattr(datum, "record", {}), "completion": text}
    return _datum_of([*prompt, *tokens], weights, datum.loss_fn_inputs, record)


def _datum_of(
    tokens: Sequence[int],
    weights: Sequence[float],
    fields: Mapping[str, Any],
    record: Mapping[str, Any],
) -> types.Datum:
    # Token t predicts token t + 1: the targets and their weights are shifted by one, and the first
    # token is never a target.
    own: dict[str, Any] = {"target_tokens": list(tokens[1:]), "weights": list(weights[1:])}
    model_input = types.ModelInput.from_ints(list(tokens[:-1]))
    datum = EncodedRecord(model_input=model_input, loss_fn_inputs={**own, **fields})
    return _with_record(datum, record)


def _with_record(datum: EncodedRecord, record: Mapping[str, Any]) -> EncodedRecord:
    object.__setattr__(datum, "record", record)  # the class is frozen
    return datum


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record[key]
    if not isinstance(value, str) or (not value and key != "prompt"):
        raise ValueError(f"{key} must be a non-empty string, got {_short(value)}")
    return value


def numeric_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of the fields of a line that are numbers or lists of numbers.

    Raises:
        ValueError: one is not finite, or has a name that is taken; the message is the rule.
    """
    arrays = {}
    for key, value in record.items():
        if key in _TEXT_KEYS or not isinstance(value, int | float | list):
            continue
        if key in _RESERVED:
            raise ValueError(
                f"{key} is made from the text, and is not allowed as a field of a line"
            )
        try:
            array = np.atleast_1d(np.asarray(value))
        except (OverflowError, ValueError):  # lists of unequal length
            continue
        if array.dtype.kind not in "bif" or not array.size:
            continue
        if not np.isfinite(array).all():
            raise ValueError(f"{key} must be finite, got {_short(value)}")
        arrays[key] = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
    return arrays


def _is_chat(messages: Any) -> bool:
    return isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get(key), str)
        for message in messages
        for key in ("role", "content")
    )


def _short(value: Any) -> str:
    return shorten(repr(value), _MAX_SHOWN)
