"""A step: a job with its payload that is not enqueued yet. It follows another job, or is a member of a batch.

A step is a finished value, and so is what follows it: a chain has an end. Whatever a handler wants to repeat it
enqueues anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from pgqueue.errors import BadOption

#: The header under which the queue keeps what belongs to a job: the steps after it, its batch, its parent.
MARK: Final = "pgqueue"
#: Steps that may follow each other: each stands inside the one before it, and a JSON reader goes only so deep.
DEEPEST: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One job to come. `kind` is the JSON text of its name and options, `payload` that of its payload.

    `depth`: how many steps follow each other from here on, this one included.
    """

    name: str
    kind: str
    payload: str
    key: str | None = None
    idempotency_key: str | None = None
    depth: int = 1

    def text(self) -> str:
        """Return the JSON text that SQL takes."""
        return _text([self])


def steps_of(option: str, steps: Any) -> tuple[Step, ...]:
    """Return steps as a tuple; raise BadOption for anything that is no list of steps."""
    if isinstance(steps, Step):
        return (steps,)
    if not isinstance(steps, list | tuple):
        raise BadOption(
            option, f"{steps!r} is not a list of steps; make one of each job: job.with_payload(...)"
        )
    for step in steps:
        if not isinstance(step, Step):
            raise BadOption(option, f"{step!r} is not a step; make one of the job: job.with_payload(...)")
    return tuple(steps)


def depth_of(option: str, then: Iterable[Step]) -> int:
    """Return how many steps follow each other; raise BadOption for more than can be read back."""
    depth = max((step.depth for step in then), default=0)
    if depth > DEEPEST:
        raise BadOption(
            option,
            f"{depth} steps follow each other, more than {DEEPEST}; let the handler add the next one: job.then(...)",
        )
    return depth


def steps_json(steps: Iterable[Step]) -> str:
    """Return the JSON text of steps; neighbours that differ in payload and keys alone become one."""
    groups = groupby(steps, key=lambda s: (s.kind, s.key is None, s.idempotency_key is None))
    return f"[{','.join(_text(list(group)) for _, group in groups)}]"


def _text(group: Sequence[Step]) -> str:
    members = [group[0].kind[1:-1], f'"payloads":[{",".join(s.payload for s in group)}]']
    if group[0].key is not None:
        members.append(f'"keys":{json.dumps([s.key for s in group])}')
    if group[0].idempotency_key is not None:
        members.append(f'"idempotency_keys":{json.dumps([s.idempotency_key for s in group])}')
    return f"{{{','.join(members)}}}"
