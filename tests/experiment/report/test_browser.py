"""The report in a real browser: charts are drawn, nothing is requested, light and dark mode."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome

from steelyard.experiment.report import write_report
from tests.experiment.browser import Page, chromium
from tests.experiment.folders import flaky, specs, write_ablation, write_lines, write_run

HOSTILE = "<img src=https://example.com/x.png onerror=\"console.error('run')\">"
CHART_SIZES = """
return [...document.querySelectorAll(".chart")].map((chart) => {
  const svg = chart.querySelector("svg.main-svg").getBoundingClientRect();
  const marks = chart.querySelectorAll("path.js-line, g.point path, .hm image").length;
  return [chart.id, svg.width, svg.height, marks];
});
"""
COLORS = """
const style = getComputedStyle(document.body);
const tick = document.querySelector(".chart .xtick text");
return [style.backgroundColor, style.color, getComputedStyle(tick).fill];
"""


def driving(step: int) -> dict[str, Any]:
    tokens = [["The ", 0.0], [HOSTILE, 0.5], [f" at {step}", 0.1]]
    data = [{"line": 2, "share": 0.6, "tokens": tokens}]
    return {"step": step, "term": "base", "grad_norm": 1.0, "file": "d.jsonl", "data": data}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with chromium(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    samples = [
        {"when": when, "step": 0, "prompt": HOSTILE, "completion": HOSTILE}
        for when in ("before", "after")
    ]
    never, at_times = flaky(*[HOSTILE] * 12, name="never"), flaky(*["away", None] * 6)
    write_run(root / "one", terms=[*specs(), never, at_times], samples=samples)
    write_lines(root / "one" / "drivers.jsonl", [driving(step) for step in (0, 4, 11)])
    write_run(root / "two", steps=5)
    write_ablation(root / "ablation")
    write_report([root / "one"], root / "one.html")
    write_report([root / "one", root / "two"], root / "several.html")
    write_report([root / "ablation"], root / "ablation.html")
    return root


def brightness(color: str) -> float:
    numbers = color.partition("(")[2].rstrip(")").split(",")
    return sum(float(each) for each in numbers[:3]) / 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["one", "several", "ablation"])
def test_charts_are_drawn_without_console_messages_or_requests(
    browser: Chrome, folder: Path, name: str, scheme: str
) -> None:
    page = Page(browser, folder / f"{name}.html")
    page.complaints()
    page.scheme(scheme)
    page.draw()
    charts = page.run(CHART_SIZES)
    assert len(charts) >= 10
    assert [chart for chart in charts if min(chart[1:]) <= 0] == []
    assert all(width > 150 and height > 150 for _, width, height, _ in charts)
    assert page.complaints() == []
    requests = page.requests()
    assert page.url in requests
    external = [
        url for url in requests if url != page.url and not url.startswith(("data:", "blob:"))
    ]
    assert external == []
    background, ink, tick = (brightness(color) for color in page.run(COLORS))
    dark = scheme == "dark"
    assert (background < 64, ink > 192, tick > 128) == (dark, dark, dark)
    assert abs(background - ink) > 128


def test_requests_and_console_messages_would_be_noticed(browser: Chrome, tmp_path: Path) -> None:
    path = tmp_path / "requesting.html"
    path.write_text(
        '<script>console.error("trouble")</script><img src="http://127.0.0.1:1/x.png">'
        '<script>document.documentElement.dataset.drawn = "1"</script>',
        encoding="utf-8",
    )
    page = Page(browser, path)
    page.draw()
    assert any("trouble" in complaint for complaint in page.complaints())
    assert "http://127.0.0.1:1/x.png" in page.requests()


def test_charts_follow_a_change_to_dark_mode(browser: Chrome, folder: Path) -> None:
    page = Page(browser, folder / "one.html")
    page.scheme("light")
    page.draw()
    before = page.run(COLORS)
    page.scheme("dark")
    page.wait(lambda: page.run(COLORS)[2] != before[2])
    after = page.run(COLORS)
    assert [brightness(color) > 128 for color in before] == [True, False, False]
    assert [brightness(color) > 128 for color in after] == [False, True, True]


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_the_page_fits_the_window(browser: Chrome, folder: Path, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page = Page(browser, folder / "one.html")
        page.draw()
        assert page.run("return document.documentElement.scrollWidth") <= width
        assert all(chart[1] < width for chart in page.run(CHART_SIZES))
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_print_layout_is_light_and_fits_the_charts(browser: Chrome, folder: Path) -> None:
    page = Page(browser, folder / "ablation.html")
    page.scheme("dark")
    page.draw()
    page.run("dispatchEvent(new Event('beforeprint'))")
    background, ink, tick = (brightness(color) for color in page.run(COLORS))
    assert background > 192
    assert max(ink, tick) < 128
    assert all(chart[1] <= 700 for chart in page.run(CHART_SIZES))
    assert page.run("return [...document.querySelectorAll('details')].every((d) => d.open)")
    page.run("dispatchEvent(new Event('afterprint'))")
    assert brightness(page.run(COLORS)[0]) < 64


def test_user_text_is_not_interpreted_as_html(browser: Chrome, folder: Path) -> None:
    page = Page(browser, folder / "one.html")
    page.draw()
    shown = page.run("return [...document.querySelectorAll('.answers p')].map(p => p.textContent)")
    assert shown == [HOSTILE, HOSTILE]
    reasons = page.run("return [...document.querySelectorAll('.reason')].map(r => r.textContent)")
    assert reasons == [f"OSError: {HOSTILE}", "OSError: away"]
    assert page.run("return document.querySelectorAll('main img').length") == 0


def test_every_chart_has_a_name_and_headings_are_in_order(browser: Chrome, folder: Path) -> None:
    page = Page(browser, folder / "one.html")
    page.draw()
    labels = page.run(
        "return [...document.querySelectorAll('.chart')].map(c => c.getAttribute('aria-label'))"
    )
    assert all(label and label.endswith(".") for label in labels)
    levels = page.run(
        "return [...document.querySelectorAll('h1, h2, h3, h4')].map(h => +h.tagName[1])"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


EXAMPLES = """
return [...document.querySelectorAll(".driven")].filter((each) => each.checkVisibility())
  .map((each) => each.querySelector(".text").textContent);
"""
TOKENS = """
return [...document.querySelectorAll(".driven:not([hidden]) .token")].map((token) => {
  const style = getComputedStyle(token);
  return [style.backgroundColor, style.color, style.textDecorationLine];
});
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_driving_examples_of_one_step_are_shown_as_coloured_text(
    browser: Chrome, folder: Path, scheme: str
) -> None:
    page = Page(browser, folder / "one.html")
    page.scheme(scheme)
    page.draw()
    assert page.run(EXAMPLES) == [f"The {HOSTILE} at 11"]
    page.run(
        "const select = document.querySelector('#driver-steps select');"
        "select.value = '4'; select.dispatchEvent(new Event('change'));"
    )
    assert page.run(EXAMPLES) == [f"The {HOSTILE} at 4"]
    strong, weak = page.run(TOKENS)
    assert strong[0] != weak[0]  # the depth of the colour
    assert [strong[2], weak[2]] == ["underline", "none"]
    assert page.run("return document.querySelectorAll('#drivers img').length") == 0
