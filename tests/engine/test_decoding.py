from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from steelyard.engine import LocalServiceClient
from steelyard.engine.decoding import DecodingBatch
from steelyard.engine.model import Model
from steelyard.engine.model_sources import find_model

from .data import base, create, distributions, train

PROMPTS = [[5, 6, 7], [9] * 12, [1, 2], [300, 2, 40, 7, 8, 100, 3]]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(find_model("tiny-random"), torch.device("cpu"), torch.float64)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def expected(tokens: list[int]) -> Tensor:
    """Logits `[V]` of the next token, by plain transformers without a cache."""
    found: Tensor = base(torch.float64)(input_ids=torch.tensor([tokens]), use_cache=False).logits
    return found[0, -1]


def check(logits: Tensor, texts: list[list[int]]) -> None:
    assert len(logits) == len(texts)
    for row, tokens in zip(logits, texts, strict=True):
        torch.testing.assert_close(row, expected(tokens), rtol=0, atol=1e-12)


def tensors(prompts: list[list[int]]) -> list[Tensor]:
    return [torch.tensor(prompt) for prompt in prompts]


def test_prompts_of_any_length_have_the_logits_that_they_have_alone(model: Model) -> None:
    prefixes = DecodingBatch(model, None).prefill(tensors([*PROMPTS, *PROMPTS[::-1]]))
    check(torch.stack([prefix.logits for prefix in prefixes]), [*PROMPTS, *PROMPTS[::-1]])
    prefix, logits = DecodingBatch(model, None).prefill_whole(torch.tensor(PROMPTS[3]))
    check(logits, [PROMPTS[3][: end + 1] for end in range(7)])
    assert torch.equal(prefix.logits, logits[-1])


def test_rows_join_and_leave_between_tokens(model: Model) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = DecodingBatch(model, None)
    prefixes = batch.prefill(tensors(PROMPTS))
    texts: list[list[int]] = []

    def join(*chosen: int) -> None:
        batch.join([prefixes[index] for index in chosen])
        texts.extend([list(PROMPTS[index]) for index in chosen])

    def keep(*rows: int) -> None:
        batch.keep(rows)
        texts[:] = [texts[row] for row in rows]

    def advance() -> None:
        tokens = torch.randint(512, (len(texts),), generator=generator)
        logits = batch.advance(tokens)
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.append(token)
        check(logits, texts)
        assert batch.lengths == [len(text) for text in texts]

    join(0, 0)
    advance()
    join(1, 2)  # longer and shorter than the rows
    advance()
    advance()
    keep(0, 3)  # the longest leaves, and with it the padding of the others
    assert batch._cache.layers[0].keys.shape[-2] == max(batch.lengths)
    advance()
    join(3, 3, 0)
    advance()
    keep()
    join(2)
    advance()


def test_similar_prompts_share_a_pass_and_others_do_not(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = DecodingBatch(model, None)
    shapes = []
    net = model._base

    def watched(**inputs: Any) -> Any:
        shapes.append((tuple(inputs["input_ids"].shape), "attention_mask" in inputs))
        return net(**inputs)

    monkeypatch.setattr(model, "_base", watched)
    lengths = [40, 400, 39, 30, 4, 40]
    batch.prefill([torch.arange(length) for length in lengths])
    assert shapes == [((1, 400), False), ((4, 40), True), ((1, 4), False)]
    shapes.clear()
    batch.prefill([torch.arange(400)] * 12)
    assert shapes == [((10, 400), False), ((2, 400), False)], "at most 4096 tokens a pass"


def test_a_row_has_the_weights_of_its_adapter(exact: LocalServiceClient) -> None:
    client = create(exact)
    with torch.inference_mode(mode=False):
        train(client)
        wanted = distributions(client, PROMPTS[1])[-1]
    batch = DecodingBatch(client._worker.model, client._trainer.adapter)
    (prefix,) = batch.prefill(tensors(PROMPTS[1:2]))
    torch.testing.assert_close(prefix.logits.log_softmax(-1), wanted, rtol=0, atol=1e-10)


def build(config: Any) -> Any:
    torch.manual_seed(0)
    net: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return net.double().eval()


@pytest.mark.parametrize(
    ("config", "supported"),
    [
        (transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2), True),
        (
            transformers.Qwen2Config(
                vocab_size=99,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
            ),
            True,
        ),
        (
            transformers.MistralConfig(
                vocab_size=99,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                sliding_window=8,
            ),
            False,
        ),
    ],
)
def test_rows_of_one_prompt_work_for_any_model_and_ragged_rows_for_most(
    config: Any, supported: bool, tmp_path: Any
) -> None:
    with torch.inference_mode(mode=False):
        net = build(config)
        net.save_pretrained(tmp_path)
        model = Model(find_model(str(tmp_path)), torch.device("cpu"), torch.float64)
    assert model.supports_padding == supported
    prompts = [list(range(1, 12)), list(range(30, 36))] if supported else [list(range(1, 12))]
    batch = DecodingBatch(model, None)
    prefixes = batch.prefill(tensors(prompts))
    texts = [*prompts, list(prompts[0])]
    batch.join([*prefixes, prefixes[0]])
    for step in range(4):
        tokens = torch.arange(len(texts)) + step
        logits = batch.advance(tokens)
        texts = [[*text, int(token)] for text, token in zip(texts, tokens, strict=True)]
        for row, text in zip(logits, texts, strict=True):
            wanted = net(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(row, wanted, rtol=0, atol=1e-10)
        if step == 1:
            batch.keep([0, len(texts) - 1])
            texts = [texts[0], texts[-1]]
