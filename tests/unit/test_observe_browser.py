"""The report in a real browser: every chart is drawn, every label can be read, and nothing is loaded or run."""

from __future__ import annotations

from pathlib import Path

import browser
import numpy as np
import pytest
import sample_trace
from browser import Browser
from PIL import Image
from test_observe_report import EVIL, written_by_hand

from sglang_adaptive.observe import report
from sglang_adaptive.observe.charts import BLUE, GREEN, ORANGE, RED, SKY
from sglang_adaptive.runtime.trace_format import DECIDED, DRAFTED

WIDTH = 1280
# Colours without which a chart is not drawn.
MARKS = {
    "budget-time": [BLUE, GREEN],
    "load-time": ["#52606d"],
    "budget-load": [BLUE, GREEN],
    "pareto": [BLUE],
    "decisions": [SKY, GREEN, ORANGE],
    "cost": [BLUE, SKY, RED],
    "waste": [GREEN, RED],
    "lengths": [GREEN],
    **{f"calibration-{j}": [ORANGE, BLUE] for j in range(1, sample_trace.GAMMA + 1)},
}
BOXES = """[...document.querySelectorAll('svg.chart')].map(e => {
  const b = e.getBoundingClientRect();
  return [e.id.slice(6), b.left + scrollX, b.top + scrollY, b.right + scrollX, b.bottom + scrollY];
})"""
CUT_OFF = """[...document.querySelectorAll('svg.chart text')].filter(e => {
  const a = e.getBoundingClientRect(), b = e.closest('svg').getBoundingClientRect();
  return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
}).map(e => e.closest('svg').id + ': ' + e.textContent)"""
OVERLAPPING = """[...document.querySelectorAll('svg.chart')].flatMap(svg => {
  const texts = [...svg.querySelectorAll('text:not(.s)')].map(e => [e.textContent, e.getBoundingClientRect()]);
  return texts.flatMap(([s, a], i) => texts.slice(i + 1).filter(([t, b]) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3
  ).map(([t, b]) => svg.id + ': ' + s + ' / ' + t));
})"""


@pytest.fixture(scope="module")
def executable() -> str:
    found = browser.find()
    if found is None:
        pytest.skip(
            "THE REPORT WAS NOT LOOKED AT IN A BROWSER: there is no Chromium here. "
            f"Debian: apt-get install chromium-headless-shell; elsewhere set {browser.VARIABLE} to one."
        )
    return found


@pytest.fixture(scope="module")
def sample_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    trace = sample_trace.write(folder / "sample.trace", sample_trace.records(1800), {"draft": "made up"})
    report.main([str(trace), "-o", str(folder / "page.html")])
    return folder / "page.html"


def pixels(image: Image.Image, box: tuple[float, ...], colour: str) -> int:
    """How many pixels in ``box`` are of ``colour``, or all but so."""
    region = np.asarray(image.crop(tuple(map(round, box))).convert("RGB"), np.int64)
    wanted = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)])
    return int((np.abs(region - wanted).max(axis=2) <= 40).sum())


def test_every_chart_is_drawn_and_nothing_goes_wrong(executable, sample_page, tmp_path):
    with Browser(executable, WIDTH) as page:
        page.open(sample_page)
        boxes = {name: tuple(box) for name, *box in page.evaluate(BOXES)}
        shot = page.screenshot(tmp_path / "page.png")
        assert page.evaluate(CUT_OFF) == [], "labels are cut off"
        assert page.evaluate(OVERLAPPING) == [], "labels lie over each other"
        assert page.problems == [] and page.requested == [sample_page.as_uri()]
    image = Image.open(shot)
    assert set(boxes) == set(MARKS)
    for name, box in boxes.items():
        assert box[0] >= 0 and box[2] <= WIDTH and box[3] - box[1] > 100, f"{name} is not on the page"
        for colour in MARKS[name]:
            assert pixels(image, box, colour) > 60, f"{name} has nothing in {colour}"
        # Most of a chart is paper: a page that failed is often one colour all over.
        assert pixels(image, box, "#ffffff") > 0.15 * (box[2] - box[0]) * (box[3] - box[1]), f"{name} is no chart"


@pytest.mark.parametrize("width", [390, 800, 1920])
def test_it_fits_other_windows(executable, sample_page, width):
    with Browser(executable, width) as page:
        page.open(sample_page)
        assert page.evaluate("innerWidth") == width
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "it has to be scrolled sideways"
        assert page.evaluate(CUT_OFF) == []


def test_a_hostile_trace_runs_nothing(executable, tmp_path):
    steps = [{"requests": 2, "flags": DRAFTED | DECIDED, "reason": 0, "step_ms": 1.0, "predicted_ms": 2.0}] * 4
    trace = written_by_hand(
        tmp_path / "t", 3, steps, [(3, 1)] * 8, [EVIL], {"model": EVIL, EVIL: EVIL}, np.zeros((8, 3))
    )
    report.main([str(trace)])
    with Browser(executable) as page:
        page.open(tmp_path / "t.html")
        assert page.evaluate("document.querySelectorAll('script, img, iframe, [onload], [onerror]').length") == 0
        assert "alert(1)" in page.evaluate("document.body.innerText"), "it is shown as the text that it is"
        assert page.problems == [] and len(page.requested) == 1


def test_the_check_would_see_a_script_and_a_request(executable, tmp_path):
    """The browser does report what the other tests say does not happen."""
    path = tmp_path / "bad.html"
    path.write_text("<script>console.log('here'); throw new Error('broken')</script><img src='file:///nowhere.png'>")
    with Browser(executable) as page:
        page.open(path)
        assert any("broken" in problem for problem in page.problems)
        assert any("here" in problem for problem in page.problems)
        assert "file:///nowhere.png" in page.requested
