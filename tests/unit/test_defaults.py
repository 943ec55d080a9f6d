"""docs/defaults.md lists every option of every command with its environment variable and default, and no other.

`python -m tests.unit.test_defaults` writes the table as it should be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import click
import pytest

from pgqueue import app, dead, dsn, payload, policy, quota, schema_version
from pgqueue.backoff import Backoff
from pgqueue.cli import main as pgqueue
from pgqueue.cli._worker import command as worker
from pgqueue.config import WorkerSettings
from pgqueue.enqueue import Options
from relay.cli import main as relay
from relay.cli._service import command as service

PAGE = Path(__file__).resolve().parents[2] / "docs" / "defaults.md"
HEAD = "| command | option | environment | default | meaning |\n|---|---|---|---|---|"
NOTE = re.compile(r"\s*\[(default|env var): (.*?)\]")
REMEDY = "python -m tests.unit.test_defaults writes the table"
EVERYWHERE = {"--version", "--help", "--json"}


def commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield every command below one, itself included, by what is typed."""
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for word in command.list_commands(context):
            below = command.get_command(context, word)
            if below is not None:
                yield from commands(f"{name} {word}", below)


def rows() -> Iterator[str]:
    """Yield the rows that the page is to have; --dsn, the same for all, once a program."""
    context = click.Context(relay)
    programs: dict[str, click.Command | None] = {"pgqueue-worker": worker, "outbox-relay": service}
    programs |= {
        f"outbox-relay {word}": relay.get_command(context, word) for word in relay.list_commands(context)
    }
    for program, command in (programs | {"pgqueue": pgqueue}).items():
        assert command is not None
        for name, one in commands(program, command):
            for param in one.params:
                skipped = EVERYWHERE if " " not in name else EVERYWHERE | {"--dsn"}
                if isinstance(param, click.Option) and not skipped & set(param.opts):
                    yield row(name, param)


def row(command: str, option: click.Option) -> str:
    """Return one row: what the option is called, what else can set it, and what holds without it."""
    notes = dict(NOTE.findall(option.help or ""))
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    variables = option.envvar or notes.get("env var", "")
    environment = ", ".join(f"`{v.strip()}`" for v in str(variables).split(",") if v.strip()) or "-"
    meaning = NOTE.sub("", option.help or "").strip().replace("|", "\\|")
    return (
        f"| `{command}` | {names} | {environment} | {notes.get('default') or _default(option)} | {meaning} |"
    )


def _default(option: click.Option) -> str:
    if option.required:
        return "required"
    value = option.to_info_dict()["default"]
    if option.is_flag:
        return "on" if value is True else "off"
    if value is None or option.multiple or "UNSET" in repr(value).upper():
        return "-"
    return f"`{value}`"


def tables() -> str:
    """Return all the rows under their head."""
    return "\n".join([HEAD, *rows()])


def test_the_page_lists_every_option_as_it_is() -> None:
    written = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    wanted = list(rows())
    assert [line for line in wanted if line not in written] == [], f"not in docs/defaults.md; {REMEDY}"
    assert [line for line in written if line.count(" | ") == 4 and line not in wanted] == [], (
        f"not in the programs; {REMEDY}"
    )


@pytest.mark.parametrize(
    "option", [o for c in (worker, service) for o in c.params if isinstance(o, click.Option)], ids=str
)
def test_every_option_of_a_service_has_a_variable_and_says_its_default(option: click.Option) -> None:
    text = option.help or ""
    assert option.envvar or "env var:" in text
    assert (
        option.show_default
        or option.is_flag
        or option.required
        or "[default:" in text
        or _default(option) == "-"
    )


BUILT_IN: list[tuple[str, object]] = [
    ("queue", app.DEFAULT_QUEUE),
    ("priority", app.DEFAULT_PRIORITY),
    ("max_attempts", policy.DEFAULT_MAX_ATTEMPTS),
    ("timeout", timedelta(seconds=app.DEFAULT_TIMEOUT)),
    ("backoff base", timedelta(seconds=Backoff().base)),
    ("backoff cap", timedelta(seconds=Backoff().cap)),
    ("dedup window", Options().dedup_window),
    ("payload", f"{payload.LIMIT // 1024} KiB"),
    ("payload in hand", f"about {quota.MOST_PAYLOAD >> 20} MiB"),
    ("replay limit", dead.LIMIT),
    ("replay rate", f"{dead.RATE} a second"),
    ("dead-letter alert", f"more than {dead.ALERT} in 10 minutes"),
    ("sweep", timedelta(seconds=WorkerSettings().sweep)),
    ("flush", timedelta(seconds=WorkerSettings().flush)),
    ("connect timeout", timedelta(seconds=dsn.CONNECT_TIMEOUT_S)),
    ("schema", schema_version.REVISION),
]


@pytest.mark.parametrize(("name", "value"), BUILT_IN)
def test_the_page_tells_the_built_in_values(name: str, value: object) -> None:
    shown = _span(value) if isinstance(value, timedelta) else str(value)
    assert re.search(
        rf"^\| {re.escape(name)} \| `?{re.escape(shown)}`? \|", PAGE.read_text(), re.MULTILINE
    ), (name, shown)


def _span(value: timedelta) -> str:
    seconds = value.total_seconds()
    for unit, size in (("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds * 1000:g} ms"


if __name__ == "__main__":
    before, after = PAGE.read_text(encoding="utf-8").split(f"{HEAD}\n")
    PAGE.write_text(before + tables() + after[after.index("\n\n") :], encoding="utf-8")
