"""The publishing loop that follows the write-ahead log: events in the order of their commits.

The log tells which events are new; the table stays the truth. What is confirmed is marked, what is not is written down
in the table, and only then the log is confirmed: so a parked event holds no log, and a crash repeats what was not
marked and loses nothing. An aggregate with an event that was not confirmed is left: its events are read from the table,
in id order, until it has none, and from then on come from the log again.

Once a minute the table is looked at for what the log did not tell: an event whose mark somebody cleared, or that was
written while there was no publication.

Only one relay reads the log at a time; others wait for its slot.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from pgqueue.connection import execute
from pgqueue.events import LoopRecovered
from pgqueue.pipeline import Pipeline
from relay import events as told
from relay import partitions, publish
from relay.cycle import Connection
from relay.event import Event
from relay.publish import Trouble
from relay.publishing import LOOK_FROM_ZERO_S, Publishing
from relay.wal import (
    PUBLICATION,
    Heard,
    Stream,
    StreamEnded,
    committing,
    forget,
    has_publication,
    place,
    prepare,
    present,
)

PARTS: Final = 32_767
LOOK_S: Final = 0.25
LEFT_EVERY_S: Final = 0.5
VISIBLE_S: Final = 0.005


@dataclass(slots=True, kw_only=True)
class _Untold:
    """A look for what the log did not tell, up to the id `upto`, a page of unpublished events at a time.

    Once the log is dealt with up to `place`, where it ended after the page was read, it tells of no event of the page.
    """

    floors: dict[int, int]
    upto: int
    ids: list[int] = field(default_factory=list)
    place: int = 0


class Following(Publishing):
    """One loop on two connections: one to the table, one that streams."""

    _left: dict[str, int]
    _untold: _Untold | None

    def _work(self, conn: Connection) -> None:
        config = self.config
        self._ledger.rejected.clear()
        self._ledger.late.clear()
        self._left = {}
        self._rebalance_at = left_at = 0.0
        slot = prepare(conn)
        try:
            with Stream(config.dsn, f"{config.name} wal", slot) as stream:
                if (seconds := self._database.over()) is not None:
                    self._bus.emit(LoopRecovered(loop="publish", seconds=seconds))
                self._own(conn)
                self._backlog(conn, stream)
                self._untold = None
                self._zero_at = time.monotonic() + LOOK_FROM_ZERO_S
                while not self._stop.is_set():
                    self.progress = now = time.monotonic()
                    self._own(conn)
                    if now >= left_at:
                        left_at = now + LEFT_EVERY_S
                        self._publish_left(conn, stream)
                    heard = stream.next(config.batch, LOOK_S)
                    if not heard or self._publish_new(conn, stream, heard):
                        stream.confirm()
                    self._publish_untold(conn, stream, slot)
        except StreamEnded as ended:
            if ended.unreadable:
                execute(conn, forget(slot))
            raise

    def _own(self, conn: Connection) -> None:
        """Stand in the table as the relay of every partition that is free, for people and for other relays."""
        now = time.monotonic()
        if now < self._rebalance_at:
            return
        config = self.config
        execute(conn, partitions.beat(self._me, config.name, timedelta(seconds=config.lease)))
        taken = execute(conn, partitions.take(self._me, PARTS))
        self._floors.take(taken)
        if taken:
            owned = len(self._floors.parts)
            self._bus.emit(told.PartitionsChanged(taken=len(taken), owned=owned, relays=1))
        self.shared.set()
        self._rebalance_at = now + config.lease / 3

    def _backlog(self, conn: Connection, stream: Stream) -> None:
        """Publish what was written before the slot began, or was left by the relay before."""
        _, trouble = self._read(conn, [])
        self._leave(trouble)
        share = execute(conn, partitions.share())
        floors = dict.fromkeys(range(share.partitions), 0)
        while not self._stop.is_set():
            self.progress = time.monotonic()
            page = execute(conn, publish.read(floors, self.config.batch))
            if not page or not self._deliver(conn, stream, page):
                return
            for event in page:  # whatever appears below later comes by the log
                floors[event.part] = event.id

    def _publish_new(self, conn: Connection, stream: Stream, heard: Sequence[Heard]) -> bool:
        """Publish what the log told; False if the relay is to stop before all is dealt with."""
        ids = [one.id for one in heard]
        there: list[int] = execute(conn, present(ids))
        gone = set(ids).difference(there)
        if gone:  # deleted since, or not visible yet
            writers = {one.xid for one in heard if one.id in gone}
            while execute(conn, committing(writers)):
                if self._stop.wait(VISIBLE_S):
                    return False
                self.progress = time.monotonic()
                stream.pump()
        events, trouble = self._read(conn, ids)
        self._leave(trouble)
        by_id = {event.id: event for event in events}
        return self._deliver(conn, stream, [by_id[id_] for id_ in ids if id_ in by_id])

    def _publish_left(self, conn: Connection, stream: Stream) -> None:
        """Publish the events of aggregates that were left, as far as they need not wait.

        An aggregate comes from the log again when all its events in the table were read and confirmed.
        """
        _, trouble = self._read(conn, [])
        self._leave(trouble)
        if not self._left:
            return
        n = self.config.batch
        page = execute(conn, publish.read(dict.fromkeys(self._left.values(), 0), n))
        counts = Counter(event.part for event in page)
        waiting = {one.key for one in trouble if one.waits}
        before = self._left
        mine = [event for event in page if event.key in before]
        self._left = {key: part for key, part in before.items() if key in waiting}
        done = self._deliver(conn, stream, mine)
        self._left |= {key: part for key, part in before.items() if not done or counts[part] >= n}

    def _publish_untold(self, conn: Connection, stream: Stream, slot: str) -> None:
        """Go on with the look for what the log did not tell, or begin one when its time has come."""
        look = self._untold
        if look is None:
            if time.monotonic() < self._zero_at:
                return
            if not execute(conn, has_publication()):
                problem = (
                    f"publication {PUBLICATION} is gone; it is made again, and what was missed is published"
                )
                raise StreamEnded(slot, problem)
            upto, _ = execute(conn, publish.last())
            share = execute(conn, partitions.share())
            look = self._untold = _Untold(floors=dict.fromkeys(range(share.partitions), 0), upto=upto)
        elif stream.confirmed < look.place:
            return
        events, trouble = self._read(conn, look.ids)
        self._leave(trouble)
        if not self._deliver(conn, stream, sorted(events, key=lambda event: event.id)):
            return
        read = execute(conn, publish.read(look.floors, self.config.batch))
        page = [event for event in read if event.id <= look.upto]
        look.ids = [event.id for event in page]
        look.floors |= {event.part: event.id for event in page}
        look.place = execute(conn, place())
        if not page:
            self._untold = None
            self._zero_at = time.monotonic() + LOOK_FROM_ZERO_S

    def _deliver(self, conn: Connection, stream: Stream, events: Sequence[Event]) -> bool:
        """Publish events until each is confirmed, or its aggregate is left; all of it is in the table then.

        False if the relay is to stop first. While a sink is away everything waits, and the log is not confirmed.
        """
        place = {event.id: n for n, event in enumerate(events)}
        todo = [event for event in events if event.key not in self._left]
        while todo:
            _, at = execute(conn, publish.last())
            self.progress = began = time.monotonic()
            outcome = self._targets.send(todo, deadline=began + self.config.send_timeout)
            seconds = time.monotonic() - began
            age = (at - todo[0].created_at).total_seconds() + seconds
            unconfirmed = self._take_in(outcome, age=age, seconds=seconds)
            for sent in outcome.values():
                refused = {*sent.rejected, *(sent.unanswered if sent.down is None else ())}
                self._left |= {event.key: event.part for event in sent.unconfirmed if event.id in refused}
            self._write(conn)
            todo = sorted((e for e in unconfirmed if e.key not in self._left), key=lambda e: place[e.id])
            if not self._wait_for_all(conn, stream):
                return False
        return True

    def _wait_for_all(self, conn: Connection, stream: Stream) -> bool:
        """Wait while any sink is away; False if the relay is to stop meanwhile."""
        while not self._stop.is_set():
            self.progress = now = time.monotonic()
            stream.pump()
            self._own(conn)
            if not any(target.quiet(now) for target in self._targets.all):
                return True
            self._stop.wait(min(LOOK_S, max(0.0, self._targets.next_try(now) - now)))
        return False

    def _read(self, conn: Connection, ids: Sequence[int]) -> tuple[list[Event], list[Trouble]]:
        """Read events and the trouble of all aggregates in one snapshot."""
        share = execute(conn, partitions.share())
        with Pipeline(conn) as sent:
            sent.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            events = sent.send(publish.chosen(ids))
            trouble = sent.send(publish.trouble(list(range(share.partitions))))
            sent.commit()
        return events.result(), trouble.result()

    def _leave(self, trouble: Sequence[Trouble]) -> None:
        self._left |= {one.key: one.part for one in trouble}
