from __future__ import annotations

import torch

from steelyard.engine import tiny


def test_the_tiny_model_is_the_same_every_time() -> None:
    built = []
    for seed in (4, 5):
        torch.manual_seed(seed)
        built.append(tiny.build(torch.float32).state_dict())
    first, second = built
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    expected = torch.rand(2)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(2), expected)  # the global generator is not touched


def test_the_tiny_tokenizer_has_a_token_for_each_byte() -> None:
    tokenizer = tiny.tokenizer()
    text = "Grüße, 世界! \n\t🙂"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens) == text
    assert tokenizer.eos_token_id == 256


def test_the_sizes_are_those_that_it_declares() -> None:
    model = tiny.build(torch.float32)
    assert model.get_output_embeddings().weight.shape == (tiny.VOCABULARY, 64)
    assert model.config.max_position_embeddings == tiny.CONTEXT
    assert sum(parameter.numel() for parameter in model.parameters()) == 139_584
    logits = model(input_ids=torch.zeros(1, tiny.CONTEXT, dtype=torch.int64)).logits
    assert logits.shape == (1, tiny.CONTEXT, tiny.VOCABULARY)


def test_the_weights_have_the_dtype() -> None:
    assert {p.dtype for p in tiny.build(torch.float64).parameters()} == {torch.float64}
