"""Which database: from an option, the environment, or libpq's own variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgqueue.errors import BadOption, DatabaseUnreachable

EMBEDDED = "embedded:"
CONNECT_TIMEOUT_S = 10

_URL = re.compile(r"^(?P<base>[a-zA-Z][a-zA-Z0-9]*)(?:\+(?P<driver>\w+))?://")
_URL_PASSWORD = re.compile(r"(?<=://)(?P<user>[^:/@?]*):.*@", re.DOTALL)
_NAMED_PASSWORD = re.compile(
    r"(?P<name>\b(?:ssl)?password\s*=\s*)(?:'(?:[^'\\]|\\.)*'?|[^\s&]+)", re.IGNORECASE | re.DOTALL
)
_LIBPQ = ("PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE")


def resolve(dsn: str | None, environ: Mapping[str, str]) -> str:
    """Return the libpq DSN to use: `dsn`, else PGQUEUE_DSN, else DATABASE_URL, else "" (libpq reads PG*).

    URLs of SQLAlchemy (`postgresql+psycopg://`, `postgresql+asyncpg://`) become plain ones. `embedded:[path]`
    is returned as it is: only an edge can start that server. Raises BadOption when nothing names a database
    or the DSN cannot be read; no message shows a password.
    """
    for source, value in (
        ("--dsn", dsn),
        ("PGQUEUE_DSN", environ.get("PGQUEUE_DSN")),
        ("DATABASE_URL", environ.get("DATABASE_URL")),
    ):
        if value and value.strip():
            return _readable(value.strip(), source)
    if any(environ.get(name) for name in _LIBPQ):
        return ""
    raise BadOption(
        "--dsn",
        "no database is named; give --dsn, or set PGQUEUE_DSN, DATABASE_URL or libpq's PGHOST and PGDATABASE",
    )


def has_password(dsn: str) -> bool:
    """Tell whether the text of a DSN carries a password."""
    return mask(dsn) != dsn


def mask(dsn: str) -> str:
    """Return the DSN with every password as ***; also for a DSN that cannot be read."""
    shown = _URL_PASSWORD.sub(r"\g<user>:***@", dsn)
    return _NAMED_PASSWORD.sub(r"\g<name>***", shown)


def connect(dsn: str, **options: Any) -> psycopg.Connection[tuple[Any, ...]]:
    """Open a psycopg connection; raise DatabaseUnreachable, password masked, instead of a driver error.

    Waits ten seconds for the server unless the DSN says otherwise.
    """
    try:
        given = conninfo_to_dict(dsn)
        options.setdefault("application_name", given.get("application_name", "pgqueue"))
        options.setdefault("connect_timeout", given.get("connect_timeout", CONNECT_TIMEOUT_S))
        return psycopg.connect(dsn, **options)
    except psycopg.Error as error:
        remedy = "check the DSN, that the server runs, and that the role may connect to that database"
        raise DatabaseUnreachable(mask(dsn) or "libpq's PG*", f"{one_line(error)}; {remedy}") from error


def one_line(error: BaseException) -> str:
    """Return an error's text on one line, without the lines of context that Postgres adds."""
    diagnosis = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    lines = (diagnosis or str(error)).split("\n")
    return "; ".join(line.strip() for line in lines if line.strip()) or type(error).__name__


def _readable(dsn: str, source: str) -> str:
    if dsn.startswith(EMBEDDED):
        return dsn
    if url := _URL.match(dsn):
        if url["base"] not in ("postgresql", "postgres"):
            raise BadOption(
                source, f"{mask(dsn)} is not a PostgreSQL URL; write postgresql://user@host:5432/name"
            )
        if url["driver"]:
            dsn = _plain(dsn, source)
    try:
        conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # The driver's own text may quote a piece of the password.
        raise BadOption(
            source, f"{mask(dsn)} is not a DSN; write postgresql://user@host:5432/name or host=... dbname=..."
        ) from None
    return dsn


def _plain(dsn: str, source: str) -> str:
    """Turn a URL of SQLAlchemy into one of libpq: no driver, `+` in the query is a space, asyncpg's `ssl`."""
    head, _, query = dsn.partition("?")
    parts = urlsplit(head)
    hosts: list[str] = []
    ports: list[str] = []
    options: list[tuple[str, str]] = []
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name == "host" and not value.startswith("/") and ":" in value:
            host, _, port = value.rpartition(":")
            hosts.append(host)
            ports.append(port)
        elif name == "host":
            hosts.append(value)
            ports.append("")
        elif name == "ssl":
            options.append(("sslmode", {"true": "require", "1": "require"}.get(value.lower(), value)))
        elif name not in ("async_fallback", "prepared_statement_cache_size", "prepared_statement_name_func"):
            options.append((name, value))
    if hosts:
        options.append(("host", ",".join(hosts)))
    if any(ports):
        options.append(("port", ",".join(ports)))
    url = f"postgresql://{parts.netloc}{parts.path}"
    if options:
        url += "?" + "&".join(f"{name}={quote(value, safe='')}" for name, value in options)
    try:
        return url if not hosts else make_conninfo(url)
    except psycopg.ProgrammingError:
        raise BadOption(source, f"{mask(dsn)} names an option that libpq does not know") from None
