"""The walk over places that ask for the algorithm, on a small made-up host."""

from __future__ import annotations

import textwrap
from collections import Counter

import pytest

from sglang_adaptive.guard import sites, symbols

DEFINITION = """
class SpeculativeAlgorithm:
    DSPARK = 1
    EAGLE = 2
    NONE = 3
    def is_dspark(self): return self == SpeculativeAlgorithm.DSPARK
    def is_none(self): return self == SpeculativeAlgorithm.NONE
    def from_string(name): ...
"""


@pytest.fixture
def walk(tmp_path):
    definition = tmp_path / "sglang/srt/speculative/spec_info.py"
    definition.parent.mkdir(parents=True)
    definition.write_text(DEFINITION)

    def run(source: str) -> dict:
        (tmp_path / "sglang/srt/user.py").write_text(textwrap.dedent(source))
        return {name.split("::")[1]: site for name, site in sites.walk(tmp_path).items()}

    return run


CASES = [
    ("return get_spec().speculative_algorithm is None", "field", "bag"),
    ("spec = get_spec()\n    return spec.speculative_algorithm", "field", "bag"),
    ("cfg = resolving_view(x)\n    return cfg.speculative_algorithm == 'DSPARK'", "field, name DSPARK", "resolved"),
    ("a, b = resolving_view(x), resolved_view(x)\n    return b.speculative_algorithm", "field", "resolved"),
    ("return (x.speculative_algorithm or '').upper() in ('DSPARK', 'x')", "field, name DSPARK", "passed"),
    ("return x.server_args.speculative_algorithm", "field", "raw"),
    ("return server_args.speculative_algorithm", "field", "raw"),
    ("args = server_args\n    return f'{args.speculative_algorithm}'", "field", "raw"),
    ("return getattr(x, 'speculative_algorithm')", "key", ""),
    (
        "return SpeculativeAlgorithm.from_string(server_args.speculative_algorithm).is_dspark()",
        "field, from_string, is_dspark()",
        "raw, raw, raw",
    ),
    ("return x.spec_algorithm.is_dspark() or x.algo.is_none()", "is_dspark(), is_none()", "object, object"),
    ("return x.buffer.is_none() and y.is_dspark", "", ""),
    ("return SpeculativeAlgorithm.DSPARK", "member DSPARK", ""),
    ("return lambda view: view.speculative_algorithm", "field", "resolved"),
    ('"""speculative_algorithm "DSPARK" .is_dspark()"""', "", ""),
]


@pytest.mark.parametrize(("body", "asks", "receives"), CASES)
def test_what_a_function_asks_and_how_it_receives_it(walk, body, asks, receives):
    expected = {"asks": Counter(asks.split(", ")), "receives": Counter(filter(None, receives.split(", ")))}
    assert walk(f"def f(x, server_args):\n    {body}\n") == ({"f": expected} if asks else {})


def test_sites_are_told_apart_by_their_qualified_name(walk):
    found = walk(
        """
        NAMES = ("DSPARK",)
        class A:
            def f(self):
                def inner():
                    return self.algorithm.is_dspark()
                return inner
        """
    )
    assert set(found) == {"<module>", "A.f.inner"}


def test_a_raw_or_passed_value_is_to_be_judged():
    assert sites.to_judge(
        {
            "a": {"asks": {"field": 1}, "receives": {"raw": 1}},
            "b": {"asks": {"field": 1}, "receives": {"resolved": 1, "passed": 1}},
            "c": {"asks": {"key": 1}, "receives": {}},
            "d": {"asks": {"field": 1}, "receives": {"bag": 1, "object": 1}},
        }
    ) == {"a", "b", "c"}


def test_imports_are_relied_on(tmp_path):
    (tmp_path / "sglang/srt").mkdir(parents=True)
    (tmp_path / "sglang/srt/helpers.py").write_text("")
    source = """
    import sglang.srt.other as other
    from sglang.srt import helpers
    from sglang.srt.plugins import load_plugins as load
    from elsewhere import thing
    if TYPE_CHECKING:
        from sglang.srt.types import Big
    def late():
        from sglang.srt.late import Late
        return helpers.assist(other.NAME, thing.sglang)
    """
    assert symbols.imported(textwrap.dedent(source), tmp_path) == {
        "sglang.srt.other.NAME",
        "sglang.srt.helpers.assist",
        "sglang.srt.plugins.load_plugins",
        "sglang.srt.late.Late",
    }
