"""What a call with a taken dedup key does to the job that has it: keep, replace, debounce."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from pgqueue import App, BadOption, JobRef
from pgqueue.connection import execute
from pgqueue.finish import Failed, bury, retry
from pgqueue.prepared import Prepared
from pgqueue.prune import chores
from tests.factories import MINUTE, Holder, buried, ids, lose, retried, scope, token, wipe
from tests.server import Connection
from tests.waiting import eventually

app = App()
CALLERS = 50
OF_INDEX = scope(names=("index",))


@app.job("index")
def index(page: int) -> None: ...


@app.job("other")
def other(page: int) -> None: ...


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


@pytest.fixture
def holder(dsn: str) -> Iterator[Holder]:
    with Holder(dsn) as opened:
        yield opened


def replacing(**options: Any) -> Prepared[int]:
    return index.using(dedup_key="k", dedup_mode="replace", dedup_window="live", **options)


def debouncing(**options: Any) -> Prepared[int]:
    given = {"dedup_window": "live", "run_after": MINUTE, **options}
    return index.using(dedup_key="k", dedup_mode="debounce", **given)


def job(conn: Connection) -> dict[str, Any]:
    """Return the one job there is, with its delay from now in seconds (None: it has a place in the queue)."""
    rows: Any = conn.execute(
        "SELECT j.id, j.payload, extract(epoch FROM j.run_at - clock_timestamp())::float, j.pos, j.ready_at,"
        " j.attempt, j.lease, j.enqueued_at FROM pgqueue.job j"
    ).fetchall()
    assert len(rows) == 1
    names = ("id", "payload", "delay", "pos", "ready_at", "attempt", "lease", "enqueued_at")
    return dict(zip(names, rows[0], strict=True))


def test_replace_gives_the_waiting_job_the_payload_and_the_time_of_the_last_call(conn: Connection) -> None:
    first = replacing().enqueue(conn, 1)
    assert (first.created, first.changed) == (True, False)
    place = job(conn)["pos"]
    assert replacing().enqueue(conn, 2) == JobRef(first.id, created=False, changed=True)
    now = job(conn)
    assert (now["id"], now["payload"], now["pos"]) == (first.id, 2, place)  # it keeps its place in the queue
    replacing(run_after=MINUTE).enqueue(conn, 3)
    later = job(conn)
    assert (later["payload"], later["pos"]) == (3, None)
    assert 50 < later["delay"] <= 60
    replacing(run_after=10).enqueue(conn, 4)  # earlier is possible too
    assert 0 < job(conn)["delay"] <= 10
    replacing().enqueue(conn, 5)
    again = job(conn)
    assert (again["payload"], again["delay"]) == (5, None)
    assert again["pos"] > place


def test_a_job_that_replace_made_ready_is_not_as_old_as_its_enqueue(conn: Connection) -> None:
    """An age counted from the enqueue would alarm for a job that was delayed for a day and is ready for a second."""
    replacing(run_after=MINUTE).enqueue(conn, 1)
    conn.execute("UPDATE pgqueue.job SET enqueued_at = enqueued_at - interval '1 day'")
    replacing().enqueue(conn, 2)
    conn.commit()
    age = conn.execute("SELECT oldest_ready_s FROM pgqueue.queue_depth").fetchone()
    assert age is not None
    assert 0 <= float(str(age[0])) < 60


def test_keep_changes_nothing(conn: Connection) -> None:
    index.using(dedup_key="k").enqueue(conn, 1)
    before = job(conn)
    ref = index.using(dedup_key="k", run_after=MINUTE).enqueue(conn, 2)
    assert (ref.created, ref.changed) == (False, False)
    assert job(conn) == before


def test_a_job_that_runs_is_not_changed_and_the_answer_says_so(conn: Connection, holder: Holder) -> None:
    """A worker would acknowledge a payload that it has never seen."""
    first = replacing().enqueue(conn, 1)
    conn.commit()
    (claimed,) = holder.claim(of=OF_INDEX)
    for again in (replacing(), debouncing()):
        assert again.enqueue(conn, 2) == JobRef(first.id, created=False, changed=False)
        conn.commit()
    assert job(conn)["payload"] == 1
    assert job(conn)["lease"] == claimed.lease


def test_a_call_waits_for_no_worker_that_claims_the_job_meanwhile(conn: Connection, holder: Holder) -> None:
    first = replacing().enqueue(conn, 1)
    conn.commit()
    holder.begin()
    assert ids(holder.claim(of=OF_INDEX)) == [first.id]
    conn.execute("SET LOCAL lock_timeout = '1s'")
    assert replacing().enqueue(conn, 2) == JobRef(first.id, created=False, changed=False)
    conn.commit()
    holder.rollback()
    assert replacing().enqueue(conn, 3).changed


def test_a_claim_passes_a_job_that_is_being_changed_and_finds_it_afterwards(
    conn: Connection, holder: Holder
) -> None:
    first = replacing().enqueue(conn, 1)
    conn.commit()
    replacing().enqueue(conn, 2)
    assert holder.claim(of=OF_INDEX) == []
    conn.commit()
    (claimed,) = holder.claim(of=OF_INDEX)
    assert (claimed.id, claimed.payload) == (first.id, "2")


def test_a_failed_job_takes_the_new_payload_and_waits_out_its_backoff(
    conn: Connection, holder: Holder
) -> None:
    replacing().enqueue(conn, 1)
    conn.commit()
    (claimed,) = holder.claim(of=OF_INDEX)
    holder.run(retry([Failed(claim=token(claimed), outcome=retried(60.0))], "host:1"))
    assert replacing().enqueue(conn, 2).changed
    now = job(conn)
    assert (now["payload"], now["attempt"]) == (2, 1)
    assert now["delay"] > 50


def test_a_key_that_another_job_type_has_is_left_alone(conn: Connection) -> None:
    first = other.using(dedup_key="k").enqueue(conn, 1)
    assert replacing().enqueue(conn, 2) == JobRef(first.id, created=False, changed=False)
    assert job(conn)["payload"] == 1


def test_a_rollback_undoes_the_change(conn: Connection) -> None:
    first = replacing().enqueue(conn, 1)
    conn.commit()
    replacing(run_after=MINUTE).enqueue(conn, 2)
    conn.rollback()
    assert (job(conn)["payload"], job(conn)["delay"]) == (1, None)
    with suppress(ZeroDivisionError), conn.transaction():
        replacing().enqueue(conn, 3)
        raise ZeroDivisionError
    assert job(conn)["payload"] == 1
    conn.execute("DELETE FROM pgqueue.job")
    assert replacing().enqueue(conn, 4).id != first.id


@pytest.mark.parametrize("mode", ["replace", "debounce"])
def test_of_fifty_concurrent_calls_one_creates_the_job_and_the_last_to_commit_has_the_last_word(
    conn: Connection, dsn: str, mode: str
) -> None:
    """oban-bg/oban#1505: a caller got no id; here each changes the one job, too."""
    once = replacing() if mode == "replace" else debouncing()
    commits: list[int] = []

    def call(n: int) -> JobRef:
        with psycopg.connect(dsn) as mine:
            ref = once.enqueue(mine, n)
            commits.append(n)  # the key's row is held: nobody else is between here and the commit
            return ref

    with psycopg.connect(dsn) as first, ThreadPoolExecutor(CALLERS) as pool:
        early = once.enqueue(first, 0)
        late = [pool.submit(call, n) for n in range(1, CALLERS)]
        eventually(lambda: _waiting(conn) == CALLERS - 1, 60)
        first.commit()
        refs = [future.result() for future in late]
    assert {ref.id for ref in refs} == {early.id}
    assert all(ref.changed and not ref.created for ref in refs)
    assert job(conn)["payload"] == commits[-1]


