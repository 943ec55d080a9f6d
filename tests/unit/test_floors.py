"""How far back a claim must look: floors rise by proof, and fall when the proof says so."""

from __future__ import annotations

from pgqueue.floors import EVERYTHING, SLACK, WINDOW, Floors

LEVELS = [("mail", 0), ("mail", 5), ("bulk", 5)]


def made(settled: int = 0) -> Floors:
    """Make floors with a horizon that has settled so far."""
    floors = Floors(LEVELS)
    if settled:
        floors.observed(settled, (), 0.0)
    return floors


def test_without_a_proof_no_floor_rises() -> None:
    floors = made()
    floors.claimed([0, 1, 2], floors.starts(), 0, (1, 900), {}, exhausted=True)
    floors.saw([(1, 900)])
    assert floors.floor == [0, 0, 0]
    assert floors.wants_proof()


def test_a_claim_that_found_all_raises_every_floor_to_what_was_settled_before_it() -> None:
    floors = made(settled=100)
    floors.claimed([0, 1, 2], floors.starts(), 100, (1, 90), {}, exhausted=True)
    assert floors.floor == [100, 100, 100]


def test_what_settled_after_the_claim_was_sent_does_not_count() -> None:
    floors = made(settled=100)
    starts = floors.starts()
    floors.observed(200, (), 1.0)
    floors.claimed([0, 1, 2], starts, 100, None, {}, exhausted=True)
    assert floors.floor == [100, 100, 100]


def test_a_full_batch_covers_the_level_of_its_last_job_up_to_that_job_and_later_levels_not_at_all() -> None:
    floors = made(settled=1000)
    floors.claimed([0, 1, 2], floors.starts(), 1000, (1, 700), {}, exhausted=False)
    assert floors.floor == [1000, 700, 0]


def test_a_full_batch_vouches_for_no_more_than_a_window_of_an_earlier_level() -> None:
    """Whether that level's window was full of names this worker does not know is not told with a full batch."""
    floors = made(settled=WINDOW * 10)
    floors.claimed([0, 1, 2], floors.starts(), WINDOW * 10, (1, 700), {}, exhausted=False)
    assert floors.floor == [WINDOW, 700, 0]


def test_a_full_window_covers_no_more_than_it_examined() -> None:
    floors = made(settled=20_000)
    floors.claimed([0, 1, 2], floors.starts(), 20_000, None, {1: 5_400}, exhausted=True)
    assert floors.floor == [20_000, 5_400, 20_000]
    assert floors.starts()[1] == 5_400


def test_a_claim_that_began_above_the_floor_raises_nothing() -> None:
    floors = made(settled=20_000)
    floors.claimed([1], [9_000], 20_000, None, {}, exhausted=True)
    assert floors.floor[1] == 0


def test_a_claim_of_some_levels_moves_only_those() -> None:
    floors = made(settled=50)
    floors.claimed([2], [0], 50, None, {}, exhausted=True)
    assert floors.floor == [0, 0, 50]


def test_without_news_a_claim_looks_back_no_further_than_the_slack() -> None:
    floors = made()
    floors.claimed([0, 1, 2], floors.starts(), 0, (1, 300_000), {}, exhausted=False)
    assert floors.starts() == [0, 300_000 - SLACK, 0]


def test_with_news_the_next_claim_begins_at_the_floor() -> None:
    floors = made()
    floors.claimed([0, 1, 2], floors.starts(), 0, (1, 300_000), {}, exhausted=False)
    floors.observed(300_000, (), 0.0)
    assert floors.starts() == [0, 0, 0]


def test_a_floor_never_rises_past_a_number_that_an_open_transaction_may_hold() -> None:
    floors = made()
    floors.saw([(1, 50)])
    floors.observed(50, ("writer",), 0.0)
    floors.claimed([0, 1, 2], floors.starts(), floors.horizon.settled, (1, 50), {}, exhausted=True)
    assert floors.floor == [0, 0, 0]
    floors.observed(60, (), 0.1)
    floors.claimed([0, 1, 2], floors.starts(), floors.horizon.settled, None, {}, exhausted=True)
    assert floors.floor == [60, 60, 60]


def test_the_end_of_a_long_transaction_brings_the_floors_back() -> None:
    floors = made()
    floors.saw([(1, 50)])
    floors.observed(50, ("long",), 0.0)
    floors.observed(50, ("long",), 2.0)
    floors.claimed([0, 1, 2], floors.starts(), floors.horizon.settled, None, {}, exhausted=True)
    assert floors.floor == [50, 50, 50]
    assert floors.wants_proof()
    floors.observed(90, (), 3.0)
    assert floors.floor == [0, 0, 0]


def test_the_end_of_a_long_transaction_brings_routing_back() -> None:
    """A keyed job that it committed stands below: without its lane nobody would ever see it."""
    floors = made(settled=100)
    floors.routed("mail", 100, EVERYTHING)
    floors.observed(150, ("writer",), 1.0)
    floors.observed(160, ("writer",), 3.0)
    floors.routed("mail", floors.horizon.settled, EVERYTHING)
    assert floors.route["mail"] == 160
    floors.observed(170, (), 4.0)
    assert floors.route == {"mail": 100, "bulk": 0}


def test_a_sequence_that_went_back_drops_every_floor_and_the_proof() -> None:
    """After a failover to a standby that lagged behind, numbers are handed out a second time."""
    floors = made(settled=500)
    floors.claimed([0, 1, 2], floors.starts(), 500, None, {}, exhausted=True)
    floors.observed(499, (), 1.0)
    assert (floors.floor, floors.high, floors.horizon.settled) == ([0, 0, 0], [0, 0, 0], 0)
    floors.saw([(1, 800)])
    floors.observed(799, (), 2.0)
    assert floors.high == [0, 0, 0]


def test_a_sweep_that_found_a_full_batch_sends_the_floor_back_to_its_last_job() -> None:
    floors = made(settled=5_000)
    floors.claimed([0, 1, 2], floors.starts(), 5_000, None, {}, exhausted=True)
    floors.swept([0, 1, 2], {1: 700})
    assert floors.floor == [5_000, 700, 5_000]
    assert floors.high[1] == 700


def test_a_sweep_proves_nothing_above_the_floor() -> None:
    """It saw no observation: a transaction that drew a lower number may be open still."""
    floors = made()
    floors.swept([0, 1, 2], {1: 700})
    assert floors.floor == [0, 0, 0]
    assert floors.starts() == [0, 0, 0]


def test_lowered_queues_start_from_nothing_and_others_stay() -> None:
    floors = made(settled=500)
    floors.claimed([0, 1, 2], floors.starts(), 500, (2, 400), {}, exhausted=True)
    floors.lower(["mail"])
    assert floors.starts() == [0, 0, 500]


def test_suspects_are_looked_for_below_what_was_looked_at_and_everywhere_once_all_was() -> None:
    floors = made()
    floors.claimed([0, 1, 2], floors.starts(), 0, (1, 700), {}, exhausted=False)
    floors.saw([(1, 700)])
    assert floors.ceiling[1] == 700
    floors.claimed([0, 1, 2], floors.starts(), 0, (1, 900), {2: 6_000}, exhausted=True)
    assert floors.ceiling == [EVERYTHING, EVERYTHING, 6_000]


def test_a_level_that_no_claim_came_to_is_not_searched_for_suspects() -> None:
    """Behind a busy level a million waiting jobs would be read by each sweep."""
    floors = made()
    floors.claimed([0, 1, 2], floors.starts(), 0, (1, 700), {}, exhausted=False)
    assert floors.ceiling[2] == 0
