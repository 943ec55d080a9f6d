"""Settings of a worker, validated once at the edge. All durations are seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from pgqueue.errors import ConfigError

MAX_CLAIM = 500
MAX_WEIGHT = 1000
#: Ten years.
LONGEST = 3650 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How one worker process works.

    `concurrency`: jobs at once of each kind (threads for `def`, tasks for `async def`, child processes).
    `queues`: served strictly in the order written; `reserved`: slots that only one queue may use. `weights` instead of
    both: of the jobs claimed while several queues have some, each gets its share.
    `visibility`: how long a claim stands without a heartbeat. `prefetch`: jobs claimed beyond the running ones,
    None = by their duration and the size of their payloads, at most 1,500. `ledger`: how long idempotency keys are
    remembered. `dead_retention`: how long dead letters are kept, None = until a person decides.
    """

    queues: tuple[str, ...] = ("default",)
    reserved: dict[str, int] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    concurrency: int = 8
    prefetch: int | None = None
    visibility: float = 30.0
    poll: float = 1.0
    grace: float = 30.0
    flush: float = 0.02
    sweep: float = 0.25
    ledger: float = 7 * 86_400.0
    dead_retention: float | None = None
    #: Retries beyond one in ten executions (or one a second) wait longer: see `pgqueue.budget`.
    retry_budget: bool = True
    depth_every: float = 15.0

    def __post_init__(self) -> None:
        self._check_queues()
        self._check_reserved()
        self._check_weights()
        for name, value, low, high, unit in (
            ("concurrency", self.concurrency, 1, 10_000, ""),
            ("prefetch", self.prefetch or 0, 0, 5_000, ""),
            ("visibility", self.visibility, 1.0, 3_600.0, " s"),
            ("poll", self.poll, 0.01, 60.0, " s"),
            ("grace", self.grace, 0.0, 86_400.0, " s"),
            ("sweep", self.sweep, 0.05, 30.0, " s"),
            ("ledger", self.ledger, 60.0, LONGEST, " s"),
            (
                "dead retention",
                60.0 if self.dead_retention is None else self.dead_retention,
                60.0,
                LONGEST,
                " s (leave it out to keep dead letters)",
            ),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{name}: {value:g}{unit} is not between {low:g} and {high:g}{unit}")

    def _check_queues(self) -> None:
        if not self.queues:
            raise ConfigError("queues: name at least one, e.g. --queues critical,default,bulk")
        if len(set(self.queues)) != len(self.queues):
            raise ConfigError(f"queues: {', '.join(self.queues)} names one twice")
        for queue in self.queues:
            if not queue.strip() or len(queue.encode()) > 200:
                raise ConfigError(f"queues: {queue[:40]!r} is blank or longer than 200 bytes")

    def _check_reserved(self) -> None:
        for queue, slots in self.reserved.items():
            if queue not in self.queues:
                raise ConfigError(f"queues: {queue!r} has a reserved slot but is not served")
            if slots < 1:
                raise ConfigError(f"queues: {queue}={slots} reserves no slot")
        if self.reserved and sum(self.reserved.values()) >= self.concurrency:
            raise ConfigError(
                f"queues: {sum(self.reserved.values())} reserved slots leave none of {self.concurrency} "
                "for the other queues"
            )

    def _check_weights(self) -> None:
        if self.weights and self.reserved:
            raise ConfigError(
                "weights: reserved slots go with the strict order; name the queues without =SLOTS, or give no weights"
            )
        if self.weights and set(self.weights) != set(self.queues):
            raise ConfigError(
                f"weights: they name {','.join(self.weights)}, but the queues served are {','.join(self.queues)}"
            )
        for queue, weight in self.weights.items():
            if not 1 <= weight <= MAX_WEIGHT:
                raise ConfigError(f"weights: {queue}={weight} is not between 1 and {MAX_WEIGHT}")


def parse_weights(text: str) -> dict[str, int]:
    """Read `critical=8,bulk=2`: the queues, and the share of each."""
    weights: dict[str, int] = {}
    for part in _parts(text):
        name, _, weight = part.partition("=")
        if not weight.strip().isdecimal() or name.strip() in weights:
            raise ConfigError(f"weights: {part!r} should read NAME=WEIGHT, each name once")
        weights[name.strip()] = int(weight)
    if not weights:
        raise ConfigError("weights: name at least one queue, e.g. --weights critical=8,bulk=2")
    return weights


def parse_queues(text: str, concurrency: int) -> tuple[tuple[str, ...], dict[str, int]]:
    """Read `critical=1,default,bulk`: the queues in order, and the slots reserved for one of them.

    With three queues or more and no reservation spelled out, the first keeps one slot (if there are two or more).
    """
    queues: list[str] = []
    reserved: dict[str, int] = {}
    for part in _parts(text):
        name, mark, slots = part.partition("=")
        queues.append(name.strip())
        if mark:
            if not slots.strip().isdecimal():
                raise ConfigError(f"queues: {part!r} should read NAME or NAME=SLOTS")
            if int(slots):
                reserved[name.strip()] = int(slots)
    if len(queues) >= 3 and "=" not in text and concurrency > 1:
        reserved[queues[0]] = 1
    return tuple(queues), reserved


def _parts(text: str) -> list[str]:
    """Split at commas; an empty part is kept, as a name that a variable did not fill must not go unnoticed."""
    return [part.strip() for part in text.split(",")] if text.strip() else []
