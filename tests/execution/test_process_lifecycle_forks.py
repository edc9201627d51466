"""A child that a term or a reward forks and that comes back from it: it ends, and nobody waits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
import torch
from steelyard import Pipeline, RegularizerSpec, Workers
from steelyard.experiment.rewards.reward import Reward
from steelyard.experiment.rewards.scoring import score

def forked(how, value):
    if os.fork():
        return value
    if how == "raises":
        raise ValueError("in the child")
    if how == "exits":
        sys.exit(3)
    return 5 * value

def base(data, logprobs):
    return logprobs[0].sum()

def term_value(run_in, how, workers):
    def term(data, logprobs):
        return forked(how, logprobs[0].sum())

    async def later(data, logprobs):
        return term(data, logprobs)

    spec = RegularizerSpec(later if run_in == "async" else term, 1.0, how, run_in=run_in)
    return Pipeline(base, [spec], workers=workers, timeout=300).compute([], [torch.ones(3)])

def reward_values(run_in, how, workers):
    reward = Reward(how, lambda record, answer: forked(how, len(answer)), run_in=run_in)
    return score([reward], [({}, "a"), ({}, "bb")], timeout=300, workers=workers)[how]

if __name__ == "__main__":
    with Workers(processes=1) as workers:
        for how in ("returns", "raises", "exits"):
            for run_in in ("inline", "thread", "process", "async"):
                print("term", run_in, how, term_value(run_in, how, workers).loss_total, flush=True)
            for run_in in ("inline", "thread", "process"):
                values = [scored.value for scored in reward_values(run_in, how, workers)]
                print("reward", run_in, how, values, flush=True)
"""


def test_a_child_that_comes_back_ends(tmp_path: Path) -> None:
    """It went on as the program: it answered for a worker, or waited and kept the pipe open."""
    (tmp_path / "script.py").write_text(SCRIPT)
    # From Python 3.12 on, a fork in a process with threads warns.
    unwarned = ("-W", "ignore:This process:DeprecationWarning")
    done = subprocess.run(
        [sys.executable, *unwarned, "script.py"],
        cwd=tmp_path,
        capture_output=True,  # until no process has the pipes open
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        line
        for how in ("returns", "raises", "exits")
        for line in (
            *(f"term {run_in} {how} 6.0" for run_in in ("inline", "thread", "process", "async")),
            *(f"reward {run_in} {how} [1.0, 2.0]" for run_in in ("inline", "thread", "process")),
        )
    ]
    for title, calls in (("regularizer", 4), ("reward", 6)):
        for name, what in (
            ("returns", "returned"),
            ("raises", "failed (ValueError: in the child)"),
        ):
            said = f"{title} '{name}' must end the processes that it forks, and one of them {what}:"
            assert done.stderr.count(said) == calls
    assert "'exits'" not in done.stderr
