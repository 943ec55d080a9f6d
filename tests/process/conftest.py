"""Fixtures of the tests that run worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.apps.fleet import Fleet


@pytest.fixture
def fleet(dsn: str, tmp_path: Path) -> Iterator[Fleet]:
    """Give a way to start workers on the test's database."""
    started = Fleet(dsn, tmp_path)
    yield started
    started.close()