def test_bulk_and_single_agree_in_debounce(conn: Connection) -> None:
    mode = index.using(dedup_key=lambda n: f"k{n % 2}", dedup_mode="debounce", run_after=MINUTE)
    refs = mode.enqueue_many(conn, [0, 1, 2])
    assert [(r.created, r.changed) for r in refs] == [(True, False), (True, False), (False, True)]
    single = mode.enqueue(conn, 4)
    assert (single.id, single.created, single.changed) == (refs[0].id, False, True)
    rows = conn.execute("SELECT j.payload::text, j.pos IS NULL FROM pgqueue.job j ORDER BY j.id").fetchall()
    assert rows == [("4", True), ("1", True)]


def test_a_key_outlives_the_death_of_its_worker_and_not_that_of_its_job(
    conn: Connection, holder: Holder
) -> None:
    """river#1135, oban-bg/oban#424: an orphaned or discarded job blocked its unique key for ever."""
    live = index.using(dedup_key="k", dedup_window="live")
    first = live.enqueue(conn, 1)
    conn.commit()
    (job,) = holder.claim(of=OF_INDEX)
    lose(conn, [first.id])
    assert live.enqueue(conn, 2) == JobRef(first.id, created=False)  # it will run again
    conn.commit()
    (job,) = holder.suspects(of=OF_INDEX)
    holder.run(bury([Failed(claim=token(job), outcome=buried())], "host:1"))
    second = live.enqueue(conn, 3)
    assert second.created
    conn.commit()


