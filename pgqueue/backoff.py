"""How long a job waits after a failed execution.

Full jitter (Marc Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015): after failed
execution n the delay is uniform in [0, min(cap, base * 2^n)] seconds. Equal jitter keeps the upper half of
that range; decorrelated jitter draws each delay from [base, 3 * the previous one].
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Literal

from pgqueue.errors import BadOption

Jitter = Literal["full", "equal", "decorrelated", "none"]
LONGEST = 10 * 365 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """The delay policy of a job type: `base` and `cap` in seconds."""

    base: float = 1.0
    cap: float = 300.0
    jitter: Jitter = "full"

    def __post_init__(self) -> None:
        for option, value in (("base", self.base), ("cap", self.cap)):
            seconds(f"Backoff({option}=)", value, zero=False)
        if self.jitter not in ("full", "equal", "decorrelated", "none"):
            raise BadOption("Backoff(jitter=)", f"{self.jitter!r} is not full, equal, decorrelated or none")

    def bound(self, execution: int) -> float:
        """Return the longest delay after failed execution `execution` (1 for the first), in seconds."""
        growth = 3.0 if self.jitter == "decorrelated" else 2.0
        # 2.0 ** 1024 overflows; the cap is reached long before.
        return min(self.cap, self.base * growth ** min(max(execution, 0), 60))

    def delay(self, execution: int, rng: random.Random) -> float:
        """Draw the delay after failed execution `execution`, in seconds."""
        bound = self.bound(execution)
        match self.jitter:
            case "full":
                return rng.uniform(0.0, bound)
            case "equal":
                return rng.uniform(bound / 2, bound)
            case "none":
                return bound
        # The chain of delays is drawn anew instead of stored on the row: the same distribution, no column.
        wait = self.base
        for _ in range(min(max(execution, 1), 60)):
            wait = min(self.cap, rng.uniform(self.base, 3 * wait))
        return wait

    def to_json(self) -> str:
        """Return the form that the `backoff` columns hold."""
        return json.dumps({"base": self.base, "cap": self.cap, "jitter": self.jitter})

    @classmethod
    def from_json(cls, text: str) -> Backoff:
        """Read the form that the `backoff` columns hold; raise BadOption if it is not one."""
        try:
            value = json.loads(text)
        except ValueError as error:
            raise BadOption("backoff", f"{text!r} is not a backoff policy") from error
        if not isinstance(value, dict):
            raise BadOption("backoff", f"{text!r} is not a backoff policy")
        return cls(**{k: value[k] for k in ("base", "cap", "jitter") if k in value})


def seconds(option: str, value: float, *, zero: bool = True, hint: str = "") -> float:
    """Check a duration in seconds: finite, not negative (nor zero if `zero` is false), at most ten years."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 <= value <= LONGEST) or (value == 0 and not zero):
        raise BadOption(option, f"{value!r} is not a number of seconds between 0 and ten years{hint}")
    return float(value)
