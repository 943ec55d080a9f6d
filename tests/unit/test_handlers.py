"""Handlers are driven apart from each other, and what a command line says about them is read once."""

from __future__ import annotations

import asyncio
import sys
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path

import click
import pytest

from pgqueue.cli._app import Duration, load_app
from pgqueue.cli._processes import _command
from pgqueue.errors import BadOption, ConfigError
from pgqueue.run import Isolated

VALUE: ContextVar[str] = ContextVar("VALUE", default="clean")


async def sets_and_waits(value: str) -> str:
    VALUE.set(value)
    await asyncio.sleep(0)
    return VALUE.get()


def test_what_a_handler_leaves_in_a_context_variable_stays_its_own() -> None:
    async def main() -> list[str]:
        VALUE.set("the task's")
        seen: list[str] = []

        async def handler(value: str) -> None:
            seen.append(VALUE.get())
            seen.append(await sets_and_waits(value))

        await Isolated(handler("one"))
        await Isolated(handler("two"))
        return [*seen, VALUE.get()]

    assert asyncio.run(main()) == ["clean", "one", "clean", "two", "the task's"]


def test_an_isolated_handler_can_time_out_its_own_steps_and_start_tasks() -> None:
    async def handler() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.sleep(60)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(sets_and_waits(str(n))) for n in range(3)]
        assert [task.result() for task in tasks] == ["0", "1", "2"]
        assert VALUE.get() == "clean"

    async def main() -> None:
        await Isolated(handler())

    asyncio.run(main())


def test_an_isolated_handler_is_cancelled_and_may_clean_up() -> None:
    done: list[str] = []

    async def handler() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            done.append("cleaned up")

    async def main() -> None:
        async def slot() -> None:
            await Isolated(handler())

        task = asyncio.create_task(slot())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert done == ["cleaned up"]


def test_an_error_of_an_isolated_handler_comes_out_as_it_is() -> None:
    async def handler() -> None:
        await asyncio.sleep(0)
        raise LookupError("gone")

    async def main() -> None:
        with pytest.raises(LookupError, match="gone"):
            await Isolated(handler())

    asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("90", 90), ("1.5s", 1.5), ("15m", 900), ("12h", 43_200), ("7d", 604_800)],
)
def test_a_duration_reads_as_people_write_it(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "-1s", "1 week", "soon", "nan", "1e9"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a duration"):
        Duration().convert(text, None, None)


def test_the_children_of_a_parent_get_its_options_but_not_its_processes_or_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = [
        "pgqueue-worker",
        "--processes",
        "3",
        "shop:app",
        "--dsn=postgres://u:secret@h/d",
        "-c",
        "4",
        "--processes=2",
    ]
    monkeypatch.setattr(sys, "argv", given)
    assert _command()[3:] == ["shop:app", "-c", "4"]


@pytest.mark.parametrize("path", ["", "shop", ":app", "shop:"])
def test_an_app_is_named_by_module_and_name(path: str) -> None:
    with pytest.raises(BadOption, match="is not module:name"):
        load_app(path)


def test_a_module_that_an_app_lacks_is_not_taken_for_the_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacks_a_module.py").write_text("import no_such_module_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match=r"'no_such_module_here' \(.*lacks_a_module.py, line 1\)"
    ) as refused:
        load_app("lacks_a_module:app")
    assert "start in the folder" not in str(refused.value)


def test_an_app_whose_import_raises_names_the_error_and_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises_when_imported.py").write_text("import os\n\nos.environ['NO_SUCH_VARIABLE_HERE']\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match=r"KeyError: 'NO_SUCH_VARIABLE_HERE' \(.*raises_when_imported.py, line 3\)"
    ):
        load_app("raises_when_imported:app")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no_such_module_here:app", "start in the folder that holds no_such_module_here"),
        ("tests.process.apps.every:nothing", "AttributeError"),
        ("tests.process.apps.every:AT_ONCE", "is Backoff, not a pgqueue.App"),
    ],
)
def test_an_app_that_cannot_be_loaded_says_why(path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_app(path)
