from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]  # SciPy has no types
from tinker import types
from torch import Tensor

from steelyard.engine import token_choice
from steelyard.engine.token_choice import (
    RowChoice,
    at_temperature,
    choose_tokens,
    device_noise,
    exponential_noise,
)

DRAWS = 4_000
PROBS = [0.4, 0.05, 0.3, 0.05, 0.2]


def rows_of(number: int, seed: int = 0, **params: Any) -> list[RowChoice]:
    """One row for each of the samples of a request, at its first token."""
    chosen = types.SamplingParams(**params)
    return [RowChoice(chosen, seed, sample, 0) for sample in range(number)]


def drawn(probs: Sequence[float], draws: int = DRAWS, **params: Any) -> list[int]:
    """How often each token is drawn by some samples."""
    logits = torch.tensor(probs).log().expand(draws, -1)
    tokens = choose_tokens(logits, rows_of(draws, **params)).tokens
    return torch.bincount(tokens, minlength=len(probs)).tolist()


def normalised(values: list[float]) -> list[float]:
    return [value / sum(values) for value in values]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, PROBS),
        ({"temperature": 2.0}, normalised([math.sqrt(p) for p in PROBS])),
        ({"temperature": 0.5}, normalised([p**2 for p in PROBS])),
        ({"top_k": 2}, normalised([0.4, 0, 0.3, 0, 0])),
        ({"top_k": 1}, [1.0, 0, 0, 0, 0]),
        ({"top_k": 99}, PROBS),
        # 0.4 + 0.3 is short of 0.75, so that the third likeliest is in as well.
        ({"top_p": 0.75}, normalised([0.4, 0, 0.3, 0, 0.2])),
        ({"top_p": 0.699}, normalised([0.4, 0, 0.3, 0, 0])),
        ({"top_p": 1e-9}, [1.0, 0, 0, 0, 0]),
        ({"top_p": 1e-300}, [1.0, 0, 0, 0, 0]),
        ({"top_p": 1e-300, "top_k": 3}, [1.0, 0, 0, 0, 0]),
        # Of the three likeliest the first makes up 0.4 / 0.9 = 0.44, the first two 0.78.
        ({"top_k": 3, "top_p": 0.5}, normalised([0.4, 0, 0.3, 0, 0])),
        ({"top_k": 3, "top_p": 0.43}, [1.0, 0, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.79}, normalised([0.4, 0, 0.3, 0, 0.2])),
        # Squared: 0.16, 0.0025, 0.09, 0.0025, 0.04 of 0.295, so that two make up 0.85.
        ({"temperature": 0.5, "top_p": 0.8}, normalised([0.16, 0, 0.09, 0, 0])),
        ({"temperature": 0}, [1.0, 0, 0, 0, 0]),
    ],
)
def test_tokens_are_drawn_from_the_distribution(
    params: dict[str, Any], expected: list[float]
) -> None:
    counts = drawn(PROBS, **params)
    possible = [index for index, share in enumerate(expected) if share]
    assert sum(counts[index] for index in possible) == DRAWS, "no other token is drawn"
    if len(possible) > 1:
        observed = [counts[index] for index in possible]
        wanted = [DRAWS * expected[index] for index in possible]
        assert stats.chisquare(observed, wanted).pvalue > 1e-3  # the seed is fixed


def test_a_rare_token_is_drawn_as_often_as_its_probability_says() -> None:
    # One token in a thousand, beside many: what 16 bits of noise could not resolve.
    probs = [0.001, *[0.999 / 400] * 400]
    counts = drawn(probs, 20_000)
    assert stats.binomtest(counts[0], 20_000, 0.001).pvalue > 1e-3


@pytest.mark.parametrize("params", [{"top_p": 0.5}, {"top_p": 0.5, "top_k": 4}])
def test_a_token_behind_just_the_share_is_out_of_the_nucleus(params: dict[str, Any]) -> None:
    """Two of four equal tokens make up 0.5 exactly: the third is not needed."""
    logits = torch.tensor([0.0, 0.0, 0.0, 0.0, -200.0]).expand(200, -1)
    tokens = choose_tokens(logits, rows_of(200, **params)).tokens
    assert len(set(tokens.tolist())) == 2


