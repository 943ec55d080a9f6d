"""Enqueue: job rows in the caller's transaction.

The statement calls the SQL function `pgqueue.enqueue_many`, the same one that producers in other languages
use, so that a row does not depend on who wrote it: what the caller left out comes from `job_type`, else from
the built-in defaults. The rows appear exactly if the caller's transaction commits. Nothing is locked but,
with `dedup_key`, the key's row: a second enqueue of the key waits for the first one's transaction. A full queue
answers with a row, not with an error, so that the caller's transaction stays usable after QueueFull.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from itertools import repeat
from typing import Any, Literal, TypedDict, get_args

from pgqueue.backoff import Backoff, seconds
from pgqueue.errors import BadOption, QueueFull
from pgqueue.payload import NUL
from pgqueue.ref import JobRef
from pgqueue.statement import Row, Statement, load, scalar
from pgqueue.step import MARK, Step, depth_of, steps_json, steps_of

#: A key, or a function that takes it from each payload (needed by enqueue_many for keys that differ).
Key = str | Callable[[Any], str]
DedupMode = Literal["keep", "replace", "debounce"]

_SQL = load("pgqueue", "enqueue")
_HOUR = timedelta(hours=1)
_MODES = get_args(DedupMode)
_LONGEST_NAME = 200
_LONGEST_KEY = 512
_MOST_HEADERS = 64 * 1024
_DEEPEST_HEADERS = 100


class OptionValues(TypedDict, total=False):
    """The options of enqueue as keywords; see `Options` for what they mean."""

    queue: str | None
    priority: int | None
    key: Key | None
    run_after: float | timedelta | datetime | None
    dedup_key: Key | None
    dedup_window: float | timedelta | Literal["live"]
    dedup_mode: DedupMode
    dedup_max_wait: float | timedelta | None
    idempotency_key: Key | None
    max_attempts: int | None
    timeout: float | timedelta | None
    backoff: Backoff | None
    expires_at: datetime | None
    headers: Mapping[str, Any] | None
    then: Sequence[Step]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a caller can set for the jobs it enqueues; None = the job type's policy.

    Durations are seconds or timedeltas. `run_after` is a delay (counted from the call) or a time zone aware
    datetime. `dedup_window` is how long a dedup key stays taken, "live" = as long as its job lives. `dedup_mode`: what
    becomes of the job that has the key, while it waits: keep leaves it, replace gives it the payload and time of this
    call, debounce too but its time moves back only, by `run_after` from each call, `dedup_max_wait` in all.
    `timeout=math.inf` switches the type's timeout off. `then`: steps that are enqueued in the transaction in which
    the job is acknowledged; they wait with a job that dies, and go with one that is cancelled or discarded.
    """

    queue: str | None = None
    priority: int | None = None
    key: Key | None = None
    run_after: float | timedelta | datetime | None = None
    dedup_key: Key | None = None
    dedup_window: float | timedelta | Literal["live"] = _HOUR
    dedup_mode: DedupMode = "keep"
    dedup_max_wait: float | timedelta | None = None
    idempotency_key: Key | None = None
    max_attempts: int | None = None
    timeout: float | timedelta | None = None
    backoff: Backoff | None = None
    expires_at: datetime | None = None
    headers: Mapping[str, Any] | None = None
    then: Sequence[Step] = ()

    def __post_init__(self) -> None:
        check_name("queue", self.queue)
        check_range("priority", self.priority, 0, 9, " (lower runs first)")
        check_range("max_attempts", self.max_attempts, 1, 32_767)
        for option in ("key", "dedup_key", "idempotency_key"):
            value = getattr(self, option)
            if value is not None and not callable(value):
                check_key(option, value)
        if isinstance(self.run_after, datetime):
            check_time("run_after", self.run_after)
        elif self.run_after is not None:
            seconds("run_after", as_seconds(self.run_after))
        if self.expires_at is not None:
            check_time("expires_at", self.expires_at)
        _check_dedup_values(self)
        check_timeout("timeout", self.timeout)
        if self.backoff is not None and not isinstance(self.backoff, Backoff):
            raise BadOption("backoff", f"{self.backoff!r} is not a pgqueue.Backoff")
        if self.headers is not None:
            headers_json(self.headers)
        if self.then != ():
            # A copy: what becomes of the caller's list is its own affair.
            object.__setattr__(self, "then", steps_of("then", self.then))
            _headers(self)

    def but(self, **changes: Any) -> Options:
        """Return a copy with `changes`; raise BadOption for a name that is no option."""
        known = {f.name for f in fields(self)}
        for name in changes:
            if name not in known:
                raise BadOption(name, f"there is no such option; options are {', '.join(sorted(known))}")
        return Options(**{f.name: getattr(self, f.name) for f in fields(self)} | changes)


