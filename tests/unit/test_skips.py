"""A skip for want of a broker or a server is a failure where all of them have to be there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import LACKING, lacking

ROOT = Path(__file__).resolve().parents[2]
WANT = re.compile(
    r"EmbeddedUnavailable as error:\s+pytest\.skip\((.*)\)|skip\((.*max_prepared_transactions.*)\)"
)


def skipped(reason: str) -> pytest.CollectReport:
    """Return the report of a module that skipped itself."""
    return pytest.CollectReport("tests/x.py", "skipped", ("tests/x.py", 1, f"Skipped: {reason}"), None)


@pytest.mark.parametrize("reason", ["broker: no redis-server", "server: max_prepared_transactions is 0"])
def test_a_skip_for_want_of_something_fails_where_everything_has_to_be_there(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setenv("PGQUEUE_CI", "1")
    assert lacking(skipped(reason)) == reason
    monkeypatch.delenv("PGQUEUE_CI")
    assert lacking(skipped(reason)) is None


def test_any_other_skip_is_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGQUEUE_CI", "1")
    assert lacking(skipped("this sink refuses nothing")) is None


def test_ci_asks_for_everything() -> None:
    assert re.search(r"^export PGQUEUE_CI=1$", (ROOT / ".ci/run").read_text(), re.MULTILINE)


def test_a_test_that_needs_a_server_says_so_in_the_reason_of_its_skip() -> None:
    found = [
        (path.name, said[0] or said[1])
        for path in (ROOT / "tests").glob("*/test_*.py")
        if path != Path(__file__).resolve()
        for said in WANT.findall(path.read_text())
    ]
    assert len(found) > 8
    assert not [one for one in found if not one[1].lstrip('f"').startswith(LACKING)]
