from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, replace
from fractions import Fraction
from typing import Any, get_args

import cloudpickle
import numpy as np
import pytest
import torch

from steelyard import RegularizerSpec, schedules
from steelyard.errors import SpecError
from steelyard.spec.error_messages import BASE
from steelyard.spec.regularizer import Gradient, OnError, RunIn, check_timeout
from steelyard.spec.weights import Bound, check_weight


def nothing(data: Any, logprobs: Any) -> float:
    return 0.0


def strict(data: Any, logprobs: Any, *, alpha: float) -> float:
    return alpha


# In the words of Python itself, which differ between versions.
KIND = " keyword-only" if sys.version_info >= (3, 12) else ""


def read_logits(data: Any, logprobs: Any, logits: Any = None) -> float:
    return 0.0


def anything(data: Any, logprobs: Any, **options: Any) -> dict[str, Any]:
    return options


async def later(data: Any, logprobs: Any) -> float:
    return 0.0


@dataclass
class Named:
    name: str = "own"

    def compute(self, data: Any, logprobs: Any, **options: Any) -> float:
        return 1.0


class Remembers(Named):
    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        pass


class NotComputing:
    compute = 3

    def __repr__(self) -> str:
        return "NotComputing()"


def spec_of(**fields: Any) -> RegularizerSpec:
    return RegularizerSpec(**{"fn": nothing, "weight": 0.1, "name": "term", **fields})


