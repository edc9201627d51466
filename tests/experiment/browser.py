"""Headless Chromium for tests: load a page, run scripts, read its console and requests."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1000",
)


class Page:
    """A page in the browser."""

    def __init__(self, driver: Chrome, path: Path) -> None:
        self.driver = driver
        self.url = path.as_uri()

    def run(self, script: str) -> Any:
        """Run JavaScript and return its result."""
        return self.driver.execute_script(script)

    def draw(self) -> None:
        """Load the page and wait until its charts are drawn."""
        self.driver.get(self.url)
        self.wait(lambda: self.run("return document.documentElement.dataset.drawn"))

    def wait(self, until: Callable[[], Any]) -> None:
        """Wait until a condition holds; raise after ten minutes."""
        WebDriverWait(self.driver, 600, poll_frequency=0.02).until(lambda _: until())

    def scheme(self, scheme: str) -> None:
        """Set the preferred colour scheme, `"light"` or `"dark"`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def complaints(self) -> list[str]:
        """Messages on the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]

    def requests(self) -> list[str]:
        """URLs that the page itself requested."""
        log = self.driver.get_log("performance")  # type: ignore[no-untyped-call]
        sent = [json.loads(entry["message"])["message"] for entry in log]
        return [
            event["params"]["request"]["url"]
            for event in sent
            if event["method"] == "Network.requestWillBeSent"
            and event["params"]["documentURL"].partition("#")[0] == self.url
        ]


@contextmanager
def chromium(profile: Path) -> Iterator[Chrome]:
    """Start the browser; without one, skip the test, or fail if `REQUIRE_BROWSER` is 1."""
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        leave = pytest.fail if os.environ.get("REQUIRE_BROWSER") == "1" else pytest.skip
        leave("no Chromium with its driver on this machine")
    options = ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = Chrome(options=options, service=ChromeService(driver))
    try:
        yield browser
    finally:
        browser.quit()
