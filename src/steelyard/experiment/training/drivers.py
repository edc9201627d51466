"""Records of the examples that drive each term, as text: the lines of `drivers.jsonl`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from steelyard.experiment.data.source import TrainingBatch
from steelyard.experiment.data.term_data import TermData
from steelyard.gradients.algebra import norm_of
from steelyard.output.custom_loss import CustomLossOutput
from steelyard.output.redaction import redact

# Text and its share of the term's gradient; the share is None for the mark of an omission.
Piece: TypeAlias = tuple[str, float | None]
Decode: TypeAlias = Callable[[tuple[int, ...]], str]

OMITTED: Piece = ("…", None)
_DATA = 3  # of a term in a record
_MAX_TOKENS = 80  # of a datum; a longer one is shortened to the tokens around its strongest
_AROUND = 5  # tokens on each side of a strong one
_MAX_TEXT = 300  # characters of a datum that is written as one piece
_MAX_BYTES = 8  # tokens of one character: its bytes, and those of a neighbour that share a token
_INCOMPLETE = "\ufffd"  # the text of a token that ends inside a character


def driver_records(
    output: CustomLossOutput,
    step: int,
    batch: TrainingBatch,
    tokenizer: Any,
    own_data: Sequence[TermData] = (),
) -> list[dict[str, Any]]:
    """Records of one step, one for each term that has drivers; see `CustomLossOutput.drivers`.

    Args:
        output: the output of the step; without gradients of the terms there are no records.
        step: number of the step.
        batch: the data of the step.
        tokenizer: decodes their tokens.
        own_data: data of terms' own.
    """
    drawn = list(output.data or batch.data)
    origins: dict[int, tuple[str, int, str]] = {
        key: origin for own in own_data for key, origin in own.origins.items()
    }
    for one, (line, part) in zip(batch.data, batch.origins, strict=True):
        origins[id(one)] = batch.file, line, part

    @cache  # most terms are driven by the same data, and pairs of tokens come again
    def decode(tokens: tuple[int, ...]) -> str:
        text: str = tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
        return text

    records = []
    for name, gradients in (output.term_gradients or {}).items():
        data, file = [], batch.file
        for driver in output.drivers(name, _DATA):
            datum = drawn[driver.datum]
            file, line, part = origins[id(datum)]
            tokens = datum.model_input.to_ints()
            targets = datum.loss_fn_inputs["target_tokens"].tolist()
            # The log-prob at position t is that of token t + 1; the first token has none.
            shares = dict.fromkeys(range(len(tokens) + 1), 0.0)
            shares |= {token.position + 1: token.share for token in driver.tokens}
            pieces = _pieces(decode, (*tokens, targets[-1]), shares)
            field = {"field": part} if part else {}
            data.append({"line": line, **field, "share": round(driver.share, 5), "tokens": pieces})
        if data:
            # Of the gradient that has these shares, whatever the output's norms are of.
            about = {"step": step, "term": name, "grad_norm": norm_of(gradients)}
            records.append({**about, "file": file, "data": data})
    return records


def redact_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """Redact secrets in the text of pieces, also those that span several pieces.

    If the text holds a secret, all pieces become one, whose share is their sum.
    """
    text = "".join(piece for piece, _ in pieces)
    redacted = redact(text)
    if redacted == text:
        return list(pieces)
    short = redacted if len(redacted) <= _MAX_TEXT else f"{redacted[:_MAX_TEXT]}…"
    return [(short, round(sum(share or 0.0 for _, share in pieces), 5))]


def _pieces(decode: Decode, tokens: tuple[int, ...], shares: dict[int, float]) -> list[Piece]:
    """Text of a datum, token by token; of a long one, the parts around the strongest tokens."""
    # Before it is shortened: a part of a secret would not be recognised as one.
    whole = [(decode(tokens), sum(shares.values()))]
    redacted = redact_pieces(whole)
    if redacted != whole:
        return redacted
    shown: Sequence[int] = range(len(tokens))
    if len(tokens) > _MAX_TOKENS:
        shown = _around_strongest(shares)
    # Runs of consecutive positions: a gap before the first, between two, and after the last.
    starts = [at for at in shown if at - 1 not in shown]
    ends = [at + 1 for at in shown if at + 1 not in shown]
    pieces: list[Piece] = [OMITTED] if starts[0] > 0 else []
    for start, end in zip(starts, ends, strict=True):
        run = list(_texts(decode, tokens[start:end]))
        bounds = accumulate((count for _, count in run), initial=start)
        for (text, _), (first, last) in zip(run, pairwise(bounds), strict=True):
            share = sum(shares[at] for at in range(first, last))
            pieces.append((text, round(share, 5)))
        pieces += [OMITTED] if end < len(tokens) else []
    return pieces


def _around_strongest(shares: dict[int, float]) -> list[int]:
    """Positions around the tokens with the largest shares, at most `_MAX_TOKENS`."""
    shown: set[int] = set()
    for at in sorted((at for at in shares if shares[at]), key=lambda at: -shares[at]):
        wider = shown | (set(range(at - _AROUND, at + _AROUND + 1)) & shares.keys())
        if len(wider) > _MAX_TOKENS:
            break
        shown = wider
    return sorted(shown)


def _texts(decode: Decode, tokens: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """Yield the text of each token, and 1; tokens that divide a character are taken together.

    Each is decoded behind the one before it, since some tokenizers drop the space before the first
    word of a text.
    """
    before = start = 0
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[before:end])
        if text.endswith(_INCOMPLETE) and end < len(tokens) and end - start < _MAX_BYTES:
            continue
        known = decode(tokens[before:start])
        alone = not text.startswith(known)
        yield (decode(tokens[start:end]) if alone else text[len(known) :]), end - start
        before, start = start, end
