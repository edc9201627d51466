"""TorchJD's weightings as aggregators."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchjd import aggregation
from torchjd.autojac import backward, jac_to_grad
from torchjd.linalg import QuadprogProjector

from steelyard import Pipeline, RegularizerSpec
from steelyard.composition.aggregate import AggregationWarning, Aggregator, WeightedSum
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import term
from steelyard.composition.weightings import WEIGHTINGS, GramWeighting, aggregator_of
from steelyard.errors import AggregationError, MissingExtraError, SpecError, StateError

# cvxpy, the solver of CAGrad, is too large for the extra.
OPTIONS: dict[str, dict[str, Any]] = {
    "constant": {"weights": [0.5, 2.0, 1.0]},
    "fairgrad": {"alpha": 1.0},
    "krum": {"n_byzantine": 0},
}
NAMES = [name for name in WEIGHTINGS if name != "cagrad"]
DRAWING = ("gradvac", "pcgrad", "random")
REMEMBERING = ("cr_mogm", "gradvac", "pcd")
every_weighting = pytest.mark.parametrize("name", NAMES)


def by_name(name: str, **more: Any) -> dict[str, Any]:
    return {"use": name, **OPTIONS.get(name, {}), **more}


def gram(rows: Sequence[Sequence[float]] | Tensor) -> list[list[float]]:
    stacked = torch.as_tensor(rows, dtype=torch.float64)
    found: list[list[float]] = (stacked @ stacked.T).tolist()
    return found


def factors(aggregator: Aggregator, rows: Sequence[Sequence[float]] | Tensor) -> list[float]:
    products = gram(rows)
    return list(aggregator.factors([1.0] * len(products), [1.0] * len(products), products))


CONFLICT = [[4.0, 1.0, 0.0], [-2.0, 1.0, 0.5], [0.5, -1.0, 2.0]]
AGREEMENT = [[4.0, 1.0, 0.0], [3.0, 2.0, 0.5], [0.5, 1.0, 2.0]]


# Against TorchJD itself.


def losses(x: Tensor) -> list[Tensor]:
    """A base loss and five terms, with conflicts between them."""
    return [
        -x.mean() * 3,
        0.1 * x.square().mean(),
        0.5 * (x.exp() * x).mean(),
        0.3 * torch.relu(x + 1).mean(),
        0.2 * (x[::2].mean() - x[1::2].mean()).square(),
        0.4 * x.abs().mean(),
    ]


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("upgrad", lambda ones: aggregation.UPGrad(pref_vector=ones)),
        ("dualproj", lambda ones: aggregation.DualProj(pref_vector=ones)),
        ("aligned_mtl", lambda ones: aggregation.AlignedMTL(pref_vector=ones)),
        ("mgda", lambda _: aggregation.MGDA()),
        ("imtl_g", lambda _: aggregation.IMTLG()),
    ],
)
def test_the_gradient_is_that_of_autojac(name: str, theirs: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    logprobs = -torch.rand(512).double() * 3
    weights = [3.0, 0.1, 0.5, 0.3, 0.2, 0.4]

    def one(index: int) -> Callable[..., Tensor]:
        return lambda _, logprobs: losses(logprobs)[index] / weights[index]

    specs = [RegularizerSpec(one(i), weights[i], str(i), run_in="inline") for i in range(1, 6)]
    # The base loss has weight 1.
    pipeline = Pipeline(lambda _, logprobs: losses(logprobs)[0], specs, aggregate=name)
    output = pipeline.compute([], logprobs)
    leaf = logprobs.clone().requires_grad_()
    backward(losses(leaf), inputs=[leaf])
    jac_to_grad([leaf], theirs(torch.ones(6, dtype=torch.float64)))
    assert leaf.grad is not None
    error = (output.gradients - leaf.grad).norm() / leaf.grad.norm()
    assert error.item() <= 1e-6
    plain = Pipeline(lambda _, logprobs: losses(logprobs)[0], specs).compute([], logprobs)
    assert (output.gradients - plain.gradients).norm() > 1e-3 * plain.gradients.norm()
    assert output.loss_total == plain.loss_total


def test_the_gradient_of_a_composite_is_that_of_autojac() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2).double(), torch.randn(8, 4).double()

    def values(out: Tensor) -> list[Tensor]:
        return [out[:, 0].square().mean(), (out[:, 0] + out[:, 1] - 1).square().mean()]

    loss = CompositeLoss(
        lambda out: values(out)[0],
        [term(lambda out: values(out)[1], 1.0, "second")],
        wrt=model,
        aggregate="upgrad",
    )
    loss(out=model(x)).backward()
    ours = [p.grad for p in model.parameters()]
    model.zero_grad()
    backward(values(model(x)), inputs=list(model.parameters()))
    jac_to_grad(
        list(model.parameters()),
        aggregation.UPGrad(pref_vector=torch.ones(2, dtype=torch.float64)),
    )
    for mine, parameter in zip(ours, model.parameters(), strict=True):
        assert mine is not None
        assert parameter.grad is not None
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-6, atol=1e-9)
    assert set(loss.output.factors) == {"base", "second"}


# Laws.


@pytest.mark.parametrize("name", ["upgrad", "dualproj", "pcgrad", "gradvac"])
def test_without_conflict_the_factors_are_those_of_the_sum(name: str) -> None:
    assert factors(aggregator_of(name), AGREEMENT) == pytest.approx([1.0] * 3)
    assert factors(aggregator_of(name), CONFLICT) != pytest.approx([1.0] * 3, rel=1e-2)


@pytest.mark.parametrize("name", ["upgrad", "dualproj", "mgda"])
def test_no_term_is_harmed(name: str) -> None:
    rows = torch.tensor(CONFLICT, dtype=torch.float64)
    total = torch.tensor(factors(aggregator_of(name), rows), dtype=torch.float64) @ rows
    harm = -(rows @ total).min().item()
    assert harm <= 1e-2  # by as little as TorchJD's regularization of the solver
    assert -(rows @ rows.sum(0)).min().item() > 0.5  # the sum harms one by much more


def test_upgrad_of_two_opposed_gradients_by_hand() -> None:
    # g1 = (1, 0), g2 = (-1, 1): each is projected onto the plane that is normal to the other,
    # g1 + g2 / 2 and g2 + g1, so that the factors are 2 and 1.5.
    aggregator = aggregator_of({"use": "upgrad", "reg_eps": 1e-10})
    assert factors(aggregator, [[1.0, 0.0], [-1.0, 1.0]]) == pytest.approx([2.0, 1.5], rel=1e-6)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("fairgrad", "pcd")])
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_a_mean_has_the_factors_of_a_sum(name: str, scale: float) -> None:
    rows = torch.tensor(CONFLICT, dtype=torch.float64)
    plain, scaled = (aggregator_of(by_name(name)) for _ in range(2))
    assert factors(scaled, scale * rows) == pytest.approx(factors(plain, rows), rel=1e-6)


@pytest.mark.parametrize("name", ["fairgrad", "pcd"])
def test_weightings_that_depend_on_the_scale_see_it(name: str) -> None:
    rows = torch.tensor(CONFLICT, dtype=torch.float64)
    theirs = getattr(aggregation, WEIGHTINGS[name])(**OPTIONS.get(name, {}))
    wanted = theirs(torch.tensor(gram(rows), dtype=torch.float64)).tolist()
    assert factors(aggregator_of(by_name(name)), rows) == wanted


# Hard inputs.


@every_weighting
@pytest.mark.parametrize(
    "rows",
    [
        [[1.0, 2.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 1.0]],  # one zero gradient
        [[0.0, 0.0, 0.0]] * 3,
        [[1.0, 2.0, 0.0], [-1.0, -2.0, 0.0], [0.0, 1.0, 1.0]],  # opposite gradients
        [[1.0, 2.0, 0.0]] * 3,
        [[1e-20, 2e-20, 0.0], [-1e18, 0.0, 1.0], [0.0, 1.0, 1e18]],
    ],
)
def test_zero_equal_and_opposite_gradients_have_finite_factors(
    name: str, rows: list[list[float]]
) -> None:
    found = factors(aggregator_of(by_name(name)), rows)
    assert len(found) == 3
    assert torch.tensor(found).isfinite().all()


@every_weighting
def test_a_pipeline_computes_with_each(name: str) -> None:
    def pull(index: int) -> Callable[..., Tensor]:
        rows = torch.tensor(CONFLICT)
        return lambda _, logprobs: (logprobs * rows[index]).sum()

    specs = [RegularizerSpec(pull(i), 1.0, f"r{i}", run_in="inline") for i in (1, 2)]
    output = Pipeline(pull(0), specs, aggregate=by_name(name)).compute([], torch.zeros(3))
    assert list(output.factors) == ["base", "r1", "r2"]
    expected = torch.tensor(list(output.factors.values())) @ torch.tensor(CONFLICT)
    torch.testing.assert_close(output.gradients, expected)


@pytest.mark.parametrize("name", ["imtl_g", "aligned_mtl"])
def test_dependent_gradients_in_float32_have_the_factors_of_float64(name: str) -> None:
    # Their Gram matrix is singular; summed in float32, rounding makes it seem to be regular.
    rows = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.stack([rows[0], 0.3 * rows[0], rows[1], rows.sum(0)])

    def pull(index: int, dtype: torch.dtype) -> Callable[..., Tensor]:
        row = rows[index].to(dtype)
        return lambda _, logprobs: (logprobs * row).sum()

    def found(dtype: torch.dtype) -> list[float]:
        specs = [RegularizerSpec(pull(i, dtype), 1.0, f"r{i}", run_in="inline") for i in (1, 2, 3)]
        pipeline = Pipeline(pull(0, dtype), specs, aggregate=name)
        return list(pipeline.compute([], torch.zeros(20_000, dtype=dtype)).factors.values())

    assert found(torch.float32) == pytest.approx(found(torch.float64), rel=1e-3)


def test_a_solver_that_fails_leaves_the_sum_and_names_the_step() -> None:
    specs = [RegularizerSpec(lambda _, lps: (lps * 2).sum(), 1.0, "twice", run_in="inline")]
    pipeline = Pipeline(
        lambda _, lps: -lps.sum(), specs, aggregate={"use": "krum", "n_byzantine": 4}
    )
    message = "step 3 takes the plain sum .*: krum failed on 2 gradients: ValueError: .*7 rows"
    with pytest.warns(AggregationWarning, match=message):
        output = pipeline.compute([], torch.zeros(2), step=3)
    assert output.gradients.tolist() == [1.0, 1.0]
    assert output.factors == {}


def test_factors_that_are_not_finite_are_a_failure() -> None:
    class Broken(aggregation.Weighting[Any]):
        def forward(self, stat: Tensor, /) -> Tensor:
            return stat.diagonal() / 0

    with pytest.raises(AggregationError, match="Broken must find finite factors for 3 gradients"):
        factors(aggregator_of(Broken()), CONFLICT)


# Randomness and state.


def draws(aggregator: Aggregator, calls: int) -> list[list[float]]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(5, 3, generator=generator) for _ in range(calls)]
    return [factors(aggregator, each) for each in rows]


@pytest.mark.parametrize("name", DRAWING)
def test_random_numbers_are_the_aggregators_own(name: str) -> None:
    torch.manual_seed(0)
    first = draws(aggregator_of(name), 3)
    after = torch.rand(4)
    torch.manual_seed(1)
    torch.rand(7)
    assert draws(aggregator_of(name), 3) == first
    torch.manual_seed(0)
    assert torch.rand(4).tolist() == after.tolist()  # the caller's are as they were
    assert draws(aggregator_of({"use": name, "seed": 1}), 3) != first


@pytest.mark.parametrize("name", sorted({*DRAWING, *REMEMBERING}))
def test_a_saved_state_goes_on_with_the_same_bits(name: str) -> None:
    whole, first, second = (aggregator_of(name) for _ in range(3))
    assert isinstance(first, GramWeighting)
    assert isinstance(second, GramWeighting)
    everything = draws(whole, 6)
    assert draws(first, 6)[:3] == everything[:3]
    half = aggregator_of(name)
    assert isinstance(half, GramWeighting)
    draws(half, 3)
    saved = copy.deepcopy(half.state_dict())
    draws(half, 2)  # does not reach the saved state
    second.load_state_dict(saved)
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(5, 3, generator=generator) for _ in range(6)]
    assert [factors(second, each) for each in rows[3:]] == everything[3:]
    second.load_state_dict(aggregator_of(name).state_dict())  # type: ignore[attr-defined]
    assert draws(second, 6) == everything


@every_weighting
def test_a_pickled_aggregator_goes_on_alike(name: str) -> None:
    aggregator = aggregator_of(by_name(name))
    factors(aggregator, CONFLICT)
    copied = pickle.loads(pickle.dumps(aggregator))
    assert factors(copied, CONFLICT) == factors(aggregator, CONFLICT)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {*DRAWING, *REMEMBERING}])
def test_a_weighting_without_memory_has_no_state(name: str) -> None:
    aggregator = aggregator_of(by_name(name))
    factors(aggregator, CONFLICT)
    assert aggregator.stateful is None
    pipeline = Pipeline(lambda _, lps: lps.sum(), aggregate=aggregator)
    assert pipeline.state_dict() == {"(step)": 0}


def test_a_pipeline_and_a_composite_save_the_state() -> None:
    specs = [
        RegularizerSpec(lambda _, lps, row=row: (lps * row).sum(), 1.0, f"r{i}", run_in="inline")
        for i, row in enumerate(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    ]

    def built() -> Pipeline:
        return Pipeline(lambda _, lps: lps.sum(), specs, aggregate="pcgrad")

    pipeline, resumed = built(), built()
    outputs = [pipeline.compute([], torch.zeros(6)).factors for _ in range(2)]
    state = pickle.loads(pickle.dumps(pipeline.state_dict()))
    outputs.append(pipeline.compute([], torch.zeros(6)).factors)
    resumed.load_state_dict(state)
    assert resumed.compute([], torch.zeros(6)).factors == outputs[2]
    assert outputs[2] != outputs[0]

    def composite() -> CompositeLoss:
        return CompositeLoss(
            lambda x: x.sum(), [term(lambda x: -x[0], 1.0, "first")], aggregate="random"
        )

    one, other = composite(), composite()
    x = torch.ones(3, requires_grad=True)
    one(x=x)
    other.load_state_dict(one.state_dict())
    one(x=x)
    other(x=x)
    assert other.output.factors == one.output.factors
    copied = copy.deepcopy(one)
    one(x=x)
    copied(x=x)
    assert copied.output.factors == one.output.factors


@pytest.mark.parametrize("name", REMEMBERING)
def test_another_number_of_gradients_starts_anew(name: str) -> None:
    aggregator, fresh = aggregator_of(name), aggregator_of(name)
    factors(aggregator, CONFLICT)
    factors(aggregator, CONFLICT)
    if name in DRAWING:
        assert isinstance(aggregator, GramWeighting)
        assert isinstance(fresh, GramWeighting)
        fresh.load_state_dict({**aggregator.state_dict(), "statistics": {}})
    assert factors(aggregator, CONFLICT[:2]) == factors(fresh, CONFLICT[:2])


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"generator": torch.zeros(3), "rows": -1, "weighting": {}},
        {"generator": torch.zeros(3), "rows": 2, "weighting": {"a": 1.0}},
        {"generator": [1, 2], "rows": 2, "weighting": {}},
        {"generator": torch.zeros(3)},
        {"generator": torch.zeros(3), "statistics": {"{": {}}},
        {"generator": torch.zeros(3), "statistics": {"2": [1, 2]}},
    ],
)
def test_a_state_that_does_not_fit(state: Any) -> None:
    aggregator = aggregator_of("pcgrad")
    assert isinstance(aggregator, GramWeighting)
    with pytest.raises(StateError, match="the state of pcgrad must hold"):
        aggregator.load_state_dict(state)


# Names, options and objects.


def test_the_names_are_the_weightings_of_torchjd_that_read_a_gram_matrix() -> None:
    every = {name for name in aggregation.__all__ if name.endswith("Weighting")} - {"Weighting"}
    of_rows = {"ExcessMTLWeighting", "MoDoWeighting", "SDMGradWeighting"}
    assert set(WEIGHTINGS.values()) == every - of_rows - {"SumWeighting"}  # ours is "sum"


def test_objects() -> None:
    assert isinstance(aggregator_of("sum"), WeightedSum)
    own = aggregator_of("mgda")
    assert aggregator_of(own) is own
    by_object = aggregator_of(aggregation.UPGradWeighting())
    assert factors(by_object, CONFLICT) == factors(aggregator_of("upgrad"), CONFLICT)
    assert factors(aggregator_of(aggregation.UPGrad()), CONFLICT) == factors(by_object, CONFLICT)
    preferring = aggregation.UPGradWeighting(torch.tensor([2.0, 0.0, 1.0]).double())
    listed = {"use": "upgrad", "pref_vector": [2.0, 0.0, 1.0]}
    assert factors(aggregator_of(preferring), CONFLICT) == factors(aggregator_of(listed), CONFLICT)
    assert factors(aggregator_of(listed), CONFLICT) != factors(by_object, CONFLICT)


def test_options_reach_the_weighting_and_its_solver() -> None:
    found = aggregator_of({"use": "upgrad", "norm_eps": 0.5, "reg_eps": 0.25})
    assert isinstance(found, GramWeighting)
    projector = found.weighting.projector
    assert isinstance(projector, QuadprogProjector)
    assert (projector.norm_eps, projector.reg_eps) == (0.5, 0.25)
    smoothed = aggregator_of({"use": "cr_mogm", "weighting": {"use": "mgda"}, "alpha": 0.5})
    one = factors(smoothed, CONFLICT)
    assert one == factors(aggregator_of("mgda"), CONFLICT)
    two = factors(smoothed, AGREEMENT)
    half = [
        (a + b) / 2 for a, b in zip(one, factors(aggregator_of("mgda"), AGREEMENT), strict=True)
    ]
    assert two == pytest.approx(half)


@pytest.mark.parametrize(
    ("aggregate", "message"),
    [
        ("mgd", "aggregate must be one of 'sum', 'aligned_mtl', .*, 'upgrad', a mapping .*'mgd'"),
        (None, "aggregate must be one of"),
        (3, "aggregate must be one of"),
        (["upgrad"], "aggregate must be one of"),
        (WeightedSum, "aggregate must be one of"),
        ({}, "aggregate must be one of"),
        ({"use": "sum", "c": 1}, "aggregate must be one of"),
        (nn.Linear(2, 2), "aggregate must be computed from a Gram matrix.*got Linear"),
        (aggregation.ExcessMTLWeighting(), "Gram matrix.*got ExcessMTLWeighting"),
        (aggregation.ConFIG(), "Gram matrix.*got ConFIG"),
        ({"use": "mgda", "steps": 3}, "options of aggregate='mgda' must be among .*'max_iters'"),
        ({"use": "mgda", "epsilon": -1.0}, "options of aggregate='mgda'.*epsilon must be positive"),
        ({"use": "mgda", "epsilon": "a"}, "options of aggregate='mgda' must be valid"),
        ({"use": "fairgrad"}, "options of aggregate='fairgrad'.*missing.*'alpha'"),
        ({"use": "upgrad", "reg_eps": -1.0}, "options of aggregate='upgrad'.*reg_eps"),
        ({"use": "upgrad", "projector": 1}, "must be among .'norm_eps', 'pref_vector', 'reg_eps'."),
        ({"use": "pcgrad", "seed": -1}, "seed of aggregate='pcgrad' must be a whole number >= 0"),
        ({"use": "cr_mogm", "weighting": "sum"}, "weighting of aggregate='cr_mogm' must be one of"),
    ],
)  # fmt: skip
def test_what_is_no_aggregator(aggregate: Any, message: str) -> None:
    for build in (
        lambda: aggregator_of(aggregate),
        lambda: Pipeline(lambda _, lps: lps.sum(), aggregate=aggregate),
        lambda: CompositeLoss(lambda x: x.sum(), aggregate=aggregate),
    ):
        with pytest.raises(SpecError, match=message):
            build()


# What is not installed.


def test_torchjd_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchjd", None)
    with pytest.raises(MissingExtraError) as caught:
        aggregator_of("upgrad")
    assert str(caught.value) == (
        "aggregate='upgrad' needs torchjd, which is not installed: "
        'pip install "steelyard[aggregate]".'
    )
    with pytest.raises(MissingExtraError, match="aggregate needs torchjd"):
        aggregator_of(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("aggregate", "solver"),
    [
        ("upgrad", "quadprog_projector"),
        ("dualproj", "quadprog_projector"),
        ({"use": "cagrad", "c": 0.5}, "cagrad"),
        ({"use": "fairgrad", "alpha": 1.0}, "fairgrad"),
    ],
)
def test_a_missing_solver_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, aggregate: Any, solver: str
) -> None:
    monkeypatch.setattr("torchjd._mixins.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match="needs a solver that is not installed") as caught:
        Pipeline(lambda _, lps: lps.sum(), aggregate=aggregate)
    assert f'pip install "torchjd[{solver}]"' in str(caught.value)