def test_a_job_that_comes_back_beside_a_twin_of_its_key_violates_nothing(
    conn: Connection, holder: Holder
) -> None:
    """procrastinate-org/procrastinate#1446, timgit/pg-boss#522: the return hit a unique index, and all got stuck."""
    once = index.using(dedup_key="k", dedup_window=60)
    first = once.enqueue(conn, 1)
    conn.commit()
    holder.claim(of=OF_INDEX)
    conn.execute("UPDATE pgqueue.dedup SET until = clock_timestamp()")
    twin = once.enqueue(conn, 2)
    assert twin.created
    lose(conn, [first.id])
    conn.commit()
    back = holder.suspects(of=OF_INDEX)
    assert ids(back) == [first.id]
    holder.run(retry([Failed(claim=token(back[0]), outcome=retried(0.0))], "host:1"))
    (other,) = holder.claim(of=OF_INDEX)
    assert other.id == twin.id
    holder.run(bury([Failed(claim=token(other), outcome=buried())], "host:1"))
    assert conn.execute("SELECT pgqueue.replay(ARRAY[%s]::bigint[])", [twin.id]).fetchall() == [(twin.id,)]
    conn.commit()
    assert conn.execute("SELECT count(*) FROM pgqueue.job").fetchone() == (2,)


def test_bulk_and_single_agree(conn: Connection) -> None:
    """In one call as in two: the last payload of a key stands."""

    def mode(**options: Any) -> Prepared[int]:
        return index.using(dedup_key=lambda n: f"k{n % 2}", dedup_mode="replace", **options)

    refs = mode().enqueue_many(conn, [0, 1, 2])
    assert [(r.created, r.changed) for r in refs] == [(True, False), (True, False), (False, True)]
    assert refs[2].id == refs[0].id
    again = mode(run_after=MINUTE).enqueue_many(conn, [4, 3])
    assert [r.id for r in again] == [refs[0].id, refs[1].id]
    rows = conn.execute("SELECT j.payload::text, j.pos IS NULL FROM pgqueue.job j ORDER BY j.id").fetchall()
    assert rows == [("4", True), ("3", True)]
    single = index.using(dedup_key="k0", dedup_mode="replace").enqueue(conn, 6)
    assert (single.id, single.changed) == (refs[0].id, True)


