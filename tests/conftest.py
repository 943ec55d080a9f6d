"""One PostgreSQL for the whole run, one fresh migrated database for each test.

The server is PGQUEUE_TEST_DSN where that is set, else the embedded one, else a container; `PG=15` asks for a
container of that version. A role with CREATEDB is enough for PGQUEUE_TEST_DSN.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Generator, Iterator
from contextlib import ExitStack

import psycopg
import pytest
from hypothesis import settings
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from pgqueue.embedded import Embedded, EmbeddedUnavailable
from tests.server import FAST, Connection, Server, in_memory

# A shell that starts something in the background has it ignore Ctrl-C, and so the programs that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("suite", deadline=None)  # no test depends on how fast the machine is
settings.load_profile("suite")

KEPT = {"PGQUEUE_TEST_DSN", "PGQUEUE_CI", "PGQUEUE_CHAOS", "PGQUEUE_RABBITMQ_ROOT"}
#: How the reason of a skip begins that has no place where every broker and server is there.
LACKING = ("broker:", "server:")


def container(stack: ExitStack, version: str) -> str:
    """Start a PostgreSQL container and return its DSN."""
    try:
        from docker.errors import DockerException
        from testcontainers.community.postgres import PostgresContainer
    except ImportError as error:
        pytest.exit(f"{error}: install pgqueue-relay[test], or set PGQUEUE_TEST_DSN", returncode=3)
    try:
        started = stack.enter_context(PostgresContainer(f"postgres:{version}", driver=None))
    except (DockerException, OSError) as error:
        pytest.exit(
            f"no PostgreSQL {version} for the tests: testcontainers found no usable Docker ({error}). "
            "Set PGQUEUE_TEST_DSN to a server whose role may CREATE DATABASE, or leave PG unset for the "
            "embedded one",
            returncode=3,
        )
    return str(started.get_connection_url())


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Give the PostgreSQL server of this run."""
    given, version = os.environ.get("PGQUEUE_TEST_DSN"), os.environ.get("PG")
    with ExitStack() as stack:
        if given:
            found = Server(conninfo=given)
        elif version:
            found = Server(conninfo=container(stack, version))
        else:
            try:
                own = stack.enter_context(Embedded(settings=FAST, scratch=in_memory()))
            except EmbeddedUnavailable as error:
                if shutil.which("docker") is None:
                    pytest.exit(str(error), returncode=3)
                found = Server(conninfo=container(stack, "18"))
            else:
                found = Server(conninfo=own.dsn(), embedded=own)
        try:
            yield found
        finally:
            if found.embedded is None:
                found.clean()


@pytest.fixture
def empty_dsn(server: Server) -> Iterator[str]:
    """Give the DSN of a fresh database without the pgqueue schema."""
    name = server.create()
    yield server.dsn(name)
    server.drop(name)


@pytest.fixture
def dsn(server: Server) -> Iterator[str]:
    """Give the DSN of a fresh migrated database."""
    name = server.migrated()
    yield server.dsn(name)
    server.drop(name)


@pytest.fixture
def conn(dsn: str) -> Iterator[Connection]:
    """Give a psycopg connection in transaction mode with an empty search_path."""
    with psycopg.connect(dsn) as connection:
        connection.execute("SET search_path = ''")
        connection.commit()
        yield connection
        connection.rollback()


@pytest.fixture
def engine(dsn: str) -> Iterator[Engine]:
    """Give a SQLAlchemy engine on psycopg to the same database, with an empty search_path."""
    made = create_engine(
        dsn.replace("postgresql://", "postgresql+psycopg://", 1),
        poolclass=NullPool,
        connect_args={"options": "-c search_path="},
    )
    yield made
    made.dispose()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """Give a SQLAlchemy session to the same database."""
    with Session(engine) as opened:
        yield opened


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Keep the developer's own settings of the programs out of the tests."""
    for name in list(os.environ):
        if name == "DATABASE_URL" or (name.startswith(("PGQUEUE_", "OUTBOX_")) and name not in KEPT):
            del os.environ[name]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip for want of a broker or server into a failure where each has to be there."""
    report = yield
    reason = lacking(report)
    if reason:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Do the same for a module that skips itself as a whole."""
    report = yield
    reason = lacking(report)
    if reason:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid}: {reason}"
    return report


def lacking(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """Return the reason of a skip for want of a broker or server, where PGQUEUE_CI asks for all of them."""
    if not (os.environ.get("PGQUEUE_CI") and report.skipped and isinstance(report.longrepr, tuple)):
        return None
    reason = report.longrepr[2].removeprefix("Skipped: ")
    return reason if reason.startswith(LACKING) else None
