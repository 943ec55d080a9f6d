from __future__ import annotations

import re
from pathlib import Path

from pgqueue.states import TRANSITIONS, State

DOC = (Path(__file__).resolve().parents[2] / "docs" / "lifecycle.md").read_text(encoding="utf-8")
MOVES = {(old, move, new) for (old, move), reached in TRANSITIONS.items() for new in reached}


def named(word: str) -> State | None:
    return None if word in ("[*]", "-") else State(word.strip("`"))


def test_the_picture_draws_every_move_and_no_other() -> None:
    picture = DOC.split("```mermaid")[1].split("```")[0]
    drawn = re.findall(r"^    (\S+) --> (\S+): (.+)$", picture, re.MULTILINE)
    assert len(drawn) == len(MOVES)
    assert {(named(old), move, named(new)) for old, new, move in drawn} == MOVES


def test_the_table_of_moves_lists_every_move_and_no_other() -> None:
    rows = re.findall(r"^\| (-|`\w+`) \| ([\w ]+) \| ([`\w, ]+) \| .+ \|$", DOC, re.MULTILINE)
    listed = {
        (named(old), move): frozenset(State(w) for w in re.findall(r"\w+", new)) for old, move, new in rows
    }
    assert len(rows) == len(listed)
    assert listed == TRANSITIONS


def test_the_table_of_states_explains_every_state() -> None:
    assert re.findall(r"^\| `(\w+)` \| [A-Z]", DOC, re.MULTILINE) == [
        *("in_flight", "delayed", "blocked", "ready", "dead", "done")
    ]
    assert {s.value for s in State} == {"in_flight", "delayed", "blocked", "ready", "dead", "done"}


def test_every_state_can_be_reached_and_left_but_done_which_is_the_end() -> None:
    assert {new for _, _, new in MOVES} == set(State)
    assert {old for old, _, _ in MOVES if old} == set(State) - {State.DONE}


def test_only_a_claim_leads_into_flight() -> None:
    assert {(old, move) for old, move, new in MOVES if new is State.IN_FLIGHT and old is not new} == {
        (State.READY, "claim")
    }