def test_debounce_moves_the_job_back_with_each_call_and_takes_the_last_payload(conn: Connection) -> None:
    first = debouncing(run_after=10).enqueue(conn, 1)
    assert 0 < job(conn)["delay"] <= 10
    assert debouncing().enqueue(conn, 2) == JobRef(first.id, created=False, changed=True)
    assert 50 < job(conn)["delay"] <= 60
    debouncing(run_after=1).enqueue(conn, 3)  # it never comes nearer
    assert 50 < job(conn)["delay"] <= 60
    assert job(conn)["payload"] == 3


def test_debounce_takes_a_job_that_is_due_and_not_begun_back_out_of_the_queue(conn: Connection) -> None:
    debouncing().enqueue(conn, 1)
    conn.execute("UPDATE pgqueue.job SET pos = 7, ready_at = run_at, run_at = NULL")  # promoted
    debouncing().enqueue(conn, 2)
    assert (job(conn)["pos"], job(conn)["payload"]) == (None, 2)


def test_debounce_waits_no_longer_than_its_longest_wait(conn: Connection) -> None:
    """A call every second would put the job off for ever."""
    bounded = debouncing(run_after=600, dedup_max_wait=900)
    bounded.enqueue(conn, 1)
    delays = []
    for n, age in enumerate((0, 400, 400, 400), 2):
        conn.execute(
            "UPDATE pgqueue.job SET enqueued_at = enqueued_at - %s * interval '1 s',"
            " run_at = run_at - %s * interval '1 s'",
            [age, age],
        )
        bounded.enqueue(conn, n)
        delays.append(job(conn)["delay"])
    assert [None if d is None else round(d, -2) for d in delays] == [600, 500, 100, None]
    last = job(conn)
    assert last["payload"] == 5
    assert last["pos"] is not None
    assert debouncing(run_after=5, dedup_max_wait=1).enqueue(conn, 6).changed  # ready stays ready
    assert job(conn)["pos"] == last["pos"]


def test_the_first_call_obeys_the_longest_wait_too(conn: Connection) -> None:
    debouncing(dedup_max_wait=40).enqueue(conn, 1)
    assert 0 < job(conn)["delay"] <= 40


def test_a_change_begins_the_window_anew_and_a_live_key_stays_live(conn: Connection) -> None:
    def until() -> datetime | None:
        row = conn.execute("SELECT d.until FROM pgqueue.dedup d").fetchone()
        return row[0] if row else None  # type: ignore[return-value]

    windowed = index.using(dedup_key="k", dedup_mode="replace", dedup_window=3600)
    windowed.enqueue(conn, 1)
    before = until()
    windowed.enqueue(conn, 2)
    after = until()
    assert before is not None
    assert after is not None
    assert after > before
    conn.execute("UPDATE pgqueue.dedup SET until = NULL")
    windowed.enqueue(conn, 3)
    assert until() is None


def test_within_its_window_the_key_of_a_job_that_is_done_is_taken_and_nothing_is_there_to_change(
    conn: Connection,
) -> None:
    windowed = index.using(dedup_key="k", dedup_mode="replace", dedup_window=3600)
    first = windowed.enqueue(conn, 1)
    conn.execute("DELETE FROM pgqueue.job")
    assert windowed.enqueue(conn, 2) == JobRef(first.id, created=False, changed=False)
    assert replacing().enqueue(conn, 2) == JobRef(first.id, created=False, changed=False)
    conn.execute("UPDATE pgqueue.dedup SET until = clock_timestamp()")
    assert windowed.enqueue(conn, 3).created


