"""Files are named by their verb or noun and stay small; the repository speaks of the product alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pgqueue
import relay
from tests.laws.source import PACKAGES, ROOT, files, modules, texts

FORBIDDEN_STEMS = {"utils", "util", "helpers", "helper", "managers", "manager", "base", "common", "misc"}
LINES = 400
HERE = Path(__file__).resolve()

UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
REGISTRY = re.compile(r"\b(pypi\.org|pythonhosted\.org|registry\.npmjs\.org|crates\.io|proxy\.golang\.org)\b")
WRONG_INSTALL = re.compile(r"pip3?\s+install\s+(?:-\S+\s+)*['\"]?pgqueue(?!-relay)\b")
MACHINE = re.compile(r"/(?:work|root)/(?!_)[a-z.]")

PGQUEUE = """
    App BadOption BadPayload Backoff Cancelled ConfigError Job JobRef JobType LeaseLost NotInTransaction
    Permanent PgqueueError QueueFull Retry Snooze UnknownJob
"""
RELAY = "Outbox Inbox"


def test_no_file_has_a_name_that_says_nothing() -> None:
    assert not [str(path.relative_to(ROOT)) for path in files() if path.stem.lower() in FORBIDDEN_STEMS]


@pytest.mark.parametrize("module", modules().values(), ids=lambda m: m.name)
def test_a_module_stays_small(module: object) -> None:
    path: Path = module.path  # type: ignore[attr-defined]
    assert len(path.read_text().splitlines()) <= LINES, "which second idea moved in?"


def test_every_module_starts_with_a_docstring() -> None:
    silent = [name for name, module in modules().items() if not _starts_with_text(module.path)]
    assert not silent


def _starts_with_text(path: Path) -> bool:
    text = path.read_text()
    return text.lstrip().startswith('"""')


def test_the_public_names_are_the_documented_ones() -> None:
    assert set(pgqueue.__all__) == set(PGQUEUE.split())
    assert set(RELAY.split()) <= set(relay.__all__)
    for package in (pgqueue, relay):
        assert not [name for name in package.__all__ if not hasattr(package, name)]


@pytest.mark.parametrize(
    ("law", "pattern"),
    [
        ("nothing unfinished", UNFINISHED),
        ("no address of a package registry", REGISTRY),
        ("the distribution is pgqueue-relay", WRONG_INSTALL),
        ("no path of one machine", MACHINE),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_texts_hold_the_tone(law: str, pattern: re.Pattern[str]) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path, text in texts()
        if path != HERE
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert not wrong, law


def test_every_silenced_check_says_why() -> None:
    bare = re.compile(r"#\s*noqa(?!: [A-Z]+\d+(?:, ?[A-Z]+\d+)* - \S)")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path, text in texts()
        if path.suffix == ".py" and path != HERE and path.relative_to(ROOT).parts[0] in PACKAGES
        for number, line in enumerate(text.splitlines(), 1)
        if bare.search(line)
    ]
    assert not wrong, "write `# noqa: CODE - reason`"
