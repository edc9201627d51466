from __future__ import annotations

from typing import Any

import pytest
import tokenizers
import torch
import transformers

from steelyard.engine.model import Model
from steelyard.engine.model_sources import find_model
from steelyard.engine.token_choice import StopCondition


@pytest.fixture(scope="module")
def model() -> Model:
    """tiny-random: a token for each byte, and 256 for the end."""
    return Model(find_model("tiny-random"), torch.device("cpu"), torch.float32)


def length_of(model: Any, stop: Any, tokens: list[int]) -> int | None:
    """Number of tokens after which a sample ends; None if it does not."""
    ends = StopCondition(model, stop)
    return next((index + 1 for index, token in enumerate(tokens) if ends.add(token)), None)


def tokens_of(model: Model, text: str) -> list[int]:
    tokens: list[int] = model.tokenizer.encode(text, add_special_tokens=False)
    return tokens


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, 2),
        ([7], 1),
        ([8], 2),
        ([], None),
        ("zz", 2),
        (["", 5], 2),
    ],
)
def test_end_tokens(model: Model, stop: Any, expected: int | None) -> None:
    assert length_of(model, stop, [7, 256, 9]) == expected


@pytest.mark.parametrize("stop", ["b", "ab", "cab", "é", "éa", "日本", "日", "cabé", "x日"])
@pytest.mark.parametrize("text", ["abcabéab", "cab日本éa", "x日本日", "éééabé"])
def test_a_sample_ends_with_the_token_that_completes_a_stop_string(
    model: Model, stop: str, text: str
) -> None:
    tokens = tokens_of(model, text)
    # What decoding everything after each token finds.
    decoded = [model.tokenizer.decode(tokens[: end + 1]) for end in range(len(tokens))]
    expected = next((end + 1 for end, part in enumerate(decoded) if stop in part), None)
    assert length_of(model, stop, tokens) == expected


def test_bytes_that_are_no_text_do_not_hide_a_stop_string(model: Model) -> None:
    alone = tokens_of(model, "é")[1]  # the second byte of a character, without the first
    for number in range(12):
        tokens = [alone] * number + tokens_of(model, "stop")
        assert length_of(model, "stop", tokens) == number + 4


def test_each_token_is_decoded_a_few_times_whatever_the_length(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, decoded = model.tokenizer.decode, []

    def counted(tokens: list[int]) -> str:
        decoded.append(len(tokens))
        text: str = decode(tokens)
        return text

    monkeypatch.setattr(model.tokenizer, "decode", counted)
    text = "été 日本 " * 40
    tokens = tokens_of(model, text)
    assert length_of(model, "a string that is not there", tokens) is None
    assert sum(decoded) < 6 * len(tokens)


class Pieces:
    """A model whose tokenizer drops the space of the first token, as SentencePiece's do."""

    end_tokens: frozenset[int] = frozenset()

    def __init__(self) -> None:
        words = ["▁the", "▁end", "▁of", "ing", "▁"]
        raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}))
        raw.decoder = tokenizers.decoders.Metaspace()
        self.tokenizer = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=raw
        )


def test_spaces_before_words_are_part_of_the_text() -> None:
    model = Pieces()
    assert model.tokenizer.decode([1]) == "end"
    assert length_of(model, " end", [0, 2, 1, 3]) == 3
    assert length_of(model, "the end", [0, 1]) == 2
    assert length_of(model, "theend", [0, 1]) is None
    assert length_of(model, "of ending", [0, 2, 1, 3]) == 4
