"""Plans: whatever the table holds, and whenever it was analysed, the hot statements go by an index.

Statements are prepared while the table may be empty and keep that plan. A sequential scan chosen then costs a second
per round once a million jobs wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from pgqueue import batch, budget, depth, history, ledger, limits, progress, prune, stray
from pgqueue.claim import claim, claim_backlog, claim_few, horizon, keyed, reclaim, suspects, suspects_alone
from pgqueue.finish import Failed, ack, bury, complete, drop, release, retry, snooze, still_mine
from pgqueue.heartbeat import heartbeat, lane_heartbeat, signals
from pgqueue.job import Claim, Completed
from pgqueue.lanes import LaneSize, lane_claim, lane_jobs, lane_release, lane_take, lanes_mine, route
from pgqueue.promote import promote
from pgqueue.pulse import LONG_AGO
from pgqueue.shelf import LaneHold
from pgqueue.statement import Query, Statement, nothing
from tests.db.plans import (
    STATES,
    can_explain_functions,
    check,
    drop_index,
    filled,
    generic_plan,
    nested_plans,
)
from tests.factories import EVERYTHING, MINUTE, QUEUE, Holder, buried, claimed, nodes, retried, scope
from tests.server import Server

TABLES = ("job", "lane", "dedup", "effect", "job_signal", "attempt_log", "progress", "dead_job", "permit")
HELD = [Claim(id=1, lease=5), Claim(id=2, lease=5)]
TWO_CLAIMS = [Claim(id=1, lease=5), Claim(id=2, lease=6)]
OF = scope(queues=(QUEUE, "mail"), priorities=range(10))
LEVELS = len(OF.queues)
SIZE = LaneSize(lanes=25, depth=20, total=100)
FAILURES = [Failed(claim=HELD[0], outcome=retried())]
LEDGER = timedelta(days=7)
KEYED = [ledger.Keyed(claim=Claim(id=i, lease=5), name="work", key=f"e{i}") for i in (1, 2)]

STATEMENTS: dict[str, tuple[Callable[[], Statement[Any]], set[str]]] = {
    "claim": (lambda: claim(OF, [0] * LEVELS, 100, 7, MINUTE, {QUEUE: 0}), {"job_ready", "job_route"}),
    "claim_backlog": (lambda: claim_backlog(OF, [0] * LEVELS, 100, 7, MINUTE), {"job_ready"}),
    "claim_few": (lambda: claim_few(OF, [0] * LEVELS, 100, 7, MINUTE), {"job_ready"}),
    "keyed": (lambda: keyed({QUEUE: 0, "mail": 0}), {"job_route"}),
    "suspects": (lambda: suspects(OF, [EVERYTHING] * LEVELS, 8, 7, MINUTE, low=0, high=0), {"job_ready"}),
    "reclaim": (
        lambda: reclaim([claimed(n) for n in range(1, 9)], [LaneHold(QUEUE, "k1", 7, 1, 1)], MINUTE),
        {"job_pkey", "lane_pkey"},
    ),
    "suspects_alone": (lambda: suspects_alone(OF, [EVERYTHING] * LEVELS), {"job_ready"}),
    "lane_take": (lambda: lane_take(OF, [0] * LEVELS, 25, 7, MINUTE), {"lane_ready"}),
    "lane_jobs": (lambda: lane_jobs(OF, SIZE, 7, MINUTE), {"job_lane", "lane_pkey"}),
    "lanes_mine": (lambda: lanes_mine([(QUEUE, "k1", 1)], 5), {"lane_pkey"}),
    "horizon": (horizon, set()),
    "ack": (lambda: ack(TWO_CLAIMS), {"job_pkey"}),
    "ack_batch": (lambda: ack(HELD), {"job_pkey"}),
    "ack_skip": (lambda: ack(HELD, skip=True), {"job_pkey"}),
    "still_mine": (lambda: still_mine(HELD), {"job_pkey"}),
    "retry": (lambda: retry(FAILURES, "w"), {"job_pkey", "attempt_log_job"}),
    "bury": (
        lambda: bury([Failed(claim=HELD[0], outcome=buried())], "w"),
        {"job_pkey", "attempt_log_job", "effect_pkey"},
    ),
    "snooze": (lambda: snooze(HELD, [1.0, 1.0]), {"job_pkey"}),
    "release": (lambda: release(HELD), {"job_pkey"}),
    "drop": (lambda: drop(HELD), {"job_pkey", "attempt_log_job", "effect_pkey"}),
    "heartbeat": (lambda: heartbeat(HELD, MINUTE), {"job_pkey"}),
    "lane_heartbeat": (lambda: lane_heartbeat([(QUEUE, "k1", 5)], MINUTE), {"lane_pkey", "job_lane"}),
    "signals": (lambda: signals([1, 2]), {"job_signal_pkey"}),
    "promote": (lambda: promote(LONG_AGO, MINUTE), {"job_due"}),
    "strays": (lambda: stray.strays({QUEUE: 0}), {"job_route", "lane_pkey"}),
    "hold": (lambda: ledger.hold(KEYED), set()),
    "take": (lambda: ledger.take(KEYED), {"effect_pkey", "job_pkey"}),
    "applied": (lambda: ledger.applied(KEYED), {"effect_pkey"}),
    "apply": (lambda: ledger.apply(HELD), {"effect_pkey", "job_pkey"}),
    "seal": (lambda: ledger.seal(HELD[0]), {"effect_pkey", "job_pkey"}),
    "adopt": (lambda: limits.adopt(QUEUE, [1, 2]), {"job_pkey"}),
    "progress": (lambda: progress.progress([progress.Note(HELD[0], 0.5, "")]), {"job_pkey"}),
    "state": (lambda: progress.state(1), {"progress_pkey"}),
    "draw": (lambda: budget.draw([budget.Report(queue=QUEUE, ran=10, want=5)]), set()),
    "sample": (lambda: depth.sample([QUEUE]), {"job_ready", "job_route", "job_due", "lane_pkey", "job_pkey"}),
    "fold": (prune.fold, set()),
    "prune_dedup": (lambda: named("dedup"), {"dedup_until"}),
    "prune_effects": (lambda: named("effect"), {"effect_applied"}),
    "prune_signals": (lambda: named("job_signal"), {"job_pkey"}),
    "prune_attempts": (lambda: named("attempt_log"), {"job_pkey"}),
    "prune_minutes": (lambda: named("tally_minute"), {"tally_minute_pkey"}),
    "prune_workers": (lambda: named("worker"), set()),
    "prune_progress": (progress.prune, {"progress_pkey"}),
    "prune_batches": (batch.prune, {"batch_completed"}),
}
#: Tables and indexes that a statement may read from end to end: cancel requests are read up to the first one, delayed
#: jobs and counters up to a limit, in order or as they come.
WHOLE: dict[str, set[str]] = {
    **{name: {"job_signal"} for name in ("claim", "claim_backlog", "claim_few", "suspects", "lane_jobs")},
    "sample": {"job_due"},
    "fold": {"tally"},
    # What is there for live jobs only is compared with them, every 10 s and by one worker.
    "prune_dedup": {"dedup", "job"},
    "prune_signals": {"job_signal", "job"},
    "prune_attempts": {"attempt_log", "job"},
    "prune_progress": {"progress", "job", "dead_job"},
}

FILL = """
INSERT INTO pgqueue.job (name, queue, priority, pos, run_at, key, lease, deadline, attempt)
SELECT 'work', CASE i % 3 WHEN 0 THEN 'mail' ELSE 'default' END, i % 10,
  CASE WHEN i % 20 <> 7 THEN nextval('pgqueue.pos_seq') END, CASE WHEN i % 20 = 7 THEN now() + interval '1 h' END,
  CASE WHEN i % 2 = 0 THEN 'k' || i % 10000 END, (i % 50 = 1)::int * 5,
  CASE WHEN i % 50 = 1 THEN now() + interval '1 min' ELSE '-infinity' END, (i % 50 = 1)::int
