"""docs/guarantees.md numbers what is promised, and each promise names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
SECTION = re.compile(r"^### (G\d+): (.+)$", re.MULTILINE)


@cache
def written() -> frozenset[str]:
    """Return the name of every test that needs a database, a sink or a process."""
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found.add(node.name)
    return frozenset(found)


def promises() -> dict[str, list[str]]:
    """Return the tests that each numbered promise names."""
    heads = list(SECTION.finditer(PAGE))
    ends = [head.start() for head in heads[1:]] + [PAGE.index("## What is not promised")]
    return {
        head[1]: re.findall(r"`(test_\w+)`", PAGE[head.end() : end])
        for head, end in zip(heads, ends, strict=True)
    }


def test_the_promises_are_numbered_without_gaps() -> None:
    assert list(promises()) == [f"G{n}" for n in range(1, 19)]


@pytest.mark.parametrize("number", [f"G{n}" for n in range(1, 19)])
def test_each_promise_names_tests_that_exist(number: str) -> None:
    named = promises()[number]
    assert named, "a promise without a test is a hope"
    assert [name for name in named if name not in written()] == []


def test_every_test_that_the_page_names_exists() -> None:
    assert [name for name in re.findall(r"`(test_\w+)`", PAGE) if name not in written()] == []


def test_the_page_says_what_is_not_promised() -> None:
    assert PAGE.count("\n- **", PAGE.index("## What is not promised")) >= 8
