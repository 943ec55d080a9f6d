"""One measurement: the other end and the relays that publish to it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from benchmarks.bench import Case
from benchmarks.brokers import NoAnswer
from benchmarks.relay.ends import End
from benchmarks.relay.process import Relays
from benchmarks.work import RunFailed

E = TypeVar("E", bound=End)


@contextmanager
def opened(case: Case, kind: type[E]) -> Iterator[E]:
    """Give the other end, ended with the block."""
    if (lacking := kind.lacking()) is not None:
        raise RunFailed(lacking)
    folder = case.folder / "end"
    folder.mkdir()
    end = kind(folder, case.dsn)
    try:
        end.start()
        case.notes[end.title] = f"{end.title.rstrip(':')} {end.version()}".strip() + f": {end.settings}"
        yield end
    except NoAnswer as error:
        raise RunFailed(str(error)) from error
    finally:
        end.close()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running(case: Case, kind: type[E], count: int = 1) -> Iterator[tuple[E, Relays]]:
    """Give the other end and `count` relays that publish to it."""
    with (
        opened(case, kind) as end,
        Relays(case.dsn, end.url, end.folder, count=count, words=end.words, environ=end.environ) as relays,
    ):
        yield end, relays
