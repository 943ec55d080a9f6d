"""What commands print: aligned columns for people, JSON for scripts.

Texts come from rows that anybody may have written: control characters are shown, never sent to the terminal.
"""

from __future__ import annotations

import shutil
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import click
import msgspec

GAP = "  "
INDENT = "    "
#: The least that is shown of a text which is cut.
NARROW = 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Column:
    """One column: its cells as texts, the head first."""

    cells: list[str]
    number: bool
    time: bool

    @property
    def width(self) -> int:
        return max(_width(text) for text in self.cells)

    @property
    def plain(self) -> bool:
        """Whether it holds texts, neither numbers nor times."""
        return not self.number and not self.time

    @property
    def empty(self) -> bool:
        """Whether no row has a value."""
        return all(text == "-" for text in self.cells[1:])


def clean(text: str) -> str:
    """Show control characters, line ends included, and whatever else cannot be printed as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def lines(text: str) -> list[str]:
    """Split a text of several lines and clean each."""
    return [clean(line.expandtabs(4)) for line in text.splitlines()]


def cell(value: object) -> str:
    """Return what a value looks like in a column."""
    match value:
        case None:
            text = "-"
        case bool():
            text = "yes" if value else "no"
        case datetime():
            text = f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"
        case float():
            text = f"{value:.1f}"
        case tuple() | list():
            text = ",".join(map(str, value)) or "-"
        case _:
            text = str(value)
    return clean(text)


def table(head: Sequence[str], rows: Sequence[Sequence[object]], width: int | None = None) -> list[str]:
    """Align the rows under their head; numbers to the right.

    Where they are wider than `width`, texts go to a second, indented line a row, the last of them cut to fit: what
    an operator copies (names, ids, error types, times) stays whole. None: as wide as it gets.
    """
    texts = [list(head), *([cell(value) for value in row] for row in rows)]
    columns = [
        _Column(
            cells=[row[i] for row in texts],
            number=any(_is_number(row[i]) for row in rows)
            and all(row[i] is None or _is_number(row[i]) for row in rows),
            time=any(isinstance(row[i], datetime) for row in rows),
        )
        for i in range(len(head))
    ]
    if width is not None and _total(columns) > width:
        columns = [c for c in columns if not c.empty] or columns
    return [
        line
        for lines in zip(*_layout(columns, width), strict=True)
        for n, line in enumerate(lines)
        if n == 0 or not set(line) <= {" ", "-"}
    ]


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """Print a table, or one line where there are no rows."""
    if not rows:
        click.echo(empty)
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in table(head, rows, width):
        click.echo(line)


def print_facts(facts: Sequence[tuple[str, object]]) -> None:
    """Print name and value, one a line."""
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        click.echo(f"{name:<{width}}{GAP}{cell(value)}")


def print_block(title: str, text: str) -> None:
    """Print a text of several lines, indented below its title."""
    click.echo(f"\n{title}")
    for line in lines(text):
        click.echo(f"    {line}")


def print_json(value: Any) -> None:
    """Print one JSON document."""
    text = msgspec.json.format(msgspec.json.encode(value, enc_hook=_plain), indent=2).decode()
    click.echo(text)


def _plain(value: Any) -> Any:
    return str(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _total(columns: Sequence[_Column]) -> int:
    return sum(c.width for c in columns) + len(GAP) * (len(columns) - 1)


def _layout(columns: list[_Column], width: int | None) -> list[list[str]]:
    """Return the lines of all rows: first lines, second lines, .."""
    if width is None or _total(columns[:-1]) + len(GAP) + min(NARROW, columns[-1].width) <= width:
        return [_aligned(columns, width)]
    first = 2 if columns[0].number and columns[1].plain else 1  # what names the row stays
    below: list[_Column] = []
    # Texts before times before numbers, from the right.
    rest = columns[first:]
    for column in [
        *reversed([c for c in rest if c.plain]),
        *reversed([c for c in rest if c.time]),
        *reversed([c for c in rest if c.number]),
    ]:
        if _total([c for c in columns if c not in below]) > width:
            below.append(column)
    above = [c for c in columns if c not in below]
    if not below:
        return [_aligned(columns, width)]
    more = _layout([c for c in columns if c in below], width - len(INDENT))
    return [_aligned(above, width), *([INDENT + line for line in lines] for lines in more)]


def _aligned(columns: Sequence[_Column], width: int | None = None) -> list[str]:
    """Return one line a row; the last column is cut where the lines would be wider than `width`."""
    if not columns:
        return []
    room = None if width is None else max(NARROW, width - _total(columns) + columns[-1].width)
    made = []
    for row in zip(*(c.cells for c in columns), strict=True):
        cells = [_pad(text, c.width, right=c.number) for text, c in zip(row, columns, strict=True)]
        cells[-1] = _cut(row[-1] if not columns[-1].number else cells[-1], room)
        made.append(GAP.join(cells).rstrip())
    return made


def _cut(text: str, room: int | None) -> str:
    """Cut a text to what a terminal shows in `room` columns."""
    if room is None or _width(text) <= room:
        return text
    while _width(text) >= room:
        text = text[:-1]
    return f"{text}…"


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _pad(text: str, width: int, *, right: bool) -> str:
    space = " " * (width - _width(text))
    return space + text if right else text + space
