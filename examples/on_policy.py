"""On-policy training: SmolLM2 learns to answer in at most ten words.

At each step the model answers three questions, four times each; a reward judges the length of each
answer, and the model trains on its own answers, with the KL to the base model held below 0.3 nats
per token. The same run with a live table: `steelyard train examples/on_policy.toml`. Needs
`steelyard[cli]`, takes a few minutes on two cores.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steelyard.doctor import Finding
from steelyard.experiment import RunFolder, read_config, train

MODEL = os.environ.get("STEELYARD_EXAMPLE_MODEL", "smollm2-135m")


class Printer:
    """Prints the rewards of each step, and what the doctor warns of."""

    def say(self, text: str) -> None:
        pass

    def findings(self, changed: Sequence[Finding], lasting: Sequence[Finding]) -> None:  # noqa: ARG002
        for finding in changed:
            if finding.severity != "information":
                print(finding.text)

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        mean, spread = metrics["rewards/short/mean"], metrics["rewards/short/std"]
        tokens, kl = metrics["rollouts/answer_tokens"], metrics["rollouts/kl"]
        held_out = metrics.get("held_out/reward")
        shown = "" if held_out is None else f"{held_out:10.2f}"
        print(f"{step + 1:2d}/{steps}  {mean:5.2f} ± {spread:.2f}  {tokens:6.1f}  {kl:5.3f}{shown}")


def main() -> None:
    config = read_config(Path(__file__).with_name("on_policy.toml"), [f"model.base_model={MODEL}"])
    with tempfile.TemporaryDirectory() as folder:
        print(" step  reward        tokens     KL  held-out")
        train(config, folder, watch=Printer())
        answers = [each for each in RunFolder(folder).rollouts() if each.get("held_out")]
    print("\nanswers to the held-out questions, before and after")
    half = len(answers) // 2
    for before, after in zip(answers[:half], answers[half:], strict=True):
        print(before["prompt"].splitlines()[0])
        for answer in (before, after):
            print(f"  {answer['reward']:.2f} {answer['answer']}")


if __name__ == "__main__":
    main()
