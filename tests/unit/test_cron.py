"""Ticks through every change of the clocks, against zones whose changes are known facts.

The faults these would show: node-cron 563 and xen-orchestra 4024 (doubled or lost runs), node-red-cron-plus 108 (an
interval lost an hour), action-scheduler 885 (a shift to UTC).
"""

from __future__ import annotations

from bisect import bisect_left
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import accumulate, islice, pairwise
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgqueue.cron import Cron
from pgqueue.errors import BadOption

NEW_YORK, LORD_HOWE = "America/New_York", "Australia/Lord_Howe"
KIRITIMATI, DAMASCUS = "Pacific/Kiritimati", "Asia/Damascus"


def local(zone: str, text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone))


@cache
def changes(zone: str, year: int) -> list[datetime]:
    """Return the instants of a year at which the clocks of a zone change."""
    halves = [datetime(year, 1, 1, tzinfo=UTC) + n * timedelta(minutes=30) for n in range(366 * 48)]
    offsets = [at.astimezone(ZoneInfo(zone)).utcoffset() for at in halves]
    found = [halves[n] for n in range(1, len(halves)) if offsets[n] != offsets[n - 1]]
    assert found
    return found


def ticks(expr: str, zone: str, start: str, count: int) -> list[str]:
    """Return the ticks after a local time, as the clock on the wall shows them, with its offset."""
    found = islice(Cron(expr, zone).ticks(local(zone, start)), count)
    return [f"{tick.astimezone(ZoneInfo(zone)):%m-%d %H:%M%z}" for tick in found]


@pytest.mark.parametrize(
    ("expr", "zone", "start", "expected"),
    [
        # A gap: 02:00 to 03:00 does not exist on 8 March.
        ("30 2 * * *", NEW_YORK, "2026-03-07", ["03-07 02:30-0500", "03-08 03:00-0400", "03-09 02:30-0400"]),
        ("0 30 2 * * *", NEW_YORK, "2026-03-07", ["03-07 02:30-0500", "03-08 03:00-0400", "03-09 02:30-0400"]),
        ("0,30 2,3 * * *", NEW_YORK, "2026-03-08", ["03-08 03:00-0400", "03-08 03:30-0400", "03-09 02:00-0400"]),
        ("*/20 2 * * *", NEW_YORK, "2026-03-08", ["03-08 03:00-0400", "03-09 02:00-0400", "03-09 02:20-0400"]),
        ("0 */2 * * *", NEW_YORK, "2026-03-07T23:00", ["03-08 00:00-0500", "03-08 03:00-0400", "03-08 04:00-0400"]),
        # A fold: 01:00 to 02:00 comes twice on 1 November.
        ("30 1 * * *", NEW_YORK, "2026-10-31", ["10-31 01:30-0400", "11-01 01:30-0400", "11-02 01:30-0500"]),
        ("0 30 1 * * *", NEW_YORK, "2026-10-31", ["10-31 01:30-0400", "11-01 01:30-0400", "11-02 01:30-0500"]),
        ("0 9-17 * * 0", NEW_YORK, "2026-11-01", ["11-01 09:00-0500", "11-01 10:00-0500", "11-01 11:00-0500"]),
        # Half an hour.
        ("15 2 * * *", LORD_HOWE, "2026-10-03", ["10-03 02:15+1030", "10-04 02:30+1100", "10-05 02:15+1100"]),
        ("45 1 * * *", LORD_HOWE, "2026-04-04", ["04-04 01:45+1100", "04-05 01:45+1100", "04-06 01:45+1030"]),
        ("40 * * * *", LORD_HOWE, "2026-10-04T01:00", ["10-04 01:40+1030", "10-04 02:40+1100", "10-04 03:40+1100"]),
        # A whole day: Kiritimati had no 31 December 1994.
        ("0 12 * * *", KIRITIMATI, "1994-12-30", ["12-30 12:00-1000", "01-01 00:00+1400", "01-01 12:00+1400"]),
        ("0 12 * * *", KIRITIMATI, "2026-01-01", ["01-01 12:00+1400", "01-02 12:00+1400", "01-03 12:00+1400"]),
        # A gap at midnight, and the end of summer time for good on 28 October 2022.
        ("0 0 * * *", DAMASCUS, "2022-03-24T12:00", ["03-25 01:00+0300", "03-26 00:00+0300", "03-27 00:00+0300"]),
        ("0 2 * * *", DAMASCUS, "2022-10-27", ["10-27 02:00+0300", "10-28 02:00+0300", "10-29 02:00+0300"]),
        ("0 2 * * *", DAMASCUS, "2026-03-26", ["03-26 02:00+0300", "03-27 02:00+0300", "03-28 02:00+0300"]),
    ],
)  # fmt: skip
def test_a_local_time_runs_once_a_day_whatever_the_clocks_do(
    expr: str, zone: str, start: str, expected: list[str]
) -> None:
    assert ticks(expr, zone, start, len(expected)) == expected