def enqueue(
    name: str,
    values: Sequence[Any],
    payloads: str,
    options: Options,
    otherwise: tuple[str | None, int | None] = (None, None),
) -> Statement[list[JobRef]]:
    """Write one job per payload: `payloads` is the JSON array of `values`; refs come back in their order.

    `otherwise` is the (queue, priority) of a job type that no worker has declared in the database yet.
    """
    _check_dedup(options)
    run_after = options.run_after
    params: dict[str, object] = {
        "name": name,
        "payloads": payloads,
        "queue": options.queue,
        "priority": options.priority,
        "run_at": run_after if isinstance(run_after, datetime) else None,
        "delay": None if run_after is None or isinstance(run_after, datetime) else _interval(run_after),
        "keys": _keys("key", options.key, values),
        "dedup_keys": _keys("dedup_key", options.dedup_key, values),
        "dedup_window": _HOUR if options.dedup_window == "live" else _interval(options.dedup_window),
        "dedup_live": options.dedup_window == "live",
        "dedup_mode": options.dedup_mode,
        "dedup_max_wait": None if options.dedup_max_wait is None else _interval(options.dedup_max_wait),
        "idempotency_keys": _keys("idempotency_key", options.idempotency_key, values),
        "max_attempts": options.max_attempts,
        "timeout_s": None if options.timeout is None else as_seconds(options.timeout),
        "backoff": options.backoff.to_json() if options.backoff else None,
        "expires_at": options.expires_at,
        "headers": _headers(options),
        "else_queue": otherwise[0],
        "else_priority": otherwise[1],
        "each": options.dedup_key is not None,
    }
    return Statement(_SQL["enqueue"], params, _refs)


def step(
    name: str,
    value: Any,
    text: str,
    options: Options,
    otherwise: tuple[str | None, int | None] = (None, None),
) -> Step:
    """Make a step of a payload, `text` being its JSON text. A delay counts from the end of what it follows.

    Raises BadOption for a dedup key: a step is enqueued once, with its parent's acknowledgement, which must not wait
    for whoever holds the key.
    """
    if options.dedup_key is not None:
        raise BadOption("dedup_key", f"a step of job {name!r} takes none; it is enqueued once in any case")
    run_after = options.run_after
    timeout = None if options.timeout is None else as_seconds(options.timeout)
    kind = {
        "name": name,
        "queue": options.queue,
        "priority": options.priority,
        "run_at": run_after.isoformat() if isinstance(run_after, datetime) else None,
        "delay": None if run_after is None or isinstance(run_after, datetime) else as_seconds(run_after),
        "max_attempts": options.max_attempts,
        "timeout_s": "Infinity" if timeout == math.inf else timeout,
        "backoff": json.loads(options.backoff.to_json()) if options.backoff else None,
        "expires_at": options.expires_at.isoformat() if options.expires_at else None,
        "headers": dict(options.headers) if options.headers else None,
        "else_queue": otherwise[0],
        "else_priority": otherwise[1],
    }
    given = json.dumps(
        {k: v for k, v in kind.items() if v is not None}, ensure_ascii=False, separators=(",", ":")
    )
    if options.then:
        given = f'{given[:-1]},"then":{steps_json(options.then)}}}'
    keys, idempotency_keys = (_keys(o, getattr(options, o), [value]) for o in ("key", "idempotency_key"))
    return Step(
        name=name, kind=given, payload=text, key=keys[0] if keys else None,
        idempotency_key=idempotency_keys[0] if idempotency_keys else None, depth=1 + depth_of("then", options.then),
    )  # fmt: skip


def declared(name: str) -> Statement[bool]:
    """Tell whether a job type of that name is declared in the database."""
    return Statement(_SQL["declared"], {"name": name}, scalar)


def check_name(option: str, value: str | None) -> None:
    """Refuse a queue or job name that is blank, longer than 200 bytes, or holds a NUL."""
    if value is not None:
        _check_text(option, value, _LONGEST_NAME)


def check_key(option: str, value: str) -> None:
    """Refuse a key that is blank, longer than 512 bytes, or holds a NUL."""
    _check_text(option, value, _LONGEST_KEY)


def check_range(option: str, value: int | None, low: int, high: int, hint: str = "") -> None:
    """Refuse a whole number outside low..high."""
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high
    ):
        raise BadOption(option, f"{value!r} is not a whole number from {low} to {high}{hint}")


def check_time(option: str, value: datetime) -> None:
    """Refuse a time that is no datetime, or has no time zone."""
    if not isinstance(value, datetime):
        raise BadOption(option, f"{value!r} is not a datetime")
    if value.utcoffset() is None:
        raise BadOption(
            option, f"{value!r} has no time zone; use datetime.now(timezone.utc) or an aware datetime"
        )


def check_timeout(option: str, value: float | timedelta | None) -> None:
    """Refuse a timeout that is not above zero; math.inf is no timeout."""
    if value is not None and as_seconds(value) != math.inf:
        seconds(option, as_seconds(value), zero=False, hint=", or math.inf")