EXACTLY_ONE = (
    "exactly one of weight, at_most and at_least must be given, got {} (regularizer 'term')."
)
SCALE = (
    "scale must be a finite number > 0, what a violation is measured against, got {} "
    "(regularizer 'term')."
)
WEIGHT = "weight must be a finite number >= 0, got {} (regularizer 'term')."
TIMEOUT = (
    "timeout must be a number of seconds above 0 and at most 300, got {} (regularizer 'term')."
)
EVERY = "every must be a whole number >= 1, got {} (regularizer 'term')."
OPTIONS = "options must be a mapping with string keys, got {} (regularizer 'term')."
FN = (
    "fn must be callable as (data, logprobs), or have such a compute method, "
    "got {} (regularizer 'term')."
)
RUN_IN = (
    "run_in must be one of auto, inline, thread, process, async, ray, got {} (regularizer 'term')."
)
GRADIENT = (
    "gradient must be one of auto, autograd, numerical, score, none, got {} (regularizer 'term')."
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight": -0.1}, WEIGHT.format("-0.1")),
        ({"weight": float("nan")}, WEIGHT.format("nan")),
        ({"weight": float("inf")}, WEIGHT.format("inf")),
        ({"weight": "0.1"}, WEIGHT.format("'0.1'")),
        ({"weight": True}, WEIGHT.format("True")),
        ({"weight": None}, EXACTLY_ONE.format("none")),
        ({"at_most": 0.1}, EXACTLY_ONE.format("weight=0.1, at_most=0.1")),
        (
            {"weight": None, "at_most": 1, "at_least": 0},
            EXACTLY_ONE.format("at_most=1, at_least=0"),
        ),
        (
            {"weight": None, "at_most": float("nan")},
            "a bound must be a finite number, or a schedule of them, got nan (regularizer 'term').",
        ),
        (
            {"weight": None, "at_least": 0},
            f"a bound of 0 needs a scale: {SCALE.format(None)}",
        ),
        ({"weight": None, "at_most": 1, "scale": -1}, SCALE.format(-1)),
        ({"weight": None, "at_most": schedules.constant(1), "scale": "x"}, SCALE.format("'x'")),
        ({"scale": 1.0}, "scale must be left out without a bound, got 1.0 (regularizer 'term')."),
        ({"weight": 1j}, WEIGHT.format("1j")),
        ({"fn": 3}, FN.format("3")),
        ({"fn": NotComputing()}, FN.format("NotComputing()")),
        (
            {"fn": Named},
            "fn must be an instance, got the class Named: write Named(...).",
        ),
        ({"run_in": "gpu"}, RUN_IN.format("'gpu'")),
        ({"run_in": None}, RUN_IN.format("None")),
        ({"gradient": "exact"}, GRADIENT.format("'exact'")),
        (
            {"on_error": "ignore"},
            "on_error must be one of raise, skip, got 'ignore' (regularizer 'term').",
        ),
        ({"timeout": 0}, TIMEOUT.format("0")),
        ({"timeout": -1.0}, TIMEOUT.format("-1.0")),
        ({"timeout": 300.1}, TIMEOUT.format("300.1")),
        ({"timeout": float("nan")}, TIMEOUT.format("nan")),
        ({"timeout": "5"}, TIMEOUT.format("'5'")),
        ({"timeout": True}, TIMEOUT.format("True")),
        ({"anchor": 1}, "anchor must be True or False, got 1 (regularizer 'term')."),
        ({"enabled": 1}, "enabled must be True or False, got 1 (regularizer 'term')."),
        ({"every": 0}, EVERY.format("0")),
        ({"every": -2}, EVERY.format("-2")),
        ({"every": 1.0}, EVERY.format("1.0")),
        ({"every": True}, EVERY.format("True")),
        ({"options": ["alpha"]}, OPTIONS.format("['alpha']")),
        ({"options": {1: 2}}, OPTIONS.format("{1: 2}")),
        ({"options": None}, OPTIONS.format("None")),
        (
            {"needs": ("logits", "weights")},
            (
                "needs must be among logits, projection, hidden_states, parameters, "
                "reference_logits, reference_projection, got ('logits', 'weights') "
                "(regularizer 'term')."
            ),
        ),
        (
            {"options": {"alpha": 1.0}},
            (
                "fn must accept (data, logprobs) and the keywords ['alpha']: "
                "got an unexpected keyword argument 'alpha'; its options are none "
                "(regularizer 'term')."
            ),
        ),
        (
            {"options": {"data": 1.0}},
            (
                "fn must accept (data, logprobs) and the keywords ['data']: "
                "multiple values for argument 'data'; its options are none "
                "(regularizer 'term')."
            ),
        ),
        (
            {"fn": anything, "needs": "logits", "options": {"logits": 1}},
            (
                "options must not hold what the term needs, which is passed by the same keyword, "
                "got ['logits'] in both (regularizer 'term')."
            ),
        ),
        (
            {"needs": "logits"},
            (
                "fn must accept (data, logprobs) and the keywords ['logits']: "
                "got an unexpected keyword argument 'logits'; its options are none "
                "(regularizer 'term')."
            ),
        ),
        (
            {"fn": strict},
            (
                "fn must accept (data, logprobs) and the keywords []: "
                f"missing a required{KIND} argument: 'alpha'; its options are 'alpha' "
                "(regularizer 'term')."
            ),
        ),
        (
            {"run_in": "inline", "timeout": 2.0},
            (
                "timeout cannot go with run_in='inline': an inline call cannot be stopped; "
                "use run_in='thread' or 'process', got timeout=2.0 (regularizer 'term')."
            ),
        ),
        (
            {"run_in": "inline", "fn": later},
            "run_in='inline' cannot run an async fn: use 'auto' or 'async' (regularizer 'term').",
        ),
        (
            {"run_in": "async"},
            (
                f"run_in='async' needs an async fn, got {nothing!r}: "
                "write it with 'async def', or use 'thread' (regularizer 'term')."
            ),
        ),
        (
            {"run_in": "ray", "fn": Remembers()},
            (
                "run_in='ray' cannot run a stateful term: its state would stay in the "
                "worker; use 'auto', 'inline' or 'thread' (regularizer 'term')."
            ),
        ),
        (
            {"run_in": "ray", "resources": {"num_gpus": -1}},
            (
                "num_gpus must be a number >= 0, and a whole one above 1, got -1 "
                "(regularizer 'term')."
            ),
        ),
        (
            {"run_in": "process", "fn": Remembers()},
            (
                "run_in='process' cannot run a stateful term: its state would stay in the "
                "worker; use 'auto', 'inline' or 'thread' (regularizer 'term')."
            ),
        ),
    ],
)
def test_a_broken_rule_names_term_rule_value_and_cure(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_of(**fields)
    assert str(caught.value) == message


@pytest.mark.parametrize(("fn", "name"), [(nothing, ""), (nothing, None), (Named(""), "")])
def test_a_name_is_required(fn: Any, name: Any) -> None:
    with pytest.raises(SpecError) as caught:
        RegularizerSpec(fn, 0.1, name)
    assert str(caught.value) == (
        f"name must be a non-empty string, got '' (fn {fn!r}): give one, or give fn a name "
        f"attribute."
    )


@pytest.mark.parametrize("fn", [nothing, Named()])
@pytest.mark.parametrize("name", [5, 0, False])
def test_a_name_is_a_string(fn: Any, name: Any) -> None:
    with pytest.raises(SpecError) as caught:
        RegularizerSpec(fn, 0.1, name)
    message = f"name must be a non-empty string, got {name!r} (regularizer {name!r})."
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight": 10**400}, "weight must be a finite number >= 0, got 1000"),
        (
            {"needs": 5},
            "needs must be among .*, parameters, reference_logits, reference_projection, got 5",
        ),
        (
            {"needs": None},
            "needs must be among .*, parameters, reference_logits, reference_projection, got None",
        ),
        ({"run_in": ["thread"]}, "run_in must be one of"),
    ],
)
def test_odd_values_are_errors_of_the_tree(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec_of(**fields)


def test_a_mapping_is_needed() -> None:
    with pytest.raises(SpecError, match="must be described by a mapping, got 5"):
        RegularizerSpec.from_dict(5)  # type: ignore[arg-type]  # the point of it


def test_a_schedule_that_raises_is_named() -> None:
    spec = spec_of(weight=lambda step: 1 / (step - 3))
    assert spec.weight_at(4) == 1.0
    with pytest.raises(SpecError, match=r"raised ZeroDivisionError.*at step 3 \(regularizer"):
        spec.weight_at(3)


def test_numpy_numbers_are_numbers() -> None:
    spec = spec_of(weight=np.float32(0.5), every=np.int64(2), timeout=np.float64(3.0))
    assert (spec.weight, spec.due(4), spec.due(3)) == (0.5, True, False)
    assert type(spec.timeout) is float


class NamedByMethod:
    def name(self) -> str:
        return "by method"

    def compute(self, data: Any, logprobs: Any) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("fn", "given", "name"),
    [
        (Named(), "", "own"),
        (Named("other"), "", "other"),
        (Named(), "given", "given"),
        (NamedByMethod(), "", "by method"),
    ],
)
def test_the_name_is_inferred_only_when_left_out(fn: Any, given: str, name: str) -> None:
    assert RegularizerSpec(fn, 0.1, given).name == name
    if not given:
        assert RegularizerSpec(fn, 0.1).name == name


