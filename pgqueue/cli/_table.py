"""What commands print: aligned columns for people, JSON for scripts.

Texts come from rows that anybody may have written: control characters are shown, never sent to the terminal.
"""

from __future__ import annotations

import shutil
import sys
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click
import msgspec

GAP = "  "
NARROW = 20


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


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Align the rows under their head; numbers to the right. On a terminal the last column is cut to fit."""
    texts = [list(head), *([cell(value) for value in row] for row in rows)]
    right = [
        any(_is_number(row[i]) for row in rows) and all(row[i] is None or _is_number(row[i]) for row in rows)
        for i in range(len(head))
    ]
    widths = [max(_width(row[i]) for row in texts) for i in range(len(head))]
    room = None
    if sys.stdout.isatty():
        room = max(NARROW, shutil.get_terminal_size().columns - sum(widths[:-1]) - len(GAP) * (len(head) - 1))
    made = []
    for row in texts:
        cells = [_pad(text, widths[i], right=right[i]) for i, text in enumerate(row[:-1])]
        last = row[-1] if not right[-1] else _pad(row[-1], widths[-1], right=True)
        if room is not None and len(last) > room:
            last = last[: room - 1] + "…"
        made.append(GAP.join([*cells, last]).rstrip())
    return made


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """Print a table, or one line where there are no rows."""
    if not rows:
        click.echo(empty)
        return
    for line in table(head, rows):
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


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _pad(text: str, width: int, *, right: bool) -> str:
    space = " " * (width - _width(text))
    return space + text if right else text + space
