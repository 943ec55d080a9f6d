"""A backlog of ordering keys: many lanes by one statement, rounds that fly, routing when it is needed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import psycopg
import pytest

from pgqueue.floors import WINDOW
from pgqueue.job import Claimed
from pgqueue.lanes import LaneSize, lane_jobs, lane_take
from pgqueue.plan import LaneWish, Outcomes, Plan, Wish
from pgqueue.results import Results
from pgqueue.shelf import LaneHold
from tests.db.test_claim_names import Desk
from tests.db.test_flights import Pilot
from tests.factories import MINUTE, QUEUE, Connection, Holder, enqueue, scope, wipe

#: Every test of lanes runs with both forms of their claim (see conftest).
BOTH_CLAIMS = True


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


def keys(jobs: list[Claimed]) -> str:
    return "".join(job.key or "" for job in jobs)


def test_lanes_of_every_kind_hand_out_their_jobs_in_their_turn(conn: Connection, a: Holder) -> None:
    """Common lanes are claimed together; a limit, a lost lane between them neither waits nor goes first."""
    conn.execute("INSERT INTO pgqueue.job_type (name, slots) VALUES ('limited', 1)")
    both = scope(names=("work", "limited"))
    for key in "ab":
        enqueue(conn, 2, key=key)
    enqueue(conn, 2, name="limited")
    for key in "cd":
        enqueue(conn, 2, key=key)
    conn.commit()
    a.route()
    conn.execute("UPDATE pgqueue.lane SET lost = 1 WHERE key = 'b'")
    conn.commit()
    assert keys(a.lanes(100, 2, total=5, of=both, routing=False)) == "aab@limited@limited"
    assert keys(a.lanes(100, 2, total=3, of=both, routing=False)) == "ccd"


def test_a_lane_that_has_nothing_to_hand_out_holds_up_none_of_those_claimed_with_it(
    conn: Connection, a: Holder
) -> None:
    for key in "abcde":
        enqueue(conn, 2, key=key)
    conn.commit()
    a.route()
    conn.execute("DELETE FROM pgqueue.job WHERE key = 'b'")
    conn.execute("UPDATE pgqueue.job SET name = 'else' WHERE key = 'd'")
    conn.commit()
    with psycopg.connect(a.connection.info.dsn) as other:
        other.execute("SELECT FROM pgqueue.job WHERE key = 'c' ORDER BY id LIMIT 1 FOR UPDATE")
        assert keys(a.lanes(depth=2, routing=False)) == "aaee"
    left = {
        str(key): int(lease) for key, lease in conn.execute("SELECT key, lease FROM pgqueue.lane").fetchall()
    }
    assert left.keys() == set("acde")
    assert [left[key] != 0 for key in "acde"] == [True, False, False, True]
    conn.rollback()
    assert keys(a.lanes(depth=2, routing=False)) == "cc"


def test_two_claims_at_once_share_the_lanes_out(conn: Connection, dsn: str, a: Holder) -> None:
    for key in "abcdef":
        enqueue(conn, 2, key=key)
    conn.commit()
    a.route()
    with Holder(dsn, 2, backlog=a.backlog) as b:
        b.connection.execute("SET lock_timeout = '30s'")
        a.begin()
        mine = a.lanes(3, 5, routing=False)
        theirs = b.lanes(100, 5, routing=False)
        a.commit()
    assert (keys(mine), keys(theirs)) == ("aabbcc", "ddeeff")


def positions(conn: Connection) -> dict[str, tuple[int, bool]]:
    rows = conn.execute("SELECT key, pos, lease <> 0 FROM pgqueue.lane").fetchall()
    conn.rollback()
    return {str(key): (int(pos), bool(held)) for key, pos, held in rows}


def test_a_claim_of_a_backlog_stops_at_a_lane_of_another_kind(conn: Connection, dsn: str) -> None:
    for key in "abcde":
        enqueue(conn, 2, key=key)
    conn.commit()
    with Holder(dsn, 1) as a:
        a.route()
        conn.execute("UPDATE pgqueue.lane SET lost = 1 WHERE key = 'c'")
        conn.commit()
        assert keys(a.lane_backlog(LaneSize(lanes=4, depth=2, total=100))) == "aabb"
        assert a.lane_backlog(LaneSize(lanes=4, depth=2, total=100)) == []
    assert {key for key, (_, held) in positions(conn).items() if held} == set("ab")


def test_a_lane_whose_next_job_has_a_name_that_is_not_known_here_is_left_alone(
    conn: Connection, dsn: str
) -> None:
    enqueue(conn, 1, key="a", name="else")
    enqueue(conn, 2, key="b")
    conn.commit()
    with Holder(dsn, 1) as a:
        a.route()
        assert keys(a.lane_backlog(LaneSize(lanes=1, depth=2, total=100))) == "bb"


def test_lanes_whose_turn_does_not_come_stay_where_they_were(conn: Connection, dsn: str) -> None:
    for key in "abcd":
        enqueue(conn, 3, key=key)
    conn.commit()
    with Holder(dsn, 1) as a:
        a.route()
        before = positions(conn)
        first = a.lane_backlog(LaneSize(lanes=4, depth=3, total=4))
        assert keys(first) == "aaab"
        assert [job.pos for job in first] == [before[key][0] for key in "aaab"]
        after = positions(conn)
        assert {key: pos for key, (pos, _) in after.items()} == {key: pos for key, (pos, _) in before.items()}
        assert {key for key, (_, held) in after.items() if held} == set("ab")
        assert keys(a.lane_backlog(LaneSize(lanes=4, depth=3, total=4))) == "cccd"


def test_a_key_that_waits_for_a_person_is_not_handed_out_by_a_lane_that_does_not_know_it(
    conn: Connection, dsn: str
) -> None:
    enqueue(conn, 2, key="a")
    enqueue(conn, 2, key="b")
    conn.execute(
        "INSERT INTO pgqueue.dead_job (id, name, queue, key, priority, attempt, lost, payload, enqueued_at,"
        " reason, blocks) VALUES (-1, 'work', 'default', 'a', 5, 1, 0, 'null', now(), 'permanent', true)"
    )
    conn.commit()
    with Holder(dsn, 1) as a:
        a.route()
        assert keys(a.lane_backlog(LaneSize(lanes=4, depth=2, total=4))) == "bb"
    assert positions(conn)["a"][1] is False


def test_what_became_of_a_key_before_its_lane_was_taken_is_seen_when_its_jobs_are(
    conn: Connection, dsn: str
) -> None:
    """One statement would hand out by what it saw before it had the lane; here a job comes in front between the two."""
    enqueue(conn, 1, key="a")
    (late,) = enqueue(conn, 1, key="a", delay=MINUTE)
    (last,) = enqueue(conn, 1, key="a")
    conn.commit()
    size = LaneSize(lanes=1, depth=3, total=3)
    whole = scope(priorities=range(10))
    with Holder(dsn, 1) as a:
        a.route()
        a.begin()
        assert len(a.run(lane_take(whole, [0] * 10, 1, 7, MINUTE))) == 1
        conn.execute(
            "UPDATE pgqueue.job SET run_at = NULL, pos = nextval('pgqueue.pos_seq') WHERE id = %s", [late]
        )
        conn.commit()
        jobs = a.run(lane_jobs(whole, size, 7, MINUTE))
        a.commit()
    assert [job.id for job in sorted(jobs, key=lambda job: job.id)][1:] == [late, last]


def lane_wish(total: int = 100, depth: int = 20) -> LaneWish:
    whole = scope(priorities=range(10))
    return LaneWish(
        levels=list(range(10)), scope=whole, starts=[0] * 10, lanes=total, depth=depth, total=total, backlog=True,
        route={QUEUE: 0},
    )  # fmt: skip


class LanePilot(Pilot):
    """Rounds that claim lanes."""

    def send(self, total: int, *, plain: bool = True) -> Plan:
        wish = self.wish()
        plan = Plan(
            results=self.write_off.collect(), wishes=[wish], lane_wish=lane_wish(total), route_floors={QUEUE: 0}
        )  # fmt: skip
        assert plan.plain is plain
        assert plan.most == max(wish.n, total)
        self.flights.depart(self.rounds, plan)
        return plan

    def wish(self) -> Wish:
        return Wish(levels=list(range(10)), scope=scope(priorities=range(10)), starts=[0] * 10, n=10)

    def took(self, out: Outcomes) -> None:
        """Shelve lanes as the engine does, one job each."""
        for job in out.lane_jobs:
            hold = LaneHold(QUEUE, job.key or "", job.lease, job.level, job.pos, ids=(job.id,))
            hold.jobs.append(job)
            self.hand.held[job.id] = job
            self.hand.lanes[QUEUE, hold.key, job.pos] = hold

    def run_all(self) -> None:
        """Run what is in hand."""
        for hold in list(self.hand.lanes.values()):
            if hold.jobs:
                self.hand.done.append(hold.jobs.popleft())
                self.hand.lane_over(hold)

    def run_two(self, conn: Connection, keys: str) -> None:
        """Enqueue a job for each key; take the first two and run them."""
        for key in keys:
            enqueue(conn, key=key)
        conn.commit()
        self.send(2)
        self.took(self.land())
        self.run_all()


@pytest.fixture
def pilot(dsn: str) -> Iterator[LanePilot]:
    pilot = LanePilot(dsn)
    yield pilot
    pilot.rounds.connection.close()


def lanes(conn: Connection) -> list[tuple[str, bool]]:
    rows = conn.execute("SELECT key, lease <> 0 FROM pgqueue.lane ORDER BY key").fetchall()
    conn.rollback()
    return [(str(key), bool(held)) for key, held in rows]


def test_a_round_gives_lanes_back_while_the_next_one_takes_others(conn: Connection, pilot: LanePilot) -> None:
    pilot.run_two(conn, "abcdef")
    first = pilot.send(2)
    assert [hold.key for hold in first.results.lanes] == ["a", "b"]
    second = pilot.send(2)
    assert second.results.lanes == []  # they are on their way
    outs = [pilot.land(), pilot.land()]
    assert [keys(out.lane_jobs) for out in outs] == ["cd", "ef"]
    assert lanes(conn) == [(key, True) for key in "cdef"]
    assert pilot.hand.lanes == {}
    assert not pilot.write_off.collect()


def test_lanes_of_a_round_that_is_undone_are_given_back_by_a_later_one(
    conn: Connection, pilot: LanePilot
) -> None:
    pilot.run_two(conn, "abcd")
    stuck = next(iter(pilot.hand.lanes.values())).ids[0]
    conn.execute("UPDATE pgqueue.job SET headers = '{}' WHERE id = %s", [stuck])
    pilot.send(2)
    pilot.send(2)
    out = pilot.land()
    assert (out.lane_jobs, out.lanes_back, out.locked) == ([], [], {stuck})
    assert pilot.flights.land(pilot.rounds) is None
    conn.rollback()
    again = pilot.send(2, plain=False)
    assert [hold.key for hold in again.results.lanes] == ["b"]  # the other waits for its job
    out = pilot.land()
    assert stuck in out.finished
    assert keys(out.lane_jobs) == "cd"
    last = pilot.send(2)
    assert [hold.key for hold in last.results.lanes] == ["a"]
    pilot.land()
    assert lanes(conn) == [("c", True), ("d", True)]


def test_lanes_on_their_way_over_a_connection_that_is_lost_are_given_back(
    conn: Connection, pilot: LanePilot
) -> None:
    enqueue(conn, 2, key="a")
    conn.commit()
    pilot.send(1)
    pilot.took(pilot.land())
    pilot.run_all()
    pilot.send(1)
    pilot.rounds.connection.close()
    pilot.flights.lose(pilot.rounds)
    pilot.open()
    plan = pilot.send(1)
    assert [hold.key for hold in plan.results.lanes] == ["a"]
    pilot.land()
    assert pilot.hand.lanes == {}


class LaneDesk(Desk):
    """An intake whose rounds claim lanes."""

    def lanes(self) -> tuple[LaneWish, Outcomes]:
        wish = self.intake.lane_wish()
        assert wish is not None
        settled = self.intake.floors.horizon.settled
        out = self.rounds.run(
            Plan(results=Results(), lane_wish=wish, route_floors=dict(self.intake.floors.route), observe=True)
        )
        assert out.observation is not None
        self.intake.took_lanes(wish, settled, out)
        self.intake.floors.observed(out.observation.last, out.observation.holders, 0.0)
        return wish, out


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """Let no time pass between the rounds of a desk; return the time it is."""
    now = time.monotonic()
    monkeypatch.setattr("pgqueue.intake.time", SimpleNamespace(monotonic=lambda: now))
    return now


def fill(conn: Connection, jobs: int, over: int) -> None:
    conn.execute(
        "INSERT INTO pgqueue.job (queue, name, priority, key, payload)"
        " SELECT 'default', 'work', 5, 'k' || n %% %s, 'null' FROM generate_series(1, %s) n",
        [over, jobs],
    )
    conn.commit()


def brief(desk: LaneDesk) -> None:
    """Let jobs have been short."""
    desk.hand.attempts, desk.hand.busy_s = 1000, 0.01
    desk.intake._quota.learn()


def test_keys_of_a_long_backlog_are_routed_now_and_then_while_lanes_give_enough(
    conn: Connection, a: Holder, now: float
) -> None:
    """Routing looks up the lane of each job once; jobs that are gone when it comes to them cost nothing."""
    fill(conn, 3 * WINDOW, over=100)
    desk = LaneDesk(a)
    brief(desk)
    wish, out = desk.lanes()
    assert (wish.route, wish.backlog, [row[1] for row in out.routed]) == ({QUEUE: 0}, False, [WINDOW])
    wish, out = desk.lanes()
    assert (wish.route, out.routed, wish.backlog, wish.whole) == ({}, [], True, False)
    places = {lane.key: (QUEUE, lane.key, lane.pos) for lane in out.lanes}
    new = {places[job.key or ""] for job in out.lane_jobs}
    assert new
    assert new < desk.hand.lanes.keys()
    assert max(pos for _, _, pos in new) == max(desk.intake._lane_floors)
    routing = desk.intake._routing
    floor = desk.intake.floors.route[QUEUE]
    assert routing.due(now) == {}
    assert routing.due(now + 0.6) == {QUEUE: floor}
    assert routing.due(now + 0.7) == {}  # the round behind that one
    routing.enough = False  # lanes run short
    assert routing.due(now) == {QUEUE: floor}
    routing.enough = True
    desk.hand.attempts, desk.hand.busy_s = 10**6, 10**4  # jobs of 10 ms: the looks are nothing beside them
    desk.intake._quota.learn()
    assert routing.due(now) == {QUEUE: floor}


def test_lanes_of_one_key_in_two_queues_are_held_as_they_stand(
    conn: Connection, a: Holder, now: float
) -> None:
    conn.execute(
        "INSERT INTO pgqueue.job (queue, name, priority, key, payload)"
        " SELECT q, 'work', n % 3, 'k' || n % 60, 'null' FROM generate_series(1, 600) n,"
        " unnest(ARRAY['mail', 'default']) q"
    )
    conn.commit()
    desk = LaneDesk(a, queues=(QUEUE, "mail"))
    brief(desk)
    held: dict[tuple[str, str, int], tuple[int, int, int]] = {}
    kinds = set()
    while True:
        wish, out = desk.lanes()
        if not out.lane_jobs:
            break
        kinds.add(wish.backlog and not wish.whole)
        for place, hold in desk.hand.lanes.items():
            assert {(desk.intake.queue_of[job.level][0], job.key) for job in hold.jobs} == {place[:2]}
            held[place] = (hold.lease, (hold.level - 1) % 10, len(hold.jobs))
        desk.hand.lanes.clear()
        desk.hand.held.clear()
        desk.hand.lanes_over.clear()
    assert kinds == {False, True}
    lanes = {
        (str(queue), str(key), int(pos)): (int(lease), int(priority), 10)
        for queue, key, pos, lease, priority in conn.execute(
            "SELECT queue, key, pos, lease, priority FROM pgqueue.lane"
        )
    }
    assert held == lanes
    assert len(lanes) == 120


def test_a_queue_whose_routing_has_caught_up_is_routed_by_every_claim_of_lanes(
    conn: Connection, a: Holder, now: float
) -> None:
    fill(conn, 30, over=3)
    desk = LaneDesk(a)
    brief(desk)
    for _ in range(3):
        floor = desk.intake.floors.route[QUEUE]
        wish, out = desk.lanes()
        assert wish.route == {QUEUE: floor}
        assert [row[1] < WINDOW for row in out.routed] == [True]
    routing = desk.intake._routing
    routing._floors.route["elsewhere"] = 0
    routing.took(["elsewhere"], [(1, WINDOW, 7)], 0, now)
    routing.enough = True
    assert routing.due(now).keys() == {QUEUE}  # one that is behind keeps no other from it


def test_as_many_lanes_are_locked_as_their_jobs_are_worth(conn: Connection, a: Holder) -> None:
    fill(conn, 400, over=40)
    desk = LaneDesk(a)
    brief(desk)
    first, out = desk.lanes()
    assert (first.lanes, len(out.lane_jobs)) == (first.total, 400)
    assert desk.intake._quota._per_lane == 10
    desk.hand.held.clear()
    desk.hand.lanes.clear()
    second = desk.intake.lane_wish()
    assert second is not None
    assert (second.lanes, second.total) == (50, 500)
