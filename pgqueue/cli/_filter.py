"""The options that choose dead letters, and the moments they are about."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

import click

from pgqueue.cli._app import Duration, JobId
from pgqueue.dead import Filter

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class Moment(click.ParamType[datetime | timedelta]):
    """A moment, 2026-03-01 or 2026-03-01T12:00+01:00 (local time without a zone), or how long ago: 2h, 7d."""

    name = "moment"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime | timedelta:
        if isinstance(value, datetime | timedelta):
            return value
        try:
            return datetime.fromisoformat(str(value)).astimezone()
        except (ValueError, OverflowError):
            pass
        try:
            return Duration().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is neither a moment (2026-03-01T12:00) nor a time ago (2h, 7d)", param, ctx)


class _Where(click.ParamType[tuple[str, str]]):
    name = "PATH=VALUE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        path, equals, wanted = str(value).partition("=")
        if not equals or not path:
            self.fail(f"{value!r} is not PATH=VALUE, for example order.id=17", param, ctx)
        return path, wanted


def filter_options(function: Decorated) -> Decorated:
    """Add the arguments and options of a Filter; the command gives its keywords to `filter_of`."""
    for option in reversed(
        (
            click.argument("ids", type=JobId(), nargs=-1, metavar="[ID]..."),
            click.option(
                "--error-type", metavar="TYPE", help="Only this type of error, as `dead list` shows it."
            ),
            click.option(
                "--reason", metavar="REASON", help="Only this reason: exhausted, permanent, timeout, .."
            ),
            click.option("--name", metavar="NAME", help="Only jobs of this name."),
            click.option("--queue", metavar="QUEUE", help="Only jobs of this queue."),
            click.option(
                "--since", type=Moment(), help="Only what died from then on: 2026-03-01T12:00, or 2h ago."
            ),
            click.option("--until", type=Moment(), help="Only what died before."),
            click.option(
                "--where",
                type=_Where(),
                multiple=True,
                help="Only where the payload has that value; may be repeated.",
            ),
        )
    ):
        function = option(function)
    return function


def filter_of(given: dict[str, Any]) -> Filter:
    """Take the filter's keywords out of a command's."""
    ids, where = given.pop("ids"), given.pop("where")
    return Filter(
        ids=sorted(set(ids)) if ids else None,
        matching=dict(where),
        **{name: given.pop(name) for name in ("error_type", "reason", "name", "queue", "since", "until")},
    )
