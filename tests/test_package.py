"""The package as a whole: its surface, how light its import is, and its packaging."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import GenericAlias, ModuleType
from typing import Any

import pytest

import steelyard

from .missing_modules import errors_without, python

SOURCE = Path(steelyard.__file__).parent
ROOT = Path(__file__).parents[1]
HEAVY = ("jax", "ray", "tinker", "torch", "transformers")


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}
# What users import. All other modules are private.
PACKAGES = [
    "steelyard",
    *(
        f"steelyard.{name}"
        for name in (
            "clients",
            "doctor",
            "engine",
            "experiment",
            "experiment.page",
            "integrations",
            "integrations.huggingface",
            "integrations.jax",
            "integrations.lightning",
            "integrations.optim",
            "penalties",
            "penalties.from_logits",
            "regularizers",
            "telemetry",
        )
    ),
]
MODULES = ["steelyard.errors", "steelyard.schedules"]
SURFACES = PACKAGES + MODULES


# The public surface.


def bound_by(module: str) -> set[str]:
    """The public names a module defines or takes from elsewhere in the library."""
    names: set[str] = set()
    for node in top_level(ast.parse(FILES[module].read_text(encoding="utf-8")).body):
        match node:
            case ast.ImportFrom(module=str(origin)) if origin.partition(".")[0] == "steelyard":
                names |= {alias.asname or alias.name for alias in node.names}
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return {name for name in names if not name.startswith("_") or name == "__version__"}


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from top_level(node.body)
        else:
            yield node


def test_no_other_module_has_a_public_surface() -> None:
    named = {n for n, path in FILES.items() if "__all__" in path.read_text(encoding="utf-8")}
    assert named == set(SURFACES)


def names_within(folder: Path) -> set[str]:
    """Folders and modules of a package, what these define, and the parameters of that."""
    names = {path.stem for path in SOURCE.rglob("*.py")} | {
        path.name for path in SOURCE.rglob("*") if path.is_dir()
    }
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    names.add(name)
                case ast.ClassDef(name=name) | ast.arg(arg=name):
                    names.add(name)
    return names


@pytest.mark.parametrize("name", [name for name in FILES if FILES[name].name == "__init__.py"])
def test_what_a_package_says_is_in_it_is_there(name: str) -> None:
    named = re.findall(r"`([a-z_]+)/?`", importlib.import_module(name).__doc__ or "")
    assert set(named) - {"steelyard"} - names_within(FILES[name].parent) == set()


def test_few_names_are_public() -> None:
    assert sum(len(importlib.import_module(name).__all__) for name in SURFACES) <= 160


@pytest.mark.parametrize("name", SURFACES)
def test_all_is_sorted_and_every_name_in_it_exists(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__ == sorted(module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)
    missing = [public for public in module.__all__ if not hasattr(module, public)]
    assert missing == []


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_of_a_package_is_in_all(name: str) -> None:
    assert bound_by(name) == set(importlib.import_module(name).__all__)


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_a_module_defines_is_in_all(name: str) -> None:
    module = importlib.import_module(name)
    taken = {
        public
        for public in bound_by(name)
        if getattr(getattr(module, public), "__module__", name) != name
    }
    assert bound_by(name) - taken <= set(module.__all__)


def test_dir_shows_what_is_loaded_on_demand() -> None:
    assert set(steelyard.__all__) <= set(dir(steelyard))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'steelyard' has no attribute 'pipline'"):
        _ = steelyard.pipline
    with pytest.raises(ImportError, match="cannot import name 'pipline'"):
        exec("from steelyard import pipline", {})


# Documentation.


def public_things() -> Iterator[tuple[str, Any]]:
    for name in SURFACES:
        module = importlib.import_module(name)
        yield name, module
        for public in module.__all__:
            yield f"{name}.{public}", getattr(module, public)


def documented(thing: Any) -> bool:
    """Whether a thing has a written docstring, not one that `dataclass` generated."""
    text = thing.__doc__ or ""
    generated = inspect.isclass(thing) and text.startswith(f"{thing.__name__}(")
    return bool(text.strip()) and not generated


def undocumented(name: str, thing: Any) -> list[str]:
    if isinstance(thing, GenericAlias):  # an alias for a type has no place for a docstring
        return []
    if inspect.ismodule(thing) or inspect.isroutine(thing):
        return [] if documented(thing) else [name]
    if not inspect.isclass(thing):
        return []
    members = {
        f"{name}.{key}": member
        for key, member in vars(thing).items()
        if not key.startswith("_") and (inspect.isroutine(member) or hasattr(member, "__get__"))
    }
    return [key for key, each in {name: thing, **members}.items() if not documented(each)]


def test_everything_public_has_a_docstring() -> None:
    bare = {found for name, thing in public_things() for found in undocumented(name, thing)}
    assert bare == set()


def test_a_missing_docstring_would_be_found() -> None:
    class Bare:
        def method(self) -> None: ...

        @property
        def value(self) -> None: ...

        @classmethod
        def make(cls) -> None: ...

        @staticmethod
        def help() -> None: ...

        def _private(self) -> None: ...

    assert undocumented("Bare", Bare) == [
        "Bare",
        "Bare.method",
        "Bare.value",
        "Bare.make",
        "Bare.help",
    ]
    assert undocumented("module", ModuleType("module")) == ["module"]
    assert undocumented("f", lambda: None) == ["f"]


def test_every_module_says_what_it_is() -> None:
    silent = [
        name
        for name, path in FILES.items()
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []


# Imports are light; `test_layers` says which way they point.

LIGHT = [
    name
    for name in (
        "steelyard",
        *(f"steelyard.{s}" for s in ("output", "penalties", "spec", "telemetry")),
    )
    if name in FILES
]
LOADED = f"import sys; print(*sorted({set(HEAVY)} & set(sys.modules)))"


@pytest.mark.parametrize("name", LIGHT)
def test_the_import_is_light(name: str) -> None:
    assert python(f"import {name}; {LOADED}") == ""


def test_the_process_of_uploaded_losses_needs_torch_and_the_sdk_alone() -> None:
    module = "steelyard.engine.server.uploaded_loss.loss_process"
    slow = {"peft", "safetensors", "starlette", "transformers"}
    assert python(f"import {module}, sys; print(*sorted({slow} & set(sys.modules)))") == ""


def test_the_first_uploaded_loss_imports_nothing() -> None:
    """It would be part of the time that the loss may take."""
    code = """
