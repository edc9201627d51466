"""The layers: which folder may import which.

`LAYERS` is the table of `docs/architecture.md`, row by row. An import counts wherever it stands: at
the top, in a function, under `TYPE_CHECKING`, absolute or relative, or as the name given to
`import_module`; so does what a module reaches as an attribute of something that it imported.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import steelyard

SOURCE = Path(steelyard.__file__).parent
ARCHITECTURE = Path(__file__).parents[1] / "docs" / "architecture.md"

ROW_1 = frozenset({"telemetry", "output"})
ROWS_1_2 = ROW_1 | {"spec", "doctor"}
ROWS_1_4 = ROWS_1_2 | {"penalties", "execution"}
ROWS_1_5 = ROWS_1_4 | {"gradients", "composition"}
ROWS_1_6 = ROWS_1_5 | {"regularizers"}
ROWS_1_8 = ROWS_1_6 | {"clients", "engine"}
LAYERS: dict[str, frozenset[str]] = {
    "telemetry": frozenset({"output"}),
    "output": frozenset({"telemetry"}),
    "spec": frozenset(),
    "doctor": ROW_1 | {"spec"},
    "penalties": ROW_1 | {"spec"},
    "execution": ROW_1 | {"spec"},
    "gradients": ROWS_1_4,
    "composition": ROWS_1_4 | {"gradients"},
    "regularizers": ROWS_1_5,
    "clients": ROWS_1_6,
    "engine": ROWS_1_5,
    "integrations": ROWS_1_6,
    "experiment": ROWS_1_8,
    "cli": ROW_1 | {"doctor", "engine", "experiment"},
}
FOR_ALL = frozenset({"errors", "_extras", "_torch_internals", "_version"})
# What users import by the package's own name. Nothing inside the package imports it.
FACE: dict[str, frozenset[str]] = {
    "__init__": frozenset({*LAYERS, "schedules"}),
    "__main__": frozenset({"cli"}),
    "schedules": frozenset({"spec"}),
}
ALLOWED = {**LAYERS, **FACE, **dict.fromkeys(FOR_ALL, frozenset[str]())}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def source_of(module: str) -> str:
    return FILES[module].read_text(encoding="utf-8")


def modules_of(folder: str) -> list[str]:
    return [name for name in FILES if f"{name}.".startswith(f"steelyard.{folder}.")]


@cache
def used(module: str, source: str) -> set[str]:
    """Names of the library that a module imports, or reaches through an import."""
    is_package = module in FILES and FILES[module].name == "__init__.py"
    package = module if is_package else module.rpartition(".")[0]
    nodes = list(ast.walk(ast.parse(source)))
    found = [pair for node in nodes for pair in imported(node, package)]
    bound = {"steelyard": "steelyard", **dict(found)}
    chains = [chain(node) for node in nodes if isinstance(node, ast.Attribute)]
    reached = [".".join([bound[root], *rest]) for root, *rest in chains if root in bound]
    names = {*(name for _, name in found), *reached}
    return {name for name in names if name.partition(".")[0] == "steelyard"}


def imported(node: ast.AST, package: str) -> list[tuple[str, str]]:
    """Imports of a node in a module of `package`: pairs of the bound name and the full name."""
    match node:
        case ast.Import(names=aliases):
            return [(alias.asname or alias.name, alias.name) for alias in aliases]
        case ast.ImportFrom(module=module, names=aliases, level=level):
            parents = package.split(".")[: package.count(".") + 2 - level] if level else []
            origin = ".".join([*parents, *filter(None, [module])])
            return [(alias.asname or alias.name, f"{origin}.{alias.name}") for alias in aliases]
        case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
            if ast.unparse(func).rpartition(".")[2] in ("import_module", "__import__"):
                return [(name, name)]
    return []


def chain(node: ast.expr) -> list[str]:
    """The parts of `a.b.c`; the first is empty if the expression begins with more than a name."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value, attr=name):
            return [*chain(value), name]
    return [""]


def breach(folder: str, name: str) -> str | None:
    """Rule that a module of `folder` breaks by using a name of the library; None if it may."""
    target = f"{name}.".split(".")[1]
    if target == folder or target in FOR_ALL:
        return None
    if target not in ALLOWED[folder]:
        return f"{name}: {folder} may not import {target if target in LAYERS else 'the face'}"
    return None


def breaches(module: str, source: str) -> list[str]:
    """Rules that the imports of a module break; the module need not exist."""
    folder = f"{module}.__init__".split(".")[1]
    return sorted(filter(None, (breach(folder, name) for name in used(module, source))))


# The source, and the table.


def test_imports_keep_to_the_layers() -> None:
    found = {module: breaches(module, source_of(module)) for module in FILES}
    assert {module: wrong for module, wrong in found.items() if wrong} == {}


def test_every_folder_and_module_has_a_row() -> None:
    folders = {path.parent.name for path in SOURCE.glob("*/*.py")}
    assert folders == set(LAYERS)
    assert {path.stem for path in SOURCE.glob("*.py")} == {*FACE, *FOR_ALL}


def test_the_documentation_has_the_same_table() -> None:
    rows = re.findall(
        r"^\| (\d+) \| \[?`(\w+)`.* \| ([^|]+) \|$", ARCHITECTURE.read_text("utf-8"), re.MULTILINE
    )
    numbers = {folder: int(number) for number, folder, _ in rows}
    table = {}
    for _, folder, cell in rows:
        spans = [(int(a), int(b or a)) for a, b in re.findall(r"(\d+)(?:–(\d+))?", cell)]
        named = re.findall(r"`(\w+)`", cell)
        within = (each for each, at in numbers.items() if any(a <= at <= b for a, b in spans))
        table[folder] = frozenset({*named, *within})
    assert table == LAYERS


