from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tinker import types

from steelyard.engine import LocalServiceClient, LocalTrainingClient, tiny
from steelyard.engine.model import Model
from steelyard.engine.packing import pack
from steelyard.errors import InputError

from .data import SMALL, by_hand, close, create, datum, logprobs, net, ragged, same, train

DATA = ragged(5, [6, 11])


def base_weights(client: Any) -> dict[str, int]:
    """Addresses of the weights that are no adapter's."""
    named = net(client).named_parameters()
    return {name: p.data_ptr() for name, p in named if ".lora_" not in name}


def test_clients_share_one_copy_of_the_base_weights(alone: LocalServiceClient) -> None:
    first = create(alone)
    before = base_weights(first)
    second = create(alone, rank=2, train_unembed=False)
    sampling = second.save_weights_and_get_sampling_client()
    assert net(first) is net(second)
    assert base_weights(first) == before
    addresses = set(before.values())
    assert len(addresses) == len(list(tiny.build(torch.float32).parameters()))
    del sampling


def test_clients_train_independently(alone: LocalServiceClient) -> None:
    one, other = create(alone, rank=2), create(alone, rank=5, seed=1)
    train(other)
    other.forward_backward(DATA, "cross_entropy").result()
    weights, gradients = other.weights(), other.gradients()
    expected = logprobs(other.forward(DATA, "cross_entropy").result())
    train(one, 3)
    assert same(other.weights(), weights)
    assert same(other.gradients(), gradients)
    found = logprobs(other.forward(DATA, "cross_entropy").result())
    assert all(map(torch.equal, found, expected))
    # Each trains as if it were alone.
    alike = create(alone, rank=2)
    train(alike, 3)
    assert same(alike.weights(), one.weights())


def test_layers_are_chosen_by_group(alone: LocalServiceClient) -> None:
    chosen: dict[str, dict[str, Any]] = {
        "attn": {"train_mlp": False, "train_unembed": False},
        "mlp": {"train_attn": False, "train_unembed": False},
        "lm_head": {"train_attn": False, "train_mlp": False},
    }
    counts = {}
    for group, options in chosen.items():
        keys = create(alone, **options).weights().keys()
        assert all(group in key for key in keys)
        counts[group] = len(keys)
    # Two layers of q, k, v, o and of gate, up, down; two matrices for each.
    assert counts == {"attn": 16, "mlp": 12, "lm_head": 2}
    assert len(create(alone).weights()) == 30


def test_the_rank_and_the_scale_of_an_adapter(alone: LocalServiceClient) -> None:
    client = create(alone, rank=3)
    weights = client.weights()
    assert all(w.shape[0] == 3 for key, w in weights.items() if "lora_A" in key)
    assert all(w.shape[1] == 3 for key, w in weights.items() if "lora_B" in key)
    train(client)
    (found,) = logprobs(client.forward([datum([1, 2, 3])], "cross_entropy").result())
    with torch.no_grad():
        rows = by_hand(client.weights(), [1, 2, 3]).logits[0].log_softmax(-1)
    torch.testing.assert_close(found, rows[[0, 1, 2], [2, 3, 7]], rtol=0, atol=1e-4)


def test_a_rank_without_room_in_memory_is_an_error(alone: LocalServiceClient) -> None:
    message = r"rank must leave room in memory, got 1000000000: its weights, .* GB are free: use"
    with pytest.raises(InputError, match=message):
        create(alone, rank=10**9)


def test_a_fresh_adapter_is_the_base_model(alone: LocalServiceClient) -> None:
    base = alone.create_sampling_client(base_model="tiny-random")
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    before = base.compute_logprobs(prompt).result()
    client = create(alone)
    fresh = client.save_weights_and_get_sampling_client()
    assert fresh.compute_logprobs(prompt).result() == before
    train(client)
    assert client.save_weights_and_get_sampling_client().compute_logprobs(prompt).result() != before
    assert base.compute_logprobs(prompt).result() == before


def test_the_same_seed_gives_the_same_weights(alone: LocalServiceClient) -> None:
    first, again, other = (create(alone, seed=seed).weights() for seed in (3, 3, 4))
    assert same(first, again)
    assert not same(first, other)
    # Also in a model that has had no adapter yet.
    with LocalServiceClient() as another:
        assert same(create(another, seed=3).weights(), first)
    drawn, drawn_again = (create(alone, seed=None).weights() for _ in range(2))
    assert not same(drawn, drawn_again)


