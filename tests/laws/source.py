"""The product's own source, as the laws look at it."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pgqueue", "relay")


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One Python module of the two packages."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """Return the package that relative imports start from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@cache
def modules() -> dict[str, Module]:
    """Return every module of the two packages by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if "_migrations" in parts:
                continue
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(name=name, path=path, tree=ast.parse(path.read_text(), str(path)))
    return found


def imports(module: Module, *, types: bool = True) -> Iterator[tuple[str, int]]:
    """Yield (imported module, line), also from inside functions; `types=False` skips TYPE_CHECKING."""
    known = modules()
    skipped = (
        set() if types else {id(node) for block in _type_blocks(module.tree) for node in ast.walk(block)}
    )
    for node in ast.walk(module.tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            start = node.module or ""
            if node.level:
                base = module.package.split(".")
                base = base[: len(base) - node.level + 1]
                start = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{start}.{alias.name}"
                yield (inner if inner in known else start), node.lineno


def _type_blocks(tree: ast.Module) -> list[ast.If]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]


@cache
def files() -> tuple[Path, ...]:
    """Return every file of the repository that git keeps or would keep."""
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    return tuple(ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())


def texts() -> Iterator[tuple[Path, str]]:
    """Yield (path, text) of every text file of the repository."""
    for path in files():
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def sql_files() -> list[Path]:
    """Return the SQL files of both packages."""
    return [path for package in PACKAGES for path in sorted((ROOT / package / "sql").glob("*.sql"))]


def blocks(path: Path) -> list[tuple[str, str]]:
    """Split a SQL file into (name, text)."""
    pieces = re.split(r"(?m)^--\s*name:\s*(\S+)\s*$", path.read_text())
    return list(zip(pieces[1::2], pieces[2::2], strict=True))
