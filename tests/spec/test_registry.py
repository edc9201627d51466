from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import steelyard
from steelyard import RegularizerSpec, register
from steelyard.errors import MissingExtraError, RegistryError
from steelyard.spec import registry
from steelyard.spec.registry import lookup, lookup_penalty, registered

MODULE = """
class Brevity:
    def __init__(self, limit=5):
        self.limit = limit
    def compute(self, data, logprobs):
        return self.limit

class Named(Brevity):
    name = "named"

def length(data, logprobs, scale=1.0):
    return scale

class Box:
    inner = staticmethod(length)
"""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", {})
    monkeypatch.setattr(registry, "BUILT_IN", {"own": "their_package.terms:Brevity"})


@pytest.fixture
def terms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "their_package").mkdir()
    (tmp_path / "their_package" / "terms.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("their_package", "their_package.terms"):
        sys.modules.pop(name, None)


def length(data: Any, logprobs: Any, scale: float = 1.0) -> float:
    return scale


class Brevity:
    def __init__(self, limit: int = 5) -> None:
        self.limit = limit

    def compute(self, data: Any, logprobs: Any) -> int:
        return self.limit


def make_brevity(*, limit: int) -> Brevity:
    return Brevity(limit)


def test_the_decorator_gives_back_what_it_decorates() -> None:
    assert register("length")(length) is length
    assert lookup("length") is length


def test_names_are_listed_in_order() -> None:
    assert registered() == ("own",)
    for name in ("z", "c", "a"):
        register(name)(length)
    assert registered() == ("a", "c", "own", "z")


def test_the_name_of_a_built_in_is_taken() -> None:
    with pytest.raises(RegistryError) as caught:
        register("own")(length)
    assert str(caught.value) == "the name 'own' is that of a built-in: choose another one."


def test_an_extra_that_a_regularizer_lacks_is_not_taken_for_a_wrong_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from steelyard.errors import MissingExtraError\nraise MissingExtraError('install it')"
    (tmp_path / "lacking.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError, match="install it"):
        lookup("lacking:thing")


@pytest.mark.parametrize("name", ["", "package:attr", ":", 3, None])
def test_a_name_that_config_files_cannot_say_is_refused(name: Any) -> None:
    with pytest.raises(RegistryError) as caught:
        register(name)
    assert str(caught.value) == (
        f"a registered name must be a non-empty string without ':', got {name!r}."
    )


def test_a_name_is_not_taken_twice() -> None:
    register("length")(length)
    with pytest.raises(RegistryError) as caught:
        register("length")(make_brevity)
    assert str(caught.value) == f"the name 'length' is taken by {length!r}: choose another one."
    assert lookup("length") is length


def test_an_instance_does_not_make_way_for_another() -> None:
    first = register("brevity")(Brevity(1))
    with pytest.raises(RegistryError, match="taken"):
        register("brevity")(Brevity(2))
    assert lookup("brevity") is first
    assert register("brevity")(first) is first


def test_the_same_definition_run_again_takes_its_own_place() -> None:
    def define(value: float) -> Any:
        @register("cell")
        def cell(data: Any, logprobs: Any) -> float:
            return value

        return cell

    first, second = define(1.0), define(2.0)
    assert lookup("cell") is second is not first


def test_threads_register_side_by_side() -> None:
    barrier = threading.Barrier(8)

    def add(number: int) -> bool:
        barrier.wait()
        register(f"term-{number}")(length)
        try:
            register("contested")(Brevity(number))
        except RegistryError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(add, range(8)))
    assert won.count(True) == 1
    assert lookup("contested").limit == won.index(True)
    assert registered() == ("contested", "own", *(f"term-{number}" for number in range(8)))


@pytest.mark.parametrize(("names", "known"), [([], "own"), (["b", "a"], "a, b, own")])
def test_an_unknown_name_lists_what_exists(names: list[str], known: str) -> None:
    for name in names:
        register(name)(length)
    with pytest.raises(RegistryError) as caught:
        lookup("lenght")
    assert str(caught.value) == (
        f"no regularizer is registered as 'lenght' (registered: {known}); "
        "register it with @steelyard.register('lenght') or write 'package.module:attr'."
    )


def test_an_unknown_name_close_to_a_known_one_gets_a_hint() -> None:
    register("length")(length)
    with pytest.raises(RegistryError, match=r"as 'lenght'; did you mean 'length'\? \(registered"):
        lookup("lenght")


def test_an_attribute_close_to_one_of_the_module_gets_a_hint() -> None:
    with pytest.raises(RegistryError, match=r"has no attribute 'tau2'; did you mean 'tau'\?$"):
        lookup("math:tau2")


def test_a_penalty_close_to_a_known_one_gets_a_hint() -> None:
    with pytest.raises(RegistryError, match=r"got 'entropi'; did you mean 'entropy'\?$"):
        lookup_penalty("entropi")


@pytest.mark.parametrize(
    ("code", "why"),
    [("x = 1\ndef f(:\n", "SyntaxError: invalid syntax"), ("\n1 / 0", "ZeroDivisionError: div")],
)
def test_a_module_that_fails_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    (tmp_path / "failing_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RegistryError) as caught:
        lookup("failing_module:f")
    message = str(caught.value)
    assert message.startswith(f"'failing_module:f' cannot be imported: {why}")
    assert message.endswith(f"({tmp_path / 'failing_module.py'}, line 2).")


@pytest.mark.usefixtures("terms")
def test_a_namesake_from_another_module_is_something_else() -> None:
    register("brevity")(Brevity)
    with pytest.raises(RegistryError, match="taken"):
        register("brevity")(lookup("their_package.terms:Brevity"))
    assert lookup("brevity") is Brevity


@pytest.mark.usefixtures("terms")
@pytest.mark.parametrize(
    ("path", "qualname"),
    [
        ("their_package.terms:length", "length"),
        ("their_package.terms:Brevity", "Brevity"),
        ("their_package.terms:Box.inner", "length"),
    ],
)
def test_a_path_is_imported(path: str, qualname: str) -> None:
    assert lookup(path).__qualname__ == qualname
    assert lookup(path).__module__ == "their_package.terms"


@pytest.mark.usefixtures("terms")
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no_such_package.terms:length", "No module named 'no_such_package'"),
        ("their_package.terms:zzzz", "module 'their_package.terms' has no attribute 'zzzz'"),
        ("their_package.terms:Box.outer", "type object 'Box' has no attribute 'outer'"),
        ("their_package.terms:", "module 'their_package.terms' has no attribute ''"),
        (":length", "Empty module name"),
    ],
)
def test_a_path_that_leads_nowhere_says_why(path: str, why: str) -> None:
    with pytest.raises(RegistryError) as caught:
        lookup(path)
    assert str(caught.value) == f"{path!r} cannot be imported: {why}."
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("thing", "factory", "options", "call", "left"),
    [
        (length, None, {"scale": 2.0}, 2.0, {"scale": 2.0}),
        (Brevity, None, {"limit": 7}, 7, {}),
        (Brevity, None, {}, 5, {}),
        (make_brevity, True, {"limit": 8}, 8, {}),
    ],
    ids=["function", "class", "class without options", "factory"],
)
def test_a_config_names_what_was_registered(
    thing: Any, factory: bool | None, options: dict[str, Any], call: float, left: dict[str, Any]
) -> None:
    register("term", factory=factory)(thing)
    fields = {"fn": "term", "weight": 0.5, "options": options}
    given = {**fields, "options": dict(options)}
    spec = RegularizerSpec.from_dict(fields)
    assert spec.call(None, None, **spec.options) == call
    assert (spec.name, spec.options) == ("term", left)
    assert fields == given


