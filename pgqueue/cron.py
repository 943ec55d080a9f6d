"""Cron: when a schedule's ticks are, in a time zone, through every change of its clocks.

The library cronsim reads the expression (five fields, or six with the seconds first) and walks the calendar; it is
given local times without a zone, and the zone is dealt with here, by two rules:

- An expression that names hours (`30 2 * * *`, `0 9-17 * * *`) is a list of local times. A time that the clocks
  skip runs at the first instant after the gap, a time that they repeat runs the first time only: each once a day.
- An expression for every hour (`*/15 * * * *`, `30 * * * *`) is a rhythm. It matches the clock on the wall at any
  instant, so it goes on through a change without a pause and without a double.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from difflib import get_close_matches
from typing import Final
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from pgqueue.errors import BadOption

LONGEST: Final = 200
_FORM = "write minute hour day month weekday, e.g. '0 2 * * *', with the second in front if you need it"
_STRANGE = re.compile(r"[^0-9A-Za-z*/,# \t\n\r\f\v-]")  # what pgqueue.schedule_add refuses too
_DAY = timedelta(days=1)
_SECOND = timedelta(seconds=1)
_SOME_DAY = datetime(2024, 1, 1)  # noqa: DTZ001 - local times are walked without a zone


@dataclass(frozen=True, slots=True)
class Cron:
    """An expression in a zone. Raises BadOption for one that cannot be read or never comes true."""

    expr: str
    zone: str = "UTC"
    _fields: str = field(init=False, repr=False, compare=False)
    _zone: tzinfo = field(init=False, repr=False, compare=False)
    _every_hour: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fields = _fields(self.expr)
        try:
            walk = CronSim(fields, _SOME_DAY)
            next(walk)
        except CronSimError as error:
            problem = str(error).lower()
            if "day-of-month" in problem:
                problem += " (out of range, or in none of its months)"
            raise BadOption("schedule", f"{self.expr!r}: {problem}; {_FORM}") from error
        except (StopIteration, RuntimeError) as error:
            raise BadOption("schedule", f"{self.expr!r} never comes true") from error
        object.__setattr__(self, "_fields", fields)
        object.__setattr__(self, "_zone", _zone(self.zone))
        object.__setattr__(self, "_every_hour", len(walk.hours) == 24)

    def ticks(self, after: datetime) -> Iterator[datetime]:
        """Yield the ticks after an instant, in UTC and in order, each once."""
        return self._rhythm(after.astimezone(UTC)) if self._every_hour else self._times(after.astimezone(UTC))

    def next(self, after: datetime) -> datetime:
        """Return the first tick after an instant."""
        return next(self.ticks(after))

    def latest(self, after: datetime, until: datetime, count: int) -> list[datetime]:
        """Return the last `count` ticks of (after, until], oldest first, at a cost that the span does not matter to."""
        span = timedelta(minutes=1)
        while True:
            start = max(after, until - span) if span < until - after else after
            found: deque[datetime] = deque(maxlen=count)
            for tick in self.ticks(start):
                if tick > until:
                    break
                found.append(tick)
            if len(found) == count or start <= after:
                return list(found)
            span *= 8

    def _times(self, after: datetime) -> Iterator[datetime]:
        """Yield local times as instants."""
        walk = CronSim(self._fields, after.astimezone(self._zone).replace(tzinfo=None))
        for local in walk:
            tick = self._instant(local)
            if tick > after:  # else skipped into a gap, or repeated
                yield tick
                after = tick

    def _instant(self, local: datetime) -> datetime:
        """Return the first instant at which a clock shows `local`, or that follows it."""
        instant = local.replace(tzinfo=self._zone).astimezone(UTC)
        if instant.astimezone(self._zone).replace(tzinfo=None) == local:
            return instant
        # The clock never shows it: by the old offset it falls after the change, by the new one before it.
        early = local.replace(tzinfo=self._zone, fold=1).astimezone(UTC)
        return self._change(early, instant, self._offset(early)) or instant

    def _rhythm(self, after: datetime) -> Iterator[datetime]:
        """Yield every instant at which the clock on the wall matches, one stretch of equal offset after another."""
        offset = self._offset(after)
        walk = CronSim(self._fields, (after + offset).replace(tzinfo=None))
        while True:
            tick = next(walk).replace(tzinfo=UTC) - offset
            while (change := self._change(after, tick, offset)) is not None:
                after, offset = change - _SECOND, self._offset(change)
                walk = CronSim(self._fields, (after + offset).replace(tzinfo=None))
                tick = next(walk).replace(tzinfo=UTC) - offset
                after = change
            yield tick
            after = tick

    def _offset(self, at: datetime) -> timedelta:
        return at.astimezone(self._zone).utcoffset() or timedelta()

    def _change(self, low: datetime, high: datetime, offset: timedelta) -> datetime | None:
        """Return the first instant of (low, high] at which the offset is not `offset` any more."""
        low = low.replace(
            microsecond=0
        )  # clocks change at whole seconds; between two of them the search would not end
        while self._offset(probe := min(low + _DAY, high)) == offset:
            if probe >= high:
                return None
            low = probe
        high = probe
        while high - low > _SECOND:
            middle = low + _SECOND * ((high - low) // _SECOND // 2)
            low, high = (middle, high) if self._offset(middle) == offset else (low, middle)
        return high


def _fields(expr: str) -> str:
    """Return the six fields of an expression."""
    if not isinstance(expr, str):
        raise BadOption("schedule", f"{expr!r} is not a string; {_FORM}")
    if _STRANGE.search(expr):
        raise BadOption("schedule", f"{expr[:40]!r} has a character that is in no expression; {_FORM}")
    parts = expr.split()
    if len(parts) not in (5, 6) or len(expr) > LONGEST:
        raise BadOption("schedule", f"{expr[:40]!r} has {len(parts)} fields, not 5 or 6; {_FORM}")
    return " ".join(parts if len(parts) == 6 else ["0", *parts])


def _zone(name: str) -> tzinfo:
    """Return the IANA zone of that name; UTC needs no zone data on the machine."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, OSError, ValueError, TypeError) as error:  # not found, a folder, a path, not a string
        known = available_timezones()
        near = get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ", like 'Europe/Berlin' or 'UTC'"
        if not known:
            hint = " on this machine, which has none: install tzdata"
        raise BadOption("timezone", f"{name!r} is no zone of the IANA database{hint}") from error