@pytest.mark.parametrize("weight", [0, 0.0, 2, np.float32(0.5), np.int64(3), Fraction(1, 4)])
def test_a_weight_may_be_any_real_number_and_becomes_a_float(weight: Any) -> None:
    spec = spec_of(weight=weight)
    assert type(spec.weight) is float
    assert spec.weight == weight == spec.weight_at(7)


@pytest.mark.parametrize("timeout", [1e-9, 5, 300, 300.0])
def test_a_timeout_may_be_anything_up_to_the_limit(timeout: float) -> None:
    assert spec_of(timeout=timeout).timeout == timeout


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("run_in", ("auto", "inline", "thread", "process")),
        ("gradient", ("auto", "autograd", "numerical", "score", "none")),
        ("on_error", ("raise", "skip")),
        ("enabled", (True, False)),
    ],
)
def test_every_listed_choice_is_accepted(key: str, values: tuple[object, ...]) -> None:
    assert [getattr(spec_of(**{key: value}), key) for value in values] == list(values)


@pytest.mark.parametrize(
    "fields",
    [
        {"fn": later, "run_in": "async", "timeout": 1.0},
        {"fn": later, "run_in": "auto"},
        {"fn": Remembers(), "run_in": "thread", "timeout": 1.0},
        {"fn": Remembers(), "run_in": "inline"},
        {"fn": Named(), "run_in": "process"},
    ],
)
def test_a_place_that_suits_the_function_is_accepted(fields: dict[str, Any]) -> None:
    assert spec_of(**fields).run_in == fields["run_in"]


def test_the_types_list_the_choices_of_the_design() -> None:
    assert get_args(RunIn) == ("auto", "inline", "thread", "process", "async", "ray")
    assert get_args(Gradient) == ("auto", "autograd", "numerical", "score", "none")
    assert get_args(OnError) == ("raise", "skip")
    assert BASE == "base"


