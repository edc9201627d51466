"""Terms that draw random numbers: the same ones wherever they run, whenever, and resumed."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from steelyard import Pipeline, RegularizerSpec
from steelyard.composition.call_seeds import CallSeed
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import term
from steelyard.composition.terms import Term
from steelyard.errors import SpecError, TermTimeoutError
from steelyard.execution import random_state
from tests.process_group import run_group

from .terms import LOGPROBS, nll

SEED = 7


def of_torch(_: Any, logprobs: list[Tensor]) -> Tensor:
    flat = torch.cat(logprobs)
    return (flat * torch.randn(len(flat))).sum()


def of_numpy(_: Any, logprobs: list[Tensor]) -> Tensor:
    return torch.cat(logprobs).sum() * np.random.rand()  # noqa: NPY002 - as users write it


def of_python(_: Any, logprobs: list[Tensor]) -> Tensor:
    return torch.cat(logprobs).sum() * random.random()


def given(_: Any, logprobs: list[Tensor], *, generator: torch.Generator) -> Tensor:
    return torch.cat(logprobs).sum() * torch.rand((), generator=generator)


def dawdling(_: Any, logprobs: list[Tensor]) -> Tensor:
    """Many draws, between which another thread may draw."""
    total = torch.zeros(())
    for _i in range(20):
        total = total + random.random() + torch.rand(())
        time.sleep(0)
    return torch.cat(logprobs).sum() * total


async def interrupted(_: Any, logprobs: list[Tensor]) -> Tensor:
    """Draws before and after it waits."""
    before = random.random()
    for _i in range(3):
        await asyncio.sleep(0)
    return torch.cat(logprobs).sum() * (before + torch.rand(()))


def calm(_: Any, logprobs: list[Tensor]) -> Tensor:
    return torch.cat(logprobs).square().sum()


FUNCTIONS = [of_torch, of_numpy, of_python, given, dawdling]


def specs(run_in: Any = "auto") -> list[RegularizerSpec]:
    return [
        *(RegularizerSpec(fn, 0.1, fn.__name__, run_in=run_in) for fn in FUNCTIONS),
        RegularizerSpec(interrupted, 0.1, "interrupted"),
        RegularizerSpec(interrupted, 0.1, "another"),
        RegularizerSpec(calm, 0.1, "calm", run_in=run_in),
    ]


def numbers(pipeline: Pipeline, step: int) -> tuple[Any, ...]:
    """All values of a call and its gradient, to the bit."""
    output = pipeline.compute([], LOGPROBS, step)
    values = {name: each.value for name, each in output.regularizers.items()}
    return output.loss_total, values, [row.tolist() for row in output.gradients]


@contextmanager
def load() -> Iterator[None]:
    """Keep threads busy, so that those of the terms are interrupted at other places each time."""
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=spin) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("run_in", ["inline", "thread", "process", "auto"])
def test_where_a_term_runs_does_not_change_its_numbers(run_in: Any) -> None:
    here = Pipeline(nll, specs("inline"), seed=SEED, max_concurrency=4)
    expected = [numbers(here, step) for step in range(4)]
    with load():
        there = Pipeline(nll, specs(run_in), seed=SEED, max_concurrency=4)
        got = [numbers(there, step) for step in range(4)]
    assert got == expected


def test_the_numbers_follow_from_seed_step_call_rank_and_name() -> None:
    """By the formula in the docs, written again here."""
    flat = torch.cat(LOGPROBS)
    for step, call in [(0, 0), (3, 0), (3, 1), (4, 0)]:
        words = [SEED, step, call, 1, 0, *b"given"]
        (seed,) = np.random.SeedSequence(words).generate_state(1, np.uint64) >> 1
        drawn = torch.rand((), generator=torch.Generator().manual_seed(int(seed)))
        if (step, call) == (0, 0):
            pipeline = Pipeline(nll, [RegularizerSpec(given, 1.0, "given")], seed=SEED)
        output = pipeline.compute([], LOGPROBS, step)
        assert output.regularizers["given"].value == (flat.sum() * drawn).item()


@pytest.mark.parametrize("fn", [*FUNCTIONS, interrupted])
def test_numbers_differ_by_step_call_name_and_seed(fn: Any) -> None:
    def value(step: int, name: str = "t", seed: int = SEED, calls: int = 1) -> float:
        pipeline = Pipeline(nll, [RegularizerSpec(fn, 1.0, name)], seed=seed)
        return (
            [pipeline.compute([], LOGPROBS, step) for _ in range(calls)][-1]
            .regularizers[name]
            .value
        )

    values = [value(0), value(1), value(0, "u"), value(0, seed=8), value(0, calls=2)]
    assert len(set(values)) == len(values)
    assert value(0) == values[0]


def test_a_resumed_run_draws_the_same_numbers() -> None:
    whole = Pipeline(nll, specs(), seed=SEED)
    expected = [numbers(whole, step) for step in range(8) for _ in range(2)]
    first, second = Pipeline(nll, specs(), seed=SEED), Pipeline(nll, specs(), seed=SEED)
    got = [numbers(first, step) for step in range(5) for _ in range(2)]
    second.load_state_dict(first.state_dict())
    got += [numbers(second, step) for step in range(5, 8) for _ in range(2)]
    assert got == expected


def test_a_pipeline_that_is_built_anew_between_two_calls_of_a_step_goes_on_counting() -> None:
    whole = Pipeline(nll, specs(), seed=SEED)
    expected = [numbers(whole, 0) for _ in range(2)]
    first = Pipeline(nll, specs(), seed=SEED)
    got = [numbers(first, 0)]
    got.append(numbers(Pipeline(nll, specs(), seed=SEED, after=first), 0))
    assert got == expected


@pytest.mark.parametrize("run_in", ["inline", "thread"])
def test_the_callers_generators_stay_as_they_were(run_in: Any) -> None:
    pipeline = Pipeline(nll, specs(run_in), seed=SEED)

    def drawn() -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(()).item()]  # noqa: NPY002

    def restart() -> None:
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)

    restart()
    expected = [drawn() for _ in range(4)]
    restart()
    got = []
    for step in range(4):
        pipeline.compute([], LOGPROBS, step)
        got.append(drawn())
    assert got == expected


def test_without_a_seed_it_is_the_one_that_torch_was_given() -> None:
    def run(**settings: Any) -> tuple[Any, ...]:
        return numbers(Pipeline(nll, specs("inline"), **settings), 0)

    torch.manual_seed(SEED)
    torch.rand(3)  # draws do not change it
    assert run() == run(seed=SEED)
    torch.manual_seed(SEED + 1)
    assert run() == run(seed=SEED + 1) != run(seed=SEED)


@pytest.mark.parametrize("seed", [-1, 1.5, "1"])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(SpecError, match="seed must be a whole number >= 0 or None, got"):
        Pipeline(nll, seed=seed)


def test_a_term_that_does_not_draw_is_not_seeded_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls 1, 2, 4, 8, … are watched, with seeded generators."""
    seeded: list[int] = []
    pipeline = Pipeline(nll, [RegularizerSpec(calm, 0.1, "calm", run_in="inline")])
    plain, step = random_state._seed_all, 0

    def seed_all(key: Any) -> None:
        seeded.append(step)
        plain(key)

    monkeypatch.setattr(random_state, "_seed_all", seed_all)
    for step in range(1, 20):
        pipeline.compute([], LOGPROBS, step)
    assert seeded == [step for step in (1, 2, 4, 8, 16) for _ in ("base", "calm")]


