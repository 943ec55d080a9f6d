"""A module imports its own floor or a lower one, never in a circle, and does only what its floor may do."""

from __future__ import annotations

import ast

import pytest

from tests.laws.source import Module, imports, modules

FLOORS = {
    0: "errors job states backoff cron events config payload handler horizon floors shelf weights step",
    1: "dsn statement connection schema_version pipeline wait",
    2: "enqueue claim heartbeat finish dead ledger lanes limits budget pressure schedule depth declare "
    "promote prune turn age cancel change control jobs doctor prepared policy progress batch history ref stray",
    3: "app run loop tick worker maintenance engine gate sweep intake plan flights round writeoff hand quota "
    "threads tasks processes pulse monitor transact retries results report notebook listen rest release stride routing",
    4: "cli health report testing metrics embedded migrate migration",
}
FLOOR = {f"pgqueue.{name}": floor for floor, names in FLOORS.items() for name in names.split()} | {
    "pgqueue": 3
}

OPEN_TO_RELAY = {"pgqueue.loop", "pgqueue.events"}
ENQUEUING_SINK = "relay.sinks.queue"

IMPURE = {"os", "time", "socket", "subprocess", "secrets", "asyncio", "psycopg", "sqlalchemy"}
EDGE_ONLY = {"os.environ", "os.getenv", "sys.argv", "signal.signal"}
CHILD_MAIN = {"pgqueue.processes": {"signal.signal"}}
"""Modules that hold the main function of a child process, which is an edge of its own."""
RUNTIME_ONLY = {"commit", "rollback", "sleep", "connect"}


def floor(name: str) -> int | None:
    """Return the floor of a module or of the nearest package above it."""
    while name not in FLOOR and "." in name:
        name = name.rpartition(".")[0]
    return FLOOR.get(name)


def ours(package: str) -> list[Module]:
    """Return the modules of one package."""
    return [module for name, module in modules().items() if name.split(".")[0] == package]


def calls(module: Module) -> list[tuple[str, int]]:
    """Return every attribute that the module names, as written."""
    return [
        (ast.unparse(node), node.lineno) for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)
    ]


def test_every_module_of_pgqueue_has_a_floor() -> None:
    homeless = [
        name
        for name in modules()
        if name.startswith("pgqueue.")
        and floor(name) == FLOOR["pgqueue"]
        and not any(name == known or name.startswith(known + ".") for known in FLOOR if known != "pgqueue")
    ]
    assert not homeless, f"give them a floor in FLOORS: {homeless}"


@pytest.mark.parametrize("module", ours("pgqueue"), ids=lambda m: m.name)
def test_a_module_imports_no_higher_floor(module: Module) -> None:
    own = floor(module.name)
    assert own is not None
    wrong = []
    for name, line in imports(module):
        if name.split(".")[0] == "relay":
            wrong.append(f"line {line}: pgqueue never imports relay")
        elif name.split(".")[0] == "pgqueue":
            other = floor(name)
            if other is not None and other > own:
                wrong.append(f"line {line}: {module.name} (floor {own}) imports {name} (floor {other})")
    assert not wrong


@pytest.mark.parametrize("module", ours("relay"), ids=lambda m: m.name)
def test_relay_uses_the_lower_floors_of_pgqueue_and_none_of_its_verbs(module: Module) -> None:
    edge = module.name.startswith("relay.cli")
    wrong = []
    for name, line in imports(module):
        if name.split(".")[0] != "pgqueue" or module.name == ENQUEUING_SINK:
            continue
        there = floor(name)
        if name in OPEN_TO_RELAY or there in {0, 1} or (edge and there == 4):
            continue
        wrong.append(f"line {line}: {name} (floor {there})")
    assert not wrong


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {
        name: {other for other, _ in imports(module, types=False) if other in modules() and other != name}
        for name, module in modules().items()
    }
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        path.append(name)
        for other in sorted(graph[name]):
            circle = visit(other)
            if circle:
                return circle
        done.add(path.pop())
        return []

    for name in graph:
        circle = visit(name)
        assert not circle, " -> ".join(circle)


@pytest.mark.parametrize("module", [m for m in ours("pgqueue") if floor(m.name) == 0], ids=lambda m: m.name)
def test_floor_0_knows_no_database_clock_or_environment(module: Module) -> None:
    wrong = [f"line {line}: {name}" for name, line in imports(module) if name.split(".")[0] in IMPURE]
    wrong += [
        f"line {line}: {name}"
        for name, line in calls(module)
        if name.endswith((".now", ".utcnow", ".today"))
        or (name.startswith("random.") and name != "random.Random")
    ]
    assert not wrong


@pytest.mark.parametrize("module", [m for m in ours("pgqueue") if floor(m.name) == 2], ids=lambda m: m.name)
def test_verbs_neither_open_nor_commit_nor_sleep_nor_log(module: Module) -> None:
    wrong = [
        f"line {line}: {name}" for name, line in calls(module) if name.rpartition(".")[2] in RUNTIME_ONLY
    ]
    wrong += [f"line {line}: {name}" for name, line in imports(module) if name.split(".")[0] == "logging"]
    assert not wrong


@pytest.mark.parametrize(
    "module",
    [m for m in modules().values() if floor(m.name) != 4 and not m.name.startswith("relay.cli")],
    ids=lambda m: m.name,
)
def test_only_edges_read_the_environment_arguments_and_signals(module: Module) -> None:
    forbidden = EDGE_ONLY - CHILD_MAIN.get(module.name, set())
    assert not [f"line {line}: {name}" for name, line in calls(module) if name in forbidden]