def test_pruning_frees_keys_whose_time_is_over_and_no_other(conn: Connection) -> None:
    for key, window in (("over", 60), ("taken", 60), ("gone", "live"), ("here", "live")):
        index.using(dedup_key=key, dedup_mode="replace", dedup_window=window).enqueue(conn, 1)  # type: ignore[arg-type]
    conn.execute("UPDATE pgqueue.dedup SET until = clock_timestamp() - interval '1 s' WHERE key = 'over'")
    conn.execute("DELETE FROM pgqueue.job WHERE dedup_key = 'gone'")
    conn.commit()
    for chore in chores(timedelta(days=7)):
        execute(conn, chore)
    left = conn.execute("SELECT d.key FROM pgqueue.dedup d ORDER BY 1").fetchall()
    assert left == [("here",), ("taken",)]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"dedup_mode": "replace"}, "dedup_key"),
        ({"dedup_mode": "merge", "dedup_key": "k"}, "keep, replace, debounce"),
        ({"dedup_mode": "debounce", "dedup_key": "k"}, "run_after"),
        ({"dedup_max_wait": 5, "dedup_key": "k"}, "debounce"),
        ({"dedup_max_wait": 0, "dedup_key": "k", "dedup_mode": "debounce", "run_after": 1}, "dedup_max_wait"),
    ],
)
def test_a_mode_without_what_it_needs_is_refused_before_anything_is_sent(
    conn: Connection, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(BadOption, match=what):
        index.using(**options).enqueue(conn, 1)
    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


@pytest.mark.parametrize(
    "arguments",
    [
        "dedup_mode => 'replace'",
        "dedup_mode => 'merge', dedup_keys => ARRAY['k']",
        "dedup_mode => NULL, dedup_keys => ARRAY['k']",
        "dedup_mode => 'debounce', dedup_keys => ARRAY['k']",
        "dedup_max_wait => '5 s', dedup_keys => ARRAY['k']",
        "dedup_mode => 'debounce', dedup_max_wait => '0 s', delay => '1 s', dedup_keys => ARRAY['k']",
    ],
)
def test_sql_refuses_them_too(conn: Connection, arguments: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="dedup_m"):
        conn.execute(f"SELECT FROM pgqueue.enqueue_many('index', '[1]', {arguments})".encode())


def test_the_sql_function_has_the_modes_too(conn: Connection) -> None:
    call = (
        "SELECT pgqueue.enqueue('index', %s, dedup_key => 'k', dedup_live => true, dedup_mode => %s,"
        " delay => '1 min', dedup_max_wait => %s)"
    )
    made = {
        conn.execute(call, [payload, mode, wait]).fetchone()
        for payload, mode, wait in [
            ("1", "replace", None),
            ("2", "debounce", "2 min"),
            ("3", "replace", None),
        ]
    }
    assert len(made) == 1
    assert job(conn)["payload"] == 3


def test_the_plans_of_a_change_read_no_backlog(conn: Connection) -> None:
    conn.execute(
        "INSERT INTO pgqueue.job (name, queue, priority, payload)"
        " SELECT 'index', 'default', 5, '1' FROM generate_series(1, 5000)"
    )
    replacing().enqueue(conn, 1)
    conn.commit()
    mine = "SELECT seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'job'"
    before = conn.execute(mine).fetchone()
    for n in range(20):
        replacing().enqueue(conn, n)
    assert conn.execute(mine).fetchone() == before


def test_two_bulks_of_the_same_keys_in_opposite_order_do_not_deadlock(conn: Connection, dsn: str) -> None:
    """vectorize-io/hindsight PR#2368: bulks of the same keys in opposite order."""
    numbers = list(range(200))
    mode = index.using(dedup_key=lambda n: f"page-{n}", dedup_mode="replace")
    mode.enqueue_many(conn, numbers)
    conn.commit()

    def bulk(order: list[int]) -> list[JobRef]:
        with psycopg.connect(dsn) as mine:
            return mode.enqueue_many(mine, order)

    for _ in range(3):
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(bulk, [numbers, numbers[::-1]]))
        assert all(ref.changed for ref in itertools.chain(*found))


def _waiting(conn: Connection) -> int:
    row = conn.execute(
        "SELECT count(*) FROM pg_catalog.pg_stat_activity a"
        " WHERE a.datname = current_database() AND a.wait_event_type = 'Lock'"
    ).fetchone()
    conn.commit()
    return int(str(row[0])) if row else 0
