"""Every named statement has its plan checked in every state of the tables, or stands here with the reason why not."""

from __future__ import annotations

from collections.abc import Iterator

from pgqueue.statement import Query, load
from tests.db import test_plans, test_plans_outbox
from tests.laws.source import blocks, sql_files

#: Statements whose plans nobody checks, by the reason: file -> names.
UNGUARDED: dict[str, dict[str, str]] = {
    "reads and writes small tables only, a row a queue, job type, schedule, worker or relay": {
        "pgqueue.age": "age_queue",
        "pgqueue.claim": "paused",
        "pgqueue.control": "pause_queue pause_name names queues unsampled",
        "pgqueue.declare": "declare",
        "pgqueue.depth": "gauge",
        "pgqueue.enqueue": "declared",
        "pgqueue.heartbeat": "register beat unregister",
        "pgqueue.limits": "limit_job limit_queue as_declared",
        "pgqueue.metrics": "patience queues schedules workers",
        "pgqueue.pressure": "limit full",
        "pgqueue.schedule": "define add remove pause status due settle broken",
        "relay.partitions": "beat share give leave forget",
        "relay.replay": "open show leave",
    },
    "reads no table: settings, the catalog, locks, sequences, notifications": {
        "pgqueue.claim": "claiming elect resign",
        "pgqueue.finish": "nudge",
        "pgqueue.heartbeat": "idle channels",
        "pgqueue.history": "days",
        "pgqueue.migrate": "server try_lock guard settings grant_role",
        "pgqueue.promote": "notify",
        "pgqueue.schema_version": "version_table revisions",
        "pgqueue.transact": "limits",
        "pgqueue.turn": "sweep_turn turn postpone bounds",
        "pgqueue.worker": "settings",
        "relay.prune": "turn",
        "relay.publish": "idle",
        "relay.replay": "now",
        "relay.wal": "level has_publication publication slot_state forget_slot slot place committing",
    },
    "inserts; what it looks up, it does in a function that is checked by itself": {
        "pgqueue.age": "age",
        "pgqueue.batch": "enqueue",
        "pgqueue.enqueue": "enqueue",
        "pgqueue.schedule": "fire",
        "relay.outbox": "add add_ordered add_many add_many_ordered",
        "relay.queue_sink": "enqueue",
    },
    "runs when a person or the application asks, on a connection that keeps no plan for long": {
        "pgqueue.batch": "look",
        "pgqueue.cancel": "cancel waiting count",
        "pgqueue.change": "reprioritise move edit",
        "pgqueue.dead": "groups letters tell show replay discard rate",
        "pgqueue.depth": "depth due unknown",
        "pgqueue.doctor": (
            "settings holders waiting keys fleets sequences tables indexes publications outbox schedules"
            " batches limits slots"
        ),
        "pgqueue.jobs": "jobs show workers",
        "pgqueue.limits": "limits",
        "relay.park": "parked hold",
        "relay.replay": "found begin",
    },
    "reads all that it tells about, once in a while": {
        "pgqueue.metrics": "ended dead unknown outbox",
        "relay.lag": "lag",
    },
}


def guarded() -> Iterator[Query]:
    """Return the statements whose plans the tests check."""
    for make, _ in (
        *test_plans.STATEMENTS.values(),
        *test_plans.FUNCTIONS.values(),
        *test_plans_outbox.STATEMENTS.values(),
    ):
        yield make().query
    for statement in test_plans.LANES.values():
        yield statement.query
    for name in test_plans_outbox.HANDED_OVER:
        yield load("relay", "queue_sink")[name]


def test_every_statement_is_guarded_or_has_a_reason_not_to_be() -> None:
    checked = set(guarded())
    written = {
        f"{path.parent.parent.name}.{path.stem}.{name}": load(path.parent.parent.name, path.stem)[name]
        in checked
        for path in sql_files()
        for name, _ in blocks(path)
    }
    excused = {
        f"{file}.{name}" for names in UNGUARDED.values() for file, of in names.items() for name in of.split()
    }
    assert {name for name, done in written.items() if not done} == excused
