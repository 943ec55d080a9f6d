"""Which sink an event goes to: a table of patterns over event types.

    order.placed = ..    exactly this type
    order.*      = ..    every type that begins with "order."
    *            = ..    all others

The exact type wins over prefixes, a longer prefix over a shorter one. Each event goes to one sink: to give an event
to several is the work of a broker, or of the subscribers of `queue:`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Generic, TypeVar

from pgqueue.errors import BadOption

T = TypeVar("T")

DEFAULT: Final = "*"
REMEMBERED: Final = 10_000


class Routes(Generic[T]):
    """A table from patterns to what stands behind them; it always has a default."""

    __slots__ = ("_exact", "_known", "_prefixes", "table")

    def __init__(self, table: Mapping[str, T]) -> None:
        for pattern in table:
            _check(pattern)
        if DEFAULT not in table:
            raise BadOption(
                "route", "there is no default: other types would have no place to go; add --sink URL or *=URL"
            )
        self.table = dict(table)
        self._exact = {pattern: to for pattern, to in table.items() if not pattern.endswith("*")}
        self._prefixes = sorted(
            ((pattern[:-1], to) for pattern, to in table.items() if pattern.endswith("*")),
            key=lambda entry: -len(entry[0]),
        )
        self._known: dict[str, T] = {}

    def of(self, event_type: str) -> T:
        """Return what an event type goes to."""
        found = self._known.get(event_type)
        if found is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            found = self._known[event_type] = self._find(event_type)
        return found

    def _find(self, event_type: str) -> T:
        if event_type in self._exact:
            return self._exact[event_type]
        return next(to for prefix, to in self._prefixes if event_type.startswith(prefix))


def routes(sink: str | None, lines: Iterable[str] = (), file: Path | None = None) -> Routes[str]:
    """Make a table of sink URLs from the default, lines `PATTERN=URL` and a TOML file; each pattern once."""
    table: dict[str, str] = {}
    entries = [(DEFAULT, sink)] if sink is not None else []
    entries += [_split(line) for line in lines]
    entries += list(_read(file).items()) if file is not None else []
    for pattern, url in entries:
        if pattern in table:
            raise BadOption("route", f"{pattern!r} is given twice (--sink is the route of *)")
        table[pattern] = url
    return Routes(table)


def _check(pattern: str) -> None:
    if not pattern or pattern != pattern.strip() or "*" in pattern[:-1]:
        raise BadOption(
            "route", f"{pattern!r} is no event type, prefix (order.*) or *; one asterisk, at the end"
        )


def _split(line: str) -> tuple[str, str]:
    pattern, equals, url = line.partition("=")
    if not equals or not url.strip():
        raise BadOption("route", f"{pattern!r} names no sink; write PATTERN=URL, such as order.*=https://..")
    return pattern.strip(), url.strip()


def _read(file: Path) -> dict[str, str]:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadOption("routes", f"cannot read {file}: {error}") from error
    found = content.get("routes")
    if content.keys() != {"routes"} or not isinstance(found, dict):
        raise BadOption("routes", f'{file} is not one table [routes] with lines "PATTERN" = "URL"')
    if wrong := [name for name, url in found.items() if not isinstance(url, str)]:
        raise BadOption(
            "routes",
            f'{file}: the value of {wrong[0]!r} is no URL; put a pattern with dots in quotes, "order.*"',
        )
    return found
