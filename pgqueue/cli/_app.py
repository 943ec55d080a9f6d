"""Find what a command line names: an app, a duration, a signal to stop."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import psycopg

from pgqueue.app import App
from pgqueue.cli import raised
from pgqueue.connection import execute
from pgqueue.declare import declare
from pgqueue.enqueue import declared
from pgqueue.errors import BadOption, ConfigError, PgqueueError
from pgqueue.statement import Row

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?")
LAST_ID = 2**63 - 1
SLOWEST = 1e-6
_UNIT = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}


class Duration(click.ParamType[timedelta]):
    """A length of time: 250ms, 90, 90s, 15m, 12h, 7d."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        found = _DURATION.fullmatch(str(value).strip())
        if found is None:
            self.fail(f"{value!r} is not a duration; write 250ms, 90s, 15m, 12h or 7d", param, ctx)
        return timedelta(seconds=float(found[1]) * _UNIT[found[2] or "s"])


class Id(click.ParamType[int]):
    """An id, `what` it is of: a whole number from `least` to the largest bigint. `where` tells where to find them."""

    name = "id"

    def __init__(self, what: str, where: str, *, least: int = 1) -> None:
        self._what = what
        self._where = where
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        if not text.isdecimal() or len(text) > 19 or not self._least <= int(text) <= LAST_ID:
            self.fail(f"{text[:40]!r} is no {self._what} id; {self._where}", param, ctx)
        return int(text)


class JobId(Id):
    """The id of a job: a whole number from 1."""

    def __init__(self) -> None:
        super().__init__("job", "pgqueue jobs list and pgqueue dead list --each show them")


class Rate(click.FloatRange):
    """So many a second; 0 is as fast as it goes."""

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        rate = float(super().convert(value, param, ctx))
        if rate and not SLOWEST <= rate < math.inf:
            self.fail(f"{value} is no rate; write how many a second, 0.5 or 500, or 0", param, ctx)
        return rate


def load_app(path: str) -> App:
    """Import `module:name` from the current folder or the installed packages."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise BadOption("APP", f"{path!r} is not module:name, for example shop.jobs:app")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except PgqueueError:
        raise
    except Exception as error:  # the module is the operator's: it may raise anything, as a handler may
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"cannot load {path}: {error}; start in the folder that holds {module.split('.')[0]}"
            ) from error
        raise ConfigError(f"cannot load {path}: {raised(error)}") from error
    if not isinstance(found, App):
        raise ConfigError(f"{path} is {type(found).__name__}, not a pgqueue.App")
    return found


def declare_types(conn: psycopg.Connection[Row], app: App) -> None:
    """Write the app's job types, as a worker does, so that jobs made on `conn` get their queue and policy.

    `conn` is in autocommit mode. Raises ConfigError where its role may not write them and lacks some.
    """
    try:
        execute(conn, declare(kind.policy for kind in app.types.values()))
    except psycopg.errors.InsufficientPrivilege as error:
        missing = [name for name in sorted(app.types) if not execute(conn, declared(name))]
        if missing:
            raise ConfigError(
                f"job types are not declared ({', '.join(missing)}), and this role may not declare them: their jobs "
                "would go to queue default; run pgqueue sync with the rights of a worker, or start a worker, first"
            ) from error


def stop_on_signals(at_once: Callable[[], None] | None = None) -> threading.Event:
    """Return an event that SIGTERM or SIGINT sets; a second signal ends the process at once, after `at_once()`."""
    told = threading.Event()
    heard = 0

    def stop(number: int, _: object) -> None:
        nonlocal heard
        heard += 1
        if heard > 1:
            if at_once is not None:
                at_once()
            os._exit(128 + number)
        told.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    return told