def test_a_lighter_token_behind_just_the_share_is_out_of_the_nucleus() -> None:
    weights = torch.tensor([1.0, 0.5, 1.0, *[0.25] * 6]).expand(200, -1)
    race = weights / exponential_noise(rows_of(200), weights)
    limit = torch.full((200,), 2.0)  # half of the total
    tokens = token_choice._draw_top_p(weights, race, race.argmax(-1), limit)
    assert set(tokens.tolist()) == {0, 2}


def by_sorting(weights: Tensor, top_k: int, top_p: float) -> set[int]:
    """Tokens that top-k and then top-p leave, from a full sort in float64."""
    ordered, ids = weights.double().sort(descending=True, stable=True)
    ordered = ordered[: top_k if top_k > 0 else None]
    share = ordered / ordered.sum()
    kept = int((share.cumsum(0) - share < top_p).sum())
    return set(ids[:kept].tolist())


def test_of_equal_tokens_the_nucleus_has_the_first() -> None:
    # As a stable sort would: half of ten equal tokens, and of [.4, .2, .2, .2] the first two.
    assert [number > 0 for number in drawn([0.1] * 10, top_p=0.45)] == [True] * 5 + [False] * 5
    assert [number > 0 for number in drawn([0.2, 0.4, 0.2, 0.2], top_p=0.5)] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 12.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(-1, 0.05), (-1, 0.9), (-1, 0.999), (40, 1.0), (40, 0.5), (900, 0.95)]
)
def test_partial_selection_leaves_the_tokens_of_a_full_sort(
    scale: float, top_k: int, top_p: float
) -> None:
    generator = torch.Generator().manual_seed(3)
    # Distinct, as equal logits may be ordered either way.
    noise = torch.randperm(1000, generator=generator).double() / 1000
    logits = (scale + 1e-4) * (noise + torch.randn(1000, generator=generator).double())
    kept = by_sorting((logits - logits.max()).exp(), top_k, top_p)
    rows = rows_of(500, top_k=top_k, top_p=top_p)
    tokens = choose_tokens(logits.expand(500, -1), rows).tokens
    assert set(tokens.tolist()) <= kept
    # Each is the argmax of weight / noise over that set.
    allowed = torch.full((1000,), -math.inf, dtype=torch.float64)
    allowed[list(kept)] = logits[list(kept)]
    race = (allowed - allowed.max()).exp() / exponential_noise(rows[:50], logits.expand(50, -1))
    assert race.argmax(-1).tolist() == tokens[:50].tolist()


