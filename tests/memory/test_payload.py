"""memory/payload.py: bytes are readable where they are resident, and nowhere else."""

from __future__ import annotations

import pytest

from patrickstar.core.machine import Tier
from patrickstar.memory.lanes import CompletedTicket
from patrickstar.memory.payload import InFlight, Released, Resident, readable_on


@pytest.mark.parametrize("tier", list(Tier))
def test_only_a_resident_payload_is_readable_and_only_on_its_tier(tier):
    assert readable_on(Resident(Tier.HOST, slot=3, slots=2), tier) is (tier is Tier.HOST)
    assert not readable_on(Released(), tier)
    # Not even when the transfer has ended: it must be waited for.
    assert not readable_on(InFlight(CompletedTicket(), Tier.HOST, Tier.DEVICE, slot=0), tier)
