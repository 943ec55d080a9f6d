"""Handlers: which functions can be one, and what their parameters say.

A handler takes the payload first and by position, and the context (a parameter annotated `Job`, or named
`job` without annotation) by keyword; either may be left out. Whatever else it takes must have a default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

from pgqueue.errors import ConfigError
from pgqueue.job import Job


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


def parameters(name: str, handler: Callable[..., Any]) -> tuple[bool, str | None, Any]:
    """Read a handler's signature: has it a payload, which parameter takes the Job, the payload's type.

    Raises ConfigError for a signature that the runtime could not call.
    """
    hints = _hints(name, handler)
    given = list(inspect.signature(handler).parameters.values())
    contexts = [p for p in given if _is_job(p, hints)]
    needed = [p for p in given if p not in contexts and p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if problem := _problem(given, contexts, needed):
        raise ConfigError(f"job {name!r}: its handler takes {problem}")
    job = contexts[0].name if contexts else None
    return bool(needed), job, hints.get(needed[0].name, Any) if needed else Any


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
