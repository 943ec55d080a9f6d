"""The one PostgreSQL of a run: embedded, with the settings below, a fresh database for every measurement."""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import sql

from pgqueue.embedded import Embedded
from pgqueue.embedded.binaries import installed

#: Durable commits, checkpoints out of the way of a short run, and nothing that can hang for ever.
SETTINGS: Final[Mapping[str, str]] = {
    "shared_buffers": "2GB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "15min",
    "max_connections": "200",
    "synchronous_commit": "on",
    "fsync": "on",
    "autovacuum": "on",
    "statement_timeout": "120s",
    "idle_in_transaction_session_timeout": "15min",
    "log_min_messages": "fatal",
}


class Server:
    """A running server and the databases of a run."""

    def __init__(self, embedded: Embedded) -> None:
        self._embedded = embedded
        self._numbers = itertools.count(1)

    def dsn(self, name: str) -> str:
        """Return the URL of a database."""
        return self._embedded.dsn(name)

    def create(self, template: str | None = None) -> str:
        """Create a database, as a copy of `template` if given; return its name."""
        name = f"bench_{next(self._numbers)}"
        command = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
            sql.Identifier(name), sql.Identifier(template or "template1")
        )
        self._run(command)
        return name

    def drop(self, name: str) -> None:
        """Drop a database, whoever is still connected to it."""
        self._run(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def set(self, name: str, value: str) -> None:
        """Change a setting of the running server until `reset`."""
        self._run(sql.SQL("ALTER SYSTEM SET {} = {}").format(sql.Identifier(name), sql.Literal(value)))
        self._run(sql.SQL("SELECT pg_reload_conf()"))

    def reset(self, name: str) -> None:
        """Return a setting to the one in SETTINGS."""
        self._run(sql.SQL("ALTER SYSTEM RESET {}").format(sql.Identifier(name)))
        self._run(sql.SQL("SELECT pg_reload_conf()"))

    def version(self) -> str:
        """Return the server's version."""
        with psycopg.connect(self.dsn("postgres")) as connection:
            row = connection.execute("SHOW server_version").fetchone()
        return str(row[0]) if row else "?"

    def _run(self, command: sql.SQL | sql.Composed) -> None:
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            connection.execute(command)


@contextmanager
def started() -> Iterator[Server]:
    """Run the server for the length of the block; its data are thrown away at the end."""
    with Embedded(settings=SETTINGS) as embedded:
        yield Server(embedded)


def settle(dsn: str) -> None:
    """Bring a filled database to rest: statistics, visibility map and checkpoint are done before the clock starts."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("VACUUM (ANALYZE)")
        connection.execute("CHECKPOINT")


def ask(dsn: str, question: str, *parameters: Any) -> Any:
    """Return the first value of a query."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(question, parameters or None).fetchone()
    return row[0] if row else None


def until(dsn: str, question: str, patience: float = 10.0) -> bool:
    """Ask until the answer is true; False if it is not within `patience` seconds."""
    end = time.monotonic() + patience
    with psycopg.connect(dsn, autocommit=True) as connection:
        while time.monotonic() < end:
            row = connection.execute(question).fetchone()
            if row is not None and row[0]:
                return True
            time.sleep(0.01)
    return False


def pgbench(dsn: str, script: str, *, clients: int, seconds: int) -> float:
    """Run a pgbench script in prepared mode; return its transactions per second."""
    done = subprocess.run(
        [
            installed().tool("pgbench"), "--no-vacuum", "--protocol=prepared", f"--client={clients}", "--jobs=2",
            f"--time={seconds}", "--file=-", dsn,
        ],
        input=script, capture_output=True, text=True, check=False, timeout=seconds + 60,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith("tps = "):
            return float(line.split()[2])
    raise RuntimeError(f"pgbench told no rate: {done.stderr.strip()[-400:]}")
