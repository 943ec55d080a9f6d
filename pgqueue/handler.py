"""Handlers: which functions can be one, and what their parameters say.

A handler takes the payload first and by position, and the context (a parameter annotated `Job`, or named
`job` without annotation) by keyword; either may be left out. Whatever else it takes must have a default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args, get_origin, get_type_hints

from pgqueue.errors import ConfigError
from pgqueue.job import Job

#: What a transactional handler can be handed: (top package, class).
HANDLES: Final = {
    ("psycopg", "Connection"),
    ("psycopg", "AsyncConnection"),
    ("sqlalchemy", "Connection"),
    ("sqlalchemy", "Session"),
    ("sqlalchemy", "AsyncConnection"),
    ("sqlalchemy", "AsyncSession"),
}


def check_handler(name: str, handler: Callable[..., Any], *, process: bool) -> None:
    """Refuse what cannot be a handler of `name`."""
    if not inspect.isroutine(handler):
        raise ConfigError(f"job {name!r}: its handler is {handler!r}, not a function; wrap it in a `def`")
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise ConfigError(
            f"job {name!r}: its handler is a generator, which would never run; drop the `yield`"
        )
    if process and inspect.iscoroutinefunction(handler):
        raise ConfigError(f"job {name!r}: process=True takes a plain function, not `async def`")
    if process and "<" in getattr(handler, "__qualname__", ""):
        raise ConfigError(
            f"job {name!r}: process=True takes a function at the top of a module, as a child imports "
            f"it; {handler.__qualname__} is not there"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What a handler takes: a payload or not, of which type; the names of the Job's and the handle's parameters."""

    payload: bool
    payload_type: Any
    job: str | None
    handle: str | None
    handle_type: type | None


def parameters(name: str, handler: Callable[..., Any], *, transactional: bool = False) -> Parameters:
    """Read a handler's signature. Raises ConfigError for one that the runtime could not call.

    A transactional handler takes the handle of its transaction as the parameter annotated with its type.
    """
    hints = _hints(name, handler)
    given = list(inspect.signature(handler).parameters.values())
    contexts = [p for p in given if _is_job(p, hints)]
    handles = [p for p in given if _handle_type(hints.get(p.name)) is not None]
    if problem := _handle_problem(handler, handles, hints, transactional=transactional):
        raise ConfigError(f"job {name!r}: {problem}")
    rest = [p for p in given if p not in handles]
    needed = [p for p in rest if p not in contexts and p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if problem := _problem(rest, contexts, needed):
        raise ConfigError(f"job {name!r}: its handler takes {problem}")
    return Parameters(
        payload=bool(needed),
        payload_type=hints.get(needed[0].name, Any) if needed else Any,
        job=contexts[0].name if contexts else None,
        handle=handles[0].name if handles else None,
        handle_type=_handle_type(hints[handles[0].name]) if handles else None,
    )


def _handle_type(hint: Any) -> type | None:
    """Return the handle's type if an annotation names one: known by name, so that nothing is imported."""
    kind = get_origin(hint) or hint
    if isinstance(kind, type) and (kind.__module__.split(".")[0], kind.__qualname__) in HANDLES:
        return kind
    return None


def _handle_problem(
    handler: Callable[..., Any],
    handles: list[inspect.Parameter],
    hints: Mapping[str, Any],
    *,
    transactional: bool,
) -> str | None:
    if not transactional:
        if handles:
            return f"its handler takes {handles[0].name}, a database handle; set transactional=True to be given one"
        return None
    if len(handles) != 1 or handles[0].kind is inspect.Parameter.POSITIONAL_ONLY:
        return "transactional=True takes one parameter annotated with " + ", ".join(
            sorted({k for _, k in HANDLES})
        )
    kind = _handle_type(hints[handles[0].name])
    is_async = kind is not None and kind.__qualname__.startswith("Async")
    if is_async != inspect.iscoroutinefunction(handler):
        return f"{'an async' if not is_async else 'a plain'} handler cannot work on {handles[0].name}; match the two"
    return None


def _problem(
    given: list[inspect.Parameter], contexts: list[inspect.Parameter], needed: list[inspect.Parameter]
) -> str | None:
    spread = next((p for p in needed if p.kind is p.VAR_POSITIONAL), None)
    if spread is not None:
        return f"*{spread.name}; name its parameters, or give the decorator around it functools.wraps"
    if len(contexts) > 1:
        return f"two contexts, {' and '.join(p.name for p in contexts)}; one is enough"
    if any(p.kind is p.POSITIONAL_ONLY for p in contexts):
        return f"{contexts[0].name} by position only; remove the `/`"
    if len(needed) > 1:
        return f"{', '.join(p.name for p in needed)}; a handler takes one payload and, if it likes, a Job"
    if needed and (needed[0] is not given[0] or needed[0].kind is inspect.Parameter.KEYWORD_ONLY):
        return f"{needed[0].name}, its payload, not as the first parameter and by position; move it there"
    return None


def _hints(name: str, handler: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return get_type_hints(handler, include_extras=True)
    except Exception as error:  # annotations are evaluated as code, which may raise anything
        raise ConfigError(
            f"job {name!r}: an annotation of its handler cannot be resolved ({error}); define and import "
            "payload types at the top of the module, not inside a function or under TYPE_CHECKING"
        ) from error


def _is_job(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> bool:
    if parameter.name not in hints:
        return parameter.name == "job"
    hint = hints[parameter.name]
    return hint is Job or (type(None) in get_args(hint) and Job in get_args(hint))
