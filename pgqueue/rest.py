"""Rest: the wait of an idle engine, and the first look that a notification asks for.

The engine listens on the connection it claims on, and waits for its socket and for its own threads at once: the thread
that is woken is the one that claims. While it has time, it makes that claim ready, down to the bytes of its parameters,
and with nothing in hand a notification only fires it. Whatever else changes what is to be claimed (a result, a pause,
a drain) raises the flag of the process; the claim that was made ready is then dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pgqueue.config import WorkerSettings
from pgqueue.hand import Hand
from pgqueue.intake import Intake
from pgqueue.listen import BELOW, take_notes
from pgqueue.plan import Flight, Plan
from pgqueue.quota import Quota
from pgqueue.results import Results
from pgqueue.round import Rounds
from pgqueue.writeoff import WriteOff


class Rest:
    """Waits for one engine, in its thread. `below`: queues that are to be started from 0."""

    def __init__(
        self,
        settings: WorkerSettings,
        hand: Hand,
        quota: Quota,
        intake: Intake,
        write_off: WriteOff,
        below: deque[str],
    ) -> None:
        self._settings = settings
        self._hand = hand
        self._quota = quota
        self._intake = intake
        self._write_off = write_off
        self._below = below
        self._called = False
        self._loaded: Flight | None = None

    def wait(self, rounds: Rounds | None, pause: Callable[[], float], *, alone: bool) -> None:
        """Wait for news, at most the pause: from the database, if there is a connection, or from this process.

        `alone`: nothing may be claimed now. Raises OperationalError where the connection turns out to be lost.
        """
        self._called, self._loaded = False, None
        wake = self._hand.wake
        if not wake.is_set():
            self._intake.wake_slots()
        if rounds is None or rounds.connection.closed:
            wake.wait(pause())
        elif not self._hear(rounds):  # what came along with an answer leaves the socket silent
            loaded = None if alone else self._load(rounds)
            raised = wake.wait(pause(), rounds.connection.fileno())
            self._called = self._hear(rounds) and not (raised or self._below)
            self._loaded = loaded if self._called else None

    def called(self) -> bool:
        """Tell, once, whether a notification ended the last wait, and nothing else."""
        called, self._called = self._called, False
        return called

    def loaded(self) -> Flight | None:
        """Return, once, the round that was made ready for the notification that came."""
        loaded, self._loaded = self._loaded, None
        return loaded

    def _hear(self, rounds: Rounds) -> bool:
        """Take in what was notified; tell whether anything was."""
        said = take_notes(rounds.connection)
        if BELOW in said:
            self._below.extend(self._settings.queues)
        return bool(said)

    def _load(self, rounds: Rounds) -> Flight | None:
        """Make the first look ready; None while there is more to decide."""
        hand, intake = self._hand, self._intake
        if hand.held or hand.given_up or intake.paused.gates or self._write_off.waiting:
            return None
        self._quota.leave(())
        wishes = intake.wishes(called=True)
        if not wishes or not all(wish.few for wish in wishes):
            return None
        settled = intake.floors.horizon.settled
        return rounds.load(
            Plan(results=Results(), wishes=wishes, settled=settled, meanwhile=intake.wake_slots)
        )
