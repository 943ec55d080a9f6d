"""Flights: rounds that are on their way to the database while the engine gets on with its work.

Draining a backlog the engine sends a round before the one in front of it is answered, so that the database has work
while answers are read and the next statements are made. Only plain rounds fly like that: jobs that are done, lanes to
give back, and claims of a backlog. The server works them off in their order; if one fails inside its transaction, it
refuses the one behind, and what that was to write is written by a later round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import psycopg

from pgqueue.events import Bus, LoopFailed
from pgqueue.job import Buried, Claimed, Completed, Retried, Snoozed
from pgqueue.plan import Flight, Outcomes, Plan, Wish
from pgqueue.quota import Quota
from pgqueue.results import Results
from pgqueue.round import Rounds
from pgqueue.run import failure_of
from pgqueue.writeoff import WriteOff

#: Rounds under way at once: one that the database works on, and one behind it.
MOST: Final = 2


class Flights:
    """The rounds of one engine that have departed."""

    def __init__(self, write_off: WriteOff, quota: Quota) -> None:
        self._write_off = write_off
        self._quota = quota
        self._away: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._away)

    @property
    def full(self) -> bool:
        """Tell whether the oldest has to land before another departs."""
        return len(self._away) >= MOST

    @property
    def front(self) -> Sequence[Wish]:
        """The claims of the round that departed last."""
        return self._away[-1].plan.wishes if self._away else ()

    def claims(self) -> Iterator[Claimed]:
        """Return the claims whose end is being written."""
        for flight in self._away:
            yield from flight.plan.results.claims()

    def depart(self, rounds: Rounds, plan: Plan) -> None:
        """Send a round."""
        self._away.append(rounds.start(plan))
        self._write_off.depart(plan.results)
        self._count()

    def fire(self, flight: Flight) -> None:
        """Send a round that was loaded before; it writes no results."""
        flight.pipeline.fire()
        self._away.append(flight)
        self._count()

    def land(self, rounds: Rounds) -> tuple[Plan, Outcomes] | None:
        """Wait for the oldest round and settle its results; None if the server refused it for the sake of another.

        Raises what the round met. Its results are then to be written again.
        """
        flight = self._away.popleft()
        self._count()
        try:
            out = rounds.finish(flight)
        except psycopg.errors.InFailedSqlTransaction:
            self._again(flight, rounds)
            return None
        except BaseException:
            self._again(flight, rounds)
            raise
        rounds.unsure.clear()
        self._write_off.landed(flight.plan.results, out)
        return flight.plan, out

    def lose(self, rounds: Rounds) -> None:
        """Take back what was on its way over a connection that is closed: whether it was written is not known."""
        while self._away:
            self._again(self._away.popleft(), rounds)
        self._count()

    def one_by_one(self, rounds: Rounds, results: Results, bus: Bus) -> None:
        """Write results apart from each other, so that one that cannot be written does not keep the others."""
        for single in results.singles():
            try:
                out = rounds.run(Plan(results=single))
            except psycopg.Error as error:
                if rounds.connection.closed:
                    return
                if isinstance(error, psycopg.OperationalError):
                    continue  # a timeout, a deadlock: it passes, and the next round writes the result
                if single.ended and isinstance(single.ended[0][1], Completed | Retried | Snoozed):
                    # What becomes of it cannot be written: a person has to see that, and can replay it.
                    why = Buried(reason="permanent", failure=failure_of(error))
                    self._write_off.instead(single.ended[0][0], why)
                    continue
                bus.emit(
                    LoopFailed(
                        loop="claim", error=f"result dropped, its lease will run out: {error}", retry_in=0.0
                    )
                )
                self._write_off.forget(single)
            else:
                self._write_off.settle(single, out)

    def _again(self, flight: Flight, rounds: Rounds) -> None:
        """Take results back that are to be written again; over a closed connection they may have been."""
        results = flight.plan.results
        self._write_off.back(results)
        if rounds.connection.closed:
            rounds.unsure.update(claimed.id for claimed in results.claims())

    def _count(self) -> None:
        self._quota.coming = sum(flight.plan.most for flight in self._away)