# Planted breaches.

FORMS = (
    "from steelyard.{folder} import {name}",
    "from steelyard.{folder} import {name} as other",
    "from steelyard import {folder}",
    "from steelyard import {folder} as other",
    "import steelyard.{folder}",
    "import torch, steelyard.{folder} as other",
    "def f():\n    from steelyard.{folder} import {name}",
    "class A:\n    async def f(self):\n        import steelyard.{folder}",
    "if TYPE_CHECKING:\n    from steelyard.{folder} import {name}",
    "try:\n    from steelyard import {folder}\nexcept ImportError:\n    pass",
    "from ..{folder} import {name}",
    "from .. import {folder}",
    "def f():\n    from ..{folder} import {name}",
    "importlib.import_module('steelyard.{folder}')",
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("folder", LAYERS)
def test_every_pair_of_folders_is_held_to_the_table(folder: str, form: str) -> None:
    for other in set(LAYERS) - {folder}:
        line = form.format(folder=other, name="name")
        found = breaches(f"steelyard.{folder}.planted", line)
        if other in LAYERS[folder]:
            assert found == []
        else:
            assert [each.partition(": ")[2] for each in found] == [
                f"{folder} may not import {other}"
            ]


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("engine", "from steelyard.cli.display import step_table"),
        ("clients", "from steelyard.experiment.training.loop import train"),
        ("regularizers", "from steelyard.engine.server.state import ServerState"),
        ("engine", "from steelyard.integrations.torch.activations import capture"),
        ("cli", "from steelyard.spec.checks import is_whole"),
    ],
)
def test_a_line_planted_in_any_file_of_a_folder_is_found(folder: str, line: str) -> None:
    name = line.removeprefix("from ").replace(" import ", ".")
    wrong = f"{name}: {folder} may not import {name.split('.')[1]}"
    for module in modules_of(folder):
        assert breaches(module, source_of(module)) == []
        assert breaches(module, f"{source_of(module)}\n{line}\n") == [wrong]
        assert breaches(module, f"{source_of(module)}\n\ndef f():\n    {line}\n") == [wrong]


@pytest.mark.parametrize(
    ("module", "line", "wrong"),
    [
        ("spec.x", "import steelyard", "steelyard: spec may not import the face"),
        ("spec.x", "from steelyard import Pipeline", "Pipeline: spec may not import the face"),
        ("gradients.x", "from steelyard import Workers", "Workers: gradients may not import"),
        ("engine.x", "from steelyard import schedules", "schedules: engine may not import the"),
        ("spec.x", "from .. import Pipeline", "Pipeline: spec may not import the face"),
        ("errors", "from steelyard import spec", "spec: errors may not import spec"),
        ("_extras", "from . import telemetry", "telemetry: _extras may not import telemetry"),
        ("schedules", "import steelyard.output", "output: schedules may not import output"),
        ("__main__", "import steelyard.engine", "engine: __main__ may not import engine"),
        (
            "engine.server.x",
            "from ...clients import regularize",
            "clients.regularize: engine may not import clients",
        ),
        (
            "cli.x",
            "import steelyard.engine\nsteelyard.spec",
            "steelyard.spec: cli may not import spec",
        ),
    ],
)
def test_other_imports_against_the_table_are_found(module: str, line: str, wrong: str) -> None:
    (found,) = breaches(f"steelyard.{module}", line)
    assert wrong in found


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("spec.x", "from . import registry\nfrom .registry import build"),
        ("spec.x", "from steelyard.errors import SpecError\nimport torch"),
        ("spec.x", "from steelyard import errors\nraise errors.SpecError"),
        ("penalties.x", "from steelyard.telemetry import events, execute\nevents.PENALTIES_START"),
        ("composition.x", "from steelyard.spec.schedules import linear"),
        ("composition.x", "import steelyard.spec\nsteelyard.spec.RegularizerSpec.from_dict({})"),
        ("composition.x", "import steelyard.spec\nsteelyard.errors.SpecError"),
        ("composition.x", "spec = f()\nspec.numbers.is_whole"),  # no import has bound the name
        ("regularizers.x", "from steelyard import penalties\npenalties.from_logits.kl(x, y)"),
        ("composition.x", "from steelyard.spec.checks import is_whole"),
        ("composition.x", "from ..spec import checks"),
        ("engine.x", "from steelyard.engine._model import load"),
        ("cli.x", "from steelyard.engine.server.state import ServerState"),
        ("engine.server.x", "from ..model import Model\nfrom . import wire"),
        ("engine.x", "from steelyard.penalties.from_logits import Projection, lm_head"),
        ("engine.x", "from steelyard.penalties.from_logits.lm_head import affine"),
        ("cli.x", "from steelyard.experiment import page\npage.write_report([], x)"),
        ("cli.x", "from steelyard import experiment\nexperiment.train(x, y).folder._x"),
        ("cli.x", "from steelyard._version import __version__"),
        ("__main__", "from steelyard.cli import main"),
    ],
)
def test_what_the_layers_allow_passes(module: str, line: str) -> None:
    assert breaches(f"steelyard.{module}", line) == []