import sys
from steelyard.engine.server.uploaded_loss import loss_process as ours
from tests.engine.server.uploaded_loss.graphs import SUM, upload
request = upload(SUM)
loss = ours.TracedLoss(request.name, request.inputs, request.graph.nodes)
fields = [[ours.torch.ones(3)]]
before = set(sys.modules)
bound = ours.BoundLoss(loss, fields, ours.LossBudget())
bound.check()
bound.run([ours.torch.zeros(3)])
print(*set(sys.modules) - before)
"""
    assert python(code) == ""


def test_a_heavy_import_would_be_noticed() -> None:
    assert python(f"import steelyard.gradients.algebra; {LOADED}") == "torch"


# Without the extras.

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; "
ENGINE = ("peft", "tinker", "transformers", "psutil")
SERVING = ("starlette", "uvicorn", "zstandard")
NEEDS_TORCH = (
    "CompositeLoss",
    "DetachedTermWarning",
    "Pipeline",
    "Workers",
    "acompute",
    "compute",
    "term",
)


@pytest.mark.parametrize("name", LIGHT)
def test_the_core_works_without_torch(name: str) -> None:
    # The last line proves that torch was out of reach all along.
    code = f"{WITHOUT_TORCH}import {name}\ntry:\n import torch\nexcept ImportError:\n print('ok')"
    assert python(code) == "ok"


def test_a_missing_extra_names_its_cure_every_time() -> None:
    code = f"""{WITHOUT_TORCH}
import steelyard
from steelyard.errors import MissingExtraError
for _ in range(2):
    for name in {NEEDS_TORCH}:
        try:
            exec("from steelyard import " + name)
        except MissingExtraError as error:
            print(error)
