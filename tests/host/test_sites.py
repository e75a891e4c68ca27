"""Every place of the installed host that asks which algorithm runs is known, and each of them gets the family."""

from __future__ import annotations

import pytest

from sglang_adaptive.guard import sites


@pytest.fixture(scope="module")
def found():
    return sites.walk()


ADVICE = (
    "Look at it in the host: DSPARK_ADAPTIVE behaves like DSPARK there if it reads the resolved value (get_spec(), "
    "resolving_view(), or an object made from them). If it reads the raw record, declare a patch. Then run "
    "python -m sglang_adaptive.guard record."
)


def test_no_site_is_new(found):
    assert sorted(set(found) - set(sites.recorded())) == [], f"new places ask for the algorithm. {ADVICE}"


def test_no_site_is_gone(found):
    gone = sorted(set(sites.recorded()) - set(found))
    assert gone == [], f"places that asked for the algorithm are gone; where did the question move? {ADVICE}"


def test_no_site_asks_something_else(found):
    known = sites.recorded()
    changed = {name: (known[name], site) for name, site in found.items() if name in known and known[name] != site}
    assert changed == {}, f"places ask another question than recorded (recorded, found). {ADVICE}"


def test_every_site_reads_the_resolved_value_or_was_judged(found):
    assert sites.to_judge(found) - set(sites.JUDGED) == set(), (
        f"trace who feeds these, and add them to JUDGED. {ADVICE}"
    )
    assert set(sites.JUDGED) - sites.to_judge(found) == set(), "these need no judgement any more: remove them."


def test_nothing_reads_the_raw_record(found):
    assert [name for name, site in found.items() if sites.RAW in site["receives"]] == []


def test_the_walk_sees_the_known_ones(found):
    """Places named in the host's issues, one of each kind, so that a walk that finds nothing cannot pass."""
    kinds = {kind for site in found.values() for kind in site["asks"]}
    assert {"is_dspark()", "is_dflash_family()", "supports_ragged_verify()", "name DSPARK", "member DSPARK"} <= kinds
    scheduler = found["sglang/srt/speculative/spec_utils.py::spec_need_hidden_states"]
    assert scheduler["asks"]["name DSPARK"] == 1 and scheduler["receives"] == {"bag": 1}
    assert len(found) > 250
