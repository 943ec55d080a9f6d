"""What the tests of this folder share: a database for a module, two workers' connections to it, a file of effects.

A module whose tests share a database overrides `dsn` with `wipe(database)`; the others have one for each test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.factories import Holder
from tests.process.apps.effects import EFFECTS, Effects
from tests.server import Connection, Server
from tests.waiting import eventually


@pytest.fixture(scope="module")
def database(server: Server) -> Iterator[str]:
    name = server.migrated()
    yield server.dsn(name)
    server.drop(name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of a module with BOTH_CLAIMS by both forms of a claim."""
    if "backlog" in metafunc.fixturenames and getattr(metafunc.module, "BOTH_CLAIMS", False):
        metafunc.parametrize("backlog", [False, True], ids=["claim", "backlog"])


@pytest.fixture
def backlog() -> bool:
    """Tell whether the workers claim as they do in a backlog."""
    return False


@pytest.fixture
def a(dsn: str, backlog: bool) -> Iterator[Holder]:
    with Holder(dsn, 1, backlog=backlog) as holder:
        yield holder


@pytest.fixture
def b(dsn: str, backlog: bool) -> Iterator[Holder]:
    with Holder(dsn, 2, backlog=backlog) as holder:
        yield holder


@pytest.fixture
def alone(conn: Connection) -> None:
    """Wait until the earlier sessions of the database have ended: what one has counted is added when it ends."""
    others = (
        "SELECT FROM pg_catalog.pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )

    def nobody_else() -> bool:
        found = conn.execute(others).fetchone()
        conn.rollback()
        return found is None

    eventually(nobody_else)


@pytest.fixture
def effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Effects:
    path = tmp_path / "effects.jsonl"
    monkeypatch.setenv(EFFECTS, str(path))
    return Effects(path)