def test_the_defaults() -> None:
    spec = RegularizerSpec(nothing, 0.1, "term")
    assert (spec.run_in, spec.gradient, spec.timeout, spec.on_error) == (
        "auto",
        "auto",
        None,
        "raise",
    )
    assert (spec.enabled, spec.every, spec.options, spec.needs) == (True, 1, {}, ())


def test_settings_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        RegularizerSpec(nothing, 0.1, "term", "inline")  # type: ignore[call-arg,arg-type]


@pytest.mark.parametrize(
    ("fn", "fields"),
    [
        (strict, {"options": {"alpha": 2.0}}),
        (anything, {"options": {"alpha": 2.0, "beta": "x"}}),
        (Named(), {"options": {"alpha": 2.0}}),
        (read_logits, {"needs": ("logits",)}),
        (anything, {"needs": ("logits", "hidden_states", "parameters"), "options": {"a": 1}}),
    ],
)
def test_options_and_needs_that_the_signature_takes_are_accepted(
    fn: Callable[..., Any], fields: dict[str, Any]
) -> None:
    spec = spec_of(fn=fn, **fields)
    assert spec.options == fields.get("options", {})
    assert spec.needs == fields.get("needs", ())


@pytest.mark.parametrize("needs", ["logits", ["logits"], ("logits",)])
def test_needs_become_a_tuple(needs: Any) -> None:
    assert spec_of(fn=read_logits, needs=needs).needs == ("logits",)


def test_options_are_the_specs_own_copy() -> None:
    given = {"alpha": 1.0}
    spec = spec_of(fn=anything, options=given)
    given["alpha"] = 2.0
    assert spec.options == {"alpha": 1.0}


def test_what_to_call() -> None:
    thing = Named()
    assert spec_of(fn=nothing).call is nothing
    assert spec_of(fn=thing).call == thing.compute


@pytest.mark.parametrize(("fn", "is_async"), [(nothing, False), (later, True), (Named(), False)])
def test_async_is_inferred(fn: Any, is_async: bool) -> None:
    assert spec_of(fn=fn).is_async is is_async


def test_stateful_is_the_object_that_remembers() -> None:
    thing = Remembers()
    assert spec_of(fn=thing).stateful is thing
    assert spec_of(fn=Named()).stateful is None
    assert spec_of(fn=nothing).stateful is None


@pytest.mark.parametrize("field", ["weight", "name", "enabled", "options", "invented"])
def test_a_spec_is_frozen(field: str) -> None:
    spec = spec_of()
    with pytest.raises(FrozenInstanceError):
        setattr(spec, field, 0.5)
    assert spec == spec_of()


def test_a_changed_copy_is_validated_again() -> None:
    assert replace(spec_of(), weight=0.5).weight == 0.5
    with pytest.raises(SpecError, match="weight must be"):
        replace(spec_of(), weight=-0.5)


@pytest.mark.parametrize(
    "other",
    [
        {"weight": 0.2},
        {"name": "b"},
        {"fn": anything},
        {"every": 2},
        {"fn": anything, "options": {"a": 1}},
    ],
)
def test_specs_compare_by_value_and_hash(other: dict[str, Any]) -> None:
    spec, same, different = spec_of(), spec_of(), spec_of(**other)
    assert spec == same
    assert hash(spec) == hash(same)
    assert spec != different
    assert len({spec, same, different}) == 2


@pytest.mark.parametrize(
    ("every", "enabled", "due"),
    [(1, True, [0, 1, 2, 3, 4, 5, 6]), (3, True, [0, 3, 6]), (10, True, [0]), (1, False, [])],
)
def test_a_term_is_due_on_every_nth_step(every: int, enabled: bool, due: list[int]) -> None:
    spec = spec_of(every=every, enabled=enabled)
    assert [step for step in range(7) if spec.due(step)] == due


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (0.5, [0.5, 0.5, 0.5]),
        (schedules.linear(0.0, 1.0, 2), [0.0, 0.5, 1.0]),
        (lambda step: step, [0.0, 1.0, 2.0]),
        (lambda step: np.float32(0.5) ** step, [1.0, 0.5, 0.25]),
    ],
)
def test_the_weight_follows_the_step(weight: Any, expected: list[float]) -> None:
    spec = spec_of(weight=weight)
    found = [spec.weight_at(step) for step in range(3)]
    assert found == expected
    assert {type(value) for value in found} == {float}


