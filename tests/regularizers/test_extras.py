"""Lazy imports, and the errors of missing extras."""

from __future__ import annotations

import json

import pytest

import steelyard.regularizers
from steelyard._extras import EXTRAS
from tests.missing_modules import python

EXTRA = {
    "gudhi": ("TopologicalConsistency(points=print)", "topological_consistency"),
    "httpx": ("ExternalValidation(url='http://host')", "external_validation"),
    "scipy": ("DemographicParity()", "demographic_parity"),
    "z3": ("LogicalConsistency(constraints=print)", "logical_consistency"),
}


def test_importing_the_package_loads_neither_torch_nor_extras() -> None:
    code = "import sys, steelyard.regularizers; print({'torch', *%r} & {*sys.modules})"
    assert python(code % set(EXTRA)) == "set()"


def test_building_loads_no_extra() -> None:
    made = "\n".join(f"r.{code}" for code, _ in EXTRA.values())
    code = (
        f"import sys, steelyard.regularizers as r\n{made}\nprint({set(EXTRA)} & {{*sys.modules}})"
    )
    assert python(code) == "set()"


@pytest.fixture(scope="module")
def without_extras() -> dict[str, str]:
    """Errors of the terms by the module they need, from an interpreter that has none of them."""
    code = f"""
import json, sys
sys.modules |= dict.fromkeys({[*EXTRA]})
import steelyard, steelyard.regularizers as r
found = {{"scipy, without a test": r.EqualizedOdds(test="none").test}}
for module, make in {[(module, make) for module, (make, _) in EXTRA.items()]}:
    try:
        eval("r." + make)
    except steelyard.errors.MissingExtraError as error:
        found[module] = str(error)
print(json.dumps(found))
"""
    found: dict[str, str] = json.loads(python(code))
    return found


@pytest.mark.parametrize("module", EXTRA)
def test_a_missing_extra_names_the_pip_command(module: str, without_extras: dict[str, str]) -> None:
    assert without_extras[module] == (
        f"regularizer {EXTRA[module][1]!r} needs {module}, which is not installed: "
        f'pip install "steelyard[{EXTRAS[module]}]".'
    )


def test_fairness_without_a_test_needs_no_scipy(without_extras: dict[str, str]) -> None:
    assert without_extras["scipy, without a test"] == "none"


@pytest.mark.parametrize(
    "statement",
    [
        "from steelyard.regularizers import L1",
        "from steelyard.spec.registry import lookup; lookup('l1')",
    ],
)
def test_without_torch(statement: str) -> None:
    code = f"""
import sys, steelyard
sys.modules["torch"] = None
try:
    exec({statement!r})
except steelyard.errors.MissingExtraError as error:
    print(error)
"""
    assert python(code) == (
        "steelyard.regularizers.L1 needs torch, which is not installed: "
        'pip install "steelyard[torch]".'
    )


def test_another_missing_module_is_an_import_error() -> None:
    code = """
import sys
sys.modules["numpy"] = None
try:
    from steelyard.regularizers import TopologicalConsistency
except ImportError as error:
    print(type(error).__name__, error.name)
"""
    assert python(code) == "ModuleNotFoundError numpy"


def test_dir_lists_lazy_names() -> None:
    assert set(steelyard.regularizers.__all__) <= set(dir(steelyard.regularizers))
    with pytest.raises(AttributeError, match="has no attribute 'L3'"):
        _ = steelyard.regularizers.L3
