"""Fixtures: a folder with a trained run, and clients of the page with and without its token."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from steelyard.engine.server.http_server import AllowedHosts
from steelyard.experiment import train
from steelyard.experiment.page.app import make_app
from steelyard.experiment.page.run_index import RunIndex
from steelyard.experiment.page.run_views import RunViews
from steelyard.experiment.page.security import Tokens
from tests.experiment.small_runs import KL, L2, failing, small_config, term

STEPS = 6


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run, `first`, of a real model with real terms, one of which fails."""
    folder = tmp_path_factory.mktemp("watched")
    bounded = {"use": "entropy", "name": "entropy", "weight": {"at_least": 2.0}}
    config = small_config(
        folder,
        f"train.steps={STEPS}",
        "train.track_grad_norms=true",
        'train.sample_prompts=["One"]',
        "train.sample_tokens=3",
        regularizers=[KL, L2, bounded, term(failing, on_error="skip")],
    )
    train(config, folder / "runs" / "first")
    return folder / "runs"


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """A copy of the folder of the trained run, to change."""
    return Path(shutil.copytree(trained, tmp_path / "runs"))


class Served:
    """The application of a folder, and its tokens."""

    def __init__(self, folder: Path) -> None:
        self.tokens = Tokens()
        self.views = RunViews(RunIndex(folder))
        hosts = AllowedHosts("127.0.0.1", ["gpu.example.org"])
        self.app = make_app(self.views, self.tokens, hosts, asyncio.Event())

    def stranger(self) -> TestClient:
        """Client without the cookie."""
        return TestClient(self.app, base_url="http://localhost:7007", follow_redirects=False)

    def client(self) -> TestClient:
        """Client that has opened the URL with the token."""
        client = self.stranger()
        client.get("/", params={"token": self.tokens.token})
        return client


@pytest.fixture
def served(runs: Path) -> Served:
    return Served(runs)


@pytest.fixture
def client(served: Served) -> TestClient:
    return served.client()
