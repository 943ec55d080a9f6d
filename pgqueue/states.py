"""The states of a job and every legal move between them.

Nothing stores a state: it is derived from the row (see the view `pgqueue.queue_depth`), in this order:

    in_flight   leased, and the deadline not past
    delayed     `run_at` in the future, or its lane waits for a backoff to end
    blocked     keyed and not the head of its lane, or paused
    ready       everything else, with due jobs and expired leases
    dead        the row stands in `dead_job`
    done        the row is gone

`docs/lifecycle.md` draws this table; a test compares the two.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a job is in its life."""

    READY = "ready"
    DELAYED = "delayed"
    BLOCKED = "blocked"
    IN_FLIGHT = "in_flight"
    DEAD = "dead"
    DONE = "done"


#: (from, verb) -> to; None is "no row yet".
TRANSITIONS: dict[tuple[State | None, str], frozenset[State]] = {
    (None, "enqueue"): frozenset({State.READY, State.DELAYED, State.BLOCKED}),
    (State.DELAYED, "promote"): frozenset({State.READY, State.BLOCKED}),
    (State.BLOCKED, "lane moves on"): frozenset({State.READY}),
    (State.READY, "pause"): frozenset({State.BLOCKED}),
    (State.BLOCKED, "resume"): frozenset({State.READY}),
    (State.READY, "claim"): frozenset({State.IN_FLIGHT}),
    (State.READY, "cancel"): frozenset({State.DONE}),
    (State.DELAYED, "cancel"): frozenset({State.DONE}),
    (State.BLOCKED, "cancel"): frozenset({State.DONE}),
    (State.IN_FLIGHT, "heartbeat"): frozenset({State.IN_FLIGHT}),
    (State.IN_FLIGHT, "ack"): frozenset({State.DONE}),
    (State.IN_FLIGHT, "retry"): frozenset({State.DELAYED}),
    (State.IN_FLIGHT, "snooze"): frozenset({State.DELAYED}),
    (State.IN_FLIGHT, "release"): frozenset({State.READY}),
    (State.IN_FLIGHT, "bury"): frozenset({State.DEAD}),
    (State.IN_FLIGHT, "cancel"): frozenset({State.DONE}),
    (State.IN_FLIGHT, "lease expires"): frozenset({State.READY}),
    (State.DEAD, "replay"): frozenset({State.READY, State.BLOCKED}),
    (State.DEAD, "discard"): frozenset({State.DONE}),
}