def test_the_seed_of_an_adapter_does_not_change_the_global_generator(
    alone: LocalServiceClient,
) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    create(alone, seed=7)
    assert torch.equal(torch.rand(3), expected)


def test_a_folder_is_a_base_model(alone: LocalServiceClient, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny.build(torch.float32).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    found, known = create(alone, str(folder)), create(alone)
    for client in (found, known):
        train(client)
    assert same(found.weights(), known.weights())
    assert found.get_tokenizer().encode("abc") == known.get_tokenizer().encode("abc")
    info = found.get_info()
    assert (info.model_name, info.lora_rank, info.is_lora) == (str(folder), 4, True)
    assert info.model_data.arch == "llama"
    assert info.model_id == found.model_id != known.model_id


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Layers that are no nn.Linear, and an output layer tied to the embeddings."""
    folder = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        eos_token_id=0,
        bos_token_id=0,
    )
    torch.manual_seed(0)
    model: Any = transformers.GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def other(gpt2: str, tmp_path: Path) -> Iterator[LocalTrainingClient]:
    with LocalServiceClient(checkpoint_dir=tmp_path, dtype="float64") as service:
        yield create(service, gpt2)


LETTERS = [datum([1, 2, 3, 4]), datum([9, 8, 7]), datum([5])]


def test_gpt2_trains(other: Any) -> None:
    keys = other.weights().keys()
    assert {"c_attn", "c_proj", "c_fc", "lm_head"} == {
        key.split(".lora_")[0].rsplit(".", 1)[1] for key in keys
    }
    losses = []
    for _ in range(8):
        losses.append(other.forward_backward(LETTERS, "cross_entropy").result().metrics["loss:sum"])
        other.optim_step(SMALL).result()
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


def test_the_gradients_of_gpt2_are_finite_differences(other: Any) -> None:
    for _ in range(2):
        other.forward_backward(LETTERS, "cross_entropy")
        other.optim_step(SMALL).result()
    other.forward_backward(LETTERS, "cross_entropy").result()
    gradients = other.gradients()
    adapter = other._trainer.adapter
    for key in list(gradients)[::5]:
        flat = adapter.parameters[key].data.view(-1)
        at = int(gradients[key].abs().argmax())
        losses = []
        for change in (1e-4, -2e-4):
            flat[at] += change
            output = other.forward(LETTERS, "cross_entropy").result()
            losses.append(output.metrics["loss:sum"])
        flat[at] += 1e-4
        slope = (losses[0] - losses[1]) / 2e-4
        assert slope == pytest.approx(float(gradients[key].view(-1)[at]), rel=1e-5, abs=1e-7)


def test_packed_sequences_of_gpt2_do_not_attend_to_each_other(other: Any) -> None:
    assert pack([4, 3, 1], 1000)[0].rows == 1
    together = logprobs(other.forward(LETTERS, "cross_entropy").result())
    for one, found in zip(LETTERS, together, strict=True):
        (alone,) = logprobs(other.forward([one], "cross_entropy").result())
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-6)


def test_the_output_layer_and_the_embeddings_stay_tied(other: Any) -> None:
    train_on = [datum([1, 2, 3])]
    other.forward_backward(train_on, "cross_entropy")
    other.optim_step(SMALL).result()
    inner = net(other).get_base_model()
    head = inner.get_output_embeddings().base_layer.weight
    assert head.data_ptr() == inner.get_input_embeddings().weight.data_ptr()


def test_the_layers_of_opt_are_found(alone: LocalServiceClient, tmp_path: Path) -> None:
    config = transformers.OPTConfig(
        vocab_size=64,
        hidden_size=16,
        ffn_dim=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        word_embed_proj_dim=16,
    )
    model: Any = transformers.OPTForCausalLM(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path / "opt")
    keys = create(alone, str(tmp_path / "opt")).weights().keys()
    assert {"fc1", "fc2", "q_proj", "k_proj", "v_proj", "out_proj", "lm_head"} == {
        key.split(".lora_")[0].rsplit(".", 1)[1] for key in keys
    }


def test_a_group_without_layers_in_the_model_is_an_error(
    alone: LocalServiceClient, tmp_path: Path
) -> None:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1)
    model: Any = transformers.MambaForCausalLM(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path / "mamba")
    with pytest.raises(
        InputError, match=r"train_attn needs layers of that kind, .*train_attn=False"
    ):
        create(alone, str(tmp_path / "mamba"))


def test_the_gradients_of_a_client_are_its_own_after_others_ran(alone: LocalServiceClient) -> None:
    first, second = create(alone), create(alone, seed=1, rank=2)
    futures = []
    for _ in range(3):
        futures += [c.forward_backward(DATA, "cross_entropy") for c in (first, second)]
        futures += [c.optim_step(SMALL) for c in (second, first)]
    for future in futures:
        future.result()
    by_itself = create(alone, seed=1, rank=2)
    for _ in range(3):
        by_itself.forward_backward(DATA, "cross_entropy")
        by_itself.optim_step(SMALL).result()
    close(second.weights(), by_itself.weights(), 0.0)


@pytest.fixture(scope="module")
def bloom(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that takes no positions: ALiBi lowers attention with the distance instead."""
    folder = tmp_path_factory.mktemp("bloom")
    config = transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2)
    torch.manual_seed(0)
    model: Any = transformers.BloomForCausalLM(config)
    model.save_pretrained(folder)
    return str(folder)