"""
    assert python(code).splitlines() == 2 * [
        f"steelyard.{name} needs torch, which is not installed: "
        'pip install "steelyard[torch]".'
        for name in NEEDS_TORCH
    ]  # fmt: skip


@pytest.fixture(scope="module")
def engine_errors() -> dict[str, list[str]]:
    ways = ("import steelyard.engine", "from steelyard import engine")
    return errors_without(ENGINE, "import torch", *ways)


@pytest.fixture(scope="module")
def serving_errors() -> dict[str, list[str]]:
    serve = "with steelyard.engine.serve('tiny-random'): pass"
    return errors_without(SERVING, "import steelyard.engine", serve)


@pytest.mark.parametrize("module", ENGINE)
def test_the_engine_without_its_extra(
    engine_errors: Mapping[str, Sequence[str]], module: str
) -> None:
    assert engine_errors[module] == 2 * [
        f'steelyard.engine needs {module}, which is not installed: pip install "steelyard[engine]".'
    ]


@pytest.mark.parametrize("module", SERVING)
def test_serving_without_its_extra(
    serving_errors: Mapping[str, Sequence[str]], module: str
) -> None:
    (error,) = serving_errors[module]
    assert error == (
        f"steelyard.engine.serve needs {module}, which is not installed: "
        'pip install "steelyard[serve]".'
    )


def test_regularize_needs_no_sdk() -> None:
    code = "import sys; sys.modules['tinker'] = None; from steelyard import regularize; print('ok')"
    assert python(code) == "ok"


def test_another_missing_module_is_not_blamed_on_an_extra() -> None:
    code = """
import sys; sys.modules["pebble"] = None
try:
    from steelyard import Pipeline
except ImportError as error:
    print(type(error).__name__, error.name)
"""
    assert python(code) == "ModuleNotFoundError pebble"


# Packaging.


def test_the_version_is_the_installed_one() -> None:
    assert steelyard.__version__ == importlib.metadata.version("steelyard")


def test_types_are_shipped() -> None:
    assert (SOURCE / "py.typed").is_file()


def stand_in(folder: Path, name: str, code: int = 0, said: str = "") -> None:
    """A program that says how it was called: the real make would run these very tests."""
    program = folder / name
    echo = f'echo "$PWD: {name} $*{said and " " + said}"'
    program.write_text(f"#!/bin/sh\n{echo}\nexit {code}\n", encoding="utf-8")
    program.chmod(0o755)


def run_script(
    script: str, path: str, folder: Path, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / script],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={"PATH": path, **more},
    )


@pytest.mark.parametrize("code", [0, 3])
def test_ci_calls_make_test_and_fails_with_it(code: int, tmp_path: Path) -> None:
    stand_in(tmp_path, "make", code, said="$REQUIRE_BROWSER")
    done = run_script(".ci/run", f"{tmp_path}{os.pathsep}{os.environ['PATH']}", tmp_path)
    assert done.stdout == f"{ROOT}: make test 1\n"
    assert done.returncode == code


def only(folder: Path, *names: str) -> str:
    """A path on which there are these programs of this machine, and the folder's own."""
    for name in names:
        (folder / name).symlink_to(shutil.which(name) or pytest.fail(name))
    return str(folder)


@pytest.mark.parametrize("there", [[], ["chromium"], ["chromedriver"]])
def test_the_browser_is_brought_where_it_is_missing(there: list[str], tmp_path: Path) -> None:
    for name in ("apt-get", *there):
        stand_in(tmp_path, name)
    program = tmp_path / "id"
    program.write_text("#!/bin/sh\necho 0\n", encoding="utf-8")
    program.chmod(0o755)
    done = run_script("tools/browser.sh", only(tmp_path, "sh"), tmp_path)
    assert done.stderr.splitlines()[1:3] == [
        f"{tmp_path}: apt-get update",
        f"{tmp_path}: apt-get install -y --no-install-recommends chromium chromium-driver",
    ]


@pytest.mark.parametrize(("required", "code"), [("", 0), ("1", 1)])
def test_a_browser_that_cannot_be_brought_is_required_by_ci_alone(
    required: str, code: int, tmp_path: Path
) -> None:
    path = only(tmp_path, "sh", "id")  # no apt-get
    done = run_script("tools/browser.sh", path, tmp_path, REQUIRE_BROWSER=required)
    assert done.stderr.startswith("No Chromium with its driver here")
    assert done.returncode == code


def test_the_gpu_tests_need_no_package_that_they_do_not_test() -> None:
    # A machine with a GPU has torch, JAX and transformers; these it usually does not have.
    absent = ("gudhi", "lightning", "optuna", "ray", "selenium", "torchjd", "wandb", "z3")
    command = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")
    targets = next(line for line in command.splitlines() if line.startswith("ON_GPU :="))
    collected = python(f"""
import sys
sys.modules.update(dict.fromkeys({absent}))
import pytest
sys.exit(pytest.main(["--collect-only", *{targets.split()[2:]}]))
""")
    assert re.search(r"\d+ tests collected", collected)
