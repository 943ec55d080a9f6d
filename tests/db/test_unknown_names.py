"""A name that no worker of its queue knows stays where it is, uncounted, and is seen by whoever looks.

formbricks 9123: an old worker finished jobs it did not know. proletarian 18: it burnt their attempts.
"""

from __future__ import annotations

import pytest

from pgqueue import App
from pgqueue.connection import execute
from pgqueue.depth import unknown
from pgqueue.heartbeat import register
from pgqueue.testing import NotDrained, drain
from tests.factories import MINUTE, buffers, enqueue, explain, wipe
from tests.server import Connection


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


def works(conn: Connection, nonce: int, queues: list[str], names: list[str]) -> None:
    """Register a live worker."""
    given = register(
        nonce=nonce, host="here", pid=nonce, version="1", queues=queues, names=names, concurrency=8
    )
    execute(conn, given)


def found(conn: Connection) -> list[tuple[str, str, int]]:
    return [(one.queue, one.name, one.jobs) for one in execute(conn, unknown())]


def test_names_are_unknown_by_queue_whatever_other_queues_know(conn: Connection) -> None:
    works(conn, 1, ["mail"], ["send"])
    works(conn, 2, ["bulk"], ["pdf"])
    enqueue(conn, 3, name="pdf", queue="mail")
    enqueue(conn, 2, name="send", queue="mail")
    enqueue(conn, 1, name="old", queue="bulk", key="k", priority=9)
    assert found(conn) == [("mail", "pdf", 3), ("bulk", "old", 1)]
    works(conn, 3, ["mail"], ["pdf"])
    assert found(conn) == [("bulk", "old", 1)]


def test_a_queue_without_a_worker_a_job_in_hand_and_a_delayed_one_are_no_unknown_names(
    conn: Connection,
) -> None:
    works(conn, 1, ["mail"], ["send"])
    enqueue(conn, queue="nobody", name="pdf")
    enqueue(conn, queue="mail", name="pdf", delay=MINUTE)
    (held,) = enqueue(conn, queue="mail", name="pdf")
    conn.execute(
        "UPDATE pgqueue.job SET lease = 7, deadline = now() + interval '1 min' WHERE id = %s", [held]
    )
    assert found(conn) == []


def test_a_worker_that_fell_silent_knows_nothing(conn: Connection) -> None:
    works(conn, 1, ["mail"], ["send"])
    works(conn, 2, ["mail"], ["pdf"])
    enqueue(conn, queue="mail", name="pdf")
    assert found(conn) == []
    conn.execute("UPDATE pgqueue.worker SET beat_at = now() - interval '1 h' WHERE nonce = 2")
    assert found(conn) == [("mail", "pdf", 1)]


def test_the_look_costs_the_same_at_any_backlog(conn: Connection) -> None:
    """graphile 240: what is looked at all the time must not grow with what waits."""
    works(conn, 1, ["default"], ["work"])
    enqueue(conn, 1_500, name="strange")
    enqueue(conn, 1_000)
    conn.execute("ANALYZE pgqueue.job")
    small = buffers(explain(conn, unknown()))
    assert found(conn) == [("default", "strange", 1_000)]
    for _ in range(20):
        enqueue(conn, 1_000)
    conn.execute("ANALYZE pgqueue.job")
    assert buffers(explain(conn, unknown())) <= small * 1.2 + 20


def test_drain_says_which_names_the_app_has_no_handler_for(dsn: str, conn: Connection) -> None:
    app = App()

    @app.job("send")
    def send() -> None: ...

    enqueue(conn, 2, name="pdf")
    enqueue(conn, 1, name="pdf", queue="bulk")
    conn.commit()
    with pytest.raises(NotDrained, match=r"no handler for 'pdf' in queue 'default' \(2\)$") as caught:
        drain(app, dsn, timeout=0.1)
    assert caught.value.left == 2
