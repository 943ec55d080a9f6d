"""Limits: how many jobs of a name, of a key or of a queue run at once, and how many begin in a time, over all workers.

Of a name and of a key they are lanes with several slots (see `pgqueue.lanes`), in each queue by themselves: `limit`,
`rate`, `key_limit` and `key_rate` of a job type, which its workers declare and `limit_job` changes while jobs run. Of a
queue they are a gate that its workers pass: `gate` and `gate_pass`, in one transaction with the claim between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pgqueue.enqueue import check_name, check_range
from pgqueue.errors import BadOption
from pgqueue.statement import Row, Statement, load, nothing, scalar

_SQL = load("pgqueue", "limits")
#: Jobs at once of a job type or key, and of a queue.
MOST = 10_000
MOST_OF_QUEUE = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a job type or a queue, None = none. Rates are per second.

    `held`: how many of its jobs are leased now. `changed`: set while jobs run; declarations do not change them.
    """

    kind: str
    name: str
    limit: int | None
    rate: float | None
    burst: float | None
    key_limit: int | None
    key_rate: float | None
    held: int
    changed: bool


def limit_job(
    name: str,
    *,
    limit: int | None = None,
    rate: float | None = None,
    key_limit: int | None = None,
    key_rate: float | None = None,
) -> Statement[bool]:
    """Change the limits of a job type while jobs run: None leaves one as it is, 0 lifts it; rates are per second.

    They hold until the next `limit_job` or `as_declared`, whatever workers declare. False if there is no such job
    type. Raises BadOption; a limit beside a key limit is refused by the database (SQLSTATE 22023).
    """
    check_name("name", name)
    check_range("limit", limit, 0, MOST, " jobs at once (0: no limit)")
    check_range("key_limit", key_limit, 0, MOST, " jobs at once (0: no limit)")
    _check_rate("rate", rate)
    _check_rate("key_rate", key_rate)
    params = {"name": name, "slots": limit, "rate": rate, "key_slots": key_limit, "key_rate": key_rate}
    return Statement(_SQL["limit_job"], params, scalar)


def limit_queue(
    queue: str, *, limit: int | None = None, rate: float | None = None, burst: float | None = None
) -> Statement[None]:
    """Limit how many jobs of a queue run at once (`limit`) and begin in a second (`rate`), over all workers.

    None leaves one as it is, 0 lifts it. `burst`: how many may begin at once after a rest, a second's worth if it was
    never given, at least 1. Workers see it within a second. Raises BadOption.
    """
    check_name("queue", queue)
    check_range("limit", limit, 0, MOST_OF_QUEUE, " jobs at once (0: no limit)")
    _check_rate("rate", rate)
    if burst is not None and not 1 <= burst <= 1_000_000:
        raise BadOption("burst", f"{burst!r} is not a number from 1 to 1000000")
    return Statement(
        _SQL["limit_queue"], {"queue": queue, "slots": limit, "rate": rate, "burst": burst}, nothing
    )


def as_declared(name: str) -> Statement[bool]:
    """Let what the code declares decide about the limits of a job type again, from the next declaration on.

    That is the next start of a worker, or `pgqueue sync`. False if there is no such job type.
    """
    check_name("name", name)
    return Statement(_SQL["as_declared"], {"name": name}, bool)


def limits() -> Statement[list[Limits]]:
    """List the job types and queues that have limits, with how many of their jobs are leased."""
    return Statement(_SQL["limits"], {}, lambda rows: [_limits(row) for row in rows])


def gate(queue: str, want: int) -> Statement[Row]:
    """Ask how many jobs of a queue may begin, and after how many seconds the next one: a row (n, wait).

    Holds the queue's row to the end of the transaction; (0, 0) where somebody else has it. Never waits.
    """
    return Statement(_SQL["gate"], {"queue": queue, "want": want}, lambda rows: rows[0])


def gate_pass(queue: str, ids: Sequence[int]) -> Statement[None]:
    """Note which jobs have passed, in the transaction of `gate`."""
    return Statement(_SQL["gate_pass"], {"queue": queue, "ids": list(ids)}, nothing)


def adopt(queue: str, ids: Sequence[int]) -> Statement[None]:
    """Give leased jobs of a queue permits, which they have not from its gate."""
    return Statement(_SQL["adopt"], {"queue": queue, "ids": list(ids)}, nothing)


def _check_rate(option: str, rate: float | None) -> None:
    if rate is not None and rate != 0 and not 1e-6 <= rate <= 1e6:
        raise BadOption(option, f"{rate!r} a second is not between 0.000001 and 1000000 (0: no rate)")


def _limits(row: Row) -> Limits:
    kind, name, limit, rate, burst, key_limit, key_rate, held, changed = row
    return Limits(
        kind=kind, name=name, limit=limit, rate=rate, burst=burst, key_limit=key_limit, key_rate=key_rate,
        held=held, changed=changed,
    )  # fmt: skip
