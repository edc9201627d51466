"""The site builds without broken links, its pages match the source, and their commands work."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from steelyard import schedules
from steelyard.cli.app import app
from steelyard.experiment.config.weights import SCHEDULES
from steelyard.experiment.run.health import examine

from .cli.command import CommandRunner
from .lasting_findings import above_information
from .test_layers import FILES, LAYERS, source_of, used

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# `make bench` writes it.
WITHOUT_EXAMPLE = {"benchmarks", "multi_turn"}


def blocks(path: Path, language: str) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(path: Path) -> list[list[str]]:
    """Arguments of the `steelyard` commands on a page, without redirections."""
    lines = [line for block in blocks(path, "console") for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines if "$ steelyard " in line]
    ends = [next((i for i, word in enumerate(each) if word in {">", "|"}), None) for each in words]
    return [each[2:end] for each, end in zip(words, ends, strict=True)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    pages = {path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")}
    written = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert written <= pages
    assert {f"examples/{path.stem}" for path in (ROOT / "examples").glob("*.py")} <= pages


def test_the_config_reference_has_every_section(site: Path) -> None:
    page = (site / "reference" / "config" / "index.html").read_text(encoding="utf-8")
    for key in ("base_model", "grad_clip_norm", "on_error", "objective", "tensorboard"):
        assert f"<code>{key}</code>" in page


def test_the_config_reference_explains_every_key(site: Path) -> None:
    page = (site / "reference" / "config" / "index.html").read_text(encoding="utf-8")
    rows = re.findall(r"<tr>\s*<td><code>(\w+)</code></td>(.*?)</tr>", page, re.DOTALL)
    assert len(rows) > 60
    assert [key for key, cells in rows if re.search(r"<td></td>", cells)] == []


def test_the_reference_of_the_command_has_every_option(site: Path) -> None:
    page = (site / "reference" / "command" / "index.html").read_text(encoding="utf-8")
    for word in ("steelyard config schema", "--skip-bad", "--port"):
        assert word in page


def reference_of(site: Path, module: str) -> str:
    return (site / "reference" / "api" / module / "index.html").read_text(encoding="utf-8")


def test_the_api_reference_has_every_public_name(site: Path) -> None:
    for folder in (site / "reference" / "api").iterdir():
        module = importlib.import_module(folder.name)
        shown = set(re.findall(r'id="([\w.]+)"', reference_of(site, folder.name)))
        for name in getattr(module, "__all__", ()):
            thing, path = getattr(module, name), f"{folder.name}.{name}"
            if inspect.isclass(thing) or inspect.isroutine(thing):
                assert {path, f"{path}.{name}"} & shown, path


def test_the_api_reference_has_what_the_documentation_imports(site: Path) -> None:
    texts = [block for page in PAGES for block in blocks(page, "python")]
    texts += [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]
    modules = {
        name for text in texts for name in re.findall(r"from (steelyard[\w.]*) import", text)
    }
    pages = {folder.name for folder in (site / "reference" / "api").iterdir()}
    assert modules - pages == set()


def test_the_api_reference_has_the_docstrings(site: Path) -> None:
    page = (site / "reference" / "api" / "steelyard.penalties" / "index.html").read_text("utf-8")
    assert "kl_divergence" in page
    assert "max_log_ratio" in page


def test_an_example_shows_its_output(site: Path) -> None:
    page = (site / "examples" / "fairness" / "index.html").read_text(encoding="utf-8")
    assert "DemographicParity" in page
    assert "group 0  group 1    gap" in page


def test_a_page_loads_nothing_from_other_hosts(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    assert 'src="http' not in page
    assert '<link rel="stylesheet" href="http' not in page


def test_the_architecture_lists_every_file_of_the_core() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    source = ROOT / "src" / "steelyard"
    files = {path.relative_to(source).as_posix() for path in source.glob("composition/*.py")}
    listed = set(re.findall(r"`(composition/\w+\.py)`", page))
    assert listed == files - {"composition/__init__.py"}


def test_the_diagram_has_every_folder_and_imports_that_the_layers_allow(site: Path) -> None:
    drawn = (site / "reference" / "diagram.svg").read_text(encoding="utf-8")
    assert set(re.findall(r">(\w+)</text>", drawn)) == set(LAYERS)
    imports = re.findall(r"(\w+) imports (\w+)", drawn)
    assert sorted(imports) == sorted(imports_of_the_source())


def imports_of_the_source() -> set[tuple[str, str]]:
    """Pairs of folders of which the first imports the second, as `test_layers` finds them."""
    names = {(module, name) for module in FILES for name in used(module, source_of(module))}
    pairs = {(f"{a}.".split(".")[1], f"{b}.".split(".")[1]) for a, b in names}
    return {(a, b) for a, b in pairs if a in LAYERS and b in LAYERS and a != b}


# What a reader types.


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_has_an_example_that_the_tests_run(page: Path) -> None:
    assert blocks(page, "python") or page.stem in WITHOUT_EXAMPLE


def test_every_recipe_has_an_answer_that_the_tests_run() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    _, *recipes = re.split(r"^## ", text, flags=re.MULTILINE)
    assert len(recipes) == 12
    assert [recipe.splitlines()[0] for recipe in recipes if "```python" not in recipe] == []


def parse(arguments: list[str]) -> dict[str, Any]:
    """Parameters of a command of `steelyard`; a wrong argument or option raises."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name, *arguments = arguments
        command = command.commands[name]
    parameters: dict[str, Any] = command.make_context(command.name, arguments).params
    return parameters


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=lambda path: path.stem)
def test_the_commands_of_a_page_can_be_parsed(page: Path) -> None:
    for arguments in commands(page):
        parse(list(arguments))