@pytest.mark.parametrize(
    ("schedule", "step", "got"),
    [
        (schedules.linear(1.0, -1.0, 4), 3, "-0.5"),
        (schedules.exponential(1.0, 1e200), 2, "inf"),
        (lambda step: float("nan") if step == 5 else 0.1, 5, "nan"),
        (lambda step: None if step == 1 else 0.1, 1, "None"),
        (bool, 1, "True"),
    ],
)
def test_a_schedule_is_refused_at_the_step_where_it_goes_wrong(
    schedule: Any, step: int, got: str
) -> None:
    spec = spec_of(weight=schedule)
    with pytest.raises(SpecError) as caught:
        spec.weight_at(step)
    assert str(caught.value) == (
        f"weight must be a finite number >= 0, got {got} at step {step} (regularizer 'term')."
    )


def test_a_schedule_is_good_until_then() -> None:
    spec = spec_of(weight=schedules.linear(1.0, -1.0, 4))
    assert [spec.weight_at(step) for step in range(3)] == [1.0, 0.5, 0.0]


def test_from_dict_is_the_constructor() -> None:
    fields = {
        "fn": strict,
        "weight": 0.2,
        "name": "term",
        "run_in": "thread",
        "gradient": "none",
        "timeout": 2.0,
        "on_error": "skip",
        "enabled": False,
        "every": 3,
        "options": {"alpha": 1.0},
    }
    assert RegularizerSpec.from_dict(fields) == spec_of(**fields)
    assert RegularizerSpec.of(fields) == spec_of(**fields)
    assert RegularizerSpec.from_dict({"fn": Named(), "weight": 1}).name == "own"


def test_a_spec_stands_for_itself() -> None:
    spec = spec_of()
    assert RegularizerSpec.of(spec) is spec


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"fn": nothing, "weigth": 0.1, "name": "term"},
            (
                "a regularizer has no field 'weigth'; did you mean 'weight'? Known: "
                "['fn', 'weight', 'name', 'at_most', "
                "'at_least', 'scale', 'anchor', 'run_in', 'gradient', 'timeout', 'on_error', "
                "'enabled', 'every', 'options', 'resources', 'needs', 'ranks', 'data', "
                "'per_step'] "
                "(regularizer 'term')."
            ),
        ),
        (
            {"fn": nothing, "name": "term"},
            (
                "a regularizer needs the field 'weight', or a bound, 'at_most' or 'at_least', got "
                "['fn', 'name'] (regularizer 'term')."
            ),
        ),
        (
            {"weight": 0.1},
            "a regularizer needs the field 'fn', got ['weight'] (regularizer None).",
        ),
        ({"fn": nothing, "weight": -1, "name": "term"}, WEIGHT.format("-1")),
        ({"fn": "l2", "weight": 1, "name": "term", "options": [1]}, OPTIONS.format("[1]")),
        (3, "a regularizer must be a RegularizerSpec or a mapping, got 3."),
    ],
)
def test_a_mapping_that_is_no_spec_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        RegularizerSpec.of(fields)
    assert str(caught.value) == message


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "spec",
    [
        spec_of(),
        spec_of(weight=schedules.cosine(1.0, 0.0, 10), every=2),
        spec_of(fn=strict, options={"alpha": 2.0}, timeout=5.0, run_in="process"),
        spec_of(fn=Named("other"), name=""),
        spec_of(fn=later),
    ],
    ids=["plain", "schedule", "settings", "object", "async"],
)
def test_a_spec_pickles(spec: RegularizerSpec, protocol: int) -> None:
    twin = pickle.loads(pickle.dumps(spec, protocol))
    assert twin == spec
    assert twin.is_async is spec.is_async
    assert twin.weight_at(4) == spec.weight_at(4)


def test_a_copy_calls_its_own_object() -> None:
    twin = pickle.loads(pickle.dumps(spec_of(fn=Named())))
    assert twin.call.__self__ is twin.fn


