"""Every block of Python in README.md and docs/ runs, in the order of its page, against a migrated database.

The blocks of a page share one namespace, with DATABASE_URL and PGQUEUE_DSN in the environment; `await` stands at
the top level where a page needs it. A block below `<!-- no-run: reason -->` is only compiled.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- no-run: (?P<reason>\S.*?) -->\n+)?(?P<indent> *)```python *\n(?P<code>.*?)^ *```",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of Python."""

    line: int
    code: str
    reason: str | None


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, with the lines they stand on."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            line=text.count("\n", 0, found.start("code")),
            code=inspect.cleandoc(found["code"]) if found["indent"] else found["code"],
            reason=found["reason"],
        )
        for found in BLOCK.finditer(text)
    ]


@pytest.fixture
def namespace(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """Give the namespace of a module that can be found by its name, as dataclasses and pickles need."""
    monkeypatch.setenv("DATABASE_URL", dsn.replace("postgresql://", "postgresql+psycopg://", 1))
    monkeypatch.setenv("PGQUEUE_DSN", dsn)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    yield module.__dict__
    for value in list(module.__dict__.values()):
        if hasattr(value, "dispose") and not inspect.iscoroutinefunction(value.dispose):
            value.dispose()


@pytest.mark.parametrize("page", [p for p in PAGES if p.exists() and blocks(p)], ids=lambda p: p.name)
def test_the_python_of_a_page_runs(page: Path, namespace: dict[str, object]) -> None:
    with asyncio.Runner() as runner:
        for block in blocks(page):
            source = "\n" * block.line + block.code
            code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            if block.reason is None:
                pending = eval(code, namespace)  # noqa: S307  # the product's own documentation
                if inspect.iscoroutine(pending):
                    runner.run(pending)
