"""MkDocs hook that generates the pages of the site that are not in `docs/`.

It generates the reference of the command from its help, that of the config from the schema, that
of the API from the docstrings, the diagram of the folders from the imports, and a page for each
file in `examples/` with its output.
"""

from __future__ import annotations

import ast
import inspect
import re
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "steelyard"
EXAMPLES = ROOT / "examples"
# The head of a page that a search lists after the guides.
AFTER_GUIDES = "---\nsearch:\n  boost: 0.3\n---\n"

# From the bottom up, as in docs/architecture.md.
STAGES = (
    "telemetry",
    "output",
    "spec",
    "doctor",
    "penalties",
    "execution",
    "gradients",
    "composition",
    "regularizers",
    "clients",
    "engine",
    "integrations",
    "experiment",
    "cli",
)
API = (
    "steelyard",
    "steelyard.errors",
    "steelyard.schedules",
    "steelyard.penalties",
    "steelyard.penalties.from_logits",
    "steelyard.telemetry",
    "steelyard.doctor",
    "steelyard.regularizers",
    "steelyard.clients",
    "steelyard.engine",
    "steelyard.integrations",
    "steelyard.integrations.huggingface",
    "steelyard.integrations.lightning",
    "steelyard.integrations.optim",
    "steelyard.integrations.jax",
    "steelyard.experiment",
    "steelyard.experiment.page",
    "steelyard.experiment.rewards",
    "steelyard.experiment.rewards.reward",
    "steelyard.experiment.rewards.scoring",
    "steelyard.experiment.rewards.text",
    "steelyard.composition.advantages",
    "steelyard.composition.per_datum",
    "steelyard.output.accumulated",
    "steelyard.experiment.page",
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the generated pages to the navigation."""
    examples = [f"examples/{path.stem}.md" for path in example_files()]
    api = [{name: f"reference/api/{name}.md"} for name in API]
    config.nav = [*(config.nav or []), {"Examples": examples}, {"API": api}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "reference/command.md": command_reference(),
        "reference/config.md": config_reference(),
        "reference/diagram.svg": diagram(),
        **{f"reference/api/{name}.md": api_page(name) for name in API},
        **{f"examples/{path.stem}.md": example_page(path) for path in example_files()},
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Replace links to example files by links to their pages."""
    up = "../" * page.file.src_uri.count("/")
    return re.sub(r"\]\((?:\.\./)+examples/(\w+)\.py\)", rf"]({up}examples/\1.md)", markdown)


def example_files() -> Iterator[Path]:
    """Paths of the examples, in alphabetical order."""
    yield from sorted(EXAMPLES.glob("*.py"))


def example_page(path: Path) -> str:
    """Page with the source of an example and its output."""
    source = path.read_text(encoding="utf-8")
    title = path.stem.replace("_", " ").capitalize()
    saved = path.parent / "outputs" / f"{path.stem}.txt"
    output = f"\n```text\n{saved.read_text(encoding='utf-8')}```\n" if saved.exists() else ""
    return f"{AFTER_GUIDES}# {title}\n\n```{{.python}}\n{source}```\n{output}"


def api_page(name: str) -> str:
    """Page with the docstrings of a module."""
    page = f"{AFTER_GUIDES}# `{name}`\n\n::: {name}\n    options:\n      show_root_heading: false\n"
    heading = "    options:\n      show_root_heading: true\n"
    return page + "".join(f"\n::: {path}\n{heading}" for path in hidden_functions(name))


def hidden_functions(name: str) -> Iterator[str]:
    """Paths of the functions that a package exports, and that have the name of their file.

    The reference of the package takes the file in their place, and so leaves them out.
    """
    package = SOURCE.parent.joinpath(*name.split("."))
    exports = (package / "__init__.py").read_text(encoding="utf-8") if package.is_dir() else ""
    for stem in re.findall(rf"^ *from {name}\.(\w+) import .*\b\1\b", exports, re.MULTILINE):
        yield f"{name}.{stem}.{stem}"


def command_reference() -> str:
    """Page with the `--help` text of every command."""
    from steelyard.cli.app import app  # noqa: PLC0415 - loads the experiment

    lines = ["# The `steelyard` command", "", "Generated from its own help.", ""]
    for path, command in _commands("steelyard", typer.main.get_command(app)):
        context = typer.Context(command, info_name=path, max_content_width=88, terminal_width=88)
        lines += [f"## `{path}`", "", "```text", command.get_help(context).rstrip(), "```", ""]
    return "\n".join(lines)


def _commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(f"{path} {name}", inner)


def config_reference() -> str:
    """Page with every key of a config file: its type, default and meaning."""
    from steelyard.experiment.config.schema import Config  # noqa: PLC0415 - loads pydantic

    lines = [
        "# Config reference",
        "",
        "Generated from the schema; `steelyard config schema` prints it as JSON Schema.",
        "",
    ]
    lines += _section("(top level)", Config, [n for n, f in _fields(Config) if not _model_in(f)])
    for name, field in _fields(Config):
        model = _model_in(field)
        if model is not None:
            many = get_origin(field.annotation) is list
            title = f"[[{name}]]" if many else f"[{name}]"
            lines += _section(title, model, [n for n, _ in _fields(model)])
    return "\n".join(lines)


def _fields(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    return list(model.model_fields.items())


def _model_in(field: FieldInfo) -> type[BaseModel] | None:
    for kind in (field.annotation, *get_args(field.annotation)):
        if inspect.isclass(kind) and issubclass(kind, BaseModel):
            return kind
    return None


def _section(title: str, model: type[BaseModel], names: Sequence[str]) -> list[str]:
    summary = (model.__doc__ or "").strip().splitlines()[0]
    lines = [f"## `{title}`", "", summary, "", "| key | type | default | |", "|---|---|---|---|"]
    for name in names:
        field = model.model_fields[name]
        default = "**required**" if field.default is PydanticUndefined else f"`{field.default!r}`"
        kind = _type(field.annotation).replace("|", "\\|")
        lines.append(f"| `{name}` | {kind} | {default} | {field.description or ''} |")
    return [*lines, ""]


def _type(kind: Any) -> str:
    args = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return " | ".join(_type(arg) for arg in args)
    if args and all(isinstance(arg, str) for arg in args):
        return ", ".join(f"`{arg}`" for arg in args)
    if kind is Any:
        return "see right"
    return "none" if kind is type(None) else f"{getattr(kind, '__name__', kind)}"


def imports() -> dict[str, set[str]]:
    """Imports between the folders, read from the source."""
    found: dict[str, set[str]] = {stage: set() for stage in STAGES}
    for stage in STAGES:
        for path in (SOURCE / stage).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("steelyard"):
                    parts = (node.module or "").split(".")
                    names = parts[1:2] or [alias.name for alias in node.names]
                    found[stage] |= {n for n in names if n in STAGES and n != stage}
    return found


def diagram() -> str:
    """SVG with the folders from bottom to top, and an arc for each import."""
    width, row, left, box = 520, 44, 10, 150
    x = left + box
    height = row * len(STAGES) + 20
    at = {stage: height - 30 - row * i for i, stage in enumerate(STAGES)}
    shape = f'width="{width}" viewBox="0 0 {width} {height}" font-family="sans-serif"'
    label = 'role="img" aria-label="The folders and their imports"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {shape} font-size="15" {label}>']
    for stage, used in imports().items():
        for other in sorted(used):
            y, z = at[stage], at[other]
            bend = min(280, 24 + abs(y - z) * 0.6)
            parts.append(
                f'<path d="M {x} {y} C {x + bend} {y}, {x + bend} {z}, {x} {z}" fill="none" '
                f'stroke="#3f51b5" stroke-opacity="0.45">'
                f"<title>{stage} imports {other}</title></path>"
            )
    for stage, y in at.items():
        parts.append(
            f'<rect x="{left}" y="{y - 15}" width="{box}" height="30" rx="6" fill="#fff" '
            f'stroke="#3f51b5"/><text x="{left + box // 2}" y="{y + 5}" text-anchor="middle">'
            f"{stage}</text>"
        )
    return "\n".join([*parts, "</svg>"])
