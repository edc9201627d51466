"""Run every example, and save its output in `examples/outputs/` for the documentation."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def main() -> None:
    folder = EXAMPLES / "outputs"
    folder.mkdir(exist_ok=True)
    for example in sorted(EXAMPLES.glob("*.py")):
        with tempfile.TemporaryDirectory() as away:
            done = subprocess.run(
                [sys.executable, example], cwd=away, check=True, stdout=subprocess.PIPE, text=True
            )
        (folder / f"{example.stem}.txt").write_text(done.stdout, encoding="utf-8")
        print(example.name)


if __name__ == "__main__":
    main()
