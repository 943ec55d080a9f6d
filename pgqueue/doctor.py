"""Doctor: what is wrong with this installation, and what to do about it. Reads only.

Each check is a query and a judgement; `checkup` runs them all on one connection. A problem wants action now; a
warning is worth knowing. The queries read the live tables, up to some seconds at millions of waiting jobs.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pgqueue.connection import execute
from pgqueue.dead import ALERT, rate
from pgqueue.errors import SchemaError
from pgqueue.jobs import workers
from pgqueue.schema_version import REVISION, require_schema
from pgqueue.statement import Query, Row, Statement, load, table

_SQL = load("pgqueue", "doctor")

#: A snapshot older than this keeps dead rows in the tables.
OLD_SNAPSHOT_S = 300.0
#: The same where nobody knows its time: so many transactions have begun since.
OLD_SNAPSHOT_XIDS = 1_000_000
#: Dead rows that autovacuum should have taken long ago.
DEAD_ROWS = 200_000
#: A heap this large with hardly a row in it.
BLOATED_BYTES, BYTES_PER_ROW = 256 * 1024 * 1024, 8_192
CONNECTIONS_PER_WORKER = 2

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of one check; `remedy` is empty where nothing is to be done."""

    check: str
    level: Level
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A replication slot by which a relay follows the log; `held` in bytes, `age` in transactions, None = nothing."""

    name: str
    active: bool
    status: str
    held: int | None
    age: int | None

    @property
    def text(self) -> str:
        """Tell what it does, for people."""
        what = "active" if self.active else "not active"
        return (
            f"{what}, holds {max(0, self.held or 0) / 2**20:.1f} MiB of log ({self.status}) and dead rows of the "
            f"catalogs for {self.age or 0} transactions"
        )


Findings = Iterator[Finding]


def checkup(handle: Any) -> list[Finding]:
    """Run every check in the handle's transaction; a check without findings is reported as ok.

    Where the schema is missing, older or newer, that is the only finding.
    """
    try:
        require_schema(handle)
    except SchemaError as error:
        return [Finding(check="schema", level="problem", text=str(error))]
    found = [Finding(check="schema", level="ok", text=f"at {REVISION}")]
    for check, query, judge in _CHECKS:
        rows = execute(handle, Statement(query, {}, table))
        found += list(judge(rows)) or [Finding(check=check, level="ok", text="")]
    found += list(_slots(handle)) or [Finding(check="slots", level="ok", text="")]
    found += list(_workers(handle)) or [Finding(check="workers", level="ok", text="")]
    found += list(_dead(handle)) or [Finding(check="dead letters", level="ok", text="")]
    return found


def _settings(rows: Sequence[Row]) -> Findings:
    version, shown, commit, fsync, pages, _, _ = rows[0]
    if version < 150_000:
        yield _problem("settings", f"PostgreSQL {shown} is older than 15", "upgrade the server")
    if commit == "off":
        yield _problem(
            "settings",
            f"synchronous_commit is {commit} for this role: a crash of the server can lose jobs that were committed",
            "ALTER ROLE .. SET synchronous_commit = on for the roles that enqueue, or ALTER SYSTEM",
        )
    for name, value in (("fsync", fsync), ("full_page_writes", pages)):
        if value == "off":
            yield _warning(
                "settings",
                f"{name} is off: a crash of the machine can destroy the database",
                f"ALTER SYSTEM SET {name} = on, unless this is a test",
            )


def _connections(rows: Sequence[Row]) -> Findings:
    limit, used = rows[0][5], rows[0][6]
    if used > 0.9 * limit:
        yield _problem(
            "connections",
            f"{used} of {limit} connections are taken",
            "put a pooler before the business connections, or raise max_connections; "
            f"a worker process takes {CONNECTIONS_PER_WORKER}",
        )
    elif used > 0.75 * limit:
        yield _warning("connections", f"{used} of {limit} connections are taken")


def _holders(rows: Sequence[Row]) -> Findings:
    for kind, who, detail, age_s, age_xids in rows:
        if kind == "hidden":
            yield _warning(
                "snapshots",
                f"sessions of other roles cannot be seen ({detail}): one of them may hold an old snapshot",
                f"GRANT pg_read_all_stats TO {who}",
            )
            continue
        old = age_s > OLD_SNAPSHOT_S if age_s is not None else (age_xids or 0) > OLD_SNAPSHOT_XIDS
        if old:
            since = f" for {age_s:.0f} s" if age_s is not None else ""
            yield _problem(
                "snapshots",
                f"{kind} {who} ({detail}) holds a snapshot{since}, {age_xids or 0} transactions old: "
                "dead rows of all tables stay until it ends",
                {
                    "session": f"end it: SELECT pg_terminate_backend({who.removeprefix('pid ')})",
                    "prepared transaction": f"COMMIT PREPARED {who} or ROLLBACK PREPARED {who}",
                    "replication slot": f"restart its consumer, or SELECT pg_drop_replication_slot({who})",
                    "standby": "look for a long query on the standby, or turn hot_standby_feedback off there",
                }[kind],
            )


def _waiting(rows: Sequence[Row]) -> Findings:
    unserved: dict[str, int] = {}
    for queue, name, count, served, known, paused in rows:
        if paused:
            yield _warning(
                "jobs", f"{count} jobs {name!r} wait in queue {queue!r}, paused", "pgqueue queue list"
            )
        elif not served:
            unserved[queue] = unserved.get(queue, 0) + count
        elif not known:
            yield _problem(
                "jobs",
                f"{count} jobs {name!r} wait in queue {queue!r}, whose workers do not know that name",
                "start a worker that registers it, or move or cancel them: pgqueue jobs move "
                f"--name {_quoted(name)} --queue {_quoted(queue)} --to QUEUE, or pgqueue jobs cancel "
                f"--name {_quoted(name)} --queue {_quoted(queue)}",
            )
    for queue, count in unserved.items():
        yield _problem(
            "jobs",
            f"{count} jobs wait in queue {queue!r}, which no worker serves",
            f"start one: pgqueue-worker APP --queues {_quoted(queue)}",
        )


def _limits(rows: Sequence[Row]) -> Findings:
    for name, queues in rows:
        yield _warning(
            "limits",
            f"jobs {name!r} wait in {len(queues)} queues ({', '.join(queues[:4])}): "
            "their limit or rate holds for each of these, not for all together",
            f"enqueue them in one queue, and move what waits: pgqueue jobs move --name {_quoted(name)} "
            f"--queue {_quoted(queues[1])} --to {_quoted(queues[0])}",
        )


def _keys(rows: Sequence[Row]) -> Findings:
    for queue, keys, waiting, letter in rows:
        if waiting:
            yield _warning(
                "keys",
                f"{keys} ordering keys of queue {queue!r} wait, with jobs behind them, for a decision on a dead letter",
                f"look at one: pgqueue dead show {letter}; then pgqueue dead replay or discard",
            )


def _fleets(rows: Sequence[Row]) -> Findings:
    for queue, fleets, who in rows:
        yield _warning(
            "fleets",
            f"queue {queue!r} is served by {fleets} fleets that know different names: {', '.join(who[:4])}",
            "while a deployment is under way that is as it should be; otherwise give each fleet a queue of its own, "
            "or each steps over the other's jobs",
        )


def _sequences(rows: Sequence[Row]) -> Findings:
    for sequence, last, highest, cache in rows:
        if highest is not None and last < highest:
            yield _problem(
                "sequences",
                f"{sequence} stands at {last}, but {highest} is in use: after a failover or a restore",
                f"SELECT setval('{sequence}', {highest + 1_000_000})",
            )
        if cache != 1:
            yield _problem(
                "sequences",
                f"{sequence} hands out {cache} numbers at a time: order and floors rest on one at a time",
                f"ALTER SEQUENCE {sequence} CACHE 1",
            )


def _tables(rows: Sequence[Row]) -> Findings:
    for name, live, dead, size, cleaned in rows:
        when = f"last cleaned {cleaned:%Y-%m-%d %H:%M}" if cleaned else "never cleaned"
        if dead > max(DEAD_ROWS, 2 * live):
            yield _warning(
                "tables",
                f"pgqueue.{name} has {dead} dead rows beside {live} live ones ({when})",
                "see the check snapshots for who keeps them; else autovacuum does not keep up",
            )
        if size > BLOATED_BYTES and size > BYTES_PER_ROW * max(live, 1):
            yield _warning(
                "tables",
                f"pgqueue.{name} takes {size // 2**20} MiB for {live} rows",
                f"VACUUM (TRUNCATE) pgqueue.{name}",
            )


def _indexes(rows: Sequence[Row]) -> Findings:
    for (name,) in rows:
        yield _problem("indexes", f"index pgqueue.{name} is not valid", f"REINDEX INDEX pgqueue.{name}")


def _publications(rows: Sequence[Row]) -> Findings:
    for name, tables in rows:
        yield _problem(
            "publications",
            f"publication {name} carries {len(tables)} tables of pgqueue: each claim and heartbeat is replicated, "
            "and a subscriber's workers would run the jobs again",
            "publish your own tables by name or by schema, not FOR ALL TABLES",
        )


def _outbox(rows: Sequence[Row]) -> Findings:
    pending, parked, blocked, oldest, relays, orphans = rows[0]
    if pending and not relays:
        yield _problem(
            "outbox",
            f"{pending} events wait, the oldest for {oldest:.0f} s, and no relay runs",
            "start one: outbox-relay --sink URL",
        )
    elif orphans and relays:
        yield _warning(
            "outbox",
            f"{orphans} partitions have no live relay",
            "it takes them over within seconds; if this stays, look at its log",
        )
    if blocked:
        yield _problem(
            "outbox",
            f"{blocked} aggregates are held up by an event that was rejected",
            "outbox-relay parked, then outbox-relay retry ID or skip ID",
        )
    if parked:
        yield _warning("outbox", f"{parked} events are parked", "outbox-relay parked")


def _schedules(rows: Sequence[Row]) -> Findings:
    for name, state, problem, late_s in rows:
        if state == "broken":
            yield _problem(
                "schedules", f"schedule {name!r} makes no jobs: {problem}", "pgqueue schedule list"
            )
        elif state == "orphan":
            yield _warning(
                "schedules",
                f"schedule {name!r} rests: no running worker defines it any more",
                f"pgqueue schedule remove {_quoted(name)}, if it is not coming back",
            )
        else:
            yield _problem(
                "schedules",
                f"schedule {name!r} is {late_s:.0f} s late: no worker looks after schedules",
                "start a worker",
            )


def _batches(rows: Sequence[Row]) -> Findings:
    for batch_id, problem, remedy in rows:
        yield _problem(
            "batches",
            f"the completion job of batch {batch_id} cannot be enqueued: {problem}",
            "mend the cause, it is tried again every minute; or do without the job: " + remedy,
        )


def slots() -> Statement[list[Slot]]:
    """Read the replication slots of relays of this database."""
    return Statement(_SQL["slots"], {}, _read_slots)


def _read_slots(rows: Sequence[Row]) -> list[Slot]:
    return [Slot(name=n, active=a, status=s, held=h, age=age) for n, a, s, h, age in rows]


def _slots(handle: Any) -> Findings:
    for slot in execute(handle, slots()):
        if not slot.active or slot.status in ("unreserved", "lost"):
            yield _warning(
                "slots",
                f"the relay's replication slot {slot.name!r} is {slot.text}",
                "start outbox-relay --read-from wal; if that is not wanted any more: SELECT "
                f"pg_drop_replication_slot('{slot.name}')",
            )


def _workers(handle: Any) -> Findings:
    for w in execute(handle, workers()):
        if not w.alive:
            yield _warning(
                "workers",
                f"worker {w.host}:{w.pid} has not been heard of for {w.beat_s_ago:.0f} s; it held {w.in_flight} jobs",
                "if it is dead its jobs are run again by others; the entry goes after a day",
            )
        elif w.overrun:
            yield _warning(
                "workers",
                f"worker {w.host}:{w.pid}: {w.overrun} of {w.concurrency} slots are kept by handlers that go on after "
                "their timeout",
                "its log names the jobs (overrun); bound what they wait for, or declare them process=True or async "
                "def, which are stopped; a restart frees the slots",
            )


def _dead(handle: Any) -> Findings:
    rows = execute(handle, rate())
    count = sum(jobs for _, _, jobs in rows)
    if count > ALERT:
        queue, error, most = rows[0]
        yield _problem(
            "dead letters",
            f"{count} new ones in 10 minutes, {most} of them {error} in queue {queue!r}",
            "pgqueue dead list",
        )
    elif count:
        yield _warning("dead letters", f"{count} new ones in 10 minutes", "pgqueue dead list")


def _problem(check: str, text: str, remedy: str) -> Finding:
    return Finding(check=check, level="problem", text=text, remedy=remedy)


def _warning(check: str, text: str, remedy: str = "") -> Finding:
    return Finding(check=check, level="warning", text=text, remedy=remedy)


def _quoted(text: str) -> str:
    return shlex.quote(text)


_CHECKS: tuple[tuple[str, Query, Callable[[Sequence[Row]], Findings]], ...] = (
    ("settings", _SQL["settings"], _settings),
    ("connections", _SQL["settings"], _connections),
    ("snapshots", _SQL["holders"], _holders),
    ("jobs", _SQL["waiting"], _waiting),
    ("limits", _SQL["limits"], _limits),
    ("keys", _SQL["keys"], _keys),
    ("fleets", _SQL["fleets"], _fleets),
    ("sequences", _SQL["sequences"], _sequences),
    ("tables", _SQL["tables"], _tables),
    ("indexes", _SQL["indexes"], _indexes),
    ("publications", _SQL["publications"], _publications),
    ("outbox", _SQL["outbox"], _outbox),
    ("schedules", _SQL["schedules"], _schedules),
    ("batches", _SQL["batches"], _batches),
)
