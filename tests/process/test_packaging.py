"""The wheel holds the two packages and nothing else, and works without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import psycopg
import pytest

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTION = "pgqueue-relay"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of what git keeps, so that the checkout stays clean."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pgqueue", "relay", "migrations"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)],
        check=True,
        capture_output=True,
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a new environment outside the checkout, with the dependencies of this one."""
    place = tmp_path_factory.mktemp("installed") / "venv"
    venv.EnvBuilder(symlinks=True).create(place)
    python = place / "bin" / "python"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            str(wheel),
        ],
        check=True,
        capture_output=True,
    )
    (site,) = (place / "lib").glob("python*/site-packages")
    borrowed = site / "borrowed"
    borrowed.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("pgqueue", "_pgqueue", "_editable", "__editable", "relay")):
            (borrowed / entry.name).symlink_to(entry)
    (site / "borrowed.pth").write_text("borrowed\n")
    return place


def names(wheel: Path) -> list[str]:
    """Return the files in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if not name.endswith("/")]


def test_wheel_holds_exactly_the_two_packages(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in names(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pgqueue", "relay"}


def test_wheel_carries_migrations_sql_and_type_marks(wheel: Path) -> None:
    held = set(names(wheel))
    expected = {f"{package}/py.typed" for package in ("pgqueue", "relay")}
    for package in ("pgqueue", "relay"):
        expected |= {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.sql")}
        expected |= {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
    for path in (ROOT / "migrations").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            expected.add(f"pgqueue/_migrations/{path.relative_to(ROOT / 'migrations')}")
    assert not {name for name in expected if "/_migrations/_migrations" in name}
    assert expected <= held


def test_metadata_names_the_distribution_its_extras_and_its_commands(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = message_from_bytes(archive.read(f"{folder}/METADATA"))
        commands = archive.read(f"{folder}/entry_points.txt").decode()
        licences = [name for name in archive.namelist() if name.startswith(f"{folder}/licenses/")]
    assert metadata["Name"] == DISTRIBUTION
    assert metadata["Requires-Python"] == ">=3.11"
    wanted = "binary embedded kafka rabbitmq nats aws redis pulsar webhooks metrics django example test brokers dev"
    assert set(metadata.get_all("Provides-Extra", [])) == set(wanted.split())
    for command in ("pgqueue =", "pgqueue-worker =", "outbox-relay ="):
        assert command in commands
    assert {name.rpartition("/")[2] for name in licences} == {"LICENSE", "NOTICE"}


def test_the_installed_wheel_migrates_a_database_without_the_checkout(
    installed: Path, empty_dsn: str, tmp_path: Path
) -> None:
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PGQUEUE"))
    }
    python = installed / "bin" / "python"
    found = subprocess.run(
        [python, "-c", "import pgqueue, relay; print(pgqueue.__file__, relay.__file__)"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert all(Path(place).is_relative_to(installed) for place in found)
    for command in (["migrate"], ["migrate", "check"]):
        done = subprocess.run(
            [installed / "bin" / "pgqueue", *command],
            cwd=tmp_path,
            env={**environ, "PGQUEUE_DSN": empty_dsn},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    with psycopg.connect(empty_dsn) as conn:
        assert conn.execute("SELECT count(*) FROM pgqueue.alembic_version").fetchone() == (1,)


@pytest.mark.parametrize("command", ["pgqueue", "pgqueue-worker", "outbox-relay"])
def test_every_installed_command_explains_itself(installed: Path, tmp_path: Path, command: str) -> None:
    done = subprocess.run(
        [installed / "bin" / command, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout
