"""The live page in a browser: a run that grows, its terms, the list, a comparison, controls."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By

from steelyard.experiment import RunFolder
from steelyard.experiment.page.server import WatchPage, serve_page
from steelyard.experiment.run.changes import describe_settings
from tests.experiment.browser import Page, chromium
from tests.experiment.folders import write_ablation

from .conftest import STEPS

HOSTILE = "<img src=x onerror=document.title='hacked'>"
UNFOLD = "document.querySelectorAll('main details').forEach((each) => { each.open = true; });"
NAMES_OF_RUNS = "return [...document.querySelectorAll('#runs .of-name a')].map(a => a.textContent)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def watched(runs: Path) -> Iterator[WatchPage]:
    """The page of two runs, both without a result; the second changed last."""
    shutil.copytree(runs / "first", runs / "second")
    for name in ("first", "second"):
        (runs / name / "result.json").unlink()
    (runs / "second" / "metrics.jsonl").touch()
    with serve_page(runs) as page:
        yield page


def visited(browser: Chrome, watched: WatchPage, fragment: str = "") -> Page:
    page = Page(browser, watched.folder)
    page.url = f"{watched.base_url}/"
    browser.get("about:blank")
    page.complaints()
    page.requests()
    browser.get(f"{watched.url()}#{fragment}")
    page.wait(lambda: page.run("return document.documentElement.dataset.drawn"))
    return page


def opened(browser: Chrome, watched: WatchPage, *runs: str) -> Page:
    page = visited(browser, watched, "&".join(f"run={run}" for run in runs))
    page.wait(lambda: page.run("return document.querySelectorAll('.plot canvas').length"))
    return page


def text(page: Page, selector: str) -> str:
    content: Any = page.run(
        f"return document.querySelector({json.dumps(selector)})?.textContent ?? ''"
    )
    return str(content)


def legend(page: Page, chart: str) -> str:
    """Legend of a chart, which is drawn when it comes into view."""
    selector = f'figure[aria-label="{chart}"]'
    page.run(
        f"const card = document.querySelector('{selector}');"
        "if (card) { const fold = card.closest('details'); if (fold) fold.open = true;"
        "  card.scrollIntoView({block: 'center'}); }"
    )
    return text(page, f"{selector} .legend")


def resize(browser: Chrome, width: int, height: int) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


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
    page.wait(lambda: f"{STEPS + 3}" in text(page, "#runs tbody tr .about"))
    # The sentence follows, which the server computes again.
    page.wait(lambda: text(page, ".lead").startswith(f"{STEPS + 3} steps"))
    # A metric that comes later: the run is loaded again by itself.
    run.append({**row, "step": STEPS + 3, "held_out/score": 0.25})
    run.append({**row, "step": STEPS + 4, "held_out/score": 0.5})
    page.wait(lambda: "0.5" in legend(page, "score"))
    skips = (
        f'{{"step": {STEPS + 5}, "skipped/failing": 1, "skipped/failing/reason": "KeyError: 1"}}\n'
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
        page = visited(browser, watched)
        page.wait(lambda: page.run("return !document.getElementById('no-runs').hidden"))
        # As `steelyard train --watch` does: opened before the run has a folder.
        browser.get(watched.url("later"))
        page.wait(lambda: "later has not begun" in text(page, "#problem"))
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "config.json").write_text('{"train": {"steps": 5}}')
        page.wait(lambda: "0 / 5" in text(page, "#runs"))
        (tmp_path / "later").mkdir()
        (tmp_path / "later" / "config.json").write_text("{}")
        (tmp_path / "later" / "metrics.jsonl").write_text(
            'rubbish\n{"step": 0, "loss_total": 7}\n{"step": 1, "loss_total": 6}\n'
        )
        page.wait(lambda: "6" in legend(page, "Loss"))
        assert "left out: 1." in text(page, "#summary")
        assert page.run("return document.getElementById('no-runs').hidden")


def test_the_newest_run_opens_by_itself(browser: Chrome, watched: WatchPage) -> None:
    page = visited(browser, watched)
    page.wait(lambda: text(page, "h1") == "second")
    assert page.run("return location.hash") == "#run=second"
    assert page.run("return document.getElementById('hint').hidden")


def test_the_first_screen_has_the_sentence_the_terms_and_the_loss(
    browser: Chrome, watched: WatchPage
) -> None:
    resize(browser, 1400, 900)
    try:
        with RunFolder(watched.folder / "first").locked():  # as while it is trained
            page = opened(browser, watched, "first")
            page.wait(lambda: page.run("return !document.querySelector('#run-controls').hidden"))
        places = page.run(
            "return ['.lead', '.findings, .healthy', '.terms', '#loss .plot'].map((selector) => "
            "document.querySelector(selector).getBoundingClientRect().bottom)"
        )
        assert places == sorted(places)
        assert places[-1] <= 900
        assert page.run(
            "const table = document.querySelector('#terms .scroll');"
            "return table.scrollWidth <= table.clientWidth"
        )
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_term_opens_at_a_click_or_a_key_in_its_colour(
    browser: Chrome, watched: WatchPage
) -> None:
    page = opened(browser, watched, "first")
    assert page.run("return document.getElementById('term-details').hidden")
    browser.find_element(By.CSS_SELECTOR, "tr[data-name='kl'] .value").click()
    page.wait(lambda: text(page, "#term-details h2") == "kl")
    assert page.run("return location.hash") == "#run=first&term=kl"
    page.wait(lambda: "Which examples drive it" in text(page, "#term-details"))
    charts = page.run(
        "return [...document.querySelectorAll('#term-details figure')].map(f => f.ariaLabel)"
    )
    assert charts[0] == "kl"
    assert any(chart.startswith("Weighted gradient norms") for chart in charts)
    assert "Cosines of kl with the others" in charts
    assert "Weights and multipliers" not in charts  # its weight never changed: the table has it
    colours = page.run(
        "const colour = (selector, name) =>"
        "  getComputedStyle(document.querySelector(selector))[name];"
        "return [colour(\"tr[data-name='kl'] .chip\", 'backgroundColor'),"
        " colour('#term-details h2 .chip', 'backgroundColor'),"
        " colour('#term-details .legend .key', 'color'),"
        " colour(\"tr[data-name='kl'] .spark\", 'color'),"
        " colour(\"tr[data-name='l2'] .chip\", 'backgroundColor')]"
    )
    assert len(set(colours[:4])) == 1
    assert colours[4] != colours[0]
    browser.find_element(By.CSS_SELECTOR, "#term-details .close").click()
    page.wait(lambda: page.run("return document.getElementById('term-details').hidden"))
    button = browser.find_element(By.CSS_SELECTOR, "tr[data-name='l2'] button")
    button.send_keys(Keys.ENTER)
    page.wait(lambda: text(page, "#term-details h2") == "l2")
    assert button.get_attribute("aria-expanded") == "true"
    assert page.complaints() == []


# Fraction of the width of a heat map up to the last field that is drawn.
INKED = """(() => {
  const canvas = map.querySelector('canvas');
  if (!canvas.clientWidth || canvas.width !== Math.round(canvas.clientWidth * devicePixelRatio))
    return 0;
  const copy = new OffscreenCanvas(canvas.width, 1);
  const context = copy.getContext('2d', {willReadFrequently: true});
  context.drawImage(canvas, 0, 0);
  const {data} = context.getImageData(0, 0, canvas.width, 1);
  let last = -1;
  for (let x = 0; x < canvas.width; x += 1) if (data[4 * x + 3]) last = x;
  return (last + 1) / canvas.width;
})()"""


def test_two_runs_are_compared(browser: Chrome, watched: WatchPage) -> None:
    page = opened(browser, watched, "first")
    page.wait(lambda: page.run("return document.querySelectorAll('#runs tbody tr').length") == 2)
    page.run("document.querySelector(\"input[aria-label='Compare second']\").click()")
    page.wait(lambda: text(page, "h1") == "2 runs compared")
    page.wait(lambda: "first" in legend(page, "Total loss"))
    assert "second" in legend(page, "Total loss")
    run = RunFolder(watched.folder / "second")
    run.append({**run.metrics()[-1], "step": STEPS + 59, "loss_total": 77.0})
    # One axis for both: the longer run ends it.
    page.wait(lambda: "77" in legend(page, "Total loss"))
    ends = page.run(
        "return [...document.querySelectorAll('.plot')].filter(({chart}) => chart.plot)"
        ".map(({chart}) => chart.plot.scales.x.max)"
    )
    assert set(ends) == {STEPS + 59}
    # A folded map of all cosines for each run, on that axis too.
    maps = "[...document.querySelectorAll('#charts-cosines figure')]"
    assert not page.run("return document.querySelector('#charts-cosines details').open")
    assert page.run(f"return {maps}.map((map) => map.ariaLabel)") == [
        "Cosines between gradients: first",
        "Cosines between gradients: second",
    ]
    page.run("document.querySelector('#charts-cosines summary').click()")
    inked = f"return {maps}.map((map) => {INKED})"
    page.wait(lambda: page.run(inked)[1:] == [1])
    assert page.run(inked)[0] == pytest.approx(STEPS / (STEPS + 60), abs=0.01)
    assert page.complaints() == []


def test_a_field_of_the_heat_map_names_its_steps(browser: Chrome, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "long")
    run.path.mkdir()
    (run.path / "config.json").write_text("{}")
    rows = [{"step": n, "loss_total": 1.0 + n, "cosines/base/kl": n % 2} for n in range(800)]
    run.metrics_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def read(page: Page, share: float) -> str:
        page.run(
            "const canvas = document.querySelector('#charts-cosines canvas');"
            "const {left, top, width} = canvas.getBoundingClientRect();"
            f"const place = {{clientX: left + {share} * width, clientY: top + 3}};"
            "canvas.dispatchEvent(new PointerEvent('pointermove', place));"
        )
        return text(page, "#charts-cosines .scale span")

    with serve_page(tmp_path) as watched:
        page = opened(browser, watched, "long")
        assert read(page, 0.2605) == "base · kl, mean of steps 208 to 209: 0.5"
        run.append({"step": 800, "loss_total": 1.0, "cosines/base/kl": -0.25})
        page.wait(lambda: "801 steps" in text(page, "#about-run"))
        # A step that is added is as wide as any other.
        assert read(page, 0.9995) == "base · kl, step 800: −0.25"
        assert read(page, 0.9975) == "base · kl, mean of steps 798 to 799: 0.5"


def test_all_sections_open_with_smoothing_and_a_log_scale(
    browser: Chrome, watched: WatchPage
) -> None:
    page = opened(browser, watched, "first")
    page.run(UNFOLD)
    for section, expected in {
        "#text-log": "loading tiny-random",
        "#text-samples": "One",
        "#text-config": '"base_model": "tiny-random"',
        "#skipped": "the knowledge base is down",
        "#charts-cosines": "base · kl",
    }.items():
        page.wait(lambda s=section, e=expected: e in text(page, s))  # type: ignore[misc]
    ids = page.run("return [...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids))
    levels = page.run(
        "return [...document.querySelectorAll('main :is(h1, h2, h3, h4)')].map(h => +h.tagName[1])"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    nameless = page.run(
        "return [...document.querySelectorAll('button, a, input, select, summary')].filter(e =>"
        " !e.textContent.trim() && !e.ariaLabel && !e.labels?.length).map(e => e.outerHTML)"
    )
    assert nameless == []
    page.run("document.getElementById('log-scale').click()")
    page.run(
        "const slider = document.getElementById('smoothing'); slider.value = 0.9;"
        "slider.dispatchEvent(new Event('input')); slider.dispatchEvent(new Event('change'));"
    )
    # A pale line stands behind each smoothed one: two series a curve, and the steps.
    drawn = "const {chart} = document.querySelector('#loss .plot'); return chart.plot &&"
    page.wait(lambda: page.run(f"{drawn} chart.plot.series.length > chart.lines.length + 1"))
    page.wait(lambda: page.run(f"{drawn} chart.plot.scales.y.distr") == 3)
    assert text(page, ".switches output") == "0.9"
    assert page.complaints() == []


def test_what_is_opened_stays_open_when_the_curves_are_loaded_again(
    browser: Chrome, watched: WatchPage
) -> None:
    page = opened(browser, watched, "first")
    page.run("document.querySelector('#charts-optimizer summary').click()")
    page.run("document.querySelector('#charts-gradients summary').click()")
    page.run(
        "document.getElementById('charts-time').isBefore = true;"
        "const slider = document.getElementById('smoothing'); slider.value = 0.5;"
        "slider.dispatchEvent(new Event('change'));"
    )
    page.wait(
        lambda: page.run(
            "const section = document.getElementById('charts-time');"
            "return section !== null && !section.isBefore"
        )
    )
    opened_now = (
        "return ['optimizer', 'gradients', 'time', 'contributions'].map((group) =>"
        " document.querySelector(`#charts-${group} details`).open)"
    )
    assert page.run(opened_now) == [True, False, False, True]


def test_a_zoom_holds_for_all_charts_and_ends(browser: Chrome, watched: WatchPage) -> None:
    page = opened(browser, watched, "first")
    page.run("document.querySelector('#loss').scrollIntoView()")
    plot = browser.find_element(By.CSS_SELECTOR, "#loss .u-over")
    ActionChains(browser).move_to_element_with_offset(plot, -60, 0).click_and_hold().move_by_offset(
        120, 5
    ).release().perform()
    ranges = (
        "return [...new Set([...document.querySelectorAll('.plot')].filter(e => e.chart.plot)"
        ".map(({chart}) => `${chart.plot.scales.x.min} ${chart.plot.scales.x.max}`))]"
    )
    page.wait(lambda: page.run(ranges) != [f"0 {STEPS - 1}"])
    (zoomed,) = page.run(ranges)
    first, last = map(float, zoomed.split())
    assert 0 < first < last < STEPS - 1
    browser.find_element(By.CSS_SELECTOR, ".switches button").click()
    page.wait(lambda: page.run(ranges) == [f"0 {STEPS - 1}"])


def test_a_change_is_a_mark_on_every_chart(browser: Chrome, watched: WatchPage) -> None:
    change = {"step": 3, "set": [{"kl.weight": 0.25}]}
    (watched.folder / "first" / "changes.jsonl").write_text(f"{json.dumps(change)}\n")
    page = opened(browser, watched, "first")
    assert "step 3" in text(page, ".changes")
    assert "kl.weight" in text(page, ".changes")
    # Pointed at, the mark says what was changed.
    page.run(
        "const {plot} = document.querySelector('#loss .plot').chart;"
        "plot.setCursor({left: plot.valToPos(3, 'x') + 2, top: 20});"
    )
    page.wait(lambda: "kl.weight" in text(page, "#loss .remark"))
    marked = page.run(
        "return [...document.querySelectorAll('.plot')].every(({chart}) =>"
        " chart.options.marks.length === 1)"
    )
    assert marked


def test_a_chart_is_saved_as_a_picture_and_as_numbers(browser: Chrome, watched: WatchPage) -> None:
    page = opened(browser, watched, "first")
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "deny"})
    page.run(
        "window.saved = []; const make = URL.createObjectURL;"
        "URL.createObjectURL = (blob) => { saved.push(blob); return make(blob); };"
        "document.querySelectorAll('#loss .save').forEach((button) => button.click());"
        "document.querySelectorAll('#charts-cosines .save').forEach((button) => button.click());"
    )
    page.wait(lambda: page.run("return saved.length") == 4)
    kinds = page.run("return saved.map(({type}) => type)")
    assert sorted(kinds) == ["image/png", "image/png", "text/csv", "text/csv"]
    table = browser.execute_async_script(
        "const done = arguments[0]; saved.find(({type}) => type === 'text/csv').text().then(done)"
    )
    head, *rows = table.splitlines()
    assert head.split(",")[:3] == ["step", "total", "base"]
    metrics = RunFolder(watched.folder / "first").metrics()
    losses = [float(row.split(",")[1]) for row in rows]
    assert losses == pytest.approx([row["loss_total"] for row in metrics], rel=1e-5)


def test_runs_are_sorted_filtered_and_grouped(browser: Chrome, runs: Path) -> None:
    write_ablation(runs / "leaving", seeds=2)
    failed = runs / "failed"
    shutil.copytree(runs / "first", failed)
    (failed / "result.json").unlink()
    failure = {"step": STEPS, "failed": "NonFiniteError", "failed/reason": "kl is NaN"}
    (failed / "failure.json").write_text(json.dumps(failure))
    with serve_page(runs) as watched:
        page = opened(browser, watched, "first")
        page.wait(lambda: "leaving" in text(page, "#runs"))
        page.wait(lambda: "NonFiniteError" in text(page, "#runs .error, #runs"))
        names = page.run(NAMES_OF_RUNS)
        assert set(names) == {"first", "failed"}  # those of the group are folded
        browser.find_element(By.CSS_SELECTOR, "#runs .twist").click()
        assert len(page.run(NAMES_OF_RUNS)) == 2 + 12
        assert len(browser.find_elements(By.CSS_SELECTOR, "#runs tr.mean")) == 6
        browser.find_element(By.ID, "widen").click()
        for key, order in (("name", "ascending"), ("name", "descending"), ("steps", "descending")):
            browser.find_element(By.CSS_SELECTOR, f"#runs thead .of-{key} button").click()
            head = browser.find_element(By.CSS_SELECTOR, f"#runs thead .of-{key}")
            assert head.get_attribute("aria-sort") == order
        steps = page.run(
            "return [...document.querySelectorAll('#runs tr:not(.mean) td.of-steps')]"
            ".map((cell) => parseInt(cell.textContent))"
        )
        assert steps == sorted(steps, reverse=True)
        browser.find_element(By.ID, "filter").send_keys("without kl")
        assert page.run(NAMES_OF_RUNS) == []
        assert not page.run("return document.getElementById('no-match').hidden")
        browser.find_element(By.ID, "filter").clear()
        browser.find_element(By.ID, "filter").send_keys("nonfinite")
        assert page.run(NAMES_OF_RUNS) == ["failed"]
        assert page.complaints() == []


def test_an_ablation_opens_with_its_effects(browser: Chrome, runs: Path) -> None:
    write_ablation(runs / "leaving", seeds=3)
    with serve_page(runs) as watched:
        page = visited(browser, watched, "group=leaving")
        page.wait(lambda: "leaving" in text(page, "h1"))
        assert "without evenness" in text(page, ".table-card")
        plots = page.run(
            "return [...document.querySelectorAll('#effects canvas')].map((canvas) =>"
            " [canvas.ariaLabel, canvas.width > 0])"
        )
        assert plots
        assert all(drawn and "without evenness" in label for label, drawn in plots)
        assert "regularizers.evenness" in text(page, "#differences")
        assert page.complaints() == []


def test_two_hundred_runs_are_listed(browser: Chrome, tmp_path: Path) -> None:
    for number in range(200):
        folder = tmp_path / f"run-{number:03}"
        folder.mkdir()
        (folder / "config.json").write_text('{"train": {"steps": 9}}')
        (folder / "metrics.jsonl").write_text(f'{{"step": 0, "loss_total": {number}.5}}\n')
    with serve_page(tmp_path) as watched:
        page = visited(browser, watched)
        rows = "return document.querySelectorAll('#runs tbody tr').length"
        page.wait(lambda: page.run(rows) == 200)
        assert page.complaints() == []


def test_ten_thousand_steps_are_drawn(browser: Chrome, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "long")
    run.path.mkdir()
    (run.path / "config.json").write_text("{}")
    rows = (
        {"step": n, "loss_total": 1 / (1 + n)}
        | {f"regularizers/t{k}/{key}": n % (k + 7) for k in range(7) for key in ("value", "weight")}
        for n in range(10_000)
    )
    run.metrics_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with serve_page(tmp_path) as watched:
        page = opened(browser, watched, "long")
        assert "10000 steps" in text(page, "#about-run")
        points = page.run("return document.querySelector('#loss .plot').chart.plot.data[0].length")
        assert 0 < points <= 2000
        assert page.complaints() == []


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (390, "dark"), (1280, "dark")])
def test_the_page_fits_the_window_and_follows_the_scheme(
    browser: Chrome, watched: WatchPage, width: int, scheme: str
) -> None:
    resize(browser, width, 844)
    page = Page(browser, watched.folder)
    try:
        page = visited(browser, watched, "run=first&term=kl")
        page.scheme(scheme)
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
        assert page.run(
            "const table = document.querySelector('#terms .scroll');"
            "return table.scrollWidth <= table.clientWidth"
        )
        red = page.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
        assert (int(red) < 128) == (scheme == "dark")
        assert page.run("return document.getElementById('runs-box').open") == (width > 720)
        assert page.complaints() == []
    finally:
        page.scheme("light")
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_text_of_a_run_is_not_interpreted(browser: Chrome, runs: Path) -> None:
    name = HOSTILE.replace("/", "")
    hostile = RunFolder(runs / name)
    shutil.copytree(runs / "first", hostile.path)
    row = hostile.metrics()[-1]
    for step in (STEPS, STEPS + 1):
        hostile.append(
            {
                **row,
                "step": step,
                f"regularizers/{HOSTILE}/value": 1.0 + step,
                f"regularizers/{HOSTILE}/contribution": 1.0,
                f"cosines/base/{HOSTILE}": 0.5,
                "skipped/judge": 1.0,
                "skipped/judge/reason": HOSTILE,
                f"rewards/{HOSTILE}/mean": float(step),
                f"constant {HOSTILE}": 3.0,
            }
        )
    hostile.keep_samples([{"when": "after", "step": 1, "prompt": HOSTILE, "completion": HOSTILE}])
    hostile.log(HOSTILE)
    answer = {"step": 1, "prompt": HOSTILE, "answer": HOSTILE, "rewards": {HOSTILE: 1.0}}
    hostile.append_rollouts([answer | {"reward": 1.0}])
    (hostile.path / "changes.jsonl").write_text(
        json.dumps({"step": 1, "set": [{HOSTILE: HOSTILE}]}) + "\n"
    )
    shutil.copytree(hostile.path, runs / "again")
    with serve_page(runs) as watched:
        browser.get(watched.url(name))
        page = Page(browser, runs)
        page.wait(lambda: page.run("return document.querySelectorAll('.plot canvas').length"))
        page.run(UNFOLD)
        for part in (
            "#text-log",
            "#text-samples",
            "#text-answers",
            "#skipped",
            "#charts-cosines",
            "#terms",
        ):
            page.wait(lambda p=part: HOSTILE in text(page, p))  # type: ignore[misc]
        browser.find_element(By.CSS_SELECTOR, "#terms tbody tr:last-child").click()
        assert page.run("return document.querySelectorAll('img').length") == 0
        page.run("location.hash = `${location.hash}&run=again`")
        page.wait(lambda: "2 runs compared" in text(page, "h1"))
        page.run(UNFOLD)
        assert HOSTILE in text(page, "#sections")
        assert page.run("return document.querySelectorAll('img').length") == 0
        assert page.run("return document.title") == "Steelyard"


def test_a_run_is_changed_and_paused_from_the_page(browser: Chrome, watched: WatchPage) -> None:
    run = RunFolder(watched.folder / "first")
    with run.locked():  # as while it is trained
        page = opened(browser, watched, "first")
        page.wait(lambda: page.run("return document.querySelector('[name=\"kl.weight\"]')"))
        browser.find_element(By.CSS_SELECTOR, "#run-controls summary").click()
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
        page.wait(lambda: text(page, "#summary .state") == "paused")
        browser.find_element("id", "pause").click()
        page.wait(lambda: text(page, "#pause") == "Pause")
        assert not run.paused.exists()
    (run.path / "result.json").write_text("{}")
    page.wait(lambda: page.run("return document.querySelector('#run-controls').hidden"))
    complaints = page.complaints()  # the browser reports the refused value
    assert all("409" in each for each in complaints)
