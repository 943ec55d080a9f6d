"""SQL stands in .sql files, under a name used exactly once, with every table qualified."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.laws.source import ROOT, Module, blocks, modules, sql_files

NO_TABLE = {"select", "lateral", "only", "skip", "set", "of", "nowait", "values", "unnest", "rows"}
TABLE = re.compile(
    r"(?<!distinct )\b(from|join|into|update|truncate|using|table|references)\s+(?:only\s+|lateral\s+)?"
    r'("?[a-z_][\w"]*(?:\."?[a-z_][\w"]*)*)\s*(\(?)',
    re.IGNORECASE,
)
CTE = re.compile(
    r'(?:\bwith\s+(?:recursive\s+)?|,\s*|\)\s*,\s*)("?[a-z_]\w*"?)\s*(?:\([^()]*\)\s*)?as\s+(?:not\s+)?(?:materialized\s+)?\(',
    re.IGNORECASE,
)
SQL_IN_PYTHON = re.compile(
    r"^\s*(select\s.+\sfrom\s|insert\s+into\s|update\s+\S+\s+set\s|delete\s+from\s)",
    re.IGNORECASE | re.DOTALL,
)


def bare(text: str) -> str:
    """Remove comments, string literals, and the FROM of extract(), substring() and trim()."""
    text = re.sub(r"--[^\n]*", " ", text)
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    text = re.sub(r"'(?:[^']|'')*'", "''", text)
    text = re.sub(
        r"\b(extract|substring|trim|overlay)\s*\(\s*\w+\s+from\b", r"\1(", text, flags=re.IGNORECASE
    )
    return re.sub(r"\s+", " ", text)


def loads(module: Module) -> dict[str, tuple[str, str]]:
    """Return the variables of a module that hold loaded SQL: variable -> (package, file)."""
    found = {}
    for node in ast.walk(module.tree):
        if not (isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call)):
            continue
        call, target = node.value, node.targets[0] if isinstance(node, ast.Assign) else node.target
        if ast.unparse(call.func).rpartition(".")[2] == "load" and isinstance(target, ast.Name):
            texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
            if len(texts) == 2:
                found[target.id] = (str(texts[0]), str(texts[1]))
    return found


def uses() -> Counter[tuple[str, str, str]]:
    """Count in how many modules Python names each block: (package, file, name)."""
    counted: Counter[tuple[str, str, str]] = Counter()
    for module in modules().values():
        variables = loads(module)
        counted.update(
            {
                (*variables[node.value.id], name.value)
                for node in ast.walk(module.tree)
                if isinstance(node, ast.Subscript)
                and isinstance(node.value, ast.Name)
                and node.value.id in variables
                for name in ast.walk(node.slice)
                if isinstance(name, ast.Constant) and isinstance(name.value, str)
            }
        )
    return counted


def test_every_named_block_is_used_by_exactly_one_module_and_every_used_name_exists() -> None:
    written = Counter(
        (path.parent.parent.name, path.stem, name) for path in sql_files() for name, _ in blocks(path)
    )
    twice = sorted(name for name, count in written.items() if count > 1)
    used = uses()
    assert not twice, f"written twice: {twice}"
    assert not sorted(set(used) - set(written)), "used in Python, but in no .sql file"
    assert not sorted(set(written) - set(used)), "in a .sql file, but used nowhere"
    assert not sorted(name for name, count in used.items() if count > 1), (
        "used by two modules: one verb, one statement"
    )


@pytest.mark.parametrize("path", sql_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_table_is_qualified(path: Path) -> None:
    wrong = []
    for name, text in blocks(path):
        plain = bare(text)
        known = {match.group(1).lower() for match in CTE.finditer(plain)} | NO_TABLE
        for match in TABLE.finditer(plain):
            table, function = match.group(2), match.group(3) == "(" and match.group(1).lower() != "into"
            if "." not in table and not function and table.lower() not in known:
                wrong.append(f"{name}: {match.group(0)}")
    assert not wrong


@pytest.mark.parametrize("module", modules().values(), ids=lambda m: m.name)
def test_no_statement_is_written_in_python(module: Module) -> None:
    documented = {
        id(node.body[0].value)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    wrong = [
        f"line {node.lineno}: {node.value.strip()[:60]}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in documented
        and SQL_IN_PYTHON.search(node.value)
    ]
    assert not wrong