def test_a_term_that_draws_later_is_seen_at_the_next_watched_call() -> None:
    def late(data: list[int], logprobs: list[Tensor]) -> Tensor:
        (step,) = data
        return logprobs[0].sum() * (random.random() if step >= 5 else 1.0)

    def run(start: int) -> list[float]:
        pipeline = Pipeline(nll, [RegularizerSpec(late, 1.0, "late")], seed=SEED)
        outputs = [pipeline.compute([step], LOGPROBS, step) for step in range(1, 12)]
        return [output.regularizers["late"].value for output in outputs][start:]

    random.seed(1)
    first = run(8 - 1)
    random.seed(2)
    assert run(8 - 1) == first


def test_a_watched_call_that_fails_is_made_up_for() -> None:
    def fails_first(data: list[int], logprobs: list[Tensor]) -> Tensor:
        (step,) = data
        if step < 2:
            raise ValueError("not yet")
        return logprobs[0].sum() * random.random()

    def values() -> list[float]:
        spec = RegularizerSpec(fails_first, 1.0, "t", on_error="skip")
        pipeline = Pipeline(nll, [spec], seed=SEED)
        outputs = [pipeline.compute([step], LOGPROBS, step) for step in range(6)]
        return [output.regularizers["t"].value for output in outputs[2:]]

    random.seed(1)
    first = values()
    random.seed(2)
    assert values() == first


