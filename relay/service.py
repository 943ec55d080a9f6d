"""One relay: two threads on two connections, until it is told to stop.

relay = Relay(config, sink, bus)
relay.start()
...
relay.stop(grace=30)
"""

from __future__ import annotations

import threading
import time
from uuid import UUID, uuid4

from pgqueue.events import Bus
from pgqueue.loop import Wake
from relay.config import RelayConfig
from relay.events import RelayStarted
from relay.following import Following
from relay.publishing import Publishing
from relay.routes import DEFAULT, Routes
from relay.sinks import Sink
from relay.targets import Targets
from relay.upkeep import Upkeep

CONNECTIONS = 2
#: The upkeep loop comes round several times a second; this long is a hang.
UPKEEP_PATIENCE_S = 30.0


class Relay:
    """Publishes the outbox of one database to one sink, or to several by event type. `id` is new with every start."""

    def __init__(self, config: RelayConfig, sink: Sink | Routes[Sink], bus: Bus | None = None) -> None:
        self.config = config
        self.id: UUID = uuid4()
        self._targets = Targets(sink if isinstance(sink, Routes) else Routes({DEFAULT: sink}))
        self._bus = bus or Bus()
        wake = Wake()
        self._wake = wake
        self._stop_publishing = threading.Event()
        self._stop_upkeep = threading.Event()
        loop = Following if config.wal else Publishing
        self._publishing = loop(config, self.id, self._targets, self._bus, wake, self._stop_publishing)
        self._upkeep = Upkeep(
            config, self.id, self._bus, wake, self._stop_upkeep, self._progresses, self._publishing.shared
        )
        self._threads = (
            threading.Thread(target=self._publishing.run, name="relay-publish", daemon=True),
            threading.Thread(target=self._upkeep.run, name="relay-upkeep", daemon=True),
        )

    def start(self) -> None:
        """Start both loops; returns at once. A database or broker that is away is waited for."""
        config = self.config
        self._bus.emit(
            RelayStarted(
                relay=config.name,
                sink=self._targets.name,
                batch=config.batch,
                lease_s=config.lease,
                connections=CONNECTIONS + self.config.wal,
            )
        )
        for thread in self._threads:
            thread.start()

    def stop(self, grace: float = 30.0) -> bool:
        """Finish the batch, mark it, give the partitions back; False if it took longer than `grace` s."""
        until = time.monotonic() + grace
        publishing, upkeep = self._threads
        self._stop_publishing.set()
        self._wake.set()
        publishing.join(max(0.0, until - time.monotonic()))
        if publishing.is_alive():
            return False
        self._stop_upkeep.set()
        upkeep.join(max(1.0, until - time.monotonic()))
        self._targets.close()
        return not upkeep.is_alive()

    def stalled(self) -> str | None:
        """Return which loop makes no progress, None while all is well. A sink that is away is no stall."""
        if not self._progresses():
            return f"publish: no progress for {time.monotonic() - self._publishing.progress:.0f} s"
        if time.monotonic() - self._upkeep.progress > UPKEEP_PATIENCE_S and self._threads[1].is_alive():
            return f"upkeep: no progress for {time.monotonic() - self._upkeep.progress:.0f} s"
        return None

    def _progresses(self) -> bool:
        return time.monotonic() - self._publishing.progress < self.config.patience
