"""Policy: what the keywords of `@app.job` mean, checked when the module is imported."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import get_args

from pgqueue.backoff import Backoff, seconds
from pgqueue.declare import OnDead, Policy
from pgqueue.enqueue import as_seconds, check_name, check_range, check_timeout
from pgqueue.errors import BadOption

DEFAULT_MAX_ATTEMPTS = 5
DEFAULT_BACKOFF = Backoff()
_DAY = 86_400.0
_MOST_KEPT = 400 * _DAY


def per_second(option: str, rate: str) -> float:
    """Read a rate such as 100/min."""
    found = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    if found is None or float(found[1]) <= 0:
        raise BadOption(option, f"{rate!r} does not read like 100/min, 5/s or 1000/h")
    return float(found[1]) / _SECONDS[found[2]]


_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*/\s*(s|sec|min|m|h|hour|d|day)")
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|min|m|h|hour|d|day)s?")
_SECONDS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600, "hour": 3600, "d": 86_400, "day": 86_400}


def policy_of(
    name: str, queue: str | None, priority: int | None, max_attempts: int | None, backoff: Backoff | None,
    timeout: float | timedelta | None, *, limit: int | None, rate: str | None, sheddable: bool,
    key_limit: int | None = None, key_rate: str | None = None, on_dead: OnDead | None = None,
    keep: str | float | timedelta | None = None, result: bool = False,
) -> Policy:  # fmt: skip
    """Make the policy of a job type; raise BadOption for what makes no sense."""
    check_name("name", name)
    check_name("queue", queue)
    check_range("priority", priority, 0, 9, " (lower runs first)")
    check_range("max_attempts", max_attempts, 1, 32_767)
    check_timeout("timeout", timeout)
    if backoff is not None and not isinstance(backoff, Backoff):
        raise BadOption("backoff", f"{backoff!r} is not a pgqueue.Backoff")
    check_range("limit", limit, 1, 10_000, " jobs at once; pause the job type to run none")
    check_range("key_limit", key_limit, 1, 10_000, " jobs of a key at once")
    limited, by_key = limit is not None or rate is not None, key_limit is not None or key_rate is not None
    if limited and by_key:
        raise BadOption(
            "key_limit",
            f"job {name!r} has a limit or rate of its own already; limit its queue, or its keys, instead",
        )
    if on_dead not in (None, *get_args(OnDead)):
        raise BadOption("on_dead", f"{on_dead!r} is not continue or block")
    if on_dead == "block" and (limited or by_key):
        raise BadOption(
            "on_dead", f"job {name!r} has a limit or a rate, so it takes no ordering key to block"
        )
    if result and keep is None:
        keep = _DAY
    kept = None if keep is None else _kept(keep)
    window = (max_attempts or DEFAULT_MAX_ATTEMPTS) * (backoff or DEFAULT_BACKOFF).cap
    if kept is not None and kept < window:
        raise BadOption(
            "keep",
            f"{kept:g} s is shorter than the {window:g} s in which its attempts may be retried; keep it longer",
        )
    return Policy(
        name=name,
        queue=queue,
        priority=priority,
        max_attempts=max_attempts,
        backoff=backoff,
        timeout=None if timeout is None else as_seconds(timeout),
        limit=1 if limit is None and rate is not None else limit,
        rate=None if rate is None else per_second("rate", rate),
        key_limit=1 if key_limit is None and key_rate is not None else key_limit,
        key_rate=None if key_rate is None else per_second("key_rate", key_rate),
        sheddable=sheddable,
        on_dead=on_dead,
        keep=kept,
        result=result,
    )


def _kept(keep: str | float | timedelta) -> float:
    """Read how long finished jobs are kept, in seconds."""
    if isinstance(keep, str):
        found = _SPAN.fullmatch(keep)
        if found is None:
            raise BadOption("keep", f"{keep!r} does not read like 7d, 12h or 90min")
        value = float(found[1]) * _SECONDS[found[2]]
    else:
        value = seconds("keep", as_seconds(keep), zero=False)
    if not 0 < value <= _MOST_KEPT:
        raise BadOption("keep", f"{keep!r} is not above 0 and up to 400 days")
    return value
