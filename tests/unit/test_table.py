"""A table fits the terminal it is shown on, and what an operator copies from it stays whole."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from pgqueue.cli._table import _width, table

HEAD = ("ERROR TYPE", "JOBS", "FIRST SEEN", "QUEUES", "NAMES", "SAMPLE", "KEY", "ERROR")
AT = datetime(2026, 3, 1, 9, 12, 44, tzinfo=UTC)
ROWS = [
    ("KeyError", 7, AT, ("mail",), ("send-receipt",), 12, None, "'address'"),
    ("shop.warehouse.errors.WarehouseUnavailable", 78, AT, ("bulk", "critical", "mail"),
     ("order.placed/notify-customer-service",), 8431, None, "the warehouse said no " * 20),
]  # fmt: skip


@pytest.mark.parametrize("width", [72, 80, 100, 120, 132, 200])
def test_every_line_fits_and_only_the_last_text_is_cut(width: int) -> None:
    lines = table(HEAD, ROWS, width)
    assert max(map(_width, lines)) <= width
    text = "\n".join(lines)
    for row in ROWS:
        assert str(row[0]) in text
        assert ",".join(row[4]) in text
        assert str(row[5]) in text
    assert text.count("2026-03-01 09:12:44Z") == 2
    assert text.count("…") <= 1
    assert "KEY" not in text.split()  # no row has one


def test_a_table_that_fits_is_one_line_a_row_with_its_empty_columns() -> None:
    lines = table(("ID", "NAME", "KEY"), [(1, "a", None), (20, "bb", None)], 80)
    assert lines == ["ID  NAME  KEY", " 1  a     -", "20  bb    -"]


def test_what_is_read_by_a_program_is_never_cut_or_folded() -> None:
    lines = table(HEAD, ROWS)
    assert len(lines) == 3
    assert lines[2].endswith("said no")


def test_a_row_that_is_named_by_an_id_keeps_its_name_beside_it() -> None:
    rows = [(17, "order.placed/notify-customer-service", "critical", "delayed", AT, "a-key")]
    first, *_ = table(("ID", "NAME", "QUEUE", "STATE", "RUN AT", "KEY"), rows, 80)[2:]
    assert first.startswith("17  order.placed/notify-customer-service")


def test_a_line_without_a_value_is_left_out() -> None:
    rows = [(1, "n" * 50, "q" * 20, "k" * 60), (2, "n", "q", None)]
    lines = table(("ID", "NAME", "QUEUE", "KEY"), rows, 80)
    assert lines == [
        f"ID  NAME{' ' * 48}QUEUE", "    KEY", f" 1  {'n' * 50}  {'q' * 20}", f"    {'k' * 60}",
        f" 2  n{' ' * 51}q",
    ]  # fmt: skip


def test_wide_characters_take_two_columns() -> None:
    lines = table(("NAME", "ERROR"), [("a", "錯" * 60)], 40)
    assert max(map(_width, lines)) <= 40
    assert lines[1].endswith("…")
