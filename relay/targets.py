"""The sinks of one relay, and a batch given to them so that no aggregate is ever ahead of itself.

With one sink a batch is `relay.send.send`. With several, each aggregate's events are cut into runs to the same sink;
wave k holds the k-th run of every aggregate (one event a run where a sink does not keep the order itself), the sinks
of a wave work at the same time, and an aggregate leaves the batch at its first answer that is not "confirmed",
whichever sink gave it. So the order of first occurrences holds across sinks too.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from pgqueue.loop import Trouble
from relay.event import Confirmed, Event
from relay.routes import Routes
from relay.send import Sent, send, wave
from relay.sinks import Sink

SHORTEST_HOLD_S: Final = 1.0
LONGEST_HOLD_S: Final = 30.0


class Target:
    """One sink and what the relay knows of its health (monotonic seconds)."""

    __slots__ = ("_since", "problem", "quiet_until", "sink", "trouble")

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.trouble = Trouble()
        self.quiet_until = 0.0
        self.problem = ""
        self._since = 0.0

    def down(self, problem: str, asked: float) -> float:
        """Note that the sink is away; return the seconds until the next try."""
        if not self.trouble.active:
            self._since = time.monotonic()
        delay = max(self.trouble.failed(), asked)
        self.problem = problem
        self.quiet_until = time.monotonic() + delay
        return delay

    def quiet(self, now: float) -> bool:
        """Tell whether the sink is away and not to be asked yet."""
        return now < self.quiet_until

    def hold(self) -> float:
        """Return how long an aggregate waits for this sink while others go on: the longer it is away, the longer.

        Never shorter than the sink is left alone: it would be written down again for nothing.
        """
        now = time.monotonic()
        bound = min(LONGEST_HOLD_S, max(SHORTEST_HOLD_S, (now - self._since) / 2))
        return max(random.uniform(bound / 2, bound), self.quiet_until - now)


class Targets:
    """The routing table with its sinks; a sink that several patterns name is there once."""

    def __init__(self, routes: Routes[Sink]) -> None:
        sinks = dict.fromkeys(routes.table.values())
        made = {sink: Target(sink) for sink in sinks}
        self.all = tuple(made.values())
        self._routes = Routes({pattern: made[sink] for pattern, sink in routes.table.items()})
        self._pool = ThreadPoolExecutor(len(made), thread_name_prefix="relay-sink") if len(made) > 1 else None

    @property
    def name(self) -> str:
        """Return the names of the sinks, for people."""
        return ", ".join(target.sink.name for target in self.all)

    def of(self, event: Event) -> Target:
        """Return where an event goes."""
        return self._routes.of(event.event_type)

    def next_try(self, now: float) -> float:
        """Return when the first of the quiet sinks may be asked again."""
        return min((t.quiet_until for t in self.all if t.quiet(now)), default=now)

    def all_quiet(self, now: float) -> bool:
        """Tell whether no sink is to be asked now."""
        return all(target.quiet(now) for target in self.all)

    def close(self) -> None:
        """Close every sink."""
        for target in self.all:
            target.sink.close()

    def send(self, events: Sequence[Event], *, deadline: float) -> dict[Target, Sent]:
        """Publish events that stand in id order; return what became of each sink's part.

        A sink that is quiet is not asked: its events are unconfirmed, and so are those behind them.
        """
        if self._pool is None:
            return {self.all[0]: send(self.all[0].sink, events, deadline=deadline)}
        outcome = {target: Sent() for target in self.all}
        chains: dict[str, list[Event]] = {}
        for event in events:
            chains.setdefault(event.key, []).append(event)
        while chains:
            now = time.monotonic()
            runs: dict[str, tuple[Target, list[Event]]] = {}
            for key, chain in chains.items():
                target = self.of(chain[0])
                if now >= deadline or target.quiet(now) or outcome[target].down is not None:
                    self._stop(chain, outcome)
                else:
                    runs[key] = target, self._run(target, chain)
            confirmed = self._wave(self._pool, runs, outcome)
            going: dict[str, list[Event]] = {}
            for key, (_, run) in runs.items():
                rest = chains[key][len(run) :]
                if run[-1].id not in confirmed:
                    self._stop(rest, outcome)
                elif rest:
                    going[key] = rest
            chains = going
        return outcome

    def _run(self, target: Target, chain: Sequence[Event]) -> list[Event]:
        """Return the events at the head of a chain that this sink may have at once."""
        if not target.sink.ordered:
            return [chain[0]]
        for place, event in enumerate(chain):
            if self.of(event) is not target:
                return list(chain[:place])
        return list(chain)

    def _wave(
        self,
        pool: ThreadPoolExecutor,
        runs: dict[str, tuple[Target, list[Event]]],
        outcome: dict[Target, Sent],
    ) -> set[int]:
        """Give each sink its runs, all at the same time; return the ids that were confirmed."""
        parts: dict[Target, list[Event]] = {}
        for target, run in runs.values():
            parts.setdefault(target, []).extend(run)
        for part in parts.values():
            part.sort(key=_id)

        def publish(entry: tuple[Target, list[Event]]) -> list[int]:
            target, part = entry
            receipts = wave(target.sink, part, outcome[target])
            return [e.id for e, receipt in zip(part, receipts, strict=True) if isinstance(receipt, Confirmed)]

        answers = map(publish, parts.items()) if len(parts) == 1 else pool.map(publish, parts.items())
        return {id_ for ids in answers for id_ in ids}

    def _stop(self, chain: Iterable[Event], outcome: dict[Target, Sent]) -> None:
        for event in chain:
            outcome[self.of(event)].unconfirmed.append(event)


def _id(event: Event) -> int:
    return event.id
