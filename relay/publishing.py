"""The publishing loop: write down the last batch, read the next, give it to the sinks.

No transaction waits for a sink. A lost connection is opened again, with everything that was confirmed still to be
marked; partitions change hands only between two batches.

While there is a backlog the database works while the sinks do: with batch k under way, one round trip writes down batch
k-1 and takes look k+1. That look sees the events of k as not published. What keeps the order:

- It is asked above all events of k (`Floors.ahead`), and only where these are proven: so no event of k is read again,
  and none that may still appear among them is passed over.
- Batch k+1 begins when k is settled. Where an event of k was not confirmed, the floor stays below it, the look was
  asked above, and so the partition's events of the look are dropped. Then each event of k+1 has every older one of
  its aggregate marked, parked, confirmed in k, or before it in k+1: as if k had been marked before the look.
- A rejection in k is written down by the round trip that follows, before the look that reads its partition again.
- A guard that ended, an aggregate that began or ceased to wait, an event due again, a partition lost: all are
  in the look, and are taken in after k was settled, in the order of the looks.
- A look in hand is dropped when the sinks are away or it is older than a third of a lease: a relay whose lease has
  run out sends nothing that it read long ago. None is taken when partitions are to be shared or read from 0.
- A relay that dies leaves two batches unmarked at most.
- The ledger is the round trip's while it runs; what became of k is noted after it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Event as Flag
from typing import Final
from uuid import UUID

from pgqueue.connection import execute
from pgqueue.dsn import one_line
from pgqueue.events import Bus, LoopFailed, LoopRecovered
from pgqueue.loop import IdlePoll, Trouble, Wake
from relay import events as told
from relay import partitions, publish
from relay.ahead import Ahead
from relay.config import RelayConfig
from relay.cycle import Connection, Ledger, connect, cycle, write
from relay.event import Event, Unavailable
from relay.floors import Batch, Floors
from relay.publish import Failed, Look
from relay.send import Sent, no_answer
from relay.targets import Target, Targets

LOOP: Final = "publish"
LOOK_FROM_ZERO_S: Final = 60.0
IDLE_S: Final = 5.0
SMALL_BATCH: Final = 10
CALL_AGAIN_S: Final = 1.0
LONGEST_RETRY_AFTER_S: Final = 300.0
LATE_REMEMBERED: Final = 10_000
#: So many aggregates may wait for a sink that is away while others go on; then all wait, and memory stays flat.
MOST_HELD: Final = 10_000
#: Tries to mark what is confirmed when the database is away at the end; what is not marked is published
#: again.
FAREWELLS: Final = 3
#: Few partitions that hold most of the work are read so many times deeper with each look.
DEEPER: Final = 4


@dataclass(slots=True, kw_only=True)
class Seen:
    """A look that was taken: above which floors, at most how many events of a partition, when (monotonic seconds)."""

    look: Look
    asked: Mapping[int, int]
    n: int
    began: float
    ended: float


class Publishing:
    """One loop on one connection; `progress` is the monotonic time of its last step."""

    def __init__(
        self, config: RelayConfig, me: UUID, targets: Targets, bus: Bus, wake: Wake, stop: Flag
    ) -> None:
        self.config = config
        self.progress = time.monotonic()
        self._me = me
        self._targets = targets
        self._bus = bus
        self._wake = wake
        self._stop = stop
        self._floors = Floors()
        self._ledger = Ledger()
        self._reasons: dict[int, str] = {}
        self._lateness: dict[int, int] = {}
        self._poll = IdlePoll(config.longest_poll)
        self._database = Trouble()
        self._quiet_until = 0.0
        self._rebalance_at = 0.0
        self._zero_at = 0.0
        self._armed_until = 0.0
        self._depth = 1
        #: Set once partitions were shared out for the first time: before, all look as if nobody owned them.
        self.shared = Flag()

    def run(self) -> None:
        """Publish until told to stop; then mark what is confirmed. Returns, never raises."""
        farewells = FAREWELLS
        while True:
            try:
                with connect(self.config.dsn, f"{self.config.name} publish") as conn:
                    self._work(conn)
                    self._write(conn)
            except Exception as error:  # noqa: BLE001 - whatever happened, the loop goes on
                self.shared.set()  # a relay that waits for its turn tells how much waits all the same
                delay = self._database.failed()
                self._bus.emit(LoopFailed(loop=LOOP, error=one_line(error), retry_in=delay))
                self.progress = time.monotonic()
                if self._stop.wait(delay):
                    if not self._ledger or farewells == 0:
                        return
                    farewells -= 1
                    time.sleep(delay)
            else:
                return

    def _work(self, conn: Connection) -> None:
        self._floors.reset()
        self._ledger.rejected.clear()
        self._ledger.late.clear()
        self._rebalance_at = 0.0
        self._zero_at = time.monotonic() + LOOK_FROM_ZERO_S
        seen: Seen | None = None
        while not self._stop.is_set():
            self.progress = now = time.monotonic()
            if seen is None:
                if now >= self._rebalance_at:
                    self._rebalance(conn)
                if now < self._quiet_until:  # the sink is away, but the partitions are still ours to share
                    self._stop.wait(max(0.0, min(self._quiet_until, self._rebalance_at) - now))
                    continue
                if now >= self._zero_at:
                    self._floors.look_from_zero()
                    self._zero_at = now + LOOK_FROM_ZERO_S
                seen = self._look(conn, dict(self._floors.parts))
            batch = self._absorb(seen)
            if (seconds := self._database.over()) is not None:
                self._bus.emit(LoopRecovered(loop=LOOP, seconds=seconds))
            if batch.events:
                seen = self._publish(conn, batch, seen.ended)
                self._poll.reset()
                continue
            seen = None
            if not batch.moved:
                self._floors.settle(())
                self._idle(conn)

    def _look(self, conn: Connection, asked: Mapping[int, int]) -> Seen:
        """Write the ledger down and read above these floors."""
        config = self.config
        began = time.monotonic()
        n = min(config.batch, self._depth * max(4, math.ceil(config.batch / max(1, len(asked)))))
        reasons = self._reasons
        look, failed = cycle(
            conn,
            me=self._me,
            ledger=self._ledger,
            floors=asked,
            n=n,
            keep=config.keep,
            policy=config.rejection,
        )
        self._tell_failed(failed, reasons)
        return Seen(look=look, asked=asked, n=n, began=began, ended=time.monotonic())

    def _absorb(self, seen: Seen) -> Batch:
        batch = self._floors.absorb(seen.look, asked=seen.asked, n=seen.n, now=time.monotonic())
        if batch.lost:
            self._bus.emit(told.PartitionsLost(parts=tuple(sorted(batch.lost))))
        count, most = len(batch.events), self.config.batch
        if not batch.full or count > 2 * most:
            self._depth = 1
        elif 2 * count < most:
            self._depth = min(DEEPER * self._depth, most)
        return batch

    def _publish(self, conn: Connection, batch: Batch, looked: float) -> Seen | None:
        """Give a batch to the sinks; return the look that was taken meanwhile, if one was and may be used."""
        config = self.config
        todo = [event for event in batch.events if event.id not in self._ledger.stuck]
        now, rest = todo[: 2 * config.batch], todo[2 * config.batch :]
        began = time.monotonic()
        ahead: Ahead[Seen] | None = None
        if batch.full and len(now) >= SMALL_BATCH and began < min(self._rebalance_at, self._zero_at):
            asked = self._floors.ahead(now, rest)
            ahead = None if asked is None else Ahead(partial(self._look, conn, asked))
        try:
            outcome = self._targets.send(now, deadline=began + config.send_timeout)
            seconds = time.monotonic() - began
        finally:
            if ahead is not None:
                ahead.wait()
        age = (batch.at - batch.events[0].created_at).total_seconds() + time.monotonic() - looked
        unconfirmed = self._take_in(outcome, age=age, seconds=seconds)
        self._floors.settle([*unconfirmed, *rest])
        self._wait_for_sinks(conn, unconfirmed)
        if len(todo) < SMALL_BATCH and config.pause and not self._quiet_until:
            self._stop.wait(config.pause)
        seen = None if ahead is None else ahead.result()
        usable = (
            seen is not None and not self._quiet_until and time.monotonic() - seen.began < config.lease / 3
        )
        return seen if usable else None

    def _take_in(self, outcome: Mapping[Target, Sent], *, age: float, seconds: float) -> list[Event]:
        """Note what became of events, the oldest `age` s old, to be written down; return those not confirmed."""
        unconfirmed: list[Event] = []
        count = 0
        self._reasons = {}
        for target, sent in outcome.items():
            if not target.sink.marks:
                self._ledger.confirmed.update(sent.confirmed)
            self._ledger.rejected.update(sent.rejected)
            self._reasons |= sent.rejected
            unconfirmed += sent.unconfirmed
            count += len(sent.confirmed)
        if count:
            self._bus.emit(told.EventsPublished(count=count, seconds=seconds, oldest_s=age))
        for target, sent in outcome.items():
            self._note(target, sent)
        return unconfirmed

    def _note(self, target: Target, sent: Sent) -> None:
        """Note whether a sink is away, and which of its events got no answer."""
        if sent.down is None and sent.unanswered and not sent.answered:
            sent.down, sent.retry_after = no_answer(sent.unanswered)
        if sent.down is not None:
            target.sink.close()
            asked = sent.retry_after or 0.0
            delay = target.down(sent.down, min(asked, LONGEST_RETRY_AFTER_S))
            retry_in = asked if math.isinf(asked) else delay
            self._bus.emit(
                told.SinkDown(sink=target.sink.name, problem=sent.down, retry_in=retry_in, fault=sent.fault)
            )
            return
        if sent.answered and (seconds_down := target.trouble.over()) is not None:
            self._bus.emit(told.SinkBack(sink=target.sink.name, seconds=seconds_down))
        self._defer(sent)

    def _wait_for_sinks(self, conn: Connection, unconfirmed: Sequence[Event]) -> None:
        """While every sink is away, write down what is known and wait; while some are, hold what is theirs.

        Neither spends an attempt. An aggregate is held by its first unconfirmed event.
        """
        now = time.monotonic()
        self._quiet_until = 0.0
        if self._targets.all_quiet(now):
            self._quiet_until = self._targets.next_try(now)
        elif any(target.quiet(now) for target in self._targets.all):
            heads: dict[str, Event] = {}
            for event in sorted(unconfirmed, key=lambda event: event.id):
                heads.setdefault(event.key, event)
            away = [(e, t) for e in heads.values() if (t := self._targets.of(e)).quiet(now)]
            if self._floors.waiting + len(away) > MOST_HELD:
                self._quiet_until = self._targets.next_try(now)
            else:
                self._ledger.late |= {
                    event.id: (f"{target.sink.name} is away: {target.problem}", target.hold())
                    for event, target in away
                }
        if self._quiet_until:
            self._write(conn)

    def _defer(self, sent: Sent) -> None:
        """Let an aggregate wait whose event got no answer while others got theirs: the sink is not away."""
        if self._lateness:
            for id_ in sent.confirmed:
                self._lateness.pop(id_, None)
        if not sent.unanswered:
            return
        if len(self._lateness) > LATE_REMEMBERED:
            self._lateness.clear()
        for id_, receipt in sent.unanswered.items():
            self._ledger.late[id_] = (receipt.reason, self._lateness_delay(id_, receipt))
        reason = next(iter(sent.unanswered.values())).reason
        self._bus.emit(told.EventsDeferred(event_ids=tuple(sent.unanswered), reason=reason))

    def _lateness_delay(self, id_: int, receipt: Unavailable) -> float:
        policy = self.config.rejection
        times = self._lateness[id_] = self._lateness.get(id_, 0) + 1
        bound = min(policy.cap, policy.base * 2.0 ** min(times, 30))
        return max(random.uniform(bound / 2, bound), min(receipt.retry_after or 0.0, LONGEST_RETRY_AFTER_S))

    def _rebalance(self, conn: Connection) -> None:
        """Take or give partitions up to the fair share; what is confirmed in them is marked before."""
        config = self.config
        self._write(conn)
        execute(conn, partitions.beat(self._me, config.name, timedelta(seconds=config.lease)))
        share = execute(conn, partitions.share())
        have = self._floors.parts
        taken: list[int] = []
        given: list[int] = []
        if len(have) > share.fair:
            given = random.sample(list(have), len(have) - share.fair)
            execute(conn, partitions.give(self._me, given))
            self._floors.forget(given)
        elif len(have) < share.fair:
            taken = execute(conn, partitions.take(self._me, share.fair - len(have)))
            self._floors.take(taken)
        if taken or given:
            self._bus.emit(
                told.PartitionsChanged(
                    taken=len(taken), given=len(given), owned=len(self._floors.parts), relays=share.relays
                )
            )
        self.shared.set()
        hungry = len(self._floors.parts) < share.partitions // max(1, share.relays)
        every = min(CALL_AGAIN_S, config.lease / 3) if hungry else config.lease / 3
        self._rebalance_at = time.monotonic() + every * random.uniform(0.8, 1.0)

    def _idle(self, conn: Connection) -> None:
        """Ask for a notification, look once more, then wait for it or for the poll timer."""
        now = time.monotonic()
        if self._floors.parts and now >= self._armed_until - IDLE_S / 2:
            execute(conn, publish.idle(IDLE_S))
            self._armed_until = now + IDLE_S
            return
        if self._wake.wait(max(0.0, min(self._poll.delay(), self._rebalance_at - now))):
            self._poll.reset()

    def _write(self, conn: Connection) -> None:
        config = self.config
        failed = write(conn, self._ledger, keep=config.keep, policy=config.rejection)
        self._tell_failed(failed, self._reasons)

    def _tell_failed(self, failed: list[Failed], reasons: Mapping[int, str]) -> None:
        for one in failed:
            reason = reasons.get(one.id, "")
            self._bus.emit(
                told.EventRejected(event_id=one.id, attempts=one.attempts, parked=one.parked, reason=reason)
            )