@pytest.mark.parametrize("zone", [NEW_YORK, LORD_HOWE, "Asia/Damascus", "Asia/Kolkata", "UTC"])
@pytest.mark.parametrize("expr", ["*/15 * * * *", "0 */15 * * * *"])
@pytest.mark.parametrize("day", ["2026-03-08", "2026-11-01", "2026-10-03T12:00", "2026-04-04T12:00"])
def test_a_rhythm_goes_on_through_a_change(zone: str, expr: str, day: str) -> None:
    found = list(islice(Cron(expr, zone).ticks(local(zone, day)), 200))
    assert {b - a for a, b in pairwise(found)} == {timedelta(minutes=15)}


def test_every_hour_is_every_hour_in_the_night_of_a_change_too() -> None:
    gap = ["03-08 00:30-0500", "03-08 01:30-0500", "03-08 03:30-0400"]
    fold = ["11-01 01:30-0400", "11-01 01:30-0500", "11-01 02:30-0500"]
    assert ticks("30 * * * *", NEW_YORK, "2026-03-08T00:00", 3) == gap
    assert ticks("30 * * * *", NEW_YORK, "2026-11-01T01:00", 3) == fold


@given(
    start=st.datetimes(datetime(2024, 1, 1), datetime(2027, 12, 31)),  # noqa: DTZ001 - made aware below
    expr=st.sampled_from(
        ["30 2 * * *", "*/7 1-3 * * *", "59 59 1 * * *", "*/15 * * * *", "5 0 * * 1", "*/10 2 8 3 *"]
    ),
    zone=st.sampled_from([NEW_YORK, LORD_HOWE, "Europe/Berlin", "Asia/Damascus", "Africa/Casablanca"]),
)
@settings(max_examples=200, deadline=None)
def test_from_every_instant_the_ticks_are_the_same(start: datetime, expr: str, zone: str) -> None:
    """Where one starts to count, inside a gap's night or a fold, adds no tick and loses none."""
    cron, at = Cron(expr, zone), start.replace(tzinfo=UTC)
    whole = list(islice(cron.ticks(at), 30))
    assert all(at < a < b for a, b in pairwise(whole))
    assert [cron.next(a) for a in whole[:-1]] == whole[1:]
    assert cron.next(whole[0] - timedelta(microseconds=1)) == whole[0]
    assert cron.latest(at, whole[-1], 7) == whole[-7:]
    assert cron.latest(whole[10], whole[20], 50) == whole[11:21]


@pytest.mark.parametrize("zone", [NEW_YORK, LORD_HOWE, "Europe/Berlin", "Pacific/Apia", "Asia/Kathmandu"])
@pytest.mark.parametrize("before", [0.001, 0.5, 1.0, 1.5, 1.999999, 2.5, 600.3, 90_000.7])
@pytest.mark.parametrize("expr", ["*/15 * * * *", "*/20 * * * * *", "30 2 * * *"])
def test_a_look_between_two_seconds_finds_the_tick_at_a_change(expr: str, before: float, zone: str) -> None:
    """oban-py 17: the clock of a database has fractions of a second; with some the search never ended."""
    for change in changes(zone, {"Pacific/Apia": 2011, "Asia/Kathmandu": 1985}.get(zone, 2026)):
        look = change - timedelta(seconds=before)
        whole = list(islice(Cron(expr, zone).ticks(look.replace(microsecond=0) - timedelta(seconds=1)), 400))
        expected = [tick for tick in whole if tick > look]
        assert list(islice(Cron(expr, zone).ticks(look), len(expected))) == expected


def test_the_latest_tick_of_years_of_seconds_is_found_at_once() -> None:
    now = datetime(2026, 1, 1, 0, 0, 0, 500_000, tzinfo=UTC)
    found = Cron("* * * * * *").latest(datetime(2016, 1, 1, tzinfo=UTC), now, 2)
    assert found == [datetime(2025, 12, 31, 23, 59, 59, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)]


def test_there_is_no_tick_where_there_was_none() -> None:
    assert (
        Cron("0 2 * * *").latest(local("UTC", "2026-01-01T03:00"), local("UTC", "2026-01-01T23:00"), 5) == []
    )


def test_seconds_stand_in_front() -> None:
    found = islice(Cron("*/20 * * * * *").ticks(local("UTC", "2026-01-01T00:00:59")), 3)
    assert [f"{t:%M:%S}" for t in found] == ["01:00", "01:20", "01:40"]


