"""The table of features is backed by tests that exist, and the README shows it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import feature_table
import pytest

ROOT = Path(__file__).parents[2]


@functools.cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test")}


@pytest.mark.parametrize("row", feature_table.ROWS, ids=lambda row: row.feature)
def test_each_row_is_shown_by_tests_that_exist(row):
    assert row.tests
    for test in row.tests:
        file, name = test.split("::")
        name, _, parameter = name.partition("[")
        assert name in names_in(file), test
        if parameter:
            assert f'"{parameter.rstrip("]")}"' in (ROOT / file).read_text(), f"{test} has no such case"


def test_no_feature_stands_there_twice():
    features = [row.feature for row in feature_table.ROWS]
    assert len(features) == len(set(features))


def test_the_readme_shows_every_row():
    readme = (ROOT / "README.md").read_text()
    missing = [line for line in map(feature_table.markdown, feature_table.ROWS) if line not in readme]
    assert not missing, "python tests/feature_table.py prints what is missing:\n" + "\n".join(missing)
