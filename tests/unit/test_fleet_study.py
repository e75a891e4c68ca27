"""The fleet study: what it reads off its curves, and that it runs."""

import pytest

from sglang_adaptive.benchmarks import fleet
from sglang_adaptive.errors import AdaptiveError


def test_capacity_is_where_the_promise_breaks():
    rates = [10.0, 20.0, 30.0]
    assert fleet.capacity(rates, [5.0, 10.0, 20.0], 15.0) == 25.0
    assert fleet.capacity(rates, [5.0, 10.0, 20.0], 4.0) == 0.0
    assert fleet.capacity(rates, [5.0, 10.0, 20.0], 20.0) == 30.0
    assert fleet.capacity(rates, [5.0, 30.0, 20.0], 10.0) == 12.0, "the first time counts"


def test_a_small_study(tmp_path, capsys):
    arguments = ["--arms", "none,ours", "--engines", "2", "--rates", "4,24", "--seconds", "2", "--seeds", "1"]
    assert fleet.main([*arguments, "--jobs", "1", "--slo-ms", "12", "--out", str(tmp_path / "study")]) == 0
    text = (tmp_path / "study.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| 12 |"))
    none, ours = (float(cell.strip("≥ ")) for cell in row.split("|")[2:4])
    assert none < ours, text
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("bad", [["--rates", "a"], ["--rates", "0"], ["--slo-ms", ""], ["--engines", "0"]])
def test_bad_numbers_are_refused(bad):
    with pytest.raises(AdaptiveError):
        fleet.main(bad)
