"""A written report in a browser: nothing is requested, light, dark and paper, text stays text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from steelyard.experiment.page.frozen import write_report
from tests.experiment.browser import Page, chromium
from tests.experiment.folders import flaky, specs, write_ablation, write_lines, write_run

HOSTILE = "<img src=https://example.com/x.png onerror=\"console.error('run')\"></script>"
PAPER_WIDTH = 700
UNFOLD = "document.querySelectorAll('main details').forEach((each) => { each.open = true; });"
CANVASES = """
return [...document.querySelectorAll('main canvas')].filter((canvas) => canvas.checkVisibility())
  .map((canvas) => { const {width, height} = canvas.getBoundingClientRect();
    return [width, height, canvas.closest('figure').ariaLabel]; });
"""
COLOURS = """
const style = getComputedStyle(document.body);
return [style.backgroundColor, style.color];
"""
TOKENS = """
return [...document.querySelectorAll('#term-details .token')].filter((token) => token.title)
  .map((token) => { const style = getComputedStyle(token);
    return [token.textContent, style.backgroundColor, style.textDecorationLine]; });
"""


def driving(step: int) -> dict[str, Any]:
    tokens = [["The ", 0.0], [HOSTILE, 0.5], [f" at {step}", 0.1]]
    data = [{"line": 2, "share": 0.6, "tokens": tokens}]
    return {"step": step, "term": "base", "grad_norm": 1.0, "file": "d.jsonl", "data": data}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


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
    write_ablation(root / "ablation", seeds=2)
    write_report([root / "one"], root / "one.html")
    write_report([root / "one", root / "two"], root / "several.html")
    write_report([root / "ablation"], root / "ablation.html")
    return root


def brightness(colour: str) -> float:
    numbers = colour.partition("(")[2].rstrip(")").split(",")
    return sum(float(number) for number in numbers[:3]) / 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["one", "several", "ablation"])
def test_charts_are_drawn_without_console_messages_or_requests(
    browser: Chrome, folder: Path, name: str, scheme: str
) -> None:
    page = Page(browser, folder / f"{name}.html")
    page.complaints()
    page.scheme(scheme)
    page.draw()
    page.run(UNFOLD)
    page.run("document.querySelectorAll('.plot').forEach((plot) => plot.scrollIntoView());")
    # Those in view are drawn, and all when the page is printed.
    page.run("dispatchEvent(new Event('beforeprint')); dispatchEvent(new Event('afterprint'));")
    undrawn = (
        "return [...document.querySelectorAll('.plot')]"
        ".filter((plot) => plot.checkVisibility() && !plot.querySelector('canvas')).length"
    )
    page.wait(lambda: page.run(undrawn) == 0)
    canvases = page.run(CANVASES)
    assert len(canvases) >= 5
    assert [label for width, height, label in canvases if min(width, height) < 15] == []
    assert all(label for _, _, label in canvases)
    assert page.complaints() == []
    requests = page.requests()
    assert page.url in requests
    assert [url for url in requests if url != page.url and not url.startswith("data:")] == []
    background, ink = (brightness(colour) for colour in page.run(COLOURS))
    dark = scheme == "dark"
    assert (background < 64, ink > 192) == (dark, dark)
    page.scheme("light")


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


def test_a_report_of_several_runs_has_a_map_of_the_cosines_of_each(
    browser: Chrome, folder: Path
) -> None:
    page = Page(browser, folder / "several.html")
    page.draw()
    maps = "return [...document.querySelectorAll('#charts-cosines figure')].map(m => m.ariaLabel)"
    assert page.run(maps) == [
        "Cosines between gradients: one",
        "Cosines between gradients: two",
    ]
    page.run("document.querySelector('#charts-cosines summary').click()")
    drawn = "return [...document.querySelectorAll('#charts-cosines canvas')].map(c => c.height)"
    page.wait(lambda: all(height > 0 and height != 150 for height in page.run(drawn)))


def test_lines_follow_a_change_to_dark_mode(browser: Chrome, folder: Path) -> None:
    page = Page(browser, folder / "one.html")
    page.scheme("light")
    page.draw()
    stroke = (
        "return document.querySelector('#loss .plot').chart.plot?.series[1].stroke().toString()"
    )
    page.wait(lambda: page.run(stroke))
    before = page.run(stroke)
    page.scheme("dark")
    page.wait(lambda: page.run(stroke) not in (None, before))
    page.scheme("light")


@pytest.mark.parametrize("width", [360, 800, 1600])
@pytest.mark.parametrize("name", ["one", "ablation"])
def test_the_page_fits_the_window(browser: Chrome, folder: Path, name: str, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page = Page(browser, folder / f"{name}.html")
        page.draw()
        page.run(UNFOLD)
        assert page.run("return document.documentElement.scrollWidth") <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_paper_is_white_unfolded_and_of_its_own_width(browser: Chrome, folder: Path) -> None:
    page = Page(browser, folder / "ablation.html")
    page.scheme("dark")
    page.draw()
    page.run("dispatchEvent(new Event('beforeprint'))")
    background, ink = (brightness(colour) for colour in page.run(COLOURS))
    assert background == 255
    assert ink < 64
    assert all(width <= PAPER_WIDTH for width, _, _ in page.run(CANVASES))
    assert page.run(
        "return [...document.querySelectorAll('.foldable > details')].every(d => d.open)"
    )
    page.run("dispatchEvent(new Event('afterprint'))")
    assert brightness(page.run(COLOURS)[0]) < 64
    page.scheme("light")


def test_the_table_of_terms_fits_on_paper(browser: Chrome, folder: Path) -> None:
    page = Page(browser, folder / "one.html")
    page.draw()
    page.run("dispatchEvent(new Event('beforeprint'))")
    sizes = "const table = document.querySelector('#terms .scroll');"
    assert page.run(f"{sizes} return table.scrollWidth <= table.clientWidth")
    page.run("dispatchEvent(new Event('afterprint'))")


def test_text_of_a_run_is_not_interpreted(browser: Chrome, folder: Path) -> None:
    page = Page(browser, folder / "one.html")
    page.draw()
    shown = page.run("return [...document.querySelectorAll('.answers p')].map(p => p.textContent)")
    assert shown == [HOSTILE, HOSTILE]
    assert HOSTILE in page.run("return document.querySelector('#skipped').textContent")
    assert page.run("return document.querySelectorAll('main img').length") == 0


def test_headings_are_in_order_and_ids_are_unique(browser: Chrome, folder: Path) -> None:
    for name in ("one", "several", "ablation"):
        page = Page(browser, folder / f"{name}.html")
        page.draw()
        page.run(UNFOLD)
        levels = page.run(
            "return [...document.querySelectorAll('main :is(h1, h2, h3, h4)')]"
            ".map((heading) => +heading.tagName[1])"
        )
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after - before <= 1 for before, after in pairwise(levels)), (name, levels)
        ids = page.run("return [...document.querySelectorAll('[id]')].map((each) => each.id)")
        assert len(ids) == len(set(ids))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_driving_examples_of_one_step_are_coloured_within_what_is_shown(
    browser: Chrome, folder: Path, scheme: str
) -> None:
    page = Page(browser, folder / "one.html")
    page.scheme(scheme)
    page.draw()
    browser.find_element(By.CSS_SELECTOR, "tr[data-name='base'] button").click()
    page.wait(lambda: page.run(TOKENS))
    strong, weak = page.run(TOKENS)
    assert (strong[0], weak[0]) == (HOSTILE, " at 11")
    assert strong[1] != weak[1]  # the depth of the colour
    assert [strong[2], weak[2]] == ["underline", "none"]
    page.run(
        "const select = document.querySelector('#term-details select');"
        "select.value = '4'; select.dispatchEvent(new Event('change'));"
    )
    assert page.run(TOKENS)[1][0] == " at 4"
    assert page.run("return document.querySelectorAll('#term-details img').length") == 0
    page.scheme("light")


def test_smoothing_works_without_a_server(browser: Chrome, folder: Path) -> None:
    page = Page(browser, folder / "one.html")
    page.draw()
    page.run(
        "const slider = document.getElementById('smoothing'); slider.value = 0.5;"
        "slider.dispatchEvent(new Event('input')); slider.dispatchEvent(new Event('change'));"
    )
    smoothed = page.run("return document.querySelector('#loss .plot').chart.lines[0].curve")
    kept, weight, expected = 0.0, 0.0, []
    for value in smoothed["values"]:  # the definition: weights 0.5^age, over their sum
        kept, weight = 0.5 * kept + value, 0.5 * weight + 1
        expected.append(kept / weight)
    assert smoothed["smooth"]["values"] == pytest.approx(expected)
    assert page.complaints() == []


def test_a_long_run_is_a_file_of_moderate_size(browser: Chrome, tmp_path: Path) -> None:
    run = tmp_path / "long"
    run.mkdir()
    (run / "config.json").write_text("{}")
    fields = ("value", "weight", "contribution", "grad_norm", "grad_norm_weighted", "duration")
    rows = (
        {"step": n, "loss_total": 1 / (1 + n), "base_loss/value": 1 / (2 + n)}
        | {f"regularizers/t{k}/{key}": n**0.5 % (k + 7.123) for k in range(7) for key in fields}
        | {f"cosines/base/t{k}": n % 3 - 1 for k in range(7)}
        for n in range(10_000)
    )
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    target = write_report([run], tmp_path / "long.html")
    assert target.stat().st_size <= 1_500_000
    page = Page(browser, target)
    page.draw()
    page.wait(lambda: page.run(CANVASES))
    assert page.complaints() == []
