from __future__ import annotations


def machine():
    return "m"


def merged(out, o):
    return o


def write(out, o):
    pass


def table(o):
    return "\n".join(f"{f.what} {f.system} {f.median:,.4g} {f.unit}" for x in o for f in x.figures)
