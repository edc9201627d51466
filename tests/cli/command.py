"""Run the real `steelyard` command many times without importing torch each time.

A server process imports everything once and forks for each command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

# The server must have a single thread when it forks: other threads, and locks that they hold, do
# not exist in the child. torch starts its threads with the first operation, which only children do.
SERVER = """
import gc, json, os, resource, sys, warnings
import torch, transformers, peft, tinker
import transformers.models.llama.modeling_llama, tokenizers
import steelyard.cli.app, steelyard.engine, steelyard.experiment, steelyard.regularizers.reference
import steelyard.cli.display, steelyard.regularizers.stateful

def child(request):
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    if request["stdin"]:  # a terminal becomes the controlling one, so that Ctrl-C reaches the child
        os.dup2(os.open(request["stdin"], os.O_RDWR), 0)
    for path, number in ((request["stdout"], 1), (request["stderr"], 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if request["limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"], request["limit"]))
    sys.argv = ["steelyard", *request["args"]]
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

gc.freeze()  # children share the memory of all that is imported, and never search it for garbage
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        child(request)
    print(pid, flush=True)
"""


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command that has ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Started:
    """A command that was started and may still run."""

    runner: CommandRunner
    pid: int
    out: Path
    err: Path

    def wait_for_code(self) -> int:
        return int(self.runner.request({"wait": self.pid}))

    def wait(self) -> Done:
        code = self.wait_for_code()
        return Done(code, self.out.read_text(), self.err.read_text())

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)


Spawn: TypeAlias = Callable[..., tuple[Any, Started]]  # of the fixture `spawn`


class CommandRunner:
    """Starts commands, each in a fork of one server process."""

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

    def request(self, message: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(message)}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def start(
        self,
        *args: str,
        cwd: Path,
        limit: int | None = None,
        env: dict[str, str] | None = None,
        stdin: Path | None = None,
        terminal: Path | None = None,
    ) -> Started:
        """Start a command; `terminal` is the one that it reads from and writes to."""
        self._count += 1
        out, err = (terminal or self._folder / f"{self._count}.{kind}" for kind in ("out", "err"))
        message = {"args": args, "cwd": str(cwd), "env": env or {}, "limit": limit}
        message["stdin"] = str(terminal or stdin or "")
        pid = int(self.request({**message, "stdout": str(out), "stderr": str(err)}))
        return Started(self, pid, out, err)

    def run(
        self,
        *args: str,
        cwd: Path,
        limit: int | None = None,
        env: dict[str, str] | None = None,
        stdin: Path | None = None,
    ) -> Done:
        return self.start(*args, cwd=cwd, limit=limit, env=env, stdin=stdin).wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def wait_for(path: Path, lines: int = 0) -> None:
    """Wait until a running command has written a file with this many lines."""
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        time.sleep(0.005)