def test_lambdas_travel_with_cloudpickle() -> None:
    factor = 3.0
    spec = spec_of(
        fn=lambda data, logprobs, **options: factor * options["alpha"],
        weight=lambda step: factor + step,
        options={"alpha": 2.0},
    )
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(spec)
    twin = pickle.loads(cloudpickle.dumps(spec))
    assert twin.call(None, None, **twin.options) == 6.0
    assert twin.weight_at(2) == 5.0


def test_the_checks_return_floats() -> None:
    weight, timeout = check_weight(1, "term"), check_timeout(2, "pipeline")
    assert (weight, type(weight)) == (1.0, float)
    assert (timeout, type(timeout)) == (2.0, float)


def test_the_checks_say_where() -> None:
    with pytest.raises(SpecError, match=r"got 301 \(pipeline\)\.$"):
        check_timeout(301, "pipeline")
    with pytest.raises(SpecError, match=r"got -1 at step 3 \(regularizer 'term'\)\.$"):
        check_weight(-1, "term", " at step 3")


class Prefers(Named):
    run_in: Any = "process"
    gradient: Any = "score"


def test_auto_is_what_a_regularizer_says_of_itself() -> None:
    spec = spec_of(fn=Prefers())
    assert (spec.run_in, spec.gradient) == ("process", "score")


def test_what_a_spec_says_comes_before_what_a_regularizer_says() -> None:
    spec = spec_of(fn=Prefers(), run_in="thread", gradient="none")
    assert (spec.run_in, spec.gradient) == ("thread", "none")


def test_a_regularizer_need_not_say_anything() -> None:
    fn = Prefers()
    fn.run_in, fn.gradient = lambda: None, None
    spec = spec_of(fn=fn)
    assert (spec.run_in, spec.gradient) == ("auto", "auto")


def test_a_function_says_nothing_of_itself() -> None:
    def fn(data: Any, logprobs: Any) -> float:
        return 0.0

    fn.gradient = "score"  # type: ignore[attr-defined]  # somebody's own attribute
    assert spec_of(fn=fn).gradient == "auto"


def test_a_preference_keeps_the_rules() -> None:
    fn = Prefers()
    fn.run_in = "gpu"
    with pytest.raises(SpecError) as caught:
        spec_of(fn=fn)
    assert str(caught.value) == RUN_IN.format("'gpu'")


def test_what_the_spec_says_it_reads_goes_before_what_the_regularizer_says() -> None:
    class Reading:
        needs = ("logits",)

        def compute(self, data: Any, logprobs: Any, **given: Any) -> float:
            return 0.0

    assert RegularizerSpec(Reading(), 1.0, "term").needs == ("logits",)
    assert RegularizerSpec(Reading(), 1.0, "term", needs=("parameters",)).needs == ("parameters",)


def test_numerical_gradients_move_log_probs_alone() -> None:
    with pytest.raises(
        SpecError, match=r"gradient='numerical' .* cannot go with needs=\('logits',\)"
    ):
        spec_of(fn=anything, gradient="numerical", needs="logits")


def test_a_bound_at_a_step() -> None:
    upper = RegularizerSpec(nothing, name="term", at_most=2)
    lower = RegularizerSpec(nothing, name="term", at_least=schedules.linear(-1.0, -3.0, 2))
    assert upper.is_bounded
    assert (upper.weight_at(3), upper.bound_at(3)) == (0.0, Bound(2.0, 2.0, upper=True))
    assert lower.bound_at(1) == Bound(-2.0, 2.0, upper=False)

    def array(step: int) -> Any:
        return torch.tensor(0.5 * step)

    halves = RegularizerSpec(nothing, name="term", at_most=array)
    assert halves.bound_at(3) == Bound(1.5, 1.5, upper=True)
    assert RegularizerSpec(nothing, 0.1, "term").bound_at(0) is None
    scaled = RegularizerSpec(nothing, name="term", at_most=0, scale=0.5)
    assert scaled.bound_at(0) == Bound(0.0, 0.5, upper=True)
    assert [upper.bound_at(0).error(value) for value in (1.0, 4.0)] == [-0.5, 1.0]  # type: ignore[union-attr]
    assert lower.bound_at(0).error(-2.0) == 1.0  # type: ignore[union-attr]  # has one


