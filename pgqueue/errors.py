"""Every error of pgqueue and relay, in one tree.

PgqueueError
  ConfigError            a setting, option or definition is wrong: nothing was done
    UnknownJob           no handler or job type of that name
    BadPayload           the payload does not fit its type, or JSON, or the size limit
    BadOption            an enqueue option is out of range
    UnknownRevision      the migrations have no revision of that name
    NotInTransaction     the handle would commit at once: enqueue refuses it
  SchemaError            the database is not at the revision this code needs
    SchemaMissing        no pgqueue schema here
    SchemaOutdated       the schema is older than the code
    SchemaTooNew         the schema is newer than the code
    SchemaUnreadable     the role has no rights on the schema
    MigrationError       the migration did not happen, or not all of it
      MigrationBlocked   somebody's lock was not given up in time
      MigrationRefused   a missing right, a server too old, a standby
      MigrationFailed    Postgres refused a statement
  DatabaseUnreachable    no connection to Postgres
  LeaseLost              somebody else holds the job now: the result was dropped
  QueueFull              the queue refuses new jobs for the moment
  StillRunning           a job had not ended when the wait for it was over
  HandlerSignal          what a handler raises to say how its job goes on
    Retry  Permanent  Snooze  Cancelled
"""

from __future__ import annotations

from datetime import timedelta


class PgqueueError(Exception):
    """Root of all errors raised by pgqueue and relay."""


class ConfigError(PgqueueError):
    """A setting, option or definition is wrong; nothing was done."""


class UnknownJob(ConfigError):
    """No job type of that name is registered."""

    def __init__(self, name: str, known: tuple[str, ...] = ()) -> None:
        self.name = name
        self.known = known
        hint = f" (registered: {', '.join(map(repr, known))})" if known else ""
        super().__init__(
            f"job {name!r} is neither registered with this app{hint} nor declared in the database; import "
            "the module that defines it, or declare it: start a worker that runs it once, or run pgqueue sync"
        )


class BadPayload(ConfigError):
    """The payload of a job or event cannot be stored as it is."""

    def __init__(self, name: str, problem: str) -> None:
        self.name = name
        self.problem = problem
        super().__init__(f"payload of {name!r}: {problem}")


class BadOption(ConfigError):
    """An option is out of range."""

    def __init__(self, option: str, problem: str) -> None:
        self.option = option
        self.problem = problem
        super().__init__(f"{option}: {problem}")


class NotInTransaction(ConfigError):
    """The handle is in autocommit mode and outside a transaction."""

    def __init__(self, handle: object) -> None:
        self.handle_type = f"{type(handle).__module__}.{type(handle).__qualname__}"
        super().__init__(
            f"{self.handle_type} is in autocommit mode and outside a transaction: the row would be committed "
            "at once, whatever becomes of your business rows. Open one (psycopg: `with conn.transaction():`, "
            "SQLAlchemy: `with Session.begin() as session:` on an engine without AUTOCOMMIT, Django: `with "
            "transaction.atomic():`)"
        )


class SchemaError(PgqueueError):
    """The database is not at the revision this code needs."""


class SchemaMissing(SchemaError):
    """The database has no pgqueue schema."""

    def __init__(self, database: str = "") -> None:
        self.database = database
        where = f"database {database!r}" if database else "this database"
        super().__init__(f"{where} has no pgqueue tables; run: pgqueue migrate")


class SchemaOutdated(SchemaError):
    """The schema is older than the code."""

    def __init__(self, found: str, needed: str) -> None:
        self.found, self.needed = found, needed
        super().__init__(
            f"the pgqueue schema is at {found}, this version needs {needed}; run: pgqueue migrate"
        )


