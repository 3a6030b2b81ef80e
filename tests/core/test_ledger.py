import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.core.ledger import Ledger
from patrickstar.core.machine import LINKS, Tier

D, H, K = Tier


def test_a_new_ledger_says_nothing_was_used():
    snapshot = Ledger().snapshot()
    assert snapshot.peak_bytes == snapshot.chunk_bytes == snapshot.nonmodel_bytes == {D: 0, H: 0, K: 0}
    assert snapshot.moved_bytes == dict.fromkeys(LINKS, 0)
    assert snapshot.moments == ()


def test_the_peak_is_of_chunks_and_non_model_data_together():
    ledger = Ledger()
    ledger.add(D, 100)
    ledger.nonmodel(D, 50)
    ledger.remove(D, 100)
    ledger.nonmodel(D, 120)
    assert (ledger.peak(D), ledger.in_use(D), ledger.chunks(D)) == (150, 120, 0)
    assert ledger.peak(H) == 0


def test_a_move_counts_on_its_link_only():
    ledger = Ledger()
    ledger.add(D, 8)
    ledger.move(H, D, 8)
    ledger.move(H, D, 4)
    assert ledger.snapshot().moved_bytes == {"H>D": 12, "D>H": 0, "H>K": 0, "K>H": 0}
    assert ledger.moved("H>D") == 12
    assert ledger.in_use(D) == 8
    assert ledger.in_use(H) == 0


def test_each_moment_has_a_peak_of_its_own_that_starts_from_what_is_held():
    ledger = Ledger()
    ledger.add(H, 10)
    ledger.begin_moment({H: 5})
    ledger.add(H, 10)
    ledger.remove(H, 10)
    ledger.begin_moment()
    ledger.begin_moment({H: 1})
    ledger.nonmodel(D, 7)
    assert [moment[H] for moment in ledger.snapshot().moments] == [25, 15, 11]
    assert [moment[D] for moment in ledger.snapshot().moments] == [0, 0, 7]
    assert ledger.peak(H) == 25


def test_a_snapshot_stays_as_it_was():
    ledger = Ledger()
    ledger.begin_moment()
    before = ledger.snapshot()
    ledger.add(D, 1)
    ledger.move(D, H, 1)
    assert before.peak_bytes[D] == before.chunk_bytes[D] == before.moved_bytes["D>H"] == before.moments[0][D] == 0


@pytest.mark.parametrize(
    "mistake",
    [
        lambda ledger: ledger.remove(H, 11),
        lambda ledger: ledger.add(H, -1),
        lambda ledger: ledger.move(H, D, -1),
        lambda ledger: ledger.nonmodel(H, -1),
    ],
)
def test_what_cannot_be_true_fails(mistake):
    ledger = Ledger()
    ledger.add(H, 10)
    with pytest.raises(AssertionError):
        mistake(ledger)


def test_device_and_disk_exchange_nothing_directly():
    with pytest.raises(KeyError):
        Ledger().move(D, K, 1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "nonmodel", "moment"]), st.sampled_from(Tier), st.integers(0, 99))))
def test_the_peak_of_a_tier_is_the_largest_of_its_moments(entries):
    ledger = Ledger()
    ledger.begin_moment()
    for what, tier, nbytes in entries:
        if what == "moment":
            ledger.begin_moment({tier: nbytes})
        else:
            getattr(ledger, what)(tier, nbytes)
    moments = ledger.snapshot().moments
    assert {tier: max(moment[tier] for moment in moments) for tier in Tier} == ledger.snapshot().peak_bytes