def test_a_bound_schedule_must_give_finite_numbers() -> None:
    def failing(step: int) -> float:
        raise KeyError(step)

    bad = RegularizerSpec(nothing, name="term", at_most=lambda step: float("inf"))
    with pytest.raises(SpecError, match=r"a bound must be .* got inf at step 4 \(regularizer"):
        bad.bound_at(4)
    with pytest.raises(SpecError, match="it raised KeyError: 4 at step 4"):
        RegularizerSpec(nothing, name="term", at_most=failing).bound_at(4)


class MeasuredAtOnce:
    async def compute(self, data: Any, logprobs: Any) -> float:
        return 1.0

    def measure(self, data: Any, logprobs: Any) -> float:
        return 2.0


class MeasuredLater:
    def compute(self, data: Any, logprobs: Any) -> float:
        return 1.0

    async def measure(self, data: Any, logprobs: Any) -> float:
        return 2.0


@pytest.mark.parametrize(
    ("fn", "run_in", "measured_in"),
    [
        (MeasuredAtOnce(), "async", "auto"),
        (MeasuredLater(), "inline", "auto"),
        (Named(), "inline", "inline"),
    ],
)
def test_a_term_may_be_measured_by_a_function_of_the_other_kind(
    fn: Any, run_in: Any, measured_in: str
) -> None:
    assert spec_of(fn=fn, run_in=run_in).measuring().run_in == measured_in


def scaled(data: Any, logprobs: Any, scale: float = 1.0) -> float:
    return scale


def test_on_ray_the_resources_of_the_task_are_not_passed_to_the_call() -> None:
    options, resources = {"scale": 2.0}, {"num_gpus": 1, "judge": 1}
    spec = spec_of(fn=scaled, run_in="ray", options=options, resources=resources)
    assert (spec.options, spec.resources) == (options, resources)
    assert spec.measuring().resources == resources
    resources["num_gpus"] = 2
    assert spec.resources["num_gpus"] == 1
    with pytest.raises(SpecError, match=r"keywords \['scale', 'num_gpus'\]"):
        spec_of(fn=scaled, run_in="ray", options={**options, "num_gpus": 1})


def test_on_ray_a_named_regularizer_has_resources() -> None:
    fields = {"fn": "l2", "weight": 0.1, "resources": {"num_cpus": 2}, "run_in": "ray"}
    spec = RegularizerSpec.from_dict(fields)
    assert (spec.resources, spec.options) == ({"num_cpus": 2}, {})


def test_a_term_that_is_measured_elsewhere_has_no_resources() -> None:
    class Twice:
        def compute(self, data: Any, logprobs: Any) -> float:
            return 1.0

        async def measure(self, data: Any, logprobs: Any) -> float:
            return 1.0

    spec = spec_of(fn=Twice(), run_in="ray", resources={"num_gpus": 1}).measuring()
    assert (spec.run_in, spec.resources) == ("auto", {})


def test_a_parameter_named_after_an_extra_input_is_told_about_needs() -> None:
    def reads(data: Any, logprobs: Any, logits: Any, hidden_states: Any) -> float:
        return 0.0

    with pytest.raises(SpecError, match=r"'logits', 'hidden_states' is an extra input: ask for it"):
        RegularizerSpec(reads, 0.1, "r")
    with pytest.raises(SpecError, match=r"needs=\('hidden_states',\) \(regularizer 'r'\)"):
        RegularizerSpec(reads, 0.1, "r", needs=("logits",))
    assert RegularizerSpec(reads, 0.1, "r", needs=("logits", "hidden_states")).needs


def test_a_function_that_takes_a_generator_is_given_one() -> None:
    def required(data: Any, logprobs: Any, *, generator: Any) -> float:
        return 0.0

    def optional(data: Any, logprobs: Any, generator: Any = None) -> float:
        return 0.0

    def keywords(data: Any, logprobs: Any, **generator: Any) -> float:
        return 0.0

    assert RegularizerSpec(required, 0.1, "r").takes_generator
    assert RegularizerSpec(optional, 0.1, "r").takes_generator
    for fn in (keywords, nothing, max):
        assert not RegularizerSpec(fn, 0.1, "r").takes_generator
    own = RegularizerSpec(required, 0.1, "r", options={"generator": 1})
    assert not own.takes_generator
