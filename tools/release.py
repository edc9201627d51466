"""Build the sdist and the wheel, and test the wheel outside the source tree.

`make dist` calls it. It installs the wheel, with the extra `torch` only, in a new environment in a
temporary folder, and runs the smoke test below there; then with the extra `cli`, and follows the
README there. Nothing is uploaded.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import venv
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"

SMOKE = """
import sys
from importlib.metadata import version
from pathlib import Path

import steelyard
assert Path(steelyard.__file__).is_relative_to(sys.prefix), steelyard.__file__
assert steelyard.__version__ == version("steelyard")
assert not {"torch", "transformers", "tinker", "jax"} & set(sys.modules)
assert (Path(steelyard.__file__).parent / "py.typed").exists()

import numpy
assert steelyard.penalties.l2(numpy.array([3.0, 4.0])) == 25.0

import torch
from steelyard import Pipeline, RegularizerSpec

def total(data, logprobs):
    return -torch.cat(logprobs).sum()

with Pipeline(total, [RegularizerSpec(total, 0.5, "half", run_in="process")]) as pipeline:
    output = pipeline.compute([], [torch.tensor([-1.0, -2.0])])
assert output.loss_total == 4.5, output
assert output.gradients[0].tolist() == [-1.5, -1.5], output.gradients

try:
    steelyard.engine
except steelyard.errors.MissingExtraError as error:
    assert 'pip install "steelyard[engine]"' in str(error), error
else:
    raise AssertionError("the engine is there without its extra")
print("steelyard", steelyard.__version__, "works from its wheel")
"""

# Of the README's config: a tiny model and few tokens, so that a step takes a moment.
SMALL = ("model.base_model=tiny-random", "train.steps=1", "rollouts.max_tokens=4")


def run(*command: str | Path, **options: object) -> None:
    subprocess.run([str(part) for part in command], check=True, **options)  # type: ignore[call-overload]


def check_metadata(wheel: Path) -> None:
    """Check that the wheel has only the package, the licence, and the metadata an index shows."""
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        said = Parser().parsestr(archive.read(metadata).decode())
    strangers = {n.split("/")[0] for n in names} - {"steelyard", metadata.split("/")[0]}
    assert not strangers, f"the wheel also holds {strangers}"
    assert "steelyard/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for field in ("Summary", "Requires-Python", "License-Expression", "Keywords"):
        assert said[field], f"the wheel's metadata lack {field}"
    assert said["Version"] in wheel.name


def blocks(language: str) -> str:
    """Blocks of the README in a language, one after the other."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(rf"^```{language}\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert found, f"the README has no block in {language}"
    return "\n".join(found)


def follow_the_readme(python: Path, folder: Path) -> None:
    """Run the README's blocks, and check its config, with the command of an environment."""
    (folder / "readme.py").write_text(blocks("python"), encoding="utf-8")
    (folder / "experiment.toml").write_text(blocks("toml"), encoding="utf-8")
    prompts = '{"prompt": "What is 6 × 7?", "answer": "42"}\n' * 10
    (folder / "prompts.jsonl").write_text(prompts, encoding="utf-8")
    steelyard = python.with_name("steelyard")
    run(python, "-I", "readme.py", cwd=folder)
    run(steelyard, "config", "check", "experiment.toml", cwd=folder)
    run(steelyard, "train", "experiment.toml", *SMALL, cwd=folder)


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--quiet", "--outdir", DIST, ROOT)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    check_metadata(wheel)
    with tempfile.TemporaryDirectory() as away:
        venv.create(Path(away) / "env", with_pip=True)
        python = Path(away) / "env" / "bin" / "python"
        constraints = ("-c", ROOT / "constraints.txt")
        run(python, "-m", "pip", "install", "--quiet", *constraints, f"{wheel}[torch]", cwd=away)
        run(python, "-I", "-c", SMOKE, cwd=away)
        run(python, "-m", "pip", "install", "--quiet", *constraints, f"{wheel}[cli]", cwd=away)
        follow_the_readme(python, Path(away))
    print(f"{wheel.relative_to(ROOT)}\n{sdist.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
