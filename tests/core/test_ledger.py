import pytest

from patrickstar.core.ledger import Ledger
from patrickstar.core.machine import LINKS, Tier

D, H, K = Tier


def test_a_new_ledger_says_nothing_was_used():
    ledger = Ledger()
    assert [(ledger.peak[tier], ledger.in_use(tier), ledger._chunks[tier]) for tier in Tier] == [(0, 0, 0)] * 3
    assert [ledger.moved[over] for over in LINKS] == [0] * 4


def test_the_peak_is_of_chunks_and_non_model_data_together():
    ledger = Ledger()
    ledger.add(D, 100)
    ledger.nonmodel(D, 50)
    ledger.remove(D, 100)
    ledger.nonmodel(D, 120)
    assert (ledger.peak[D], ledger.in_use(D), ledger._chunks[D]) == (150, 120, 0)
    assert ledger.peak[H] == 0


def test_a_move_counts_on_its_link_only():
    ledger = Ledger()
    ledger.add(D, 8)
    ledger.move(H, D, 8)
    ledger.move(H, D, 4)
    assert {over: ledger.moved[over] for over in LINKS} == {"H>D": 12, "D>H": 0, "H>K": 0, "K>H": 0}
    assert ledger.in_use(D) == 8
    assert ledger.in_use(H) == 0


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
