"""A round: what one trip to the database writes and claims.

    route (own transaction) | BEGIN  ack  finish..  claim..  lane_claim  lane_release  COMMIT | horizon

The results of one batch and the claim of the next share a transaction, a round trip and a commit. If somebody
else's lock stops the ack (55P03 after 250 ms), the round is undone as a whole - nothing was handed out - and the
finished jobs are written in the form that passes locked rows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import psycopg
from psycopg import errors as pg

from pgqueue import batch
from pgqueue.budget import Report, draw
from pgqueue.claim import (
    Answer,
    claim,
    claim_backlog,
    claim_few,
    claiming,
    horizon,
    keyed,
    reclaim,
    suspects,
    suspects_alone,
)
from pgqueue.finish import Failed, ack, bury, complete, drop, nudge, release, retry, snooze, still_mine
from pgqueue.heartbeat import idle
from pgqueue.job import Buried, Claim, Claimed, Completed, Dropped, Released, Retried, Snoozed
from pgqueue.lanes import LaneSize, lane_claim, lane_jobs, lane_release, lane_take, lanes_mine, route
from pgqueue.ledger import Keyed, applied, apply, hold, take
from pgqueue.pipeline import Pending, Pipeline
from pgqueue.plan import Flight, LaneWish, Outcomes, Plan, Sent, Wish
from pgqueue.results import Results, by_claim, by_lease
from pgqueue.shelf import LaneHold
from pgqueue.statement import Statement
from pgqueue.turn import postpone, sweep_turn

#: Nobody else's lock may stop a round for longer.
BRIEFLY: Final = "SET LOCAL lock_timeout = '250ms'"
#: How many results a round tries for themselves that turn out to be stuck behind a lock: each costs 250 ms.
MOST_STUCK = 4


class Leases:
    """Fencing numbers: a random nonce of this process start, and a counter. None is ever handed out twice."""

    def __init__(self, nonce: int) -> None:
        self._base = nonce << 32
        self._counter = itertools.count(random.randrange(2**31))

    def new(self) -> int:
        """Return the next lease."""
        return self._base | (next(self._counter) & 0xFFFF_FFFF)


class Rounds:
    """Runs rounds on one connection."""

    def __init__(
        self, connection: psycopg.Connection[Any], leases: Leases, visibility: timedelta, worker: str
    ) -> None:
        self.connection = connection
        self._leases = leases
        self._visibility = visibility
        self._worker = worker
        #: Claims whose commit is unknown (the connection broke): missing rows are no lost leases then.
        self.unsure: set[int] = set()

    def run(self, plan: Plan) -> Outcomes:
        """Write the results and claim."""
        return self.finish(self.start(plan))

    def start(self, plan: Plan) -> Flight:
        """Send a round behind those that are under way."""
        sent, p = Sent(), Pipeline(self.connection)
        with p.departing():
            if plan.lane_wish and plan.lane_wish.route:
                p.begin()
                sent.routed = p.send(route(plan.lane_wish.route))
                p.commit()
            if plan.arm:
                p.begin()
                p.run("SET LOCAL synchronous_commit = off")
                p.send(idle(plan.arm))
                p.commit()
            if plan.results or plan.wishes or plan.lane_wish or plan.turn:
                self._send_work(p, plan, sent)
            if plan.observe:
                sent.seen = p.send(horizon())
        return Flight(plan=plan, sent=sent, pipeline=p)

    def load(self, plan: Plan) -> Flight | None:
        """Make a round of first looks ready, so that nothing is left but to fire it; None if that is not possible."""
        sent, p = Sent(), Pipeline(self.connection)
        ready = p.load(claiming()) is not None
        for wish in plan.wishes:
            claimed = p.load(self._statement(wish, plan.route_floors))
            ready = ready and claimed is not None
            if claimed is not None:
                sent.claimed.append(claimed)
        return Flight(plan=plan, sent=sent, pipeline=p) if ready else None

    def finish(self, flight: Flight) -> Outcomes:
        """Wait for a round that was sent and read its answers; those before it are answered first."""
        plan, sent = flight.plan, flight.sent
        if plan.meanwhile is not None:
            plan.meanwhile()
        try:
            flight.pipeline.land()
        except pg.LockNotAvailable:
            return self._around_locks(plan.results)
        out = sent.read()
        out.lanes_back = self._lanes_back(sent)
        self._settle(plan.results, sent, out)
        return out

    def sweep(
        self, wish: Wish, lost: Wish, ceilings: list[int], *, recovering: bool, alone: bool
    ) -> tuple[Answer, list[Claimed], bool]:
        """Claim from the start: late rows, then suspects. In a transaction of its own: it may never undo an ack.

        Returns the late jobs, up to 8 suspects of their first loss (or the one that runs `alone`), and whether a
        suspect waits to be run alone.
        """
        late: Pending[Answer] | None = None
        found: Pending[list[Claimed]] | None = None
        waiting: Pending[bool] | None = None
        with Pipeline(self.connection) as p:
            p.begin()
            p.run(BRIEFLY)
            if wish.n > 0 and wish.levels and not alone:
                late = p.send(self._statement(wish, {}))
            if alone:
                found = p.send(
                    suspects(
                        lost.scope, ceilings, 1, self._leases.new(), self._visibility, low=1, high=32_767
                    )
                )
            elif recovering:
                found = p.send(
                    suspects(lost.scope, ceilings, 8, self._leases.new(), self._visibility, low=0, high=0)
                )
            waiting = p.send(suspects_alone(lost.scope, ceilings))
            p.commit()
        answer = late.result() if late else Answer(jobs=[], full={}, keyed=False)
        return answer, found.result() if found else [], waiting.result()

    def waits_alone(self, wish: Wish, ceilings: list[int]) -> bool:
        """Tell whether a suspect waits to be run with nothing beside it."""
        with Pipeline(self.connection) as p:
            waiting = p.send(suspects_alone(wish.scope, ceilings))
        return waiting.result()

    def reclaim(self, jobs: Sequence[Claimed], lanes: Sequence[LaneHold]) -> None:
        """Claim again what is in hand and what a crash of the server has taken from it (see docs/guarantees.md)."""
        with Pipeline(self.connection) as p:
            p.send(reclaim(jobs, lanes, self._visibility))

    def take(self, jobs: Sequence[Keyed]) -> tuple[set[int], dict[int, int]]:
        """Take the idempotency keys of claimed jobs; return the ids that have theirs, and those applied before.

        With each of the latter comes the job that did.
        """
        with Pipeline(self.connection) as p:
            p.begin()
            p.run(BRIEFLY)
            p.send(hold(jobs))
            taken = p.send(take(jobs))
            p.commit()
            before = p.send(applied(jobs))
        return set(taken.result()), before.result()

    def draw(self, reports: Sequence[Report]) -> dict[str, int]:
        """Report executions and take retry tokens."""
        with Pipeline(self.connection) as p:
            p.begin()
            granted = p.send(draw(reports))
            p.commit()
        return granted.result()

    def nudge(self, queues: Sequence[str]) -> None:
        """Tell the other workers of these queues that jobs were given back."""
        with Pipeline(self.connection) as p:
            p.send(nudge(queues))

    def fold_batches(self) -> None:
        """Count the members of batches that have ended, and enqueue the jobs that complete whole ones."""
        with Pipeline(self.connection) as p:
            p.begin()
            p.send(batch.fold())
            p.commit()

    def postpone(self, queues: Sequence[str], wait: float) -> None:
        """Put off the next sweep of these queues."""
        with Pipeline(self.connection) as p:
            p.send(postpone(queues, wait))

    def _send_work(self, p: Pipeline, plan: Plan, sent: Sent) -> None:
        """Send the one transaction that writes results and claims; the order within it is part of the protocol."""
        # What is observed is seen after the commit, which a pipeline without a BEGIN has at its end.
        alone = not plan.results and not plan.observe
        if not alone:
            p.begin()
        if plan.results:
            p.run(BRIEFLY)
        else:
            p.send(claiming())
        done, locked = plan.results.done, plan.results.locked
        if locked:
            self._send_ack(p, [c for c in done if c.id in locked], sent, skip=True)
            done = [c for c in done if c.id not in locked]
        for part in by_claim(done):
            self._send_ack(p, part, sent)
        sent.ends = self._send_ends(p, plan.results)
        self._send_claims(p, plan, sent)
        if (lanes := plan.lane_wish) is not None:
            self._send_lanes(p, lanes, sent)
        for (lease, wait), holds in by_lease(plan.results.lanes).items():
            lanes_back = [(hold.queue, hold.key) for hold in holds]
            given = p.send(lane_release(lanes_back, lease, wait, [hold.pos for hold in holds]))
            sent.lanes_back.append((holds, given))
        if plan.turn:
            sent.turned = p.send(sweep_turn(plan.turn, plan.sweep_period))
        if not alone:
            p.commit()

    def _send_claims(self, p: Pipeline, plan: Plan, sent: Sent) -> None:
        sent.claimed = [p.send(self._statement(wish, plan.route_floors)) for wish in plan.wishes]
        if plan.keyed and plan.wishes and plan.wishes[-1].backlog:
            sent.keyed = p.send(keyed(plan.route_floors))

    def _statement(self, wish: Wish, route_floors: Mapping[str, int]) -> Statement[Answer]:
        what = (wish.scope, wish.starts, wish.n, self._leases.new(), self._visibility)
        if wish.backlog:
            return claim_backlog(*what)
        return claim_few(*what) if wish.few else claim(*what, route_floors)

    def _send_lanes(self, p: Pipeline, wish: LaneWish, sent: Sent) -> None:
        size, lease = LaneSize(lanes=wish.lanes, depth=wish.depth, total=wish.total), self._leases.new()
        if wish.backlog and not wish.whole:
            sent.taken = p.send(lane_take(wish.scope, wish.starts, size.lanes, lease, self._visibility))
            sent.lanes = p.send(lane_jobs(wish.scope, size, lease, self._visibility))
        else:
            sent.lanes = p.send(lane_claim(wish.scope, wish.starts, size, lease, self._visibility))

    def _send_ack(self, p: Pipeline, done: list[Claimed], sent: Sent, *, skip: bool = False) -> None:
        if done:
            sent.acks.append(([c.id for c in done], p.send(ack(done, skip=skip))))

    def _send_ends(self, p: Pipeline, results: Results) -> list[tuple[list[int], Pending[list[int]]]]:
        ended = results.ended
        retried = [Failed(claim=_claim(c), outcome=o) for c, o in ended if isinstance(o, Retried)]
        buried = [Failed(claim=_claim(c), outcome=o) for c, o in ended if isinstance(o, Buried)]
        snoozed = [(_claim(c), o.delay) for c, o in ended if isinstance(o, Snoozed)]
        released = [_claim(c) for c, o in ended if isinstance(o, Released)]
        dropped = [(_claim(c), o) for c, o in ended if isinstance(o, Dropped)]
        completed = [(_claim(c), o) for c, o in ended if isinstance(o, Completed)]
        sent = []
        if results.applied:
            sent.append(
                ([c.id for c in results.applied], p.send(apply([_claim(c) for c in results.applied])))
            )
        if completed:
            sent.append(([c.id for c, _ in completed], p.send(complete(completed))))
        if retried:
            sent.append(([f.claim.id for f in retried], p.send(retry(retried, self._worker))))
        if buried:
            sent.append(([f.claim.id for f in buried], p.send(bury(buried, self._worker))))
        if snoozed:
            sent.append(
                ([c.id for c, _ in snoozed], p.send(snooze([c for c, _ in snoozed], [w for _, w in snoozed])))
            )
        if released:
            sent.append(([c.id for c in released], p.send(release(released))))
        if dropped:
            unbegun = [c.id for c, o in dropped if not o.begun]
            sent.append(([c.id for c, _ in dropped], p.send(drop([c for c, _ in dropped], unbegun))))
        return sent

    def _settle(self, results: Results, sent: Sent, out: Outcomes) -> None:
        """Tell, result by result, whether it was written."""
        for ids, acked in sent.acks:
            ours = acked.result()
            self._missing(ids, ids if ours is None else ours, out)
        for ids, pending in sent.ends:
            self._missing(ids, pending.result(), out)
        self._tell_locked(results, out)

    def _missing(self, ids: Sequence[int], ours: Sequence[int], out: Outcomes) -> None:
        out.finished.update(ours)
        out.lost.update(set(ids).difference(ours))

    def _tell_locked(self, results: Results, out: Outcomes) -> None:
        """Tell apart, among what did not come back, the lost from the merely locked."""
        if not out.lost:
            return
        claims = [_claim(c) for c in results.claims() if c.id in out.lost]
        with Pipeline(self.connection) as p:
            standing = p.send(still_mine(claims))
        out.locked = set(standing.result())
        out.lost -= out.locked
        gone = out.lost & self.unsure  # written before the connection broke, most likely: not ours to report
        out.lost -= gone
        out.finished |= gone

    def _around_locks(self, results: Results) -> Outcomes:
        """Write the results, passing rows that somebody has locked; claim nothing, give no lane back.

        What waits for a lock that cannot be passed (of a ledger entry, of a whole table) stays for a later round.
        """
        try:
            return self._pass_locks(results)
        except pg.LockNotAvailable:
            singles = results.singles()
        out, stuck = Outcomes(), 0
        for single in singles:
            try:
                if stuck >= MOST_STUCK:
                    raise pg.LockNotAvailable
                one = self._pass_locks(single)
            except pg.LockNotAvailable:
                stuck += 1
                out.locked.update(c.id for c in single.claims())
            else:
                out.finished |= one.finished
                out.lost |= one.lost
                out.locked |= one.locked
        return out

    def _pass_locks(self, results: Results) -> Outcomes:
        out, sent = Outcomes(), Sent()
        with Pipeline(self.connection) as p:
            p.begin()
            p.run(BRIEFLY)
            self._send_ack(p, results.done, sent, skip=True)
            sent.ends = self._send_ends(p, results)
            p.commit()
        self._settle(results, sent, out)
        return out

    def _lanes_back(self, sent: Sent) -> list[LaneHold]:
        """Return the lanes that are given back; one that somebody had locked would wait for its lease to run out."""
        back: list[LaneHold] = []
        for holds, given in sent.lanes_back:
            mine: set[tuple[Any, ...]] = set()
            if given.result() < len(holds):
                with Pipeline(self.connection) as p:
                    found = p.send(lanes_mine([(h.queue, h.key, h.pos) for h in holds], holds[0].lease))
                mine = {tuple(row) for row in found.result()}
            back += [h for h in holds if (h.queue, h.key, h.pos) not in mine]
        return back


def _claim(claimed: Claimed) -> Claim:
    return Claim(claimed.id, claimed.lease)
