"""The report of a trace: its numbers against the steps one by one, hostile traces, and one line for what is none."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import sample_trace
from sample_trace import GAMMA

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.observe import report, svg
from sglang_adaptive.observe.page import page
from sglang_adaptive.observe.reliability import reliability
from sglang_adaptive.observe.summary import summarise
from sglang_adaptive.observe.svg import Axis, Plot
from sglang_adaptive.runtime.trace_format import BLOCK, DECIDED, DRAFTED, HEAD, MAGIC, ROW_TYPE, STEP, STEP_TYPE
from sglang_adaptive.runtime.trace_reader import read_trace


@pytest.fixture(scope="module")
def records():
    return sample_trace.records(900)


@pytest.fixture(scope="module")
def trace_path(records, tmp_path_factory):
    return sample_trace.write(tmp_path_factory.mktemp("trace") / "sample.trace", records)


def written_by_hand(
    path: Path, gamma: int, steps: list[dict], rows: list[tuple[int, int]], reasons=("a",), meta=None, odds=None
) -> Path:
    """A trace with these steps; ``rows`` are drafts verified and accepted, ``odds`` [drafted rows, K]."""
    head = json.dumps({"gamma": gamma, "reasons": list(reasons), "meta": meta or {}}).encode()
    step_table, row_table = np.zeros(len(steps), STEP_TYPE), np.zeros(len(rows), ROW_TYPE)
    for into, values in zip(step_table, steps, strict=True):
        for name, value in {"step_ms": np.nan, "predicted_ms": np.nan, **values}.items():
            into[name] = value
    for into, (verified, accepted) in zip(row_table, rows, strict=True):
        into["verified"], into["accepted"] = verified, accepted
    raw = np.zeros((0, gamma), "<f2") if odds is None else odds.astype("<f2")
    payload = zlib.compress(step_table.tobytes() + row_table.tobytes() + raw.tobytes())
    blocks = [(HEAD, 0, head), (STEP, len(steps), payload)]
    data = b"".join(BLOCK.pack(tag, n, len(p), zlib.crc32(p), 0) + p for tag, n, p in blocks)
    path.write_bytes(MAGIC + data)
    return path


def pictures(text: str) -> dict[str, ET.Element]:
    """The page's charts by name; each must be well-formed."""
    found = [ET.fromstring(each) for each in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    return {each.attrib["id"].removeprefix("chart-"): each for each in found}


class Tags(HTMLParser):
    """Every tag and attribute name of a page, and the links in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_the_numbers_are_those_of_the_steps_one_by_one(trace_path, records):
    s = summarise(read_trace(trace_path))
    rows = [(v - 1, c - 1, r) for r in records for v, c in zip(r.verify_lens, r.commit_lens, strict=True)]
    assert (s.steps, s.requests) == (len(records), len(rows))
    assert s.tokens == sum(accepted + 1 for _, accepted, _ in rows)
    drafted = [row for row in rows if row[2].confidence is not None]
    for j in range(GAMMA):
        assert s.proposed[j] == len(drafted)
        assert s.verified[j] == sum(verified > j for verified, _, _ in rows)
        assert s.accepted[j] == sum(accepted > j for _, accepted, _ in rows)
    assert s.lengths.tolist() == pytest.approx(
        [sum(accepted == n for _, accepted, _ in rows) / len(rows) for n in range(GAMMA + 1)]
    )
    for load in s.loads:
        mine = [r for r in records if load.low <= len(r.slots) <= load.high]
        timed = [r for r in mine if r.step_ms is not None]
        requests = sum(len(r.slots) for r in mine)
        assert load.steps == len(mine)
        assert load.verify_length == pytest.approx(sum(r.verify_lens.sum() for r in mine) / requests)
        assert load.accept_length == pytest.approx(sum(r.commit_lens.sum() for r in mine) / requests)
        tokens = sum(r.commit_lens.sum() for r in timed)
        assert load.server_rate == pytest.approx(1e3 * tokens / sum(r.step_ms for r in timed), rel=1e-4)
        per_user = 1e3 * tokens / sum(r.step_ms * len(r.slots) for r in timed)
        assert load.user_rate == pytest.approx(per_user, rel=1e-4)
        assert load.reasons.sum() == pytest.approx(1.0)
    both = [(r.step_ms, r.decision.predicted_ms) for r in records if r.step_ms is not None]
    assert s.step_error == pytest.approx(np.median([abs(p / m - 1) for m, p in both]), rel=1e-3)


def test_cost_by_tokens(trace_path, records):
    s = summarise(read_trace(trace_path))
    for cost, drafted in ((s.drafting_cost, True), (s.plain_cost, False)):
        mine = [r for r in records if r.step_ms is not None and (r.confidence is not None) == drafted]
        for tokens, count, measured in zip(cost.tokens, cost.count, cost.measured, strict=True):
            times = [r.step_ms for r in mine if r.verify_lens.sum() == tokens]
            assert count == len(times) >= 3
            assert measured == pytest.approx(np.median(times), rel=1e-4)


def test_time_bins_hold_every_step_once(trace_path, records):
    time = summarise(read_trace(trace_path)).over_time
    edges = np.concatenate([[0], (time.step[1:] + time.step[:-1]) / 2, [len(records)]])
    assert np.average(time.requests, weights=np.diff(edges)) == pytest.approx(
        np.mean([len(r.slots) for r in records]), rel=0.01
    )
    assert (np.diff(time.step) > 0).all()


def test_the_head_that_is_too_sure_is_found_out_and_the_calibration_mends_it(trace_path):
    found = reliability(read_trace(trace_path))
    assert found.raw.overall > 0.03 and found.online.overall < 0.6 * found.raw.overall
    high = found.raw.count[0].argmax()
    assert found.raw.confidence[0, high] > found.raw.accepted[0, high] + 0.02


def test_reliability_by_hand(tmp_path):
    odds = np.array([[2.0, 2.0], [2.0, -1.0], [2.0, 2.0]])
    steps = [{"requests": 3, "flags": DRAFTED}]
    path = written_by_hand(tmp_path / "t", 2, steps, [(2, 2), (2, 1), (1, 0)], odds=odds)
    curve = reliability(read_trace(path)).raw
    # Decided: request 1 both, request 2 both (the second rejected), request 3 the first one only (rejected).
    assert curve.count.sum(axis=1).tolist() == [3, 2]
    sure, unsure = 1 / (1 + np.exp(-2.0)), 1 / (1 + np.exp(1.0))
    assert curve.accepted[0, 8] == pytest.approx(2 / 3) and curve.confidence[0, 8] == pytest.approx(sure, rel=1e-3)
    assert curve.error[1] == pytest.approx((abs(sure - 1) + unsure) / 2, rel=1e-3)


def test_the_page_needs_nothing_else(trace_path):
    text = page(summarise(read_trace(trace_path)), "sample.trace")
    tags = Tags(text)
    assert not tags.tags & {"script", "img", "iframe", "object", "embed", "link", "base", "form"}
    assert not [name for name in tags.attributes if name.startswith("on") or name in ("src", "href", "style")]
    assert "url(" not in text and "@import" not in text
    assert set(re.findall(r"https?://[^\"]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "Content-Security-Policy" in text and "default-src 'none'" in text
    names = set(pictures(text))
    charts = {"budget-time", "load-time", "budget-load", "pareto", "decisions", "cost", "waste", "lengths"}
    assert names == charts | {f"calibration-{j}" for j in range(1, GAMMA + 1)}
    assert "nan" not in re.sub(r">[^<]*<", "><", text)


def test_every_chart_says_what_its_axes_are(trace_path):
    for name, picture in pictures(page(summarise(read_trace(trace_path)), "t")).items():
        titles = [each.text for each in picture.iter() if each.attrib.get("class") == "a"]
        assert len(titles) == 2 and all(titles), name


EVIL = "</title></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'><svg onload=alert(3)>&{}"


def test_a_hostile_trace_is_only_text(tmp_path):
    steps = [{"requests": 2, "flags": DRAFTED | DECIDED, "reason": 0, "step_ms": 1.0, "predicted_ms": 2.0}] * 4
    odds = np.zeros((8, 3))
    path = written_by_hand(tmp_path / "t", 3, steps, [(3, 1)] * 8, [EVIL], {"model": EVIL, EVIL: "x" * 10**6}, odds)
    text = page(summarise(read_trace(path)), EVIL)
    tags = Tags(text)
    assert not tags.tags & {"script", "img"} and not [name for name in tags.attributes if name.startswith("on")]
    assert len(text) < 200_000
    pictures(text)


@pytest.mark.parametrize(
    "gamma, steps, rows, odds",
    [
        (1, [{"requests": 1}], [(0, 0)], None),
        (255, [{"requests": 1, "flags": DRAFTED}], [(255, 255)], np.full((1, 255), np.nan)),
        (2, [{"requests": 1, "flags": DRAFTED, "step_ms": np.inf, "predicted_ms": -1}], [(1, 0)], np.zeros((1, 2))),
        (2, [{"requests": 1, "step_ms": 1e-30}, {"requests": 1, "step_ms": 1e30}] * 4, [(0, 0)] * 8, None),
        (2, [{"requests": 0}, {"requests": 2, "flags": DECIDED}], [(0, 0)] * 2, None),
        (2, [{"requests": 1, "iteration": -(2**63)}] * 3, [(2, 2), (0, 0), (1, 1)], None),
    ],
    ids=["plain", "widest", "odd times", "extreme times", "empty step", "undrafted with drafts"],
)
def test_odd_traces_have_a_page(tmp_path, gamma, steps, rows, odds):
    text = page(summarise(read_trace(written_by_hand(tmp_path / "t", gamma, steps, rows, odds=odds))), "t")
    assert len(pictures(text)) >= 3
    assert "nan" not in re.sub(r">[^<]*<", "><", text) and "inf" not in re.sub(r">[^<]*<|<style.*</style>", "", text)


def run(*arguments: object) -> int:
    return report.main([str(argument) for argument in arguments])


def test_the_command_writes_the_page_beside_the_trace_or_where_it_is_told(trace_path, tmp_path, capsys):
    assert run(trace_path) == 0
    beside = trace_path.with_name("sample.trace.html")
    assert capsys.readouterr().out.strip() == str(beside)
    assert run(trace_path, "-o", tmp_path / "page.html") == 0
    assert (tmp_path / "page.html").read_text() == beside.read_text()


def refusal(*arguments: object) -> str:
    with pytest.raises(AdaptiveError) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_no_trace(tmp_path, trace_path):
    other = tmp_path / "other"
    other.write_text("hello")
    assert "is no trace" in refusal(other)
    assert "Cannot read the trace" in refusal(tmp_path / "missing")
    assert "Cannot read the trace" in refusal(tmp_path)
    assert "is the trace itself" in refusal(trace_path, "-o", trace_path)
    assert "Cannot write" in refusal(trace_path, "-o", tmp_path / "no" / "where.html")
    empty = written_by_hand(tmp_path / "empty", 3, [], [])
    assert "has no steps yet" in refusal(empty)
    assert not list(tmp_path.glob("*.html"))


def test_a_trace_that_is_cut_off_says_so(trace_path, tmp_path):
    cut = tmp_path / "cut.trace"
    cut.write_bytes(trace_path.read_bytes()[:-1000])
    assert run(cut) == 0
    text = (tmp_path / "cut.trace.html").read_text()
    assert "ends in the middle of a block" in text
    assert "ends in the middle" not in page(summarise(read_trace(trace_path)), "t")


def test_ticks_are_round_and_inside():
    for low, high in ((0, 1), (0, 7.3), (3.2, 3.9), (0, 123456), (-5, 5), (0, 1e-7)):
        values = svg.ticks(low, high)
        assert 2 <= len(values) <= 7 and all(low - 1e-9 <= value <= high + 1e-9 for value in values)
    assert svg.log2_ticks(1, 70) == [1, 2, 4, 8, 16, 32, 64]
    assert len(svg.log2_ticks(1, 2**40)) <= 8
    assert [svg.label(v) for v in (0, 0.25, 12000, 1e6, 2e-5, 3)] == ["0", "0.25", "12,000", "1e6", "2e-5", "3"]


def test_marks_lie_where_their_values_are():
    plot = Plot("p", "t", Axis(0, 10, "x"), Axis(0, 1, "y"), 400, 300)
    plot.dots(np.array([0.0, 5.0, 10.0, np.nan]), np.array([0.0, 0.5, 1.0, 0.5]), "#123456")
    plot.line(np.array([0.0, 1.0, np.nan, 3.0, 4.0]), np.zeros(5), "#123456")
    picture = ET.fromstring(plot.svg())
    at = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in picture.iter() if c.tag.endswith("circle")]
    assert len(at) == 3, "a missing value has no mark"
    (x0, y0), (x1, y1), (x2, y2) = at
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1) and y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert x0 < x2 and y2 < y0 and y2 == 12 and y0 == 300 - 44
    line = next(p.attrib["d"] for p in picture.iter() if p.attrib.get("stroke-linejoin"))
    assert line.count("M") == 2, "a line is interrupted where a value is missing"
