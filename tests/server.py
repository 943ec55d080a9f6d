"""The PostgreSQL server of a test run and the databases made on it."""

from __future__ import annotations

import os
import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote, urlencode

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from pgqueue.embedded import Embedded

Connection: TypeAlias = psycopg.Connection[tuple[object, ...]]

FAST = {
    "max_connections": "200",
    "max_prepared_transactions": "20",
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "on",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "30min",
    "timezone": "UTC",
}
"""Settings of the embedded server: a test kills processes, never the machine, so fsync buys nothing."""

ROOM = 3 * 2**30
"""Bytes that a run of the suite may need."""


def in_memory() -> Path | None:
    """Return a file system in memory with room for a run: databases are made on it in a tenth of the time."""
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK) or shutil.disk_usage(place).free < ROOM:
        return None
    return place


def url(conninfo: str, dbname: str | None = None) -> str:
    """Return a URL for psycopg and SQLAlchemy alike, with another database name if one is given."""
    parts = conninfo_to_dict(conninfo)
    if dbname is not None:
        parts["dbname"] = dbname
    known = {"user", "password", "host", "port", "dbname"}
    user = quote(str(parts.get("user") or ""), safe="")
    if parts.get("password"):
        user += ":" + quote(str(parts["password"]), safe="")
    query = {name: str(value) for name, value in parts.items() if name not in known and value is not None}
    place = ""
    host = str(parts.get("host") or "")
    if host.startswith("/") or not host:
        if host:
            query["host"] = host
        if parts.get("port"):
            query["port"] = str(parts["port"])
    else:
        place = host + (f":{parts['port']}" if parts.get("port") else "")
    tail = "?" + urlencode(query) if query else ""
    return f"postgresql://{user + '@' if user else ''}{place}/{parts.get('dbname') or ''}{tail}"


@dataclass(slots=True, kw_only=True)
class Server:
    """The server of this run. Databases made through it carry the run's own prefix and go with it."""

    conninfo: str
    prefix: str = field(default_factory=lambda: f"pgqueue_{uuid.uuid4().hex[:10]}")
    embedded: Embedded | None = None
    count: int = 0
    template: str | None = None

    def dsn(self, dbname: str | None = None) -> str:
        """Return the DSN of one database; without a name, of the one to administer from."""
        return url(self.conninfo, dbname)

    def admin(self) -> Connection:
        """Open an autocommit connection to administer from."""
        return psycopg.connect(self.dsn(), autocommit=True)

    def create(self, template: str | None = None) -> str:
        """Create a database, empty or from a template, and return its name."""
        self.count += 1
        name = f"{self.prefix}_{self.count}"
        with self.admin() as admin:
            admin.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy").format(
                    sql.Identifier(name), sql.Identifier(template or "template0")
                )
            )
        return name

    def drop(self, name: str) -> None:
        """Drop a database and whoever is still in it.

        WITH (FORCE) needs a superuser to end an autovacuum worker; the plain form sends it away by itself.
        """
        forced = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
        plain = sql.SQL("DROP DATABASE IF EXISTS {}").format(sql.Identifier(name))
        with self.admin() as admin:
            for statement in (forced, plain, forced, plain):
                try:
                    admin.execute(statement)
                except (psycopg.errors.InsufficientPrivilege, psycopg.errors.ObjectInUse):
                    continue
                return
            admin.execute(forced)

    def migrated(self) -> str:
        """Create a database from the migrated template; migrate that one at the first call."""
        if self.template is None:
            from pgqueue.migrate import upgrade

            name = self.create()
            upgrade(self.dsn(name))
            self.template = name
        return self.create(self.template)

    def can_create_roles(self) -> bool:
        """Say whether tests may make roles here."""
        with self.admin() as admin:
            row = admin.execute(
                "SELECT rolsuper OR rolcreaterole FROM pg_catalog.pg_roles WHERE rolname = current_user"
            ).fetchone()
        return bool(row and row[0])

    def clean(self) -> None:
        """Drop every database of this run."""
        with self.admin() as admin:
            rows = admin.execute(
                "SELECT datname FROM pg_catalog.pg_database WHERE starts_with(datname, %s)",
                [self.prefix + "_"],
            ).fetchall()
        for (name,) in rows:
            self.drop(str(name))