def headers_json(headers: Mapping[str, Any]) -> str:
    """Return the JSON text of headers; raise BadOption for headers that JSON or Postgres cannot hold."""
    if not isinstance(headers, Mapping) or not all(isinstance(name, str) for name in headers):
        raise BadOption("headers", f"{headers!r} is not a mapping with strings as keys")
    try:
        text = json.dumps(dict(headers), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        data = text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadOption("headers", f"have no JSON form: {error}") from error
    if NUL.search(data):
        raise BadOption("headers", "hold a NUL character, which Postgres cannot store")
    if len(data) > _MOST_HEADERS:
        raise BadOption("headers", f"have {len(data)} bytes, more than {_MOST_HEADERS}")
    if _nesting(headers) > _DEEPEST_HEADERS:
        raise BadOption(
            "headers", f"are nested more than {_DEEPEST_HEADERS} deep, which no worker could read"
        )
    if MARK in headers:
        raise BadOption("headers", f"{MARK!r} is the queue's own; choose another name")
    return text


def _nesting(value: object) -> int:
    """Return how deep mappings and lists stand in each other."""
    level, deep = [value], 0
    while level := [
        inner
        for outer in level
        for inner in (
            outer.values() if isinstance(outer, Mapping) else outer if isinstance(outer, list | tuple) else ()
        )
    ]:
        deep += 1
    return deep


def as_seconds(value: float | timedelta) -> float:
    """Return a duration in seconds."""
    return value.total_seconds() if isinstance(value, timedelta) else value


def _check_text(option: str, value: str, longest: int) -> None:
    if not isinstance(value, str):
        raise BadOption(option, f"{value!r} is not a string")
    if not value.strip():
        raise BadOption(option, "is blank")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise BadOption(option, f"{value!r} is not valid Unicode") from error
    if size > longest:
        raise BadOption(option, f"has {size} bytes, more than {longest}: {value[:40]!r}...")
    if "\0" in value:
        raise BadOption(option, f"{value!r} holds a NUL character")


def _headers(options: Options) -> str | None:
    """Return the headers of a job with what follows it."""
    own = headers_json(options.headers) if options.headers else "{}"
    if not options.then:
        return own if options.headers else None
    rest = f",{own[1:]}" if options.headers else "}"
    depth_of("then", options.then)
    text = f'{{"{MARK}":{{"then":{steps_json(options.then)}}}{rest}'
    # Of the most that headers may have, a step needs a few bytes for its parent and batch.
    if (size := len(text.encode())) > _MOST_HEADERS - 100:
        raise BadOption(
            "then", f"what follows has {size} bytes with its payloads, more than {_MOST_HEADERS - 100}: "
            "store payloads elsewhere and pass references, or let the handler add its steps with job.then(...)"
        )  # fmt: skip
    return text


def _check_dedup_values(options: Options) -> None:
    if options.dedup_window != "live":
        seconds("dedup_window", as_seconds(options.dedup_window), zero=False, hint=', or "live"')
    if options.dedup_mode not in _MODES:
        raise BadOption("dedup_mode", f"{options.dedup_mode!r} is not {', '.join(_MODES)}")
    if options.dedup_max_wait is not None:
        seconds("dedup_max_wait", as_seconds(options.dedup_max_wait), zero=False)


def _check_dedup(options: Options) -> None:
    """Refuse modes without what they need; not before the enqueue, as `using` may be called step by step."""
    if options.dedup_mode != "keep" and options.dedup_key is None:
        raise BadOption("dedup_mode", f"{options.dedup_mode!r} goes with a dedup_key")
    if options.dedup_mode == "debounce" and options.run_after is None:
        raise BadOption("dedup_mode", "'debounce' needs run_after, the delay that each call starts anew")
    if options.dedup_mode != "debounce" and options.dedup_max_wait is not None:
        raise BadOption("dedup_max_wait", "goes with dedup_mode='debounce'")


def _interval(value: float | timedelta) -> timedelta:
    return value if isinstance(value, timedelta) else timedelta(seconds=value)


def _keys(option: str, key: Key | None, values: Sequence[Any]) -> list[str] | None:
    if key is None:
        return None
    if isinstance(key, str):
        if option == "dedup_key" and len(values) > 1:
            raise BadOption(
                option,
                "one dedup key for many jobs would keep only the first; give a function of the payload",
            )
        return [key] * len(values)
    keys = [key(value) for value in values]
    for k in keys:
        check_key(option, k)
    return keys


def _refs(rows: Sequence[Row]) -> list[JobRef]:
    ids, created, changed, queue = rows[0]
    if ids is None:
        return []
    if ids[0] < 0:  # the mark of a full queue: seconds
        raise QueueFull(queue, timedelta(seconds=-ids[0]))
    if created is None:  # one fate for all of them: there, or shed
        created, changed = repeat(ids[0] > 0), [False] * len(ids)
    # Half the time of a JobRef(...) each, of which a bulk enqueue makes thousands.
    return list(map(tuple.__new__, repeat(JobRef), zip(ids, created, changed, strict=False)))