FROM generate_series(1, 100000) i
"""
#: Nearly all in one level, in flight, and of names that nobody here knows; one key has a fifth of the keyed jobs.
SKEWED = """
INSERT INTO pgqueue.job (name, queue, priority, pos, run_at, key, lease, deadline, attempt)
SELECT CASE WHEN i % 1000 = 1 OR i % 40 = 4 THEN 'work' ELSE 'name' || i % 100 END,
  CASE WHEN i % 5000 = 1 THEN 'mail' ELSE 'default' END, 5,
  CASE WHEN i % 10000 <> 7 THEN nextval('pgqueue.pos_seq') END,
  CASE WHEN i % 10000 = 7 THEN now() + interval '1 h' END,
  CASE WHEN i % 4 = 0 THEN CASE WHEN i % 20 = 0 THEN 'hot' ELSE 'k' || i END END,
  CASE WHEN i % 100 > 4 AND i % 4 > 0 THEN 5 ELSE 0 END,
  CASE WHEN i % 100 > 4 AND i % 4 > 0 THEN now() + interval '1 min' ELSE '-infinity' END, 1
FROM generate_series(1, 100000) i
"""
FILL_LANES = """
INSERT INTO pgqueue.lane (queue, key, priority, head_name)
SELECT DISTINCT ON (j.queue, j.key) j.queue, j.key, j.priority, j.name FROM pgqueue.job j
WHERE j.key IS NOT NULL AND j.pos IS NOT NULL
"""
FILL_DEDUP = """
INSERT INTO pgqueue.dedup (queue, key, job_id, until)
SELECT 'default', 'd' || i, i, CASE WHEN i % 2 = 0 THEN now() + interval '1 h' END FROM generate_series(1, 100000) i
"""
FILL_EFFECTS = """
INSERT INTO pgqueue.effect (name, key, job_id, lease, applied_at)
SELECT 'work', 'e' || i, i, 5, CASE WHEN i % 2 = 0 THEN now() END FROM generate_series(1, 100000) i
"""
FILL_SIGNALS = "INSERT INTO pgqueue.job_signal (job_id) SELECT i FROM generate_series(1, 10000) i"
FILL_ATTEMPTS = """
INSERT INTO pgqueue.attempt_log (job_id, attempt, outcome, lease)
SELECT i, 1, 'retry', 5 FROM generate_series(1, 100000) i
"""
FILL_PROGRESS = "INSERT INTO pgqueue.progress (job_id, lease) SELECT i, 5 FROM generate_series(1, 50000) i"
FILL_DEAD = """
INSERT INTO pgqueue.dead_job (id, queue, name, priority, key, attempt, lost, payload, enqueued_at, reason, blocks)
SELECT i, 'default', 'work', 5, 'dead' || i, 1, 0, '{}', now(), 'exhausted', i % 10 = 0
FROM generate_series(200000, 220000) i
"""
FILL_PERMITS = """
INSERT INTO pgqueue.permit (queue, job_id) SELECT 'limited', i FROM generate_series(1, 50) i
"""
REST = (
    FILL_LANES,
    FILL_DEDUP,
    FILL_EFFECTS,
    FILL_SIGNALS,
    FILL_ATTEMPTS,
    FILL_PROGRESS,
    FILL_DEAD,
    FILL_PERMITS,
)


def named(table: str) -> Statement[Any]:
    """Return the chore of prune that deletes from a table."""
    return next(one for one in prune.chores(LEDGER) if f"DELETE FROM pgqueue.{table} " in one.query.text)


@pytest.fixture(scope="module", params=STATES)
def dsn(server: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    """Give a database whose tables hold much or nothing, with statistics that fit or do not."""
    name = server.migrated()
    filled(server.dsn(name), request.param, TABLES, (FILL, *REST), (SKEWED, *REST))
    yield server.dsn(name)
    server.drop(name)


def checked(holder: Holder, name: str, statement: Statement[Any]) -> set[str]:
    """Check the plan of a statement; return the indexes it uses."""
    plan = generic_plan(holder.connection, statement)
    return check(plan, WHOLE.get(name, ()))


@pytest.mark.parametrize("name", STATEMENTS)
def test_every_hot_statement_goes_by_its_index_also_in_a_plan_made_for_any_parameters(
    dsn: str, name: str
) -> None:
    make, indexes = STATEMENTS[name]
    with Holder(dsn) as holder:
        used = checked(holder, name, make())
    assert indexes <= used


@pytest.mark.parametrize(
    ("name", "index"), [(n, i) for n, (_, all_) in STATEMENTS.items() for i in sorted(all_)]
)
def test_without_its_index_the_guard_of_a_statement_fails(dsn: str, name: str, index: str) -> None:
    make, indexes = STATEMENTS[name]
    with Holder(dsn) as holder:
        holder.begin()
        drop_index(holder.connection, index)
        with pytest.raises(AssertionError):
            assert indexes <= checked(holder, name, make())
        holder.rollback()


@pytest.mark.parametrize("name", ["claim", "claim_backlog", "claim_few"])
def test_a_claim_reads_each_level_in_the_order_of_its_index_without_a_sort(dsn: str, name: str) -> None:
    with Holder(dsn) as holder:
        plan = generic_plan(holder.connection, STATEMENTS[name][0]())
    limits = [node for node in nodes(plan) if node["Node Type"] == "Limit"]
    windows = [node for node in limits if any(n.get("Index Name") == "job_ready" for n in nodes(node))]
    assert windows
    for window in windows:
        assert not any("Sort" in node["Node Type"] for node in nodes(window))


def updates(holder: Holder) -> tuple[int, int]:
    """Return how many jobs this transaction has updated, and how many of them HOT."""
    found = holder.connection.execute(
        "SELECT pg_stat_get_xact_tuples_updated(c), pg_stat_get_xact_tuples_hot_updated(c)"
        " FROM (SELECT 'pgqueue.job'::regclass) t(c)"
    ).fetchone()
    assert found
    return int(found[0]), int(found[1])


N = 30
WRITES: dict[str, Callable[[], Statement[Any]]] = {
    "claim": lambda: claim(OF, [0] * LEVELS, N, 2**32, MINUTE, {QUEUE: 0}),
    "claim_backlog": lambda: claim_backlog(OF, [0] * LEVELS, N, 2**32, MINUTE),
    "claim_few": lambda: claim_few(OF, [0] * LEVELS, N, 2**32, MINUTE),
    "suspects": lambda: suspects(OF, [EVERYTHING] * LEVELS, N, 2**32, MINUTE, low=0, high=0),
    "lane_claim": lambda: lane_claim(OF, [0] * LEVELS, LaneSize(lanes=N, depth=5, total=N), 2**32, MINUTE),
}
JOINS = ("hashjoin", "mergejoin", "nestloop", "material")


@pytest.mark.parametrize("without", [(), JOINS[:2], (*JOINS[:2], "material"), JOINS[2:]], ids="-".join)
@pytest.mark.parametrize("name", WRITES)
def test_no_claim_updates_more_than_its_limit_by_whatever_join_and_each_update_is_hot(
    dsn: str, name: str, without: tuple[str, ...]
) -> None:
    """A limited subquery in a nested loop may be executed once a row: 2,000 rows were updated with LIMIT 10."""
    with Holder(dsn) as holder:
        holder.begin()
        rows = holder.connection.execute("SELECT count(*) FROM pgqueue.job").fetchone()
        if name == "suspects":
            holder.connection.execute("SET LOCAL session_replication_role = replica")
            holder.connection.execute(
                "UPDATE pgqueue.job SET deadline = now() - interval '1 s', name = 'work' WHERE lease <> 0"
            )
        for join in without:
            holder.connection.execute(f"SET LOCAL enable_{join} = off".encode())
        holder.connection.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        total, hot = updates(holder)
        holder.run(WRITES[name]())
        more, more_hot = updates(holder)
        holder.rollback()
    assert more - total <= N
    assert more - total > 0 or rows == (0,)
    assert more_hot - hot == more - total or name == "suspects"


LANES: dict[str, Statement[Any]] = {
    "route": route({QUEUE: 0, "mail": 0}),
    "lane_claim": lane_claim(
        OF, [0] * LEVELS, LaneSize(lanes=5, depth=5, total=20), 9, timedelta(seconds=60)
    ),
    "lane_release": lane_release([(QUEUE, "k1"), (QUEUE, "k2")], 9, 0.0),
}


#: Cancel requests are read up to the first one; keys that a dead letter blocks have an index of their own.
BESIDE_LANES = ("job_signal", "dead_job")


def plans_inside(holder: Holder, act: Callable[[], object], whole: Collection[str] = ()) -> set[str]:
    """Run twice; check the plans of the statements inside functions; return the indexes they use."""
    used: set[str] = set()
    with nested_plans(holder.connection) as told:
        for _ in range(2):
            act()
    plans = told()
    assert plans
    for plan in plans:
        used |= check(plan["Plan"], whole)
    return used


def test_the_statements_inside_the_functions_of_lanes_go_by_their_indexes_too(dsn: str) -> None:
    if why := can_explain_functions(dsn):
        pytest.skip(why)
    with Holder(dsn) as holder:
        used = plans_inside(
            holder, lambda: [holder.run(statement) for statement in LANES.values()], BESIDE_LANES
        )
    assert {"job_route", "job_lane", "lane_pkey", "lane_ready"} <= used


def test_routing_gives_a_new_key_its_lane_without_a_look_at_those_of_others(dsn: str) -> None:
    if why := can_explain_functions(dsn):
        pytest.skip(why)
    fresh = (
        "INSERT INTO pgqueue.job (name, queue, priority, key)"
        " VALUES ('work', %s, 5, 'new ' || %s) RETURNING pos - 1"
    )
    numbers = itertools.count()
    with Holder(dsn) as holder:
        holder.begin()

        def act() -> None:
            row = holder.connection.execute(fresh, [QUEUE, next(numbers)]).fetchone()
            assert row is not None
            holder.run(route({QUEUE: row[0]}))

        assert "lane_pkey" in plans_inside(holder, act)
        count = "SELECT count(*) FROM pgqueue.lane WHERE key LIKE 'new %'"
        assert holder.connection.execute(count).fetchone() == (2,)
        holder.rollback()


@pytest.mark.parametrize("index", ["job_route", "job_lane", "lane_pkey", "lane_ready"])
def test_without_its_index_the_guard_of_the_lanes_fails(dsn: str, index: str) -> None:
    if why := can_explain_functions(dsn):
        pytest.skip(why)
    with Holder(dsn) as holder:
        holder.begin()
        drop_index(holder.connection, index)
        holder.connection.execute("SET LOCAL statement_timeout = '2s'")
        with pytest.raises(
            (AssertionError, psycopg.errors.InvalidColumnReference, psycopg.errors.QueryCanceled)
        ):
            assert index in plans_inside(
                holder, lambda: [holder.run(statement) for statement in LANES.values()], BESIDE_LANES
            )
        holder.rollback()


LIMITED = """
INSERT INTO pgqueue.queue (name, slots, rate_per_s, age_after_s)
VALUES ('limited', 5, 100, NULL), ('default', NULL, NULL, 1)
"""
AGE = Statement(Query("age", "SELECT pgqueue.age(10)", ()), {}, nothing)
#: Statements that are a call of a function, and the indexes that it reads.
FUNCTIONS: dict[str, tuple[Callable[[], Statement[Any]], set[str]]] = {
    "complete": (lambda: complete([(HELD[0], Completed())]), {"job_pkey", "effect_pkey", "progress_pkey"}),
    "complete_wait": (lambda: complete([(HELD[0], Completed())], wait=True), {"job_pkey", "effect_pkey"}),
    "gate": (lambda: limits.gate("limited", 5), {"job_pkey", "permit_pkey"}),
    "gate_pass": (lambda: limits.gate_pass("limited", [1, 2]), set()),
    "age": (lambda: AGE, {"job_ready", "job_lane", "job_pkey", "lane_ready"}),
    "fold_batches": (batch.fold, set()),
    "checkpoint": (lambda: progress.checkpoint(HELD[0], "{}"), {"job_pkey", "progress_pkey"}),
    "status": (lambda: history.status(4), {"job_pkey", "dead_job_pkey", "progress_pkey"}),
    "prune_letters": (lambda: prune.chores(LEDGER, LEDGER)[0], {"dead_job_at"}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_statements_inside_every_other_hot_function_go_by_their_indexes(dsn: str, name: str) -> None:
    if why := can_explain_functions(dsn):
        pytest.skip(why)
    make, indexes = FUNCTIONS[name]
    with Holder(dsn) as holder:
        holder.begin()
        holder.connection.execute(LIMITED)
        used = plans_inside(holder, lambda: holder.run(make()), {"batch_tally"})
        holder.rollback()
    assert indexes <= used


ENQUEUE = """
SELECT id FROM pgqueue.enqueue_many(
  'work', '[1, 2]', keys => ARRAY['k1', 'k2'], dedup_keys => ARRAY['d1', 'new'], dedup_live => true)
"""


def test_an_enqueue_looks_up_its_dedup_keys_by_index_on_a_connection_without_any_settings(dsn: str) -> None:
    """A producer's connection is the application's: the planner has all its choices."""
    if why := can_explain_functions(dsn):
        pytest.skip(why)
    used = set()
    with psycopg.connect(dsn) as connection:
        with nested_plans(connection) as told:
            for _ in range(2):
                connection.execute(ENQUEUE)
        plans = [plan["Plan"] for plan in told() if "pgqueue.dedup" in plan["Query Text"]]
        connection.rollback()
    for plan in plans:
        used |= check(plan, ("job",))  # planned while there is none, until the first analysis
    assert "dedup_pkey" in used