@pytest.mark.parametrize(
    ("expr", "says"),
    [
        ("0 0 31 2 *", "in none of its months"),
        ("0 0 30 2 *", "in none of its months"),
        ("0 0 31 4,6,9,11 *", "in none of its months"),
        ("61 * * * *", "bad minute"),
        ("0 24 * * *", "bad hour"),
        ("0 0 * * 8", "bad day-of-week"),
        ("0 0 * * MON#6", "bad day-of-week"),
        ("*/0 * * * *", "bad minute"),
        ("10-5 * * * *", "bad minute"),
        ("a b c d e", "bad minute"),
        ("", "has 0 fields"),
        ("* * * *", "has 4 fields"),
        ("* * * * * * *", "has 7 fields"),
        ("* * * * " + "1," * 200 + "1", "fields"),
        ("0 2 * * \0", "a character that is in no expression"),
        (None, "not a string"),
    ],
)
def test_an_expression_that_cannot_be_is_refused(expr: str, says: str) -> None:
    with pytest.raises(BadOption, match=says) as caught:
        Cron(expr)
    assert caught.value.option == "schedule"


@pytest.mark.parametrize(
    "zone",
    ["Mars/Olympus", "Asia/Damaskus", "America", "../etc/passwd", "/etc/passwd", "", None, "a\0b"],
)
def test_an_unknown_zone_is_refused(zone: str) -> None:
    with pytest.raises(BadOption, match="is no zone of the IANA database"):
        Cron("0 2 * * *", zone)


def test_a_misspelt_zone_is_told_its_neighbour() -> None:
    with pytest.raises(BadOption, match="did you mean 'Asia/Damascus'"):
        Cron("0 2 * * *", "Asia/Damaskus")


def test_utc_needs_no_zone_data_and_any_other_zone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ZoneInfo:
        raise ZoneInfoNotFoundError(name)

    monkeypatch.setattr("pgqueue.cron.ZoneInfo", missing)
    monkeypatch.setattr("pgqueue.cron.available_timezones", set)
    assert Cron("0 2 * * *").next(datetime(2026, 1, 1, tzinfo=UTC)) == datetime(2026, 1, 1, 2, tzinfo=UTC)
    with pytest.raises(BadOption, match="which has none: install tzdata"):
        Cron("0 2 * * *", "Europe/Berlin")


def test_the_29_of_february_and_the_fifth_monday_come_true() -> None:
    assert Cron("0 0 29 2 *").next(local("UTC", "2025-01-01")).year == 2028
    assert f"{Cron('0 0 * 2 MON#5').next(local('UTC', '2025-01-01')):%F}" == "2044-02-29"


CHANGES = [
    # Summer time forward and back; by half an hour; by two; at midnight; negative; twice for Ramadan.
    ("America/New_York", 2026), ("Europe/Berlin", 2026), ("Europe/Dublin", 2026), ("Europe/London", 2026),
    ("Australia/Lord_Howe", 2026), ("Antarctica/Troll", 2026), ("Africa/Cairo", 2026), ("Africa/Casablanca", 2026),
    ("America/Havana", 2026), ("America/Santiago", 2026), ("Asia/Beirut", 2026), ("Asia/Gaza", 2026),
    ("Pacific/Chatham", 2026), ("America/Sao_Paulo", 2018), ("Asia/Tehran", 2021), ("Asia/Amman", 2021),
    # For good: a quarter or half an hour, a whole day.
    ("Asia/Pyongyang", 2015), ("Asia/Pyongyang", 2018), ("America/Caracas", 2016), ("Asia/Kathmandu", 1985),
    ("Pacific/Apia", 2011), ("Pacific/Kwajalein", 1993), ("Asia/Almaty", 2024),
]  # fmt: skip


@pytest.mark.parametrize(("name", "year"), CHANGES)
def test_by_a_look_at_the_clock_each_minute_every_local_time_has_one_tick(name: str, year: int) -> None:
    """node-cron 563, xen-orchestra 4024, action-scheduler 885: doubled, lost or shifted where clocks change."""
    zone, minute = ZoneInfo(name), timedelta(minutes=1)
    for change in changes(name, year):
        looks = [change + m * minute for m in range(-3 * 1440, 4 * 1440)]
        # How late it has been by the clock so far: what it skips is over at once, what it repeats is over already.
        latest = list(accumulate((at.astimezone(zone).replace(tzinfo=None) for at in looks), max))
        start, end = change - timedelta(hours=30), change + timedelta(hours=42)
        first = latest[0].replace(hour=0, minute=0)
        days = [first + d * timedelta(days=1) for d in range((latest[-1] - first).days + 1)]
        for expr, minutes in (
            ("*/30 0-4 * * *", range(0, 300, 30)),
            ("50 23 * * *", [1430]),
            ("7 12 * * *", [727]),
        ):
            walls = [day + m * minute for day in days for m in minutes]
            shown = {looks[place] for wall in walls if 0 < (place := bisect_left(latest, wall)) < len(looks)}
            found = []
            for tick in Cron(expr, name).ticks(start):
                if tick > end:
                    break
                found.append(tick)
            assert found == sorted(at for at in shown if start < at <= end), (expr, change)