def test_a_wrong_command_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```console\n$ steelyard train c.toml --wach  # typo\n$ steelyard config example > c\n```\n"
    )
    wrong, right = commands(page)
    assert (wrong, right) == (["train", "c.toml", "--wach"], ["config", "example"])
    with pytest.raises(Exception, match="--wach"):
        parse(wrong)
    assert parse(right) == {"on_policy": False}


def test_the_page_on_specs_names_the_schedules_that_a_config_cannot_have() -> None:
    text = " ".join((ROOT / "docs" / "spec.md").read_text(encoding="utf-8").split())
    (sentence,) = re.findall(r"all but ([^.]+?) can be written in a config", text)
    assert set(re.findall(r"`(\w+)`", sentence)) == set(schedules.__all__) - set(SCHEDULES)


def test_the_readme_is_short_and_each_of_its_commands_is_a_line() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 200
    assert [line for line in text.splitlines() if line.count("$ ") > 1] == []


def test_the_commands_of_the_tutorial_work_after_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tutorial = ROOT / "docs" / "tutorial.md"
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    experiment = [block for block in blocks(tutorial, "python") if "folder" in block]
    exec("\n".join(experiment), {"__name__": "tutorial"})
    question = tmp_path / "question"
    question.write_text("Name a thing.\n")
    (tmp_path / "output").mkdir()
    with CommandRunner(tmp_path / "output") as command:
        for arguments in commands(tutorial):
            if arguments[0] == "watch":  # it serves until it is stopped
                continue
            # The page would be opened in a browser.
            typed = [word for word in arguments if word != "--watch"]
            done = command.run(*typed, cwd=tmp_path, stdin=question)
            assert done.code == 0, (typed, done.err)
    runs = {file.parent for file in tmp_path.rglob("metrics.jsonl")}
    findings = [finding for run in runs for finding in examine(run)[0].findings]
    assert (len(runs) > 1, above_information(findings)) == (True, [])
    assert (tmp_path / "compared.html").exists()
    assert (tmp_path / "model" / "model.safetensors").exists()
