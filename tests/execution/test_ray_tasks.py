from __future__ import annotations
import time
import ray
from tests.ray_cluster import RayCluster


def test_up(ray_driver: RayCluster) -> None:
    @ray.remote
    def f():
        return 1

    assert ray.get(f.remote()) == 1
    assert len(ray.nodes()) == 2


def test_client(ray_cluster: RayCluster) -> None:
    import subprocess, sys

    t = time.time()
    print(
        subprocess.run(
            [
                sys.executable,
                "-c",
                f"import ray; ray.init('{ray_cluster.client_address}'); print(ray.get(ray.remote(lambda: 5).remote()))",
            ],
            check=True,
            capture_output=True,
            text=True,
        ),
        time.time() - t,
    )
