"""The real command, started often: a process that has loaded everything forks for each call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

# One thread and no more, so that a fork loses nothing; torch starts its own with the first use.
SERVER = """
import json, os, resource, sys, warnings
import torch, transformers, peft, tinker
import transformers.models.llama.modeling_llama, tokenizers
import steelyard.cli.app, steelyard.engine, steelyard.experiment, steelyard.regularizers.reference
import steelyard.cli.display, steelyard.regularizers.stateful

def child(asked):
    os.setsid()
    os.chdir(asked["cwd"])
    os.environ.update(asked["env"])
    for path, number in ((asked["stdout"], 1), (asked["stderr"], 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if asked["limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (asked["limit"], asked["limit"]))
    sys.argv = ["steelyard", *asked["args"]]
    try:
        steelyard.cli.app.main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        import traceback
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)

print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "wait" in asked:
        print(os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1]), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        child(asked)
    print(pid, flush=True)
"""


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Started:
    """A command under way."""

    kitchen: Kitchen
    pid: int
    out: Path
    err: Path

    def wait(self) -> Done:
        code = int(self.kitchen.ask({"wait": self.pid}))
        return Done(code, self.out.read_text(), self.err.read_text())

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)


class Kitchen:
    """Starts commands."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def ask(self, what: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(what)}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def start(
        self, *args: str, cwd: Path, limit: int | None = None, env: dict[str, str] | None = None
    ) -> Started:
        self._count += 1
        out, err = (self._folder / f"{self._count}.{kind}" for kind in ("out", "err"))
        asked = {"args": args, "cwd": str(cwd), "env": env or {}, "limit": limit}
        pid = int(self.ask({**asked, "stdout": str(out), "stderr": str(err)}))
        return Started(self, pid, out, err)

    def run(
        self, *args: str, cwd: Path, limit: int | None = None, env: dict[str, str] | None = None
    ) -> Done:
        return self.start(*args, cwd=cwd, limit=limit, env=env).wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
