"""Check `constraints.txt` against the package index, and write `hashes.txt` and `hashes-demo.txt`.

`make check-constraints` resolves what `make` installs from the index alone: without local folders
of wheels and without further indexes, whose builds of torch may have other requirements. pip reads
the metadata of each wheel by PEP 658 or by range requests, so that an index which offers one of the
two sends nothing large. `make hashes` does the same, and then writes the SHA-256 of every file that
the pins allow on Linux and macOS: of all packages, and of those that the demo needs.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.tags import Tag
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
HASHES = ROOT / "hashes.txt"
DEMO_HASHES = ROOT / "hashes-demo.txt"
# What the Makefile installs for each of them. hatchling and editables install the source folder.
EXTRAS = {HASHES: [f"{ROOT}[dev]"], DEMO_HASHES: [f"{ROOT}[demo]", "hatchling", "editables"]}

# Settings of pip that say how the index is reached. All others could bring packages from elsewhere.
REACHING = ("cert", "client-cert", "default-timeout", "index-url", "proxy", "trusted-host")
# The Makefile installs them without their requirements: the resolution does not contain them.
WITHOUT_REQUIREMENTS = {"reasoning-gym", "tinker-cookbook"}
# A build of torch for the CPU from a local folder is allowed: its hash is not the index's.
WITHOUT_HASHES = {"torch"}
# torch requires them in its own versions, unless it is built for the CPU.
BROUGHT_BY_TORCH = ("cuda-", "nvidia-")
# Large, and needed for CUDA only: the environment of the demo has it if its torch requires it.
NOT_IN_THE_DEMO = {"triton"}
OLDEST, NEWEST = 11, 13  # Python 3 versions in pyproject.toml
HEADER = "# Written by `make hashes` from constraints.txt. Do not edit.\n"


def pins(path: Path) -> dict[str, str]:
    """Version of each package that a file of requirements pins, by normalised name."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [re.match(r"([\w.-]+)==([^\s;\\]+)", line) for line in lines]
    return {canonicalize_name(each[1]): each[2] for each in found if each}


