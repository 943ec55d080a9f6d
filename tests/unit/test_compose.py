"""docker-compose.yml names services, commands and settings that exist."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker-compose.yml"


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield each command that a service of ours runs, with those of a shell line apart."""
    for name, service in services().items():
        if words := service.get("command"):
            lines = (
                [shlex.split(line) for line in words[2].split("&&")] if words[:2] == ["sh", "-c"] else [words]
            )
            yield from ((name, line) for line in lines)


def parse(words: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a command line with the program it names, without running it."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    program, *rest = words
    if program == "uvicorn":
        from uvicorn.main import main as command

        module, _, name = rest[0].partition(":")
        assert getattr(import_module(module), name)
    elif program == "python":
        assert rest[0] == "-m"
        command, rest = import_module(rest[1]).main, rest[2:]
    elif program == "outbox-relay":
        command = import_module("relay.cli._service").command
    elif program == "pgqueue-worker":
        command = import_module("pgqueue.cli._worker").command
    else:
        assert program == "pgqueue"
        command = import_module("pgqueue.cli").main
    if isinstance(command, click.Group):
        inner = command.get_command(click.Context(command), rest[0])
        assert inner is not None, f"{program} has no command {rest[0]}"
        command, rest = inner, rest[1:]
    command.make_context(program, list(rest))


def test_the_services_are_the_whole_path() -> None:
    assert set(services()) == {"postgres", "migrate", "api", "worker", "warehouse", "relay"}


@pytest.mark.parametrize(("name", "words"), [pytest.param(n, w, id=" ".join(w)[:60]) for n, w in commands()])
def test_every_command_is_one_of_ours_and_takes_its_options(
    name: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parse(words, services()[name]["environment"], monkeypatch)


def test_nothing_starts_before_what_it_needs() -> None:
    every = services()
    for name, service in every.items():
        needed = service.get("depends_on", {})
        assert set(needed) <= set(every)
        assert name == "postgres" or needed, f"{name} waits for nothing"
    assert every["migrate"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert "healthcheck" in every["postgres"]
    for name in ("api", "worker", "warehouse", "relay"):
        assert every[name]["depends_on"]["migrate"] == {"condition": "service_completed_successfully"}


def test_the_image_installs_what_the_services_import() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    extras = dockerfile.partition("[")[2].partition("]")[0].split(",")
    assert {"binary", "webhooks", "metrics", "example"} <= set(extras)
    assert "COPY examples examples" in dockerfile
    scripts = {point.name for point in entry_points(group="console_scripts")}
    assert {"pgqueue", "pgqueue-worker", "outbox-relay", "uvicorn"} <= scripts


def test_the_client_reads_it_where_there_is_one() -> None:
    docker = shutil.which("docker")
    if (
        docker is None
        or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no docker compose client")
    done = subprocess.run(
        [docker, "compose", "--file", str(COMPOSE), "config", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
