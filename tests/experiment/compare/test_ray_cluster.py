"""The address of a cluster, and what a run asks it for."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import pytest
import ray

from steelyard.errors import ConfigError, RunError
from steelyard.experiment.compare import ray_cluster
from steelyard.experiment.compare.ray_cluster import RayCluster, runs_at_once
from steelyard.experiment.config.schema import ModelConfig

NODES = [{"CPU": 8.0, "memory": 4.0 * 2**30}, {"CPU": 2.0, "GPU": 1.0, "memory": 2.0 * 2**30}]


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379", "head:6379", "ray://[::1]:10001"])
def test_addresses(address: str) -> None:
    assert RayCluster(address).address == address


@pytest.mark.parametrize("address", ["", "head", "http://head:6379", "ray://head", "a b:1", "x:y"])
def test_other_forms_are_refused(address: str) -> None:
    with pytest.raises(
        ConfigError, match=r"must be 'auto', 'HOST:6379' on a node .*, or 'ray://HOST:10001'.*, got"
    ):
        RayCluster(address)


@pytest.mark.parametrize("name", ["cpus", "gpus", "memory"])
@pytest.mark.parametrize("value", [-1, float("nan"), "2"])
def test_resources_are_numbers(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} of a run on Ray must be a finite number >= 0"):
        RayCluster(**{name: value})  # type: ignore[arg-type]  # the fault


@pytest.mark.parametrize(
    ("device", "backend", "gpus"),
    [(None, "local", 1), ("cuda:0", "local", 1), ("cpu", "local", 0), (None, "tinker", 0)],
)
def test_a_run_gets_a_gpu_by_its_device(device: str, backend: str, gpus: int) -> None:
    model = ModelConfig.model_validate({"device": device, "backend": backend})
    assert RayCluster().options(model, NODES)["num_gpus"] == gpus
    assert RayCluster(gpus=0.5).options(model, NODES)["num_gpus"] == 0.5


def test_without_a_gpu_in_the_cluster_a_run_without_a_device_uses_the_cpu() -> None:
    assert RayCluster().options(ModelConfig(), NODES[:1])["num_gpus"] == 0


def test_the_runs_that_fit_are_counted_by_node() -> None:
    assert runs_at_once({"num_cpus": 3, "num_gpus": 0, "memory": None}, NODES) == 2
    assert runs_at_once({"num_cpus": 1, "num_gpus": 0, "memory": 2 * 2**30}, NODES) == 3


def test_resources_that_no_node_has_are_named() -> None:
    with pytest.raises(
        RunError,
        match=r"must have all that a run asks for, CPU 4, GPU 1, 3 GiB, and the nodes have "
        r"CPU 8, 4 GiB \| CPU 2, GPU 1, 2 GiB: ask for less with --ray-cpus",
    ):
        RayCluster(cpus=4, memory=3).options(ModelConfig(device="cuda"), NODES)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_answers_is_named_soon(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr(ray_cluster, "_CONNECT_SECONDS", 0.2)
    with socket.socket() as silent:  # accepts connections, and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"{scheme}127.0.0.1:{silent.getsockname()[1]}"
        with (
            pytest.raises(
                RunError,
                match=rf"must be reachable at '{address}', and it is not: nothing answered within "
                r"0\.2 s\. Give 'auto', ",
            ),
            RayCluster(address).connect(),
        ):
            pass


@pytest.mark.parametrize(("failures", "connected"), [(0, True), (1, True), (2, False)])
def test_a_ray_client_whose_process_dies_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch, failures: int, connected: bool
) -> None:
    calls: list[str] = []

    def init(**_: Any) -> None:
        calls.append("init")
        if calls.count("init") <= failures:
            raise ConnectionAbortedError("Starting Ray client server failed.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    outcome = contextlib.nullcontext() if connected else pytest.raises(RunError, match="server fai")
    with outcome, RayCluster("auto").connect():
        pass
    assert calls == ["init", "shutdown"] * min(2, failures + 1)
