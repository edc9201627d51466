"""End of a sample: an end token, or a stop string in its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steelyard.engine.model import Model

# A character has at most four bytes of UTF-8, and a token has at least one of them.
_LONGEST_CHARACTER = 4
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class StopCondition:
    """Tells after each token of one sample whether it ends there.

    Args:
        model: the model, for its end tokens and its tokenizer.
        stop: stop strings or end tokens of the request. None: the model's own end tokens; an empty
            list switches these off.
    """

    def __init__(self, model: Model, stop: str | Sequence[str] | Sequence[int] | None) -> None:
        listed = [stop] if isinstance(stop, str) else list(stop or ())
        self._tokens = {item for item in listed if isinstance(item, int)}
        if stop is None or listed:
            self._tokens |= model.end_tokens
        texts = [item for item in listed if isinstance(item, str) and item]
        self._text = _StopStrings(model.tokenizer, texts) if texts else None

    def add(self, token: int) -> bool:
        """True if the sample ends with this token."""
        found = self._text is not None and self._text.add(token)
        return found or token in self._tokens


class _StopStrings:
    """Searches the text of a sample for strings, decoding each token about twice.

    A token alone does not decode as it does within a text: decoders drop the space of the first
    token, and a character may have several tokens. So the text of new tokens is what decoding
    adds to that of the tokens before them, which begin with the last complete character's.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self._decode = tokenizer.decode
        self._texts = texts
        # Characters that may begin a stop string whose end is still to come.
        self._overlap = max(map(len, texts)) - 1
        self._tail = ""
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def add(self, token: int) -> bool:
        self._pending.append(token)
        text = self._tail + self._decode(self._context + self._pending)[len(self._context_text) :]
        if any(stop in text for stop in self._texts):
            return True
        # Bytes that never become a character are not waited for longer than one takes.
        if not text.endswith(_INCOMPLETE) or len(self._pending) >= _LONGEST_CHARACTER:
            self._tail = text[-self._overlap :] if self._overlap else ""
            self._context, self._pending = self._pending, []
            self._context_text = self._decode(self._context)
        return False
