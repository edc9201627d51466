"""Data of a term's own: the batch is joined with them, and nobody else sees them."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.own_data import (
    JoinedData,
    SeparateInputs,
    indices_of_call,
    inputs_of,
)
from steelyard.errors import InputError, SpecError
from steelyard.integrations import term
from steelyard.output.accumulated import accumulated
from steelyard.penalties import from_logits

OTHERS = ["w", "x", "y", "z"]
LOGPROBS = {
    "a": [-1.0, -2.0], "b": [-3.0], "w": [-0.5, -0.25], "x": [-4.0],
    "y": [-2.5, -1.5, -0.5], "z": [-7.0],
}  # fmt: skip


def logprobs_of(data: list[str]) -> list[Tensor]:
    return [torch.tensor(LOGPROBS[datum]) for datum in data]


def nll(data: Any, logprobs: Any) -> Tensor:
    """Mean over data and tokens, which checks that each datum has its own log-probs."""
    for datum, row in zip(data, logprobs, strict=True):
        assert row.tolist() == pytest.approx(LOGPROBS[datum], abs=1e-3)  # moved by differences
    return -torch.cat(list(logprobs)).mean()


def square(data: Any, logprobs: Any) -> Tensor:
    nll(data, logprobs)
    return torch.cat(list(logprobs)).square().sum()


def keep(**fields: Any) -> RegularizerSpec:
    return RegularizerSpec(square, **{"weight": 0.5, "name": "keep", "data": OTHERS, **fields})


def test_each_function_sees_its_own_data() -> None:
    pipeline = Pipeline(nll, [keep(per_step=2), RegularizerSpec(square, 0.1, "all")])
    joined = pipeline.join(["a", "b"])
    assert joined.batch == ["a", "b"]
    assert len(joined.own["keep"]) == 2
    output = pipeline.compute(joined, logprobs_of(joined.data))
    own = [x for datum in joined.own["keep"] for x in LOGPROBS[datum]]
    assert output.base_loss.value == pytest.approx(2.0)
    assert output.regularizers["keep"].value == pytest.approx(sum(x * x for x in own))
    assert output.regularizers["all"].value == pytest.approx(14.0)


@pytest.mark.parametrize("run_in", ["inline", "thread", "process"])
def test_gradients_are_those_of_autograd(run_in: str) -> None:
    pipeline = Pipeline(nll, [keep(run_in=run_in), RegularizerSpec(square, 0.1, "all")])
    joined = pipeline.join(["a", "b"])
    rows = [row.requires_grad_() for row in logprobs_of(joined.data)]
    total = nll(["a", "b"], rows[:2]) + 0.1 * square(["a", "b"], rows[:2])
    total = total + 0.5 * square(OTHERS, rows[2:])
    expected = torch.autograd.grad(total, rows)
    output = pipeline.compute(joined, [row.detach() for row in rows])
    assert output.loss_total == pytest.approx(total.item())
    torch.testing.assert_close(list(output.gradients), list(expected))


def test_a_numerical_and_a_score_gradient() -> None:
    def costs(data: Any, logprobs: Any) -> Tensor:
        return torch.arange(float(len(data)))

    specs = [
        keep(gradient="numerical"),
        RegularizerSpec(costs, 1.0, "costs", gradient="score", data=OTHERS),
    ]
    pipeline = Pipeline(nll, specs)
    joined = pipeline.join(["a"])
    rows = logprobs_of(joined.data)
    output = pipeline.compute(joined, [row.double() for row in rows])
    for row, gradient in zip(rows[1:5], output.gradients[1:5], strict=True):
        torch.testing.assert_close(gradient, row.double())  # 0.5 · 2 x
    # (c - mean c) / (n - 1) for each token, by hand.
    for cost, gradient in zip(range(4), output.gradients[5:], strict=True):
        torch.testing.assert_close(gradient, torch.full_like(gradient, (cost - 1.5) / 3))


def test_norms_are_of_its_own_log_probs_and_cosines_are_none() -> None:
    pipeline = Pipeline(nll, [keep(), RegularizerSpec(square, 0.1, "all")], track_grad_norms=True)
    joined = pipeline.join(["a", "b"])
    output = pipeline.compute(joined, logprobs_of(joined.data))
    own = torch.cat(logprobs_of(OTHERS))
    assert output.regularizers["keep"].grad_norm == pytest.approx((2 * own).norm().item())
    assert set(output.cosines) == {("base", "all")}
    assert output.regularizers["keep"].grad_space == "logprobs"


def test_an_aggregator_refuses_gradients_it_cannot_compare() -> None:
    pipeline = Pipeline(nll, [keep(), RegularizerSpec(square, 0.1, "all")], aggregate="mgda")
    joined = pipeline.join(["a"])
    with pytest.raises(SpecError, match="'keep' is with respect to logprobs of its own data"):
        pipeline.compute(joined, logprobs_of(joined.data))
    anchored = Pipeline(
        nll, [keep(anchor=True), RegularizerSpec(square, 0.1, "all")], aggregate="mgda"
    )
    output = anchored.compute(joined, logprobs_of(joined.data))
    assert output.factors["keep"] == 1.0


def test_the_batch_itself_where_no_term_is_due() -> None:
    batch = ["a"]
    assert Pipeline(nll, [RegularizerSpec(square, 1.0, "all")]).join(batch) is batch
    assert Pipeline(nll, [keep(enabled=False)]).join(batch) is batch
    assert Pipeline(nll, [keep(every=2)]).join(batch, step=1) is batch


def test_each_step_has_the_next_data_and_each_pass_all_of_them() -> None:
    pipeline = Pipeline(nll, [keep(per_step=1, every=2)], seed=3)
    drawn = [pipeline.join(["a"], step=step).own["keep"][0] for step in range(0, 16, 2)]
    assert Counter(drawn[:4]) == Counter(drawn[4:]) == Counter(OTHERS)
    again = Pipeline(nll, [keep(per_step=1, every=2)], seed=3)
    assert [again.join(["a"], step=step).own["keep"][0] for step in range(0, 16, 2)] == drawn


def test_another_seed_name_or_call_has_other_data() -> None:
    def drawn(seed: int = 0, name: str = "keep") -> list[str]:
        pipeline = Pipeline(nll, [keep(per_step=1, name=name)], seed=seed)
        return [pipeline.join(["a"], step=step).own[name][0] for step in range(16)]

    assert drawn() == drawn()
    assert drawn() != drawn(seed=1)
    assert drawn() != drawn(name="other")
    pipeline = Pipeline(nll, [keep(per_step=2)], seed=0)
    calls = []
    for _ in range(8):  # of one step, as in gradient accumulation
        joined = pipeline.join(["a"], step=5)
        calls.append(tuple(joined.own["keep"]))
        pipeline.compute(joined, logprobs_of(joined.data), step=5)
    assert len(set(calls)) > 1


def test_steps_are_counted_as_calls_are() -> None:
    pipeline = Pipeline(nll, [keep(per_step=1)], seed=0)
    counted = []
    for _ in range(4):
        joined = pipeline.join(["a"])
        counted.append(joined.own["keep"][0])
        pipeline.compute(joined, logprobs_of(joined.data))
    assert Counter(counted) == Counter(OTHERS)


def test_data_that_were_not_joined_are_an_error() -> None:
    pipeline = Pipeline(nll, [keep()])
    with pytest.raises(InputError, match=r"'keep' reads data of its own.*join\(data\)"):
        pipeline.compute(["a"], logprobs_of(["a"]))
    joined = pipeline.join(["a"])
    with pytest.raises(InputError, match="one tensor for each of the 5 data"):
        pipeline.compute(joined, logprobs_of(["a"]))
    with pytest.raises(InputError, match="got one tensor"):
        pipeline.compute(joined, torch.zeros(9))


def test_held_at_a_bound() -> None:
    pipeline = Pipeline(nll, [keep(weight=None, at_most=1.0)])
    joined = pipeline.join(["a"])
    output = pipeline.compute(joined, logprobs_of(joined.data))
    assert output.regularizers["keep"].weight > 0
    assert output.regularizers["keep"].violation > 0  # type: ignore[operator]  # it has one


def test_an_empty_list_a_path_and_a_bad_size_are_refused() -> None:
    with pytest.raises(SpecError, match="data must be a list of at least one datum"):
        keep(data=[])
    with pytest.raises(SpecError, match="config files take a path"):
        keep(data="other.jsonl")
    with pytest.raises(SpecError, match="per_step must be a whole number >= 1, got 0"):
        keep(per_step=0)
    with pytest.raises(SpecError, match="cannot go with ranks='one'"):
        keep(ranks="one")


def test_a_composite_in_the_callers_graph() -> None:
    loss = CompositeLoss(nll_of_batch, [keep(per_step=2), RegularizerSpec(square, 0.1, "all")])
    joined = loss.join(["a", "b"])
    rows = [row.requires_grad_() for row in logprobs_of(joined.data)]
    total = loss(data=joined, logprobs=rows)
    expected = nll(["a", "b"], rows[:2]) + 0.1 * square(["a", "b"], rows[:2])
    expected = expected + 0.5 * square(joined.own["keep"], rows[2:])
    torch.testing.assert_close(total, expected)
    for got, wanted in zip(
        torch.autograd.grad(total, rows), torch.autograd.grad(expected, rows), strict=True
    ):
        torch.testing.assert_close(got, wanted)
    with pytest.raises(InputError, match="reads data of its own"):
        loss(data=["a"], logprobs=rows[:1])


def nll_of_batch(data: Any, logprobs: Any) -> Tensor:
    return nll(data, logprobs)


def test_extra_inputs_are_divided_too() -> None:
    def hidden_size(data: Any, logprobs: Any, hidden_states: Any) -> Tensor:
        assert len(data) == len(logprobs) == len(hidden_states)
        return torch.stack([h.square().sum() for h in hidden_states]).sum()

    specs = [
        RegularizerSpec(hidden_size, 1.0, "own", data=OTHERS, per_step=1, needs=("hidden_states",)),
        RegularizerSpec(
            hidden_size, 1.0, "apart", data=OTHERS, needs=("hidden_states",), run_in="thread"
        ),
    ]
    pipeline = Pipeline(nll, specs, gives=("hidden_states",))
    joined = pipeline.join(["a", "b"])
    hidden = [torch.full((2,), float(i)) for i in range(len(joined.data))]
    output = pipeline.compute(joined, logprobs_of(joined.data), given={"hidden_states": hidden})
    assert output.regularizers["own"].value == 2 * 2**2
    assert output.regularizers["apart"].value == sum(2 * i**2 for i in (3, 4, 5, 6))
    gradient = output.extra_gradients["hidden_states"]
    assert gradient[:2] == [None, None] or all(not g.any() for g in gradient[:2])
    for i in range(2, 7):
        torch.testing.assert_close(gradient[i], torch.full((2,), 2.0 * i))


@given(st.integers(0, 50), st.integers(1, 9), st.integers(1, 20))
def test_indices_are_different_and_each_pass_has_each_once(
    call: int, size: int, count: int
) -> None:
    indices = indices_of_call(call, size, count, [7])
    assert len(indices) == min(size, count)
    if size < count:
        sequence = [i for c in range(count) for i in indices_of_call(c, size, count, [7])]
        for start in range(0, len(sequence), count):
            assert sorted(sequence[start : start + count]) == list(range(count))


def test_joined_data_without_own_is_the_batch() -> None:
    joined = JoinedData(["a"], {})
    assert joined.data == ["a"]
    assert joined.split_inputs({"data": joined, "logprobs": [1]}) == (
        {"data": ["a"], "logprobs": [1]},
        {},
    )


def test_the_output_has_the_data_of_its_gradients() -> None:
    pipeline = Pipeline(nll, [keep(per_step=2)], track_grad_norms=True)
    calls = []
    for _ in range(2):
        joined = pipeline.join(["a", "b"], step=0)
        output = pipeline.compute(joined, logprobs_of(joined.data), 0, share={"keep": 0.5})
        assert output.data == joined.data
        calls.append(output)
    step = accumulated(calls, [{"keep": 0.5}] * 2)
    assert step.data == [*calls[0].data, *calls[1].data]  # type: ignore[misc]  # both have them
    for driver in step.drivers("keep", 4):
        assert step.data[driver.datum] in OTHERS
    assert pickle.loads(pickle.dumps(step)).data is None
    assert accumulated([calls[0], replace(calls[1], data=None)], [{}, {}]).data is None


def test_an_item_that_is_a_list_is_drawn_as_a_whole() -> None:
    pairs = [["a", "b"], ["w", "x"], ["y", "z"]]
    pipeline = Pipeline(nll, [keep(data=pairs, per_step=2)], seed=0)
    for step in range(6):
        drawn = pipeline.join(["a"], step=step).own["keep"]
        assert len(drawn) == 4
        assert [drawn[:2], drawn[2:]] == [pair for pair in (drawn[:2], drawn[2:]) if pair in pairs]


def test_a_call_that_measures_nothing_is_neither_a_value_nor_a_violation() -> None:
    """None is not 0: it changes no mean, and the controller of a bound does not see it."""

    def sometimes(data: Any, logprobs: Any) -> Tensor | None:
        return None if "w" in data else square(data, logprobs)

    pipeline = Pipeline(nll, [RegularizerSpec(
        sometimes, name="keep", at_most=1.0, data=OTHERS, per_step=1
    )], seed=0)  # fmt: skip
    gains, measured = [], []
    for step in range(8):
        joined = pipeline.join(["a"], step=step)
        output = pipeline.compute(joined, logprobs_of(joined.data), step=step)
        measured.append("keep" in output.regularizers)
        assert measured[-1] == (joined.own["keep"] != ["w"])
        if not measured[-1]:
            assert output.not_run == ("keep",)
            assert output.loss_total == output.base_loss.value
            assert not any(gradient.any() for gradient in output.gradients[1:])
        gains.append(pipeline.state_dict()["keep"]["multiplier"]["gain"])
    assert measured.count(False) == 2
    for step in range(7):  # the gain moves after a step that was measured, and only then
        assert (gains[step + 1] != gains[step]) == measured[step]
    first, second = (
        pipeline.compute(joined := pipeline.join(["a"], step=9), logprobs_of(joined.data), 9)
        for _ in range(2)
    )
    both = accumulated([first, second], [{}, {}])
    values = [o.regularizers["keep"].value for o in (first, second) if "keep" in o.regularizers]
    assert both.regularizers["keep"].value == pytest.approx(sum(values))


def test_inputs_from_a_pass_of_their_own() -> None:
    """As trainers have them: a term of named inputs reads those of its own data."""

    def size(logits: Tensor) -> Tensor:
        return logits.square().sum()

    keep_logits = term(size, 0.5, "keep", data=OTHERS, per_step=2)
    loss = CompositeLoss(lambda logits: logits.sum(), [keep_logits, term(size, 0.1, "all")])
    drawn = loss.join([]).own["keep"]
    own = {"logits": torch.tensor([3.0]), "data": drawn}
    data = SeparateInputs([], {"keep": drawn}, {"keep": own})
    logits = torch.tensor([1.0, 2.0])
    assert loss(logits=logits, data=data).item() == pytest.approx(3 + 0.5 * 9 + 0.1 * 5)
    assert inputs_of({"data": data}, "keep") is own
    for named in ({"data": data}, {"data": ["a"]}, {}):
        assert inputs_of(named, "all") is named


def test_a_fused_term_with_data_of_its_own_is_evaluated_by_itself() -> None:
    """Its logits are others than those of the terms that one kernel computes."""
    specs = [
        term(from_logits.entropy, 0.3, "keep", inputs="logits", data=OTHERS, per_step=2),
        term(from_logits.entropy, 0.1, "all", inputs="logits"),
    ]
    loss = CompositeLoss(lambda logits: logits.sum(), specs)
    drawn = loss.join([]).own["keep"]
    own, batch = torch.tensor([[0.0, 1.0, 5.0]]), torch.tensor([[1.0, 2.0, 1.0]])
    data = SeparateInputs([], {"keep": drawn}, {"keep": {"logits": own}})
    loss(logits=batch, data=data)
    for name, logits in (("keep", own), ("all", batch)):
        expected = from_logits.entropy(logits).item()
        assert loss.output.regularizers[name].value == pytest.approx(expected)


def test_an_input_that_is_no_list_of_data_is_the_same_for_all() -> None:
    joined = JoinedData(["a"], {"keep": ["c"]})
    of_batch, of_terms = joined.split_inputs({"logprobs": [1, 2], "scale": 2.0})
    assert of_batch == {"logprobs": [1], "scale": 2.0}
    assert of_terms == {"keep": {"logprobs": [2], "scale": 2.0}}