def mixed(number: int) -> list[RowChoice]:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.5, "top_p": 0.7},
        {"top_k": 5},
        {"temperature": 3.0},
        {"top_k": 40, "top_p": 0.9},
    ]
    return [
        RowChoice(types.SamplingParams(**settings[index % 6]), index // 6, index % 3, index % 7)
        for index in range(number)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_has_the_same_token_alone_as_among_others(dtype: torch.dtype) -> None:
    logits = torch.randn(48, 700, generator=torch.Generator().manual_seed(0), dtype=dtype) * 4
    rows = mixed(48)
    together = choose_tokens(logits, rows)
    for index, row in enumerate(rows):
        alone = choose_tokens(logits[index : index + 1], [row])
        assert int(alone.tokens[0]) == int(together.tokens[index])
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        assert float(alone.logprobs[0]) == pytest.approx(
            float(together.logprobs[index]), abs=tolerance
        )


def test_logprobs_are_those_at_the_temperature_and_of_all_tokens() -> None:
    logits = torch.randn(48, 700, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = mixed(48)
    found = choose_tokens(logits, rows)
    temperatures = torch.tensor([row.params.temperature or 1.0 for row in rows])[:, None]
    expected = (logits / temperatures).log_softmax(-1)
    torch.testing.assert_close(found.scaled - found.log_total[:, None], expected)
    chosen = expected.gather(-1, found.tokens[:, None])[:, 0]
    torch.testing.assert_close(found.logprobs, chosen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-30, 1e30, 1e300])
def test_extreme_temperatures_are_finite_or_certain(dtype: torch.dtype, temperature: float) -> None:
    logits = torch.tensor([[1.0, 1.0 + 1e-6, -math.inf, -40.0]], dtype=dtype)
    scaled = at_temperature(logits, [temperature])
    assert not scaled.isnan().any()
    found = choose_tokens(logits, rows_of(1, temperature=temperature))
    assert int(found.tokens[0]) != 2
    if temperature < 1:
        assert found.tokens.tolist() == [1]
        assert found.logprobs.tolist() == [0.0]


def test_temperature_0_sees_differences_below_the_resolution_of_the_weights() -> None:
    logits = torch.tensor([[0.0, 3e-8]])
    assert torch.equal(logits.exp()[:, 0], logits.exp()[:, 1])
    assert choose_tokens(logits, rows_of(1, temperature=0.0)).tokens.tolist() == [1]


# The noise


def noise_of(seed: int, sample: int, position: int, size: int = 512) -> Tensor:
    row = RowChoice(types.SamplingParams(), seed, sample, position)
    return exponential_noise([row], torch.empty(1, size, dtype=torch.float64))[0]


def test_noise_is_a_function_of_seed_sample_and_position_alone() -> None:
    first = noise_of(1, 2, 3)
    assert torch.equal(noise_of(1, 2, 3), first)
    assert torch.equal(noise_of(1, 2, 3, 101), first[:101])
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (-1, 2, 3), (2**63, 2, 3)):
        correlation = np.corrcoef(noise_of(*other).numpy(), first.numpy())[0, 1]
        assert abs(correlation) < 0.2  # 4.5 standard deviations of independent ones


def test_noise_is_philox_of_the_named_key_and_counter() -> None:
    words = np.random.Philox(key=[7, 1], counter=[0, 5, 0, 0]).random_raw(256)
    uniform = words.view(np.uint32) / 2**32
    np.testing.assert_allclose(noise_of(7, 1, 5).numpy(), -np.log1p(-uniform), rtol=1e-7)


def test_the_smallest_and_the_largest_bits_give_finite_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Extreme:
        def random_raw(self, number: int) -> Any:
            return np.array([0xFFFFFFFF00000000] * number, np.uint64)

    monkeypatch.setattr(token_choice, "_philox", lambda _: Extreme())
    for dtype in (torch.float32, torch.float64):
        small, large = exponential_noise(rows_of(1), torch.empty(1, 2, dtype=dtype))[0].tolist()
        assert small == pytest.approx(2.0**-33)
        assert large == pytest.approx(24 * math.log(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_exponential(dtype: torch.dtype) -> None:
    noise = exponential_noise(rows_of(40), torch.empty(40, 5001, dtype=dtype)).flatten().double()
    assert bool(((noise > 0) & noise.isfinite()).all())
    assert stats.kstest(noise.numpy(), "expon").pvalue > 1e-3


def test_noise_of_a_device_is_exponential_and_a_function_of_the_row_alone() -> None:
    # With the CPU as the device: its generator stands for that of a GPU, which is not here.
    rows = rows_of(40)
    noise = device_noise(rows, torch.empty(40, 5001))
    assert stats.kstest(noise.flatten().numpy(), "expon").pvalue > 1e-3
    alone = device_noise(rows[7:8], torch.empty(1, 5001))
    assert torch.equal(alone[0], noise[7])


def test_noise_of_float32_is_that_of_float64_rounded() -> None:
    rows = rows_of(3)
    wide = exponential_noise(rows, torch.empty(3, 1000, dtype=torch.float64))
    narrow = exponential_noise(rows, torch.empty(3, 1000))
    # Large ones, which lose anyway, are 1 - u with u near 1.
    torch.testing.assert_close(narrow[wide < 2], wide[wide < 2].float(), rtol=2e-6, atol=0)
    torch.testing.assert_close(narrow, wide.float(), rtol=1e-2, atol=0)


def test_rounding_of_the_logits_hardly_ever_changes_a_token() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1600, 4000, generator=generator) * 3
    moved = logits + 3e-5 * torch.randn(1600, 4000, generator=generator).clamp(-1, 1)
    rows = rows_of(1600)
    changed = choose_tokens(logits, rows).tokens != choose_tokens(moved, rows).tokens
    assert int(changed.sum()) <= 2
