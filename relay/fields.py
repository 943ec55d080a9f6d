"""The fields of events and of the inbox: what Postgres can store and an index can hold."""

from __future__ import annotations

from uuid import UUID

from pgqueue.errors import BadOption

KEY_BYTES = 512
NAME_BYTES = 200
LOWEST = -(2**63)
HIGHEST = 2**63 - 1


def text(option: str, value: object, longest: int) -> str:
    """Return a text; raise BadOption if it is none, blank, too long, or holds what Postgres cannot store."""
    if not isinstance(value, str):
        raise BadOption(option, f"is {type(value).__name__}, not text")
    if not value.strip():
        raise BadOption(option, "is empty")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise BadOption(option, "contains a lone surrogate, which Postgres cannot store") from None
    if "\0" in value:
        raise BadOption(option, "contains a NUL character, which Postgres cannot store")
    if size > longest:
        raise BadOption(option, f"has {size} bytes, more than {longest}")
    return value


def aggregate(value: object) -> str:
    """Return the id of an aggregate, a text, a whole number or a UUID, as text."""
    if isinstance(value, int | UUID) and not isinstance(value, bool):
        value = str(value)
    return text("aggregate_id", value, KEY_BYTES)


def whole(option: str, value: object, lowest: int) -> int:
    """Return a whole number that fits bigint and is not below `lowest`."""
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= HIGHEST:
        low = "-2^63" if lowest == LOWEST else lowest
        raise BadOption(option, f"{value!r} is not a whole number from {low} to 2^63 - 1")
    return value