def test_a_factory_makes_a_new_one_each_time() -> None:
    register("term")(Brevity)
    first, second = (RegularizerSpec.from_dict({"fn": "term", "weight": 1}) for _ in range(2))
    assert first.fn is not second.fn


def test_a_class_may_be_registered_as_the_regularizer_itself() -> None:
    class Static:
        @staticmethod
        def compute(data: Any, logprobs: Any) -> float:
            return 0.0

    register("static", factory=False)(Static)
    assert registry.build("static", {"a": 1}) == (Static, {"a": 1})


@pytest.mark.usefixtures("terms")
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"fn": "their_package.terms:Named"}, "named"),
        ({"fn": "their_package.terms:Named", "name": "given"}, "given"),
        ({"fn": "their_package.terms:Brevity"}, "their_package.terms:Brevity"),
        ({"fn": "their_package.terms:length"}, "their_package.terms:length"),
    ],
)
def test_the_name_is_given_else_its_own_else_what_the_config_says(
    fields: dict[str, Any], name: str
) -> None:
    assert RegularizerSpec.from_dict({"weight": 1.0, **fields}).name == name


def test_options_a_factory_does_not_take_are_refused() -> None:
    register("brevity")(Brevity)
    with pytest.raises(RegistryError) as caught:
        RegularizerSpec.from_dict({"fn": "brevity", "weight": 1.0, "options": {"limits": 3}})
    assert str(caught.value) == (
        "'brevity' cannot be made with the options ['limits']: "
        "got an unexpected keyword argument 'limits'; its options are 'limit'."
    )