def test_support_for_packing_is_detected(gpt2: str, bloom: str) -> None:
    with LocalServiceClient(dtype="float64", device="cpu") as service:
        packs = [
            create(service, base)._worker.model.supports_packing
            for base in ("tiny-random", gpt2, bloom)
        ]
    assert packs == [True, True, False]


def test_support_for_padding_is_detected(gpt2: str, bloom: str) -> None:
    with LocalServiceClient(dtype="float64", device="cpu") as service:
        models = [create(service, base)._worker.model for base in ("tiny-random", gpt2, bloom)]
        assert [model.supports_padding for model in models] == [True, True, False]
        # Keys and values of two layers, two heads of 16 numbers in float64.
        assert models[0].cache_bytes == 2 * 2 * 2 * 16 * 8


def test_a_model_without_support_for_padding_samples_one_prompt_at_a_time(bloom: str) -> None:
    with LocalServiceClient(dtype="float64", device="cpu") as service:
        sampling = service.create_sampling_client(base_model=bloom)
        requests = [
            (types.ModelInput.from_ints(tokens), 2, types.SamplingParams(max_tokens=6, seed=seed))
            for seed, tokens in enumerate(([1, 2, 3], [4], [1, 2, 3]))
        ]
        alone = [sampling.sample(*request).result() for request in requests]
        together = sampling.sample_list(requests).result()
        for found, expected in zip(together, alone, strict=True):
            for sequence, same_one in zip(found.sequences, expected.sequences, strict=True):
                assert sequence.tokens == same_one.tokens
                assert sequence.logprobs == same_one.logprobs


def test_sequences_have_rows_of_their_own_without_support_for_packing(bloom: str) -> None:
    with LocalServiceClient(dtype="float64", device="cpu") as service:
        client = create(service, bloom)
        together = client.forward(LETTERS, "cross_entropy").result().loss_fn_outputs
        alone = [client.forward([each], "cross_entropy").result() for each in LETTERS]
        for found, expected in zip(together, alone, strict=True):
            one = expected.loss_fn_outputs[0]["logprobs"].tolist()
            assert found["logprobs"].tolist() == pytest.approx(one, rel=1e-6)
        client.forward_backward(LETTERS, "cross_entropy").result()
        assert any(gradient.any() for gradient in client.gradients().values())


def test_a_model_that_ignores_positions_does_not_support_packing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = Model.__call__

    def heedless(model: Model, adapter: Any, **inputs: Any) -> Any:
        inputs.pop("position_ids", None)
        return call(model, adapter, **inputs)

    monkeypatch.setattr(Model, "__call__", heedless)
    with LocalServiceClient(dtype="float32", device="cpu") as service:
        assert not create(service, "tiny-random")._worker.model.supports_packing