class SchemaIncomplete(SchemaError):
    """A statement named a table, column or function that the schema lacks."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(
            f"the pgqueue schema is not the one this version needs ({problem}); run: pgqueue migrate"
        )


class SchemaTooNew(SchemaError):
    """The schema is newer than the code."""

    def __init__(self, found: str, needed: str) -> None:
        self.found, self.needed = found, needed
        super().__init__(
            f"the pgqueue schema is at {found}, which this version (made for {needed}) does not know; "
            "upgrade pgqueue-relay here, or migrate down with the newer version"
        )


class SchemaUnreadable(SchemaError):
    """The role has no rights on the schema."""

    def __init__(self, database: str) -> None:
        self.database = database
        super().__init__(
            f"this role may not read schema pgqueue of database {database!r}; as the owner of the schema "
            "run: pgqueue migrate --grant KIND=ROLE (producer, worker, relay or reader)"
        )


class UnknownRevision(ConfigError):
    """The migrations have no revision of that name."""

    def __init__(self, revision: str, known: tuple[str, ...]) -> None:
        self.revision, self.known = revision, known
        super().__init__(f"there is no revision {revision!r}; known are head, base, {', '.join(known)}")


class MigrationError(SchemaError):
    """The migration did not happen, or not all of it; each revision is in place as a whole or not at all."""

    def __init__(self, problem: str, *, remedy: str) -> None:
        self.problem, self.remedy = problem, remedy
        super().__init__(f"{problem}; {remedy}")


class MigrationBlocked(MigrationError):
    """Somebody's lock was not given up in time."""


class MigrationRefused(MigrationError):
    """The role, the server or its version does not allow it."""


class MigrationFailed(MigrationError):
    """Postgres refused a statement of a revision."""


class DatabaseUnreachable(PgqueueError):
    """No connection to Postgres."""

    def __init__(self, dsn: str, problem: str) -> None:
        self.dsn = dsn
        self.problem = problem
        super().__init__(f"cannot reach Postgres at {dsn}: {problem}")


class LeaseLost(PgqueueError):
    """Another claim holds the job now; what this attempt did is not acknowledged."""

    def __init__(self, job_id: int, lease: int) -> None:
        self.job_id, self.lease = job_id, lease
        super().__init__(f"job {job_id}: lease {lease} was lost; the job runs, or has run, elsewhere")


class QueueFull(PgqueueError):
    """The queue refuses new jobs for the moment."""

    def __init__(self, queue: str, retry_after: timedelta) -> None:
        self.queue, self.retry_after = queue, retry_after
        super().__init__(f"queue {queue!r} is full; try again in {retry_after.total_seconds():.0f} s")


class StillRunning(PgqueueError):
    """The job had not ended when the time was over; it goes on."""

    def __init__(self, job_id: int, state: str, seconds: float) -> None:
        self.job_id, self.state = job_id, state
        super().__init__(
            f"job {job_id} is {state} after {seconds:g} s; wait longer, or look at its status later"
        )


class HandlerSignal(PgqueueError):
    """What a handler raises to say how its job goes on."""


class Retry(HandlerSignal):
    """Fail this attempt and run again, `after` seconds from now (None: the backoff of the job type).

    Counts as an attempt; the last one buries the job.
    """

    def __init__(self, message: str = "", *, after: float | timedelta | None = None) -> None:
        self.after = after.total_seconds() if isinstance(after, timedelta) else after
        if self.after is not None and not 0 <= self.after <= 315_360_000:
            raise BadOption("Retry(after=)", f"{self.after} is not between 0 s and ten years")
        super().__init__(message or "the handler asked for a retry")


class Permanent(HandlerSignal):
    """Bury this job now: no further attempt can succeed."""


class Snooze(HandlerSignal):
    """Run again `after` seconds from now; this attempt does not count."""

    def __init__(self, after: float | timedelta) -> None:
        self.after: float = after.total_seconds() if isinstance(after, timedelta) else float(after)
        if not 0 <= self.after <= 315_360_000:
            raise BadOption("Snooze(after)", f"{self.after} is not between 0 s and ten years")
        super().__init__(f"snoozed for {self.after:g} s")


class Cancelled(HandlerSignal):
    """Raised in (or by) a handler whose job was cancelled; the job never runs again."""
