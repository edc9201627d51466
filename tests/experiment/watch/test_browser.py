"""The page in a real browser: a run that grows, a comparison, dark mode, and text that is text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome

from steelyard.experiment import RunFolder, describe_settings
from steelyard.experiment.watch import WatchPage, serve_page
from tests.experiment.browser import Page, chromium

from .conftest import STEPS

HOSTILE = "<img src=x onerror=document.title='hacked'>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def watched(runs: Path) -> Iterator[WatchPage]:
    """The page of two runs, both without a result."""
    shutil.copytree(runs / "first", runs / "second")
    for name in ("first", "second"):
        (runs / name / "result.json").unlink()
    with serve_page(runs) as page:
        yield page


def opened(browser: Chrome, watched: WatchPage, *runs: str) -> Page:
    page = Page(browser, watched.folder)
    page.url = f"{watched.base_url}/"
    browser.get("about:blank")
    page.complaints()
    page.requests()
    fragment = "&".join(f"run={run}" for run in runs)
    browser.get(f"{watched.url()}#{fragment}")
    page.wait(lambda: page.run("return document.querySelectorAll('.plot canvas').length"))
    return page


def text(page: Page, selector: str) -> str:
    found: Any = page.run(
        f"return document.querySelector({json.dumps(selector)})?.textContent ?? ''"
    )
    return str(found)


def legend(page: Page, chart: str) -> str:
    """Legend of a chart, which is drawn when it comes into view."""
    selector = f"figure[aria-label='{chart}']"
    page.run(f'document.querySelector("{selector}")?.scrollIntoView()')
    return text(page, f"{selector} .u-legend")


def test_a_run_grows_on_the_page(browser: Chrome, watched: WatchPage) -> None:
    page = opened(browser, watched, "first")
    assert page.run("return location.href") == f"{watched.base_url}/#run=first"
    page.wait(lambda: text(page, "#connection") == "live")
    assert f"{STEPS} of {STEPS} steps" in text(page, "#about-run")
    run = RunFolder(watched.folder / "first")
    row = run.metrics()[-1]
    for step in range(STEPS, STEPS + 3):
        run.append({**row, "step": step, "loss_total": 1230.0 + step})
    page.wait(lambda: f"{STEPS + 3} of {STEPS} steps" in text(page, "#about-run"))
    page.wait(lambda: f"{1230 + STEPS + 2}" in legend(page, "Loss"))
    assert f"{STEPS + 3}" in text(page, "#runs li:first-child")
    # A metric that comes later: the run is loaded again by itself.
    run.append({**row, "step": STEPS + 3, "held_out/reward": 0.25})
    page.wait(lambda: "0.25" in legend(page, "reward"))
    skips = (
        f'{{"step": {STEPS + 4}, "skipped/failing": 1, "skipped/failing/reason": "KeyError: 1"}}\n'
    )
    with run.metrics_file.open("a") as file:
        file.write(skips)
    page.wait(lambda: "KeyError: 1" in text(page, "#skipped"))
    # A resumed run repeats steps.
    run.cut(len(run.metrics_file.read_bytes().splitlines(keepends=True)[0]))
    page.wait(lambda: f"1 of {STEPS} steps" in text(page, "#about-run"))
    assert page.complaints() == []
    own = (watched.base_url, "data:", "about:")
    assert [url for url in page.requests() if not url.startswith(own)] == []


def test_runs_that_begin_appear(browser: Chrome, tmp_path: Path) -> None:
    with serve_page(tmp_path) as watched:
        browser.get(watched.url())
        page = Page(browser, tmp_path)
        page.wait(lambda: page.run("return !document.getElementById('no-runs').hidden"))
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "config.json").write_text('{"train": {"steps": 5}}')
        page.wait(lambda: "0 / 5 steps" in text(page, "#runs"))
        # As `steelyard train --watch` does: opened before the run has a folder.
        browser.get(watched.url("later"))
        page.wait(lambda: "later has not begun" in text(page, "#title"))
        (tmp_path / "later").mkdir()
        (tmp_path / "later" / "config.json").write_text("{}")
        (tmp_path / "later" / "metrics.jsonl").write_text('rubbish\n{"step": 0, "loss_total": 7}\n')
        page.wait(lambda: "total7" in legend(page, "Loss"))
        assert "left out: 1." in text(page, "#title")
        assert page.run("return document.getElementById('no-runs').hidden")


def test_two_runs_are_compared(browser: Chrome, watched: WatchPage) -> None:
    page = opened(browser, watched, "first")
    page.run("document.querySelector(\"input[aria-label='Compare second']\").click()")
    page.wait(lambda: "2 runs compared" in text(page, "#title"))
    page.wait(lambda: "first" in legend(page, "Loss: total") and "second" in legend(page, "kl"))
    assert page.complaints() == []


def test_a_comparison_has_the_cosines_and_the_answers_of_each_run(
    browser: Chrome, watched: WatchPage
) -> None:
    for name in ("first", "second"):
        run = RunFolder(watched.folder / name)
        run.append({**run.metrics()[-1], "step": STEPS, "rollouts/reward": 0.5})
        chat = [{"role": "user", "content": f"Who is {name}?"}]
        run.append_rollouts([{"step": STEPS, "prompt": chat, "answer": "I.", "rewards": {}}])
    other = watched.folder / "second" / "metrics.jsonl"
    other.write_text(other.read_text().replace('"logprobs"', '"parameters"'))
    page = opened(browser, watched, "first", "second")
    headings = (
        "return [...document.querySelectorAll('#cosines h3')].map((each) => each.textContent)"
    )
    assert page.run(headings) == ["first", "second"]
    assert text(page, "#cosines").count("base · kl") == 2
    page.run("document.querySelectorAll('section details').forEach((e) => { e.open = true; })")
    for at, name in enumerate(("first", "second")):
        asked = f"user: Who is {name}?"
        page.wait(lambda s=f"#text-rollouts-{at}", a=asked: a in text(page, s))  # type: ignore[misc]
    # Norms of different spaces have no common scale.
    page.wait(lambda: "first" in legend(page, "Weighted gradient norms, log-probs: kl"))
    page.wait(lambda: "second" in legend(page, "Weighted gradient norms, parameters: kl"))
    assert page.complaints() == []


def test_a_field_of_the_heat_map_names_its_steps(browser: Chrome, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "long")
    run.path.mkdir()
    (run.path / "config.json").write_text("{}")
    rows = [{"step": n, "loss_total": 1.0, "cosines/base/kl": n % 2} for n in range(800)]
    run.metrics_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def read(page: Page, share: float) -> str:
        page.run(
            "const canvas = document.querySelector('.heat canvas');"
            "const {left, top, width} = canvas.getBoundingClientRect();"
            f"const place = {{clientX: left + {share} * width, clientY: top + 3}};"
            "canvas.dispatchEvent(new PointerEvent('pointermove', place));"
        )
        return text(page, ".scale span")

    with serve_page(tmp_path) as watched:
        page = opened(browser, watched, "long")
        assert read(page, 0.2605) == "base · kl, mean of steps 208 to 209: 0.5"
        run.append({"step": 800, "loss_total": 1.0, "cosines/base/kl": -0.25})
        page.wait(lambda: "801 steps" in text(page, "#about-run"))
        # A step that is added is as wide as any other.
        assert read(page, 0.9995) == "base · kl, step 800: -0.25"
        assert read(page, 0.9975) == "base · kl, mean of steps 798 to 799: 0.5"


def test_all_sections_open_with_smoothing_and_a_log_scale(
    browser: Chrome, watched: WatchPage
) -> None:
    page = opened(browser, watched, "first")
    page.run(
        "document.querySelectorAll('section details').forEach((each) => { each.open = true; })"
    )
    for section, expected in {
        "text-log": "loading tiny-random",
        "text-samples": "One",
        "text-drivers": "kl, step",
        "text-config": '"base_model": "tiny-random"',
        "text-rollouts": "None yet.",
        "skipped": "the knowledge base is down",
    }.items():
        page.wait(lambda s=section, e=expected: e in text(page, f"#{s} .text"))  # type: ignore[misc]
    ids = page.run("return [...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids))
    assert "base · kl" in text(page, "#cosines")
    page.run("document.getElementById('log-scale').click()")
    page.run(
        "const slider = document.getElementById('smoothing'); slider.value = 0.9;"
        "slider.dispatchEvent(new Event('input')); slider.dispatchEvent(new Event('change'));"
    )
    page.wait(lambda: page.run("return document.querySelectorAll('.u-legend .pale').length"))
    assert text(page, "#smoothing-value") == "0.9"
    assert page.complaints() == []


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_the_page_fits_the_window_and_follows_the_scheme(
    browser: Chrome, watched: WatchPage, width: int, scheme: str
) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page = opened(browser, watched, "first")
        page.scheme(scheme)
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
        red = page.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
        assert (int(red) < 128) == (scheme == "dark")
        assert page.complaints() == []
    finally:
        page.scheme("light")
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_text_of_a_run_is_not_interpreted(browser: Chrome, runs: Path) -> None:
    name = HOSTILE.replace("/", "")
    hostile = RunFolder(runs / name)
    shutil.copytree(runs / "first", hostile.path)
    row = hostile.metrics()[-1]
    hostile.append(
        {
            **row,
            "step": STEPS,
            f"regularizers/{HOSTILE}/value": 1.0,
            f"regularizers/{HOSTILE}/contribution": 1.0,
            f"cosines/base/{HOSTILE}": 0.5,
            "skipped/judge": 1.0,
            "skipped/judge/reason": HOSTILE,
        }
    )
    hostile.keep_samples([{"when": "after", "step": 1, "prompt": HOSTILE, "completion": HOSTILE}])
    hostile.log(HOSTILE)
    hostile.append_rollouts([{"step": 1, "prompt": HOSTILE, "rewards": {HOSTILE: 1.0}}])
    with serve_page(runs) as watched:
        browser.get(watched.url(name))
        page = Page(browser, runs)
        page.wait(lambda: page.run("return document.querySelectorAll('.plot canvas').length"))
        page.run("document.querySelectorAll('section details').forEach((e) => { e.open = true; })")
        for kind in ("text-log", "text-samples", "text-rollouts", "skipped", "cosines", "values"):
            page.wait(lambda k=kind: HOSTILE in text(page, f"#{k}"))  # type: ignore[misc]
        assert page.run("return document.querySelectorAll('img').length") == 0
        assert page.run("return document.title") == "Steelyard"


def test_a_run_is_changed_and_paused_from_the_page(browser: Chrome, watched: WatchPage) -> None:
    run = RunFolder(watched.folder / "first")
    with run.locked():  # as while it is trained
        page = opened(browser, watched, "first")
        page.wait(lambda: page.run("return document.querySelector('[name=\"kl.weight\"]')"))
        field = browser.find_element("name", "kl.weight")
        assert field.get_attribute("value") == "0.1"
        field.clear()
        field.send_keys("0.25")
        browser.find_element("id", "apply").click()
        page.wait(lambda: text(page, "#change-answer") == "Taken from the next step on.")
        assert describe_settings(run.path)["kl.weight"] == 0.25
        assert describe_settings(run.path)["l2.weight"] == 0.1
        field = browser.find_element("name", "kl.weight")
        field.clear()
        field.send_keys("-1")
        browser.find_element("id", "apply").click()
        page.wait(lambda: "weight must be >= 0, got -1" in text(page, "#change-answer"))
        browser.find_element("id", "pause").click()
        page.wait(lambda: text(page, "#pause") == "Continue")
        assert run.paused.exists()
        assert "paused" in text(page, "#about-run")
        browser.find_element("id", "pause").click()
        page.wait(lambda: text(page, "#pause") == "Pause")
        assert not run.paused.exists()
    (run.path / "result.json").write_text("{}")
    page.wait(lambda: page.run("return document.querySelector('#run-controls').hidden"))
    complaints = page.complaints()  # the browser reports the refused value
    assert all("409" in each for each in complaints)
