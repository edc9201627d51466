"""Unknown options of the real command."""

from __future__ import annotations

from pathlib import Path

import pytest

from .command import CommandRunner


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--verson"], "--verson; did you mean --version? Options: --version, "),
        (["train", "--step"], "--step; did you mean --seeds? Options: --run/-r, --skip-bad, "),
        (["train", "--foo"], "--foo. Options: --run/-r, --skip-bad, "),
        (["train", "x.toml", "-x"], "-x. Options: --run/-r, "),
        (["report", "--skipbad"], "--skipbad. Options: "),
        (["config", "example", "--onpolicy"], "did you mean --on-policy? Options: --on-policy, "),
    ],
)
def test_an_unknown_option_is_answered_with_those_of_the_command(
    command: CommandRunner, tmp_path: Path, args: list[str], message: str
) -> None:
    done = command.run(*args, cwd=tmp_path)
    assert done.code == 2
    assert message in done.err
    assert done.err.endswith("--help.\n")
