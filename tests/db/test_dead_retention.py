"""Dead letters are kept until somebody sets a retention; then they go in batches, but for those that block a key."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from pgqueue import App, ConfigError, dead
from pgqueue.backoff import Backoff
from pgqueue.config import WorkerSettings
from pgqueue.connection import execute
from pgqueue.dead import Filter
from pgqueue.prune import chores
from pgqueue.statement import Statement
from pgqueue.worker import Worker
from tests.factories import Holder, explain, nodes, wipe
from tests.process.apps import every
from tests.process.apps.effects import EFFECTS
from tests.server import Connection
from tests.waiting import eventually

WEEK, DAY = timedelta(days=7), timedelta(days=1)
LETTERS = """
INSERT INTO pgqueue.dead_job
  (id, queue, name, key, priority, attempt, lost, payload, headers, enqueued_at, reason, died_at, blocks)
SELECT nextval('pgqueue.job_id_seq'), 'mail', 'send', %(key)s::text, 5, 1, 0, '{}', %(headers)s::json, now(),
  'exhausted', now() - %(ago)s::interval, %(key)s::text IS NOT NULL
FROM generate_series(1, %(n)s::int) RETURNING id
"""


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


@pytest.fixture
def holder(dsn: str) -> Iterator[Holder]:
    with Holder(dsn) as opened:
        yield opened


def letters(
    conn: Connection, n: int, *, days: float, key: str | None = None, headers: str | None = None
) -> list[int]:
    """Write dead letters that died so many days ago; those with a key block it."""
    given = {"n": n, "ago": timedelta(days=days), "key": key, "headers": headers}
    made = [int(str(i)) for (i,) in conn.execute(LETTERS, given)]
    conn.commit()
    return made


def kept(conn: Connection) -> list[int]:
    found = [int(str(i)) for (i,) in conn.execute("SELECT id FROM pgqueue.dead_job ORDER BY id")]
    conn.commit()
    return found


def discard(keep: timedelta = DAY) -> Statement[object]:
    """Return the chore that discards dead letters."""
    return chores(WEEK, keep)[0]


def test_without_a_retention_a_dead_letter_is_kept_for_ever(conn: Connection, holder: Holder) -> None:
    old = letters(conn, 2, days=3000)
    for statement in chores(WEEK):
        holder.run(statement)
    assert kept(conn) == old


def test_what_died_longer_ago_is_discarded_and_counted_and_the_rest_stays(
    conn: Connection, holder: Holder
) -> None:
    letters(conn, 3, days=2)
    young = letters(conn, 2, days=0.9)
    holder.run(discard())
    assert kept(conn) == young
    assert conn.execute("SELECT outcome, sum(n) FROM pgqueue.tally GROUP BY 1").fetchall() == [
        ("discarded", 3)
    ]


def test_a_letter_that_blocks_its_key_waits_for_a_person(conn: Connection, holder: Holder) -> None:
    """procrastinate 1446: what is returned to the queue by a clock alone ends a wait that nobody decided on."""
    blocking = letters(conn, 1, days=900, key="customer-7")
    letters(conn, 1, days=900)
    holder.run(discard())
    assert kept(conn) == blocking


def test_a_member_of_a_batch_that_is_discarded_by_time_has_ended(conn: Connection, holder: Holder) -> None:
    (batch,) = conn.execute("INSERT INTO pgqueue.batch (size) VALUES (1) RETURNING id").fetchone() or ()
    letters(conn, 1, days=2, headers=f'{{"pgqueue": {{"batch": {batch}}}}}')
    holder.run(discard())
    assert conn.execute("SELECT batch_id, outcome, n FROM pgqueue.batch_tally").fetchall() == [
        (batch, "gone", 1)
    ]


def test_a_turn_takes_a_thousand_the_oldest_first(conn: Connection, holder: Holder) -> None:
    younger = letters(conn, 5, days=2)
    letters(conn, 1000, days=3)
    chore = discard()
    done = holder.connection.execute(chore.query.text, dict(chore.params))
    assert done.rowcount == 1000
    assert kept(conn) == younger


def test_a_letter_that_an_operator_is_replaying_is_passed_and_runs(
    dsn: str, conn: Connection, holder: Holder
) -> None:
    """The sixth fault of the usual design: of two who take a letter at once, one must get it, and none may lose it."""
    one, two = letters(conn, 2, days=2)
    with psycopg.connect(dsn) as operator:
        assert execute(operator, dead.replay(Filter(ids=[one]))).ids == (one,)
        holder.run(discard())  # neither waits for the operator nor takes the letter
        assert kept(conn) == [one]
        operator.commit()
    assert kept(conn) == []
    assert conn.execute("SELECT id FROM pgqueue.job").fetchall() == [(one,)]
    assert two != one


def test_old_letters_are_found_by_an_index_among_very_many_young_ones(
    conn: Connection, holder: Holder
) -> None:
    letters(conn, 20_000, days=0.5)
    letters(conn, 3, days=2)
    conn.execute("ANALYZE pgqueue.dead_job")
    plan = explain(conn, discard())  # the query for the ids is planned with the call
    scans = [n for n in nodes(plan) if n.get("Relation Name") == "dead_job"]
    assert scans
    assert all(n["Node Type"] != "Seq Scan" and n["Actual Rows"] <= 3 for n in scans)


def test_a_worker_with_a_retention_discards_and_one_without_keeps(
    dsn: str, conn: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EFFECTS, str(tmp_path / "effects.jsonl"))
    letters(conn, 2500, days=2)
    young = letters(conn, 1, days=0)
    worker = Worker(every.app, dsn, WorkerSettings(dead_retention=86_400.0))
    worker.start()
    try:
        eventually(lambda: kept(conn) == young, 20)
    finally:
        worker.stop()


def test_a_ledger_that_forgets_while_attempts_may_still_be_retried_is_refused_at_the_start() -> None:
    app = App()
    app.job("charge", max_attempts=10, backoff=Backoff(base=1, cap=3600))(lambda: None)
    with pytest.raises(ConfigError, match=r"ledger: 3600 s is shorter than the 36000 s .* job 'charge'"):
        Worker(app, "", WorkerSettings(ledger=3600.0))
    Worker(app, "", WorkerSettings(ledger=36_000.0))
