"""What a worker writes to the log: a line per failure, a depth line now and then; a line per job only on demand."""

from __future__ import annotations

import logging
import time
from threading import Lock
from typing import Final

from pgqueue.events import (
    AlreadyApplied,
    Bus,
    DepthSampled,
    HandlerOverran,
    HandlerReturned,
    JobFinished,
    JobsAcked,
    JobsClaimed,
    JobsReleased,
    JobSucceeded,
    LeasesLost,
    LoopFailed,
    LoopRecovered,
    WorkerDraining,
    WorkerStarted,
    WorkerStopped,
)

AGAIN_S: Final = 60.0

_log = logging.getLogger("pgqueue")


class Report:
    """Subscribes to a bus. A database that stays away is mentioned once a minute.

    `every_job`: one line for each attempt that ended well, too; it costs about as much as a short job.
    """

    def __init__(self, bus: Bus, *, every_job: bool) -> None:
        self._lock = Lock()
        self._done = 0
        self._since = time.monotonic()
        self._said: dict[str, float] = {}
        bus.subscribe(WorkerStarted, self._started)
        bus.subscribe(WorkerDraining, self._draining)
        bus.subscribe(WorkerStopped, self._stopped)
        bus.subscribe(JobsClaimed, self._claimed)
        bus.subscribe(JobsAcked, self._count)
        bus.subscribe(JobsReleased, self._released)
        bus.subscribe(LeasesLost, self._lost)
        bus.subscribe(HandlerOverran, self._overran)
        bus.subscribe(HandlerReturned, self._returned)
        bus.subscribe(AlreadyApplied, self._applied)
        bus.subscribe(DepthSampled, self._sampled)
        bus.subscribe(LoopFailed, self._failed)
        bus.subscribe(LoopRecovered, self._works)
        bus.subscribe(JobFinished, self._finished)
        if every_job:
            bus.subscribe(JobSucceeded, self._succeeded)

    def _started(self, event: WorkerStarted) -> None:
        _log.info(
            "started queues=%s concurrency=%d jobs=%s connections=%d",
            ",".join(event.queues), event.concurrency, ",".join(event.names), event.connections,
        )  # fmt: skip

    def _draining(self, event: WorkerDraining) -> None:
        _log.info("draining %d", event.running)

    def _stopped(self, event: WorkerStopped) -> None:
        _log.info("drained released=%d", event.released)

    def _claimed(self, event: JobsClaimed) -> None:
        if event.recovered:
            _log.warning("recovered %d jobs whose worker was lost", event.recovered)

    def _count(self, event: JobsAcked) -> None:
        with self._lock:
            self._done += event.count

    def _released(self, event: JobsReleased) -> None:
        _log.info("released %d", event.count)

    def _lost(self, event: LeasesLost) -> None:
        ids = ", ".join(map(str, event.job_ids[:10])) + (", .." if len(event.job_ids) > 10 else "")
        _log.warning("lease lost on %d jobs, their results were dropped: %s", len(event.job_ids), ids)

    def _overran(self, event: HandlerOverran) -> None:
        _log.warning(
            "overrun %s %d attempt=%d: the handler goes on after its timeout of %gs and keeps its slot; overrun=%d",
            event.name, event.job_id, event.attempt, event.limit, event.overrun,
        )  # fmt: skip

    def _returned(self, event: HandlerReturned) -> None:
        _log.info(
            "overrun ended %s %d attempt=%d in=%.0fms: its slot is free; overrun=%d",
            event.name, event.job_id, event.attempt, event.seconds * 1000, event.overrun,
        )  # fmt: skip

    def _applied(self, event: AlreadyApplied) -> None:
        _log.info("already applied %s %d key=%s", event.name, event.job_id, event.key)

    def _sampled(self, event: DepthSampled) -> None:
        now = time.monotonic()
        with self._lock:
            count, self._done = self._done, 0
            seconds, self._since = now - self._since, now
        _log.info(
            "depth queue=%s ready=%d delayed=%d in_flight=%d blocked=%d oldest_ready=%.1fs done=%d rate=%.0f/s",
            event.queue, event.ready, event.delayed, event.in_flight, event.blocked, event.oldest_ready_s, count,
            count / max(seconds, 0.001),
        )  # fmt: skip

    def _failed(self, event: LoopFailed) -> None:
        now = time.monotonic()
        if now - self._said.get(event.loop, -AGAIN_S) >= AGAIN_S:
            self._said[event.loop] = now
            _log.warning("%s loop: %s; trying again", event.loop, event.error)

    def _works(self, event: LoopRecovered) -> None:
        if self._said.pop(event.loop, None) is not None:
            _log.info("%s loop works again after %.1f s", event.loop, event.seconds)

    def _succeeded(self, event: JobSucceeded) -> None:
        _log.info(
            "ok %s %d attempt=%d in=%.0fms", event.name, event.job_id, event.attempt, event.seconds * 1000
        )

    def _finished(self, event: JobFinished) -> None:
        where = f"{event.name} {event.job_id} attempt={event.attempt} in={event.seconds * 1000:.0f}ms"
        match event.outcome:
            case "ok":
                pass
            case "retry":
                _log.warning("retry %s after=%.1fs: %s", where, event.delay or 0.0, event.error)
            case "dead":
                _log.error("dead %s: %s", where, event.error)
            case "snooze" if event.error:
                _log.warning("snooze %s after=%.1fs: %s", where, event.delay or 0.0, event.error)
            case _:
                _log.info("%s %s", event.outcome, where)