def index_alone() -> dict[str, str]:
    """Environment in which pip knows the index, and no other source of packages."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    )
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in {"global", ":env:"} and option in REACHING:
            environment[f"PIP_{option.upper().replace('-', '_')}"] = ast.literal_eval(value)
    return {**environment, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def resolve(constraints: Path, *projects: str) -> dict[str, str]:
    """Versions that pip would install from the index alone, by normalised name.

    Raises:
        SystemExit: There is no such set of versions, or the index cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        options = ["--use-feature=fast-deps", "--report", str(report), "-c", str(constraints)]
        done = subprocess.run(
            [*command, *options, *projects],
            check=False,
            cwd=folder,
            env=index_alone(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise SystemExit(unresolved(constraints, done.stdout))
        installed = json.loads(report.read_text(encoding="utf-8"))["install"]
    found = [each["metadata"] for each in installed]
    return {canonicalize_name(each["name"]): each["version"] for each in found}


def unresolved(constraints: Path, said: str) -> str:
    """Message for a failed resolution: the conflict as pip explains it, or its last lines."""
    conflict = re.search(r"The conflict is caused by:\n(.*?)\n\n", said, re.DOTALL)
    reason = conflict[1] if conflict else "\n".join(said.splitlines()[-5:])
    return (
        f"{constraints.name} must resolve from the package index alone, and does not:\n{reason}\n"
        "Pin versions that agree with each other, then run `make hashes`."
    )


def faults(pinned: dict[str, str], resolved: dict[str, str]) -> Iterator[str]:
    """Packages without a pin, and pins without a package."""
    for name in sorted(resolved.keys() - pinned.keys() - {"steelyard"}):
        if not name.startswith(BROUGHT_BY_TORCH):
            yield f"{name} must be pinned, and is not: add {name}=={resolved[name]}."
    for name in sorted(pinned.keys() - resolved.keys() - WITHOUT_REQUIREMENTS):
        yield f"{name} is pinned, and nothing requires it: remove it."


def serves(tag: Tag) -> bool:
    """Whether a wheel with this tag can be installed where `make` runs: Linux or macOS, 64 bit."""
    version = re.fullmatch(r"(py|cp)3(\d*)", tag.interpreter)
    if version is None:
        return False
    # A wheel for CPython's own interface is bound to one version; others are for newer ones too.
    oldest = OLDEST if version[1] == "cp" and tag.abi != "abi3" else 0
    python = oldest <= int(version[2] or 0) <= NEWEST
    platform = re.fullmatch(r"any|macosx_.*|(many)?linux.*_(x86_64|aarch64)", tag.platform)
    return python and platform is not None


def requirement(name: str, version: str, files: dict[str, str]) -> str:
    """Lines of `hashes.txt` for one package, given the SHA-256 of each of its files."""
    wheels = {file: parse_wheel_filename(file)[3] for file in files if file.endswith(".whl")}
    kept = {file: tags for file, tags in wheels.items() if any(map(serves, tags))}
    others = {file for file in files if file not in wheels}
    platforms = {tag.platform for tags in kept.values() for tag in tags}
    elsewhere = others or any(each == "any" or each.startswith("macosx") for each in platforms)
    marker = "" if elsewhere else ' ; sys_platform == "linux"'
    sums = sorted(files[file] for file in (kept or others))
    if not sums:
        raise SystemExit(f"The package index has no file of {name} {version} for Linux or macOS.")
    return " \\\n".join((f"{name}=={version}{marker}", *(f"    --hash=sha256:{s}" for s in sums)))


# Runs in a process of its own, in the environment of `index_alone`. pip has no command that lists
# the files of a release with their hashes, hence its internal modules.
LIST_FILES = """
import json, sys
from pip._internal.commands import create_command
from pip._internal.index.collector import LinkCollector, parse_links
from pip._internal.models.link import Link

command = create_command("download")
options, _ = command.parse_args([])
found = {}
with command.main_context(), command._build_session(options) as session:
    collector = LinkCollector.create(session, options)
    for name in sys.argv[1:]:
        (url,) = collector.search_scope.get_index_urls_locations(name)
        page = collector.fetch_response(Link(url))
        found[name] = [(str(link.filename), link.hash) for link in parse_links(page)
                       if link.hash_name == "sha256"]
print(json.dumps(found))
"""


def list_files(names: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """Every file of each package on the index, with its SHA-256."""
    done = subprocess.run(
        [sys.executable, "-c", LIST_FILES, *names],
        check=True,
        env=index_alone(),
        stdout=subprocess.PIPE,
        text=True,
    )
    return dict(json.loads(done.stdout))


def is_of(file: str, version: str) -> bool:
    """Whether a file of a package belongs to a version of it."""
    return re.search(rf"-{re.escape(version)}(-|\.tar\.gz$|\.zip$)", file) is not None


def write_hashes(pinned: dict[str, str], of_the_demo: set[str]) -> None:
    """Write `hashes.txt`, and `hashes-demo.txt` with some of its packages."""
    names = [name for name in pinned if name not in WITHOUT_HASHES]
    listed = list_files(names)
    entries = {
        name: requirement(
            name,
            pinned[name],
            {file: digest for file, digest in listed[name] if is_of(file, pinned[name])},
        )
        for name in names
    }
    demo = [entries[name] for name in names if name in of_the_demo - NOT_IN_THE_DEMO]
    for path, lines in ((HASHES, entries.values()), (DEMO_HASHES, demo)):
        path.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> None:
    pinned = pins(CONSTRAINTS)
    resolved = {path: resolve(CONSTRAINTS, *projects) for path, projects in EXTRAS.items()}
    if found := list(faults(pinned, resolved[HASHES])):
        raise SystemExit("\n".join(f"constraints.txt: {each}" for each in found))
    everything, demo = (len(resolved[path]) for path in (HASHES, DEMO_HASHES))
    print(
        f"constraints.txt resolves from the package index alone: {everything} packages, "
        f"{demo} of them for the demo"
    )
    if "--hashes" in arguments:
        write_hashes(pinned, set(resolved[DEMO_HASHES]))
        for path in EXTRAS:
            print(f"{path.name} has the hashes of {len(pins(path))} packages")


if __name__ == "__main__":
    main(sys.argv[1:])