@pytest.mark.parametrize("run_in", ["inline", "thread", "process"])
def test_every_evaluation_of_a_numerical_gradient_draws_the_same(run_in: Any) -> None:
    by_name = {}
    for gradient in ("autograd", "numerical"):
        spec = RegularizerSpec(of_torch, 1.0, "t", run_in=run_in, gradient=gradient)
        pipeline = Pipeline(lambda _, lps: lps[0].sum() * 0, [spec], seed=SEED, max_concurrency=3)
        by_name[gradient] = [pipeline.compute([], LOGPROBS, step).gradients for step in range(2)]
    for one, other in zip(by_name["autograd"], by_name["numerical"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_two_coroutines_that_wait_for_each_other_keep_their_own_numbers() -> None:
    met: dict[str, asyncio.Event] = {}

    def waiting(mine: str, other: str) -> Any:
        async def fn(_: Any, logprobs: list[Tensor]) -> Tensor:
            first = random.random()
            met[mine].set()
            await met[other].wait()
            return logprobs[0].sum() * (first + random.random())

        return fn

    def run(names: list[str]) -> dict[str, float]:
        met.update({name: asyncio.Event() for name in ("a", "b")})
        terms = {"a": waiting("a", "b"), "b": waiting("b", "a")}
        pipeline = Pipeline(nll, [RegularizerSpec(terms[n], 1.0, n) for n in names], seed=SEED)
        output = pipeline.compute([], LOGPROBS)
        return {name: output.regularizers[name].value for name in ("a", "b")}

    values = run(["a", "b"])
    assert values == run(["b", "a"])
    assert values["a"] != values["b"]


def test_a_cancelled_coroutine_hears_of_it() -> None:
    heard = threading.Event()

    async def endless(_: Any, logprobs: list[Tensor]) -> Tensor:
        random.random()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            heard.set()
            raise
        return logprobs[0].sum()

    spec = RegularizerSpec(endless, 1.0, "endless", timeout=0.05)
    random.seed(3)
    expected = [random.random() for _ in range(2)]
    random.seed(3)
    with pytest.raises(TermTimeoutError):
        Pipeline(nll, [spec]).compute([], LOGPROBS)
    assert heard.wait(60)
    assert [random.random() for _ in range(2)] == expected


def test_a_term_that_hangs_does_not_keep_the_generators() -> None:
    released, ended = threading.Event(), threading.Event()

    def hanging(_: Any, logprobs: list[Tensor]) -> Tensor:
        random.random()
        released.wait(600)
        random.random()
        ended.set()
        return logprobs[0].sum()

    random.seed(3)
    expected = [random.random() for _ in range(3)]
    random.seed(3)
    spec = RegularizerSpec(hanging, 1.0, "hanging", timeout=0.05)
    with pytest.raises(TermTimeoutError):
        Pipeline(nll, [spec]).compute([], LOGPROBS)
    got = [random.random()]
    drawn = Pipeline(nll, [RegularizerSpec(of_python, 1.0, "p", run_in="thread")], seed=SEED)
    values = [drawn.compute([], LOGPROBS, step).regularizers["p"].value for step in range(2)]
    got.append(random.random())
    fresh = Pipeline(nll, [RegularizerSpec(of_python, 1.0, "p", run_in="inline")], seed=SEED)
    assert values == [fresh.compute([], LOGPROBS, s).regularizers["p"].value for s in range(2)]
    assert got == expected[:2]
    released.set()
    assert ended.wait(60)


@pytest.mark.parametrize("outer", ["inline", "thread"])
@pytest.mark.parametrize("inner", ["inline", "thread", "auto"])
def test_a_term_that_computes_a_pipeline_of_its_own(outer: Any, inner: Any) -> None:
    def nested(_: Any, logprobs: list[Tensor]) -> Tensor:
        own = Pipeline(nll, [RegularizerSpec(dawdling, 1.0, n, run_in=inner) for n in "ab"])
        value = own.compute([], logprobs).loss_total
        return logprobs[0].sum() * (value + random.random())

    def run(place: Any) -> list[float]:
        spec = RegularizerSpec(nested, 1.0, "nested", run_in=place)
        pipeline = Pipeline(nll, [spec, RegularizerSpec(dawdling, 1.0, "beside")], seed=SEED)
        return [pipeline.compute([], LOGPROBS, step).loss_total for step in range(3)]

    assert run(outer) == run("inline")


def test_concurrent_calls_have_the_numbers_of_their_steps() -> None:
    here = Pipeline(nll, specs("inline"), seed=SEED)
    expected = [here.compute([], LOGPROBS, step).loss_total for step in range(6)]
    pipeline = Pipeline(nll, specs(), seed=SEED)

    async def together() -> list[float]:
        calls = [pipeline.acompute([], LOGPROBS, step) for step in range(6)]
        return [output.loss_total for output in await asyncio.gather(*calls)]

    assert asyncio.run(together()) == expected


def test_a_generator_of_ones_own_is_left_alone() -> None:
    mine = torch.Generator().manual_seed(1)
    spec = RegularizerSpec(given, 1.0, "given", options={"generator": mine})
    got = Pipeline(nll, [spec]).compute([], LOGPROBS).regularizers["given"].value
    drawn = torch.rand((), generator=torch.Generator().manual_seed(1))
    assert got == (torch.cat(LOGPROBS).sum() * drawn).item()


class Drawing:
    def compute(
        self, _: Any, logprobs: list[Tensor], generator: torch.Generator | None = None
    ) -> Tensor:
        assert generator is not None
        return torch.rand((), generator=generator) * logprobs[0].sum()


def test_an_object_is_given_a_generator_too() -> None:
    pipeline = Pipeline(nll, [RegularizerSpec(Drawing(), 1.0, "t")], seed=SEED)
    values = [pipeline.compute([], LOGPROBS, step).regularizers["t"].value for step in range(3)]
    assert len(set(values)) == 3


# --- composites ---


def base(x: Tensor) -> Tensor:
    return x.square().mean()


def dropped(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, 0.5, training=True).square().mean()


def scaled(x: Tensor, generator: torch.Generator) -> Tensor:
    return (x * torch.rand(x.shape, generator=generator)).mean()


def composite(**settings: Any) -> CompositeLoss:
    loss = CompositeLoss(
        base, [term(dropped, 0.5, "dropped"), term(scaled, 0.5, "scaled")], seed=SEED, **settings
    )
    loss.step = 0
    return loss


def values_of(loss: CompositeLoss) -> list[float]:
    x = torch.linspace(-1, 1, 16).requires_grad_()
    total = loss(x=x)
    if total.requires_grad:
        total.backward()
    return [total.item(), *(each.value for each in loss.output.regularizers.values())]


def test_a_composite_draws_by_step_and_call() -> None:
    loss, values = composite(), []
    for loss.step in (0, 1, 1, 2):
        values.append(values_of(loss))
    assert all(a != b for one, other in pairwise(values) for a, b in zip(one, other, strict=True))
    again = composite()
    for loss_step, expected in zip((0, 1, 1, 2), values, strict=True):
        again.step = loss_step
        assert values_of(again) == expected
    resumed = composite()
    resumed.load_state_dict(loss.state_dict())
    assert values_of(resumed) == values[-1]


def test_calls_without_gradients_do_not_shift_those_of_training() -> None:
    plain, evaluated = composite(), composite()
    expected = values_of(plain)
    with torch.no_grad():
        first = [values_of(evaluated) for _ in range(3)]
    assert values_of(evaluated) == expected
    assert expected not in first


def test_a_composites_places_give_the_same() -> None:
    def terms(**how: Any) -> list[RegularizerSpec]:
        return [term(dropped, 0.5, "dropped", **how), term(scaled, 0.5, "scaled", **how)]

    here = [values_of(CompositeLoss(base, terms(), seed=SEED)) for _ in range(2)]
    assert here[0] == here[1]
    for run_in in ("thread", "process"):
        got = values_of(CompositeLoss(base, terms(run_in=run_in), seed=SEED))
        assert got[1:] == pytest.approx(here[0][1:], rel=1e-6)


def test_an_input_named_generator_may_be_named() -> None:
    spec = term(scaled, 0.5, "scaled", inputs=("x", "generator"))
    loss = CompositeLoss(base, [spec])
    x = torch.ones(4)
    loss(x=x, generator=torch.Generator().manual_seed(1))
    drawn = torch.rand(4, generator=torch.Generator().manual_seed(1))
    assert loss.output.regularizers["scaled"].value == drawn.mean().item()


def on_rank(rank: int) -> dict[str, list[float]]:
    """Values of one rank: of all processes, and where each is a group of its own."""
    alone = [dist.new_group([each]) for each in range(2)][rank]
    together, apart = composite(), composite()
    apart.group = alone
    return {"together": values_of(together), "apart": values_of(apart)}


def test_each_rank_has_numbers_of_its_own(tmp_path: Path) -> None:
    first, second = run_group(on_rank, tmp_path)
    assert first["together"] == values_of(composite())
    assert all(a != b for a, b in zip(first["together"], second["together"], strict=True))
    assert first["apart"] == second["apart"] == first["together"]


def test_a_term_that_one_process_evaluates_draws_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: 3)

    def key(ranks: Any) -> tuple[int, ...]:
        spec = RegularizerSpec(given, 1.0, "t", ranks=ranks)
        randomness = CallSeed(SEED).randomness(Term(spec), 5)
        assert randomness is not None
        return randomness.key

    assert key("all") == (SEED, 5, 0, 1, 3, ord("t"))
    assert key("one") == (SEED, 5, 0, 1, 0, ord("t"))
