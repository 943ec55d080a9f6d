"""A private PostgreSQL for one process: on a Unix socket only, gone when its owner is gone."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from pgqueue.embedded import watch
from pgqueue.embedded.binaries import (
    Account,
    Binaries,
    EmbeddedUnavailable,
    account,
    installed,
    passable,
    runnable,
    temp_folder,
)
from pgqueue.errors import PgqueueError

SOCKET_PATH_MAX = 103
"""Longest path of a Unix socket that every system takes (Linux 107, macOS 103)."""

SOCKET_NAME = ".s.PGSQL.5432"
SUPERUSER = "postgres"
START_S = 60.0
STOP_S = 20.0
LOOK_S = 0.02
STILL_IN_USE = "is still in use"


class EmbeddedFailed(PgqueueError):
    """The embedded server did not start, or stopped by itself."""

    def __init__(self, problem: str, *, path: Path, log: str = "") -> None:
        self.path = path
        self.log = log
        super().__init__(problem + (f"\nlast lines of its log:\n{log}" if log else ""))


class Embedded:
    """A PostgreSQL server of one's own, as a context manager.

    With `path=None` its data are thrown away at the end; otherwise they are kept in `<path>/pgdata` and
    used again by the next server of the same major version. Only one server runs on a path at a time.
    `scratch` is where throw-away data go instead of the temp folder, a file system in memory for example. It
    listens on a Unix socket in a folder that only this user (or, for root, the unprivileged account that
    runs it) may enter, and trusts whoever enters. Its death follows the owner's, SIGKILL included. Not
    meant to be shared by threads that start and stop it.
    """

    def __init__(
        self,
        path: Path | None = None,
        settings: Mapping[str, str] | None = None,
        *,
        scratch: Path | None = None,
    ) -> None:
        self.path = None if path is None else Path(path).absolute()
        self.scratch = scratch
        self.settings = dict(settings or {})
        self._folder: Path | None = None
        self._data: Path | None = None
        self._account: Account | None = None
        self._binaries: Binaries | None = None
        self._lock: int | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Return the process id of the postmaster."""
        if self._pid is None:
            raise EmbeddedFailed("the embedded server is not running: start() it first", path=self._place())
        return self._pid

    def dsn(self, dbname: str = "postgres") -> str:
        """Return a URL that libpq, SQLAlchemy and asyncpg understand. It stays the same across restarts."""
        return f"postgresql://{SUPERUSER}@/{quote(dbname, safe='')}?host={quote(str(self._place() / 's'))}"

    def start(self) -> None:
        """Start the server and wait until it takes connections; nothing happens when it runs already."""
        if self._listens():
            return
        self._end_watcher("immediate")
        try:
            self._prepare()
            deadline = time.monotonic() + START_S
            while not self._launched(deadline):
                time.sleep(LOOK_S * 10)
        except BaseException:
            self.close(immediate=True)
            raise

    def stop(self, *, immediate: bool = False) -> None:
        """Stop the server and keep its data; `immediate` stops like a crash, so the next start recovers."""
        self._end_watcher("immediate" if immediate else "fast")

    def kill(self) -> None:
        """Kill the postmaster with SIGKILL, as the kernel does when memory is short; start() recovers."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._end_watcher("immediate")

    def restart(self, *, immediate: bool = False) -> None:
        """Stop and start with the same data at the same DSN."""
        self.stop(immediate=immediate)
        self.start()

    def close(self, *, immediate: bool | None = None) -> None:
        """Stop the server for good: the socket folder goes, and so do throw-away data."""
        self.stop(immediate=self.path is None if immediate is None else immediate)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def log(self, lines: int = 12) -> str:
        """Return the last lines of the server's log."""
        try:
            text = (self._place() / "server.log").read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def _place(self) -> Path:
        if self._folder is None:
            raise EmbeddedFailed("the embedded server was not started: use it in a with block", path=Path())
        return self._folder

    def _listens(self) -> bool:
        """Say whether the server takes connections."""
        if self._folder is None or self._watcher is None or self._watcher.poll() is not None:
            return False
        with socket.socket(socket.AF_UNIX) as door:
            return door.connect_ex(str(self._folder / "s" / SOCKET_NAME)) == 0

    def _prepare(self) -> None:
        """Choose account, binaries and folders once; later starts use the same."""
        if self._folder is not None:
            return
        self._account = account()
        self._binaries = runnable(installed(), self._account)
        temp = self.scratch or temp_folder(self._account)
        if len(os.fsencode(temp / "pgqueue-12345678" / "s" / SOCKET_NAME)) > SOCKET_PATH_MAX:
            temp = Path("/tmp")  # noqa: S108 - only a fresh 0700 folder inside is used
        self._folder = Path(tempfile.mkdtemp(prefix="pgqueue-", dir=temp))
        (self._folder / "server.log").touch(mode=0o600)
        (self._folder / "s").mkdir(mode=0o700)
        self._data = (self._folder if self.path is None else self._kept(self.path)) / "pgdata"
        if self._account is not None:
            for place in (self._folder / "s", self._folder):
                os.chown(place, self._account.uid, self._account.gid)

    def _kept(self, path: Path) -> Path:
        """Make the folder of kept data where it is missing, lock it, and refuse what this server cannot
        use.
        """
        if not path.exists():
            path.mkdir(parents=True, mode=0o700)
            if self._account is not None:
                os.chown(path, self._account.uid, self._account.gid)
        if self._account is not None and not passable(path.parent):
            raise EmbeddedFailed(
                f"the account {self._account.name}, which runs PostgreSQL for root, cannot reach {path}: "
                "choose a folder outside private homes, such as one under /var/lib",
                path=path,
            )
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EmbeddedFailed(
                f"another embedded server runs on {path}: stop its owner, give the URL of that server instead, "
                "or choose another path",
                path=path,
            ) from None
        major = self._tools().major
        found = path / "pgdata" / "PG_VERSION"
        if found.is_file() and found.read_text().strip() != major:
            raise EmbeddedFailed(
                f"{path} was made by PostgreSQL {found.read_text().strip()} and this is {major}: "
                "dump it with the old version and restore it into a new path",
                path=path,
            )
        if self._account is not None and path.stat().st_uid != self._account.uid and not passable(path):
            raise EmbeddedFailed(
                f"the account {self._account.name}, which runs PostgreSQL for root, may not enter {path}: "
                f"`chmod o+x {path}`, or name a folder that does not exist yet",
                path=path,
            )
        return path

    def _tools(self) -> Binaries:
        if self._binaries is None:
            raise EmbeddedUnavailable("the embedded server was not started: use it in a with block")
        return self._binaries

    def _order(self) -> str:
        """Return what the watcher has to do, as JSON."""
        folder, data, tools = self._place(), self._data or self._place(), self._tools()
        draft = data.with_name("pgdata.draft")
        settings = {"listen_addresses": "", "unix_socket_directories": str(folder / "s"), **self.settings}
        initdb = [tools.tool("initdb"), "--pgdata", str(draft), "--username", SUPERUSER, "--auth", "trust"]
        initdb += ["--encoding", "UTF8", "--locale", "C", "--locale-provider", "builtin"]
        initdb += ["--builtin-locale", "C.UTF-8", *(["--no-sync"] if self.path is None else [])]
        postgres = [tools.tool("postgres"), "-D", str(data), "-p", "5432"]
        for name, value in settings.items():
            postgres += ["-c", f"{name}={value}"]
        return json.dumps(
            {
                "owner": os.getpid(),
                "initdb": initdb,
                "postgres": postgres,
                "environ": {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "HOME": str(folder)},
                "data": str(data),
                "draft": str(draft),
                "folder": str(folder),
                "throw_away": self.path is None,
                "account": None if self._account is None else [self._account.uid, self._account.gid],
                "stop_s": STOP_S,
            }
        )

    def _launch(self) -> None:
        """Start the watcher, which makes the data folder and starts the server."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        log = os.open(self._place() / "server.log", flags)
        try:
            self._watcher = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(watch.__file__)), self._order()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                pass_fds=() if self._lock is None else (self._lock,),
            )
        finally:
            os.close(log)

    def _launched(self, deadline: float) -> bool:
        """Launch and wait for the server's status file to say ready; False while a killed one's backends
        linger.
        """
        self._launch()
        watcher = self._watcher
        if watcher is None or watcher.stdout is None:
            return False
        os.set_blocking(watcher.stdout.fileno(), False)
        said = b""
        while time.monotonic() < deadline:
            said += watcher.stdout.read() or b""
            if said.endswith(b"\n") and self._ready(int(said)):
                self._pid = int(said)
                return True
            if watcher.poll() is not None:
                self._end_watcher("immediate")
                if STILL_IN_USE in self.log(3):
                    return False
                raise self._failed("the embedded server did not start")
            time.sleep(LOOK_S)
        raise self._failed(f"the embedded server takes no connections after {START_S:.0f} s")

    def _failed(self, problem: str) -> EmbeddedFailed:
        return EmbeddedFailed(problem, path=self.path or self._place(), log=self.log())

    def _ready(self, pid: int) -> bool:
        """Read the status file: the first line is the process, the eighth its state."""
        try:
            lines = ((self._data or self._place()) / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) > 7 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _end_watcher(self, how: str) -> None:
        """Ask the watcher to stop the server and wait for it; stop the server directly if the watcher was
        killed.
        """
        watcher, self._watcher = self._watcher, None
        if watcher is None:
            return
        with suppress(BrokenPipeError):
            if watcher.stdin is not None:
                watcher.stdin.write(how.encode() + b"\n")
                watcher.stdin.close()
        try:
            watcher.wait(2 * STOP_S + 5)
        except subprocess.TimeoutExpired:
            watcher.kill()
            watcher.wait()
        if watcher.stdout is not None:
            watcher.stdout.close()
        if watcher.returncode < 0 and self._pid is not None and self._ready(self._pid):
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGQUIT)
        self._pid = None
