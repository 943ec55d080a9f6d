"""A payload, or the name of a job, given on the command line and checked as an enqueue would."""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

import click

from pgqueue.cli import Failure
from pgqueue.cli._app import load_app
from pgqueue.cli._table import clean
from pgqueue.errors import BadOption, BadPayload, UnknownJob
from pgqueue.payload import Codec, misfit


def checked(name: str, given: str, path: str | None) -> str:
    """Return the JSON text of `given` (@FILE: of that file); checked against the handler's type if an app is given."""
    text = _read(given)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadPayload(name, f"is not JSON: {error}") from error
    Codec(name).encode(value)
    if path is None:
        click.echo("warning: the payload is not checked against the handler's type; give --app", err=True)
        return text
    types = load_app(path).types
    if name not in types:
        raise UnknownJob(name, tuple(sorted(types)))
    codec = types[name].codec
    if codec.takes_payload:
        try:
            codec.decode(text)
        except ValueError as error:
            raise BadPayload(name, f"does not fit its handler: {misfit(error)}") from error
    return text


def undeclared(name: str, known: Sequence[str], otherwise: str) -> Failure:
    """Return the error for a job name that is not declared in the database, with the nearest one that is."""
    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean {clean(near[0])!r}?" if near else f"; run pgqueue sync APP{otherwise}"
    return Failure(f"no worker and no pgqueue sync has declared a job {clean(name)!r} yet{hint}")


def _read(given: str) -> str:
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadOption("--payload", f"cannot read {given[1:]}: {error}") from error
