"""Scripts that run terms on Ray: which cluster they use, how they end, what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.errors import InputError
from steelyard.execution.ray_tasks import RayConnection, lacking
from tests.ray_cluster import ENVIRONMENT, RayCluster

from .tickets import ended, wait_until

# Its terms are functions of the main script, which no worker can import.
SCRIPT = """
import logging, os, signal, sys, time
import torch
from steelyard import Pipeline, RegularizerSpec, Workers
from steelyard.errors import TermError

# Without job control a shell starts programs in the background with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

def double(x):
    return 2 * x.sum()

def term(data, logprobs):
    return double(logprobs[0])

pid = os.path.abspath("pid")  # the folder of a worker is another one

def sleep(data, logprobs):
    with open(pid, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)

def base(data, logprobs):
    return logprobs[0].sum()

def compute(workers=None, fn=term):
    spec = RegularizerSpec(fn, 1.0, "t", run_in="ray")
    return Pipeline(base, [spec], workers=workers, timeout=300).compute([], [torch.ones(3)])
"""


def start(body: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT + body)
    return subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )


def run(body: str, folder: Path, **environment: str) -> tuple[str, str]:
    """Output and errors of a script."""
    started = start(body, folder, **environment)
    output, errors = started.communicate(timeout=600)
    assert started.returncode == 0, errors
    return output, errors


def test_a_cluster_is_started_on_first_use_and_ends_with_the_workers(tmp_path: Path) -> None:
    body = """
logging.basicConfig(level="INFO")
with Workers() as workers:
    assert "ray" not in sys.modules
    print(compute(workers).loss_total)
    import ray
    print(ray.is_initialized())
print(ray.is_initialized())
"""
    output, errors = run(body, tmp_path, RAY_ADDRESS="local")
    assert output.split() == ["9.0", "True", "False"]
    assert errors.count("Terms with run_in='ray' run on the Ray cluster at ") == 1


def test_the_cluster_of_ray_address_is_used_and_goes_on(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    body = """
import ray
with Workers() as one, Workers() as two:
    print(compute(one).loss_total, compute(two).loss_total)
    print(ray.get_runtime_context().gcs_address)
    one.close()
    print(compute(two).loss_total, flush=True)
    if not os.fork():
        try:
            compute(two)
        except TermError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
    print(compute(two).loss_total)
print(ray.is_initialized())
"""
    output, _ = run(body, tmp_path, RAY_ADDRESS=ray_cluster.address)
    *before, forked, after, connected = output.splitlines()
    assert before == ["9.0 9.0", ray_cluster.address, "9.0"]
    assert "a process must have a connection of its own to Ray, and this one was forked" in forked
    assert (after, connected) == ("9.0", "False")


def test_a_connection_of_the_user_is_used_and_stays(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    body = f"""
import threading, ray
ray.init("{ray_cluster.address}", runtime_env={{"env_vars": {{"FACTOR": "5"}}}})

def environment(data, logprobs):
    return logprobs[0].sum() * float(os.environ["FACTOR"])

def shut_down():
    while not os.path.exists(pid):
        time.sleep(0.01)
    ray.shutdown()

with Workers() as workers:
    print(compute(workers, environment).loss_total)
print(ray.is_initialized())

with Workers() as workers:
    stopping = threading.Thread(target=shut_down)
    stopping.start()
    try:
        compute(workers, sleep)
    except TermError as error:
        print(error)
    stopping.join()
    os.environ["RAY_ADDRESS"] = "{ray_cluster.address}"
    print(compute(workers).loss_total)
print(ray.is_initialized())
"""
    output, _ = run(body, tmp_path)
    value, stays, *shut_down, again, connected = output.splitlines()
    assert (value, stays) == ("18.0", "True")
    # Ray asks the process of the task to exit; its answer may be faster than our look.
    failure = " ".join(shut_down)
    assert failure.startswith("regularizer 't' failed: ")
    assert "and was shut down" in failure or "SystemExit" in failure
    assert (again, connected) == ("9.0", "False")


def test_the_example_prints_what_it_did(ray_cluster: RayCluster) -> None:
    example = Path(__file__).parents[2] / "examples" / "ray_terms.py"
    environment = {**os.environ, **ENVIRONMENT, "RAY_ADDRESS": ray_cluster.address}
    printed = subprocess.check_output([sys.executable, example], env=environment, text=True)
    assert printed == (example.parent / "outputs" / "ray_terms.txt").read_text(encoding="utf-8")


def test_ctrl_c_kills_the_tasks(ray_cluster: RayCluster, tmp_path: Path) -> None:
    started = start("compute(fn=sleep)", tmp_path, RAY_ADDRESS=ray_cluster.address)
    pid = tmp_path / "pid"
    wait_until(lambda: pid.exists() and bool(pid.read_text()))
    os.killpg(started.pid, signal.SIGINT)
    _, errors = started.communicate(timeout=600)
    assert "KeyboardInterrupt" in errors
    assert started.returncode not in (0, None)
    wait_until(lambda: ended(int(pid.read_text())))


def test_the_ray_client_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:1")
    with pytest.raises(InputError, match=r"got a connection by the Ray Client .*ray job submit"):
        RayConnection().open(object())


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({}, None),
        ({"num_cpus": 0}, None),
        ({"num_cpus": 4, "num_gpus": 1}, None),
        ({"num_cpus": 2, "judge": 1}, None),
        ({"num_cpus": 5}, "CPU 5; the nodes have CPU 2 | CPU 4, GPU 1"),
        (  # each is somewhere, and no node has both
            {"num_gpus": 0.5, "judge": 1},
            "CPU 1, GPU 0.5, judge 1; the nodes have CPU 2, judge 2 | CPU 4, GPU 1",
        ),
    ],
)
def test_one_node_must_have_all_resources(resources: dict[str, float], expected: str) -> None:
    nodes = [{"CPU": 2.0, "judge": 2.0, "memory": 1e9}, {"CPU": 4.0, "GPU": 1.0}]
    assert lacking(resources, nodes) == expected
    assert lacking(resources, []) is not None
