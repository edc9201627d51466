"""Take the pictures of README and docs: of the demo's run with the term, live, and of its report.

`make pictures` trains the demo and writes `docs/images/*.png`, each with the version of Steelyard
in its text chunk `Software`, which a test compares.
"""

from __future__ import annotations

import shutil
import struct
import sys
import tempfile
import time
import zlib
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions, ChromeService

from steelyard._version import __version__
from steelyard.experiment.compare.statistics import WITH_TERMS
from steelyard.experiment.demo.demo import run_demo
from steelyard.experiment.page import serve_page, write_report

IMAGES = Path(__file__).parents[1] / "docs" / "images"
LAPTOP, PHONE = (1400, 900), (390, 844)
# Of each picture: whether it is of the live page, and the size of the window.
PICTURES = {
    "watch.png": (True, LAPTOP),
    "watch-phone.png": (True, PHONE),
    "report.png": (False, LAPTOP),
}
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
_SECONDS = 60.0  # until a page must have drawn
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def main() -> None:
    """Train the demo, or take the one that is given, and take all pictures of it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch) / "runs" / "demo"
        if len(sys.argv) == 1:
            run_demo(folder)
        report = write_report([folder], Path(scratch) / "report.html")
        with serve_page(folder) as page:
            for name, (is_live, size) in PICTURES.items():
                url = page.url(WITH_TERMS) if is_live else report.as_uri()
                picture = take(url, size, Path(scratch) / name)
                (IMAGES / name).write_bytes(with_version(picture, __version__))
                print(f"docs/images/{name}")


def take(url: str, size: tuple[int, int], profile: Path) -> bytes:
    """PNG of a page in a window of a size, once its charts are drawn."""
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    browser = Chrome(options=options, service=ChromeService(shutil.which("chromedriver")))
    try:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(url)
        deadline = time.monotonic() + _SECONDS
        while not browser.execute_script("return document.documentElement.dataset.drawn"):
            if time.monotonic() > deadline:
                raise SystemExit(f"{url} was not drawn in {_SECONDS:g} seconds.")
            time.sleep(0.05)
        browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 500))")
        return browser.get_screenshot_as_png()
    finally:
        browser.quit()


def with_version(png: bytes, version: str) -> bytes:
    """PNG with a text chunk `Software: steelyard <version>` behind its header."""
    end = len(_SIGNATURE) + 25  # the chunk IHDR: length, name, 13 bytes and the checksum
    content = b"tEXt" + b"Software\0" + f"steelyard {version}".encode("latin-1")
    chunk = struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))
    return png[:end] + chunk + png[end:]


def version_in(png: bytes) -> str | None:
    """Text of the chunk `Software` of a PNG; None without one."""
    at = len(_SIGNATURE)
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        content = png[at + 4 : at + 8 + length]
        if content.startswith(b"tEXtSoftware\0"):
            return content.partition(b"\0")[2].decode("latin-1")
        at += 12 + length
    return None


if __name__ == "__main__":
    main()