@pytest.mark.usefixtures("terms")
def test_penalties_are_found_by_their_names_by_registered_ones_and_by_paths() -> None:
    assert lookup_penalty("kl") is steelyard.penalties.kl_divergence
    assert lookup_penalty("output_magnitude") is steelyard.penalties.output_magnitude_penalty
    assert register("length")(length) is lookup_penalty("length")
    assert lookup_penalty("their_package.terms:length").__module__ == "their_package.terms"


PENALTIES = (
    "'l1', 'l2', 'elastic_net', 'kl', 'js', 'entropy', 'orthogonality', 'consistency', "
    "'output_magnitude'"
)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "l3",
            f"penalty must be one of {PENALTIES}, 'brevity', 'limit', 'package.module:attr', or ",
        ),
        (
            "brevity",
            f"penalty must be a function over arrays, and 'brevity' stands for {Brevity!r}.",
        ),
        ("limit", "penalty must be a function over arrays, and 'limit' stands for 5."),
        ("math:pi", "penalty must be a function over arrays, and 'math:pi' stands for 3.14159"),
        ("math:zzzz", "'math:zzzz' cannot be imported: module 'math' has no attribute 'zzzz'."),
    ],
)
def test_what_is_no_penalty_is_refused(name: str, message: str) -> None:
    register("limit")(5)
    register("brevity")(Brevity)
    with pytest.raises(RegistryError) as caught:
        lookup_penalty(name)
    assert str(caught.value).startswith(message)


def test_the_decorator_is_at_the_top_level() -> None:
    assert steelyard.register is registry.register


def test_a_fault_inside_a_factory_is_not_taken_for_wrong_options() -> None:
    def make(limit: int) -> object:
        raise TypeError("inside")

    register("faulty", factory=True)(make)
    with pytest.raises(TypeError, match="inside"):
        RegularizerSpec.from_dict({"fn": "faulty", "weight": 1.0, "options": {"limit": 3}})


def test_two_lambdas_are_two_things() -> None:
    register("lambda")(lambda data, logprobs: 0.0)
    with pytest.raises(RegistryError, match="the name 'lambda' is taken"):
        register("lambda")(lambda data, logprobs: 1.0)


@pytest.mark.parametrize("name", [5, None, ["a"]])
def test_a_name_that_is_no_string(name: Any) -> None:
    with pytest.raises(RegistryError, match="a regularizer's name must be a string, got"):
        lookup(name)


@pytest.mark.parametrize("path", [".math:x", "no_such_module:x", "math:nothing"])
def test_a_path_that_leads_nowhere(path: str) -> None:
    with pytest.raises(RegistryError, match="cannot be imported"):
        lookup(path)


def test_a_short_name_may_be_registered_for_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_entries", {})

    @register("kl")
    def own(data: Any, logprobs: Any) -> float:
        return 0.0

    assert lookup("kl") is own


@pytest.mark.usefixtures("terms")
def test_a_built_in_is_found_without_being_registered() -> None:
    assert "their_package.terms" not in sys.modules
    assert lookup("own").__qualname__ == "Brevity"
    regularizer, options = registry.build("own", {"limit": 2})
    assert (regularizer.limit, options) == (2, {})
