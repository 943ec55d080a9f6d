"""Jobs and events inside the business transaction, on Postgres alone."""

from __future__ import annotations

from pgqueue.app import App, JobType
from pgqueue.backoff import Backoff
from pgqueue.errors import (
    BadOption,
    BadPayload,
    Cancelled,
    ConfigError,
    LeaseLost,
    NotInTransaction,
    Permanent,
    PgqueueError,
    QueueFull,
    Retry,
    Snooze,
    UnknownJob,
)
from pgqueue.job import Job
from pgqueue.ref import JobRef

__all__ = [
    "App",
    "Backoff",
    "BadOption",
    "BadPayload",
    "Cancelled",
    "ConfigError",
    "Job",
    "JobRef",
    "JobType",
    "LeaseLost",
    "NotInTransaction",
    "Permanent",
    "PgqueueError",
    "QueueFull",
    "Retry",
    "Snooze",
    "UnknownJob",
]
