"""The command `steelyard demo`, run for real."""

from __future__ import annotations

from pathlib import Path

from .command import CommandRunner


def test_demo_ends_with_a_summary_samples_and_the_report(
    command: CommandRunner, tmp_path: Path
) -> None:
    tiny = ["model.base_model=tiny-random", "data.max_length=256", "train.sample_tokens=4"]
    done = command.run("demo", *tiny, "train.steps=2", "--run", "demo", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "\n2 steps in " in done.out
    assert ", held-out " in done.out
    assert "What is the capital of Norway?\n  before: " in done.out
    assert "\nReport: demo/report.html\n" in done.out
    assert done.out.endswith(
        "\nSee its curves in a browser: steelyard watch .\n"
        "Talk to the model: steelyard chat demo --base\n"
    )
    assert (tmp_path / "demo" / "report.html").is_file()


def test_a_wrong_override_of_the_demo_is_bad_usage(command: CommandRunner, tmp_path: Path) -> None:
    done = command.run("demo", "train.steps=0", "--run", "demo", cwd=tmp_path)
    assert done.code == 2
    assert "steps" in done.err
