"""What a queue calls while the other side is down, and when it comes back: worked through in virtual time.

The decisions are those of the worker (`Retries`, `Runner`) and of the database (`budget.draw`); only the clock, the
handler's other side and the waiting are simulated, half a second a step.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgqueue import App, Backoff
from pgqueue.budget import Report, draw
from pgqueue.connection import execute
from pgqueue.hand import Ended
from pgqueue.job import Buried, Claimed, Outcome, Retried
from pgqueue.retries import MOST_EARNED, Retries
from pgqueue.run import DONE, Runner, deferred
from tests.factories import claimed, wipe
from tests.server import Connection, Server
from tests.waiting import chaos

STEP = 0.5
#: Tokens that may have been saved up, and those that come in a minute whatever is executed.
SAVED, A_MINUTE = 60, 60
MARKED = '{"deferred" : true}'


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[Connection]:
    name = server.migrated()
    with psycopg.connect(server.dsn(name), autocommit=True) as conn:
        yield conn
    server.drop(name)


@dataclass
class World:
    """A queue, its workers, and a side that is up or down."""

    conn: Connection
    up: Callable[[float], bool]
    workers: int = 2
    max_attempts: int = 5
    cap: float = 300.0
    now: float = 0.0
    first: Counter[int] = field(default_factory=Counter)
    calls: Counter[int] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    worst: int = 0
    #: When each job died or was done, and when it had come.
    lives: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(7)
        self._ids = itertools.count(1)
        self._due: list[tuple[float, int, float, int, bool]] = []
        self._drawn_at = 0.0
        self._budgets = [
            Retries([("", 0), ("default", 5)], on=True, clock=lambda: self.now) for _ in range(self.workers)
        ]
        for budget in self._budgets:
            budget.draw = self._draw
        app = App()

        @app.job("call", max_attempts=self.max_attempts, backoff=Backoff(base=1.0, cap=self.cap))
        def call() -> None:
            self.calls[int(self.now)] += 1
            if not self.up(self.now):
                raise ConnectionError("the other side is down")

        self._runner = Runner(call, random.Random(8))

    def _draw(self, reports: Sequence[Report]) -> dict[str, int]:
        self.conn.execute(
            "UPDATE pgqueue.budget SET at = clock_timestamp() - %s * interval '1 s'",
            [self.now - self._drawn_at],
        )
        self._drawn_at = self.now
        return execute(self.conn, draw(reports))

    def arrive(self, n: int) -> None:
        """Let n jobs come now."""
        self.first[int(self.now)] += n
        for _ in range(n):
            heapq.heappush(self._due, (self.now, next(self._ids), self.now, 0, False))

    def step(self) -> None:
        """Run whatever is due, spread over the workers; half a second passes."""
        batches: list[list[tuple[Claimed, float]]] = [[] for _ in self._budgets]
        while self._due and self._due[0][0] <= self.now:
            _, job_id, born, attempt, late = heapq.heappop(self._due)
            job = claimed(job_id, attempt=attempt + 1)._replace(extra=MARKED if late else None)
            batches[self._rng.randrange(len(batches))].append((job, born))
        for budget, batch in zip(self._budgets, batches, strict=True):
            for some in (batch[i : i + 100] for i in range(0, len(batch), 100)):
                self._work(budget, dict(some))
        self.now += STEP

    def _work(self, budget: Retries, batch: dict[Claimed, float]) -> None:
        refused = set(budget.refuse([job for job in batch if deferred(job)]))
        done = []
        ended = [Ended(job, self._runner.put_off(job), 0.0, executed=False) for job in refused]
        for job in batch.keys() - refused:
            outcome: Outcome = self._runner.call(job, None)
            if outcome is DONE:
                done.append(job)
                self._end(batch[job], "done", job)
            else:
                ended.append(Ended(job, outcome, 0.0))
        budget.ran(done, ended)
        for one in budget.spend(ended):
            job, outcome = one.claimed, one.outcome
            if isinstance(outcome, Retried):
                heapq.heappush(
                    self._due, (self.now + outcome.delay, job.id, batch[job], job.attempt, outcome.deferred)
                )
            else:
                assert isinstance(outcome, Buried)
                self._end(batch[job], "dead", job)

    def _end(self, born: float, how: str, job: Claimed) -> None:
        self.ended[how] += 1
        self.worst = max(self.worst, job.attempt)
        self.lives.append((born, self.now))

    @property
    def waiting(self) -> int:
        """Return how many jobs have not ended."""
        return len(self._due)

    def within(self, counts: Counter[int], begin: int, seconds: int) -> int:
        """Add up what happened in so many seconds."""
        return sum(counts[s] for s in range(begin, begin + seconds))


@settings(
    max_examples=chaos(3, 20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    minutes=st.lists(st.integers(0, 1500), min_size=1, max_size=6),
    workers=st.integers(1, 3),
    max_attempts=st.integers(1, 6),
    cap=st.sampled_from([10.0, 60.0, 300.0]),
)
def test_with_every_call_failing_calls_stay_within_arrivals_and_a_tenth_and_every_job_ends(
    shared: Connection, minutes: list[int], workers: int, max_attempts: int, cap: float
) -> None:
    """vectorize-io/hindsight#2675, activepieces/activepieces#15130: what nobody counts is tried on and on."""
    wipe(shared.info.dsn)
    world = World(shared, lambda _: False, workers=workers, max_attempts=max_attempts, cap=cap)
    for rate in minutes:
        for step in range(120):
            world.arrive(rate * (step + 1) // 120 - rate * step // 120)
            world.step()
    while world.waiting:
        world.step()
        assert world.now < 60 * len(minutes) + max_attempts * (cap + 120) + 10, "a job that never ends"
    assert world.ended == ({"dead": sum(minutes)} if sum(minutes) else {})
    assert world.worst <= max_attempts
    for begin in range(int(world.now)):
        calls = world.within(world.calls, begin, 60)
        # Executions are reported every five seconds: those of the five before may earn tokens in this minute.
        arrivals = world.within(world.first, begin, 60) + 0.1 * world.within(world.first, begin - 6, 66)
        assert calls <= arrivals + A_MINUTE + SAVED, f"{calls} calls in the minute from second {begin}"
    assert sum(world.calls.values()) <= 1.1 * sum(minutes) + SAVED + world.now + 5


def test_an_outage_meets_a_hundred_thousand_jobs_once_and_ends_without_a_wave(shared: Connection) -> None:
    """matrix-org/synapse#13929, jobseek#6611: the backlog of an outage came back at once and made the next one."""
    jobs, outage, half = chaos(6_000, 100_000), 420.0, 150
    wipe(shared.info.dsn)
    world = World(shared, lambda t: t >= outage, workers=2)
    for _ in range(50):
        world.arrive(jobs // 50)
        world.step()
    while world.now < outage:
        world.step()
    during = sum(world.calls.values())
    assert jobs <= during <= 1.1 * jobs + SAVED + outage + 5
    while world.waiting:
        world.step()
    assert world.ended["done"] >= 0.95 * jobs  # the others had used up their attempts by then
    assert world.ended["done"] + world.ended["dead"] == jobs
    # What waits is spread over half of the longest backoff; nothing comes in a wave above that, nor in steps.
    peak = max(world.within(world.calls, s, 10) for s in range(int(outage), int(world.now)))
    assert peak <= 2 * 10 * jobs / half
    first = [world.calls[int(outage) + s] for s in range(3)]
    assert first[0] <= 2 * MOST_EARNED + SAVED


def test_after_an_outage_that_lasts_every_job_is_a_dead_letter_and_was_called_little_more_than_once(
    shared: Connection,
) -> None:
    jobs = chaos(2_000, 100_000)
    wipe(shared.info.dsn)
    world = World(shared, lambda _: False)
    world.arrive(jobs)
    while world.waiting:
        world.step()
    assert world.ended == {"dead": jobs}
    assert sum(world.calls.values()) <= 1.1 * jobs + SAVED + world.now + 5


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_where_some_calls_fail_no_job_dies_without_having_been_tried(
    shared: Connection, share: float
) -> None:
    """Otherwise one customer's dead endpoint would bury the jobs of all others of its queue."""
    wipe(shared.info.dsn)
    rng = random.Random(3)
    world = World(shared, lambda _: rng.random() >= share)
    for _ in range(chaos(200, 1_200)):
        world.arrive(20)
        world.step()
    while world.waiting:
        world.step()
    lost = world.ended["dead"] / (world.ended["dead"] + world.ended["done"])
    assert lost <= 1.5 * share**5 + 0.002  # what fails five times in a row dies, and nothing else
