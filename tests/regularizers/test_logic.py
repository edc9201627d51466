from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import z3

from steelyard import Pipeline, RegularizerSpec
from steelyard.errors import InputError, TermTimeoutError
from steelyard.regularizers import LogicalConsistency

from .checks import value_and_gradients


def ordered(datum: Any, index: int) -> list[Any]:
    """Constraints a < b < c with the numbers of the datum."""
    a, b, c = z3.Ints("a b c")
    return [a < b, b < c, a == datum[0], b == datum[1], c == datum[2]]


def cubes(datum: Any, index: int) -> list[Any]:
    """Fermat's last theorem for cubes, which Z3 cannot decide."""
    a, b, c = z3.Ints("a b c")
    return [a > 0, b > 0, c > 0, a**3 + b**3 == c**3]


DATA = [(1, 2, 3), (3, 2, 1), (0, 5, 9)]


def test_verdicts_agree_with_z3() -> None:
    verdicts = []
    for datum in DATA:
        solver = z3.Solver()
        solver.add(*ordered(datum, 0))
        verdicts.append(solver.check())
    assert verdicts == [z3.sat, z3.unsat, z3.sat]
    penalties, metrics = LogicalConsistency(constraints=ordered).compute(DATA, [])
    assert penalties == [0.0, 1.0, 0.0]
    assert metrics == {"sat": 2.0, "unsat": 1.0, "unknown": 0.0}


def test_each_verdict_has_its_penalty() -> None:
    penalties = {"sat": 0.1, "unsat": 2.0, "unknown": 0.7}
    easy = LogicalConsistency(constraints=ordered, solver_timeout=300, **penalties)
    assert easy.compute(DATA, []) == ([0.1, 2.0, 0.1], {"sat": 2.0, "unsat": 1.0, "unknown": 0.0})
    hard = LogicalConsistency(constraints=cubes, solver_timeout=0.05, **penalties)
    assert hard.compute([None], []) == ([0.7], {"sat": 0.0, "unsat": 0.0, "unknown": 1.0})


@pytest.mark.parametrize(
    ("constraints", "verdict"),
    [
        (lambda datum, index: z3.BoolVal(False), "unsat"),
        (lambda datum, index: (z3.Bool("p"), z3.Not(z3.Bool("p"))), "unsat"),
        (lambda datum, index: [], "sat"),
        (lambda datum, index: [datum == 3], "unsat"),
        (lambda datum, index: index == 0, "sat"),
        (lambda datum, index: z3.parse_smt2_string("(assert (= 1 2))"), "unsat"),
        (lambda datum, index: z3.parse_smt2_string("(assert (= 1 1)) (assert true)"), "sat"),
    ],
)
def test_forms_of_constraints(constraints: Any, verdict: str) -> None:
    _, metrics = LogicalConsistency(constraints=constraints).compute([4], [])
    assert metrics[verdict] == 1.0


@pytest.mark.parametrize("wrong", [None, 3, "x > 1", z3.Int("x"), [z3.Int("x") + 1]])
def test_invalid_constraints(wrong: Any) -> None:
    with pytest.raises(InputError, match="the constraints of datum 1 must be Z3 expressions"):
        LogicalConsistency(constraints=lambda d, i: [] if i == 0 else wrong).compute([0, 0], [])


def test_the_gradient_from_a_process_is_the_score_function_estimate() -> None:
    rows = [torch.zeros(2), torch.zeros(1), torch.zeros(3)]
    term = LogicalConsistency(constraints=ordered)
    value, gradients = value_and_gradients(term, DATA, rows, run_in="auto")
    assert RegularizerSpec(term, 1.0).run_in == "process"
    assert value == pytest.approx(1 / 3)
    # (c - mean) / (n - 1)
    for gradient, value in zip(gradients, (-1 / 6, 1 / 3, -1 / 6), strict=True):
        torch.testing.assert_close(gradient, torch.full_like(gradient, value))


def test_the_solver_timeout_gives_unknown() -> None:
    term = LogicalConsistency(constraints=cubes, solver_timeout=0.05)
    output = Pipeline(lambda d, lp: lp[0].sum(), [RegularizerSpec(term, 1.0, "cubes")]).compute(
        [None, None], [torch.zeros(1)] * 2
    )
    assert output.regularizers["cubes"].custom == {"sat": 0.0, "unsat": 0.0, "unknown": 2.0}
    assert output.regularizers["cubes"].value == 0.5


def test_the_term_timeout_kills_the_solver() -> None:
    endless = LogicalConsistency(constraints=cubes, solver_timeout=3600)
    pipeline = Pipeline(
        lambda d, lp: lp[0].sum(),
        [
            RegularizerSpec(endless, 1.0, "endless", timeout=1.0),
            RegularizerSpec(LogicalConsistency(constraints=ordered), 1.0, "ordered"),
        ],
    )
    with pytest.raises(TermTimeoutError, match="regularizer 'endless' must end within 1 s"):
        pipeline.compute(DATA, [torch.zeros(1)] * 3)
    pipeline.remove("endless")
    output = pipeline.compute(DATA, [torch.zeros(1)] * 3)
    assert output.regularizers["ordered"].custom["unsat"] == 1.0


def test_threads_use_the_solver_one_at_a_time() -> None:
    """Z3's default context breaks when two threads use it at once."""
    term = LogicalConsistency(constraints=ordered)
    barrier = threading.Barrier(4)

    def judge(_: int) -> list[float]:
        barrier.wait()
        return term.compute(DATA * 20, [])[0]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(judge, range(4))) == [[0.0, 1.0, 0.0] * 20] * 4
