"""Updates of a run of chunks on the host, below a device, while their gradients are on the way there and their weight is already asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from patrickstar.core.ledger import Ledger
from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.errors import DeviceError
from patrickstar.memory.arena import Arena
from patrickstar.memory.lanes import Lane
from patrickstar.plan.actions import Drop, Issue, Wait, Work
from tests.manual_lane import ManualLane
from tests.memory.stores import SLOT_BYTES, store_of

D, H = Tier.DEVICE, Tier.HOST
CHUNKS = 3
NUMEL = SLOT_BYTES // 4
WEIGHT = PlaneRef(0, "weight")
GRADS = [PlaneRef(chunk, "grad") for chunk in range(CHUNKS)]


class RunOnHost:
    """A run of three chunks of ones on the host, and gradients of 2, 3 and 4 on the device, that updates add to it."""

    def __init__(self) -> None:
        homes = dict.fromkeys([WEIGHT, *GRADS], H)
        slots = dict.fromkeys(GRADS, 1) | {WEIGHT: CHUNKS}
        self.lanes: dict[tuple[Tier, Tier | None], ManualLane] = {}
        self.updated: list[int] = []
        arenas = {tier: Arena(SLOT_BYTES, virtual_slots=4 * CHUNKS, name=tier.label) for tier in (D, H)}
        self.store = store_of(homes, slots, arenas=arenas, make_lane=self.make_lane, ledger=Ledger(), poison=True)
        for tier, refs in ((D, GRADS), (H, [WEIGHT])):
            for ref in refs:
                self.store.carry_out([Issue.create(ref, tier, slots[ref])])
                self.store.tensor(ref, tier).fill_(1.0 if ref == WEIGHT else ref.chunk + 2.0)
                self.store.wrote(ref, tier)

    def make_lane(self, src: Tier, dst: Tier | None) -> Lane:
        return self.lanes.setdefault((src, dst), ManualLane())

    def work(self, chunk: int, tier: Tier) -> Callable[[], None]:
        assert tier is H
        weight = self.store.operand(WEIGHT, H)[chunk * NUMEL : (chunk + 1) * NUMEL]
        gradient = self.store.operand(GRADS[chunk], H)

        def work() -> None:
            weight.add_(gradient)
            self.updated.append(chunk)

        return work

    def begin(self) -> None:
        """Everything is issued, and nothing is done."""
        down = [Issue.copy(ref, D, H) for ref in GRADS]
        updates = [Issue.update(chunk, H) for chunk in range(CHUNKS)]
        self.store.carry_out([*down, *updates], update_work=self.work)
        for ref in GRADS:
            self.store.forget(ref)

    def end(self) -> None:
        self.store.carry_out([Wait(Work.update(chunk, H)) for chunk in range(CHUNKS)])

    def values(self, tier: Tier) -> list[float]:
        return self.store.tensor(WEIGHT, tier).view(CHUNKS, NUMEL).mean(1).tolist()


@pytest.fixture
def run() -> Iterator[RunOnHost]:
    made = RunOnHost()
    yield made
    made.store.close()


def test_an_update_comes_after_its_gradients_way_there_which_its_wait_ends(run: RunOnHost) -> None:
    run.begin()
    assert run.lanes[D, H].pending == CHUNKS
    assert run.updated == []
    run.store.works.ticket(Issue.update(1, H)).wait()
    assert run.lanes[D, H].pending == CHUNKS - 1
    run.end()
    assert run.updated == [1, 0, 2]
    assert run.values(H) == [3.0, 4.0, 5.0]
    assert not run.store.state.in_flight
    assert all(map(run.store.state.is_free, GRADS))
    run.store.carry_out([Drop(ref, D) for ref in GRADS])


def test_the_weight_comes_up_chunk_by_chunk_each_after_its_own_update(run: RunOnHost) -> None:
    run.begin()
    run.store.carry_out([Issue.copy(WEIGHT, H, D, CHUNKS)])
    up = run.lanes[H, D]
    up.complete(1)
    assert run.updated == [0]
    assert run.lanes[D, H].pending == CHUNKS - 1
    up.complete(1)
    assert run.updated == [0, 1]
    run.end()
    run.store.carry_out([Wait.copy(WEIGHT, D)])
    assert run.values(D) == run.values(H) == [3.0, 4.0, 5.0]
    assert run.store.ledger.moved["H>D"] == CHUNKS * SLOT_BYTES


def test_what_could_not_come_is_not_updated_and_stays_wanted(run: RunOnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = run.store.units.arenas[H]
    copying = arena.copying

    def fails() -> None:
        raise DeviceError("the link is gone")

    def broken(first: int, n: int, source: Arena, source_first: int) -> Callable[[], None]:
        return fails if source_first == run.store.units._at[D][GRADS[1]] else copying(first, n, source, source_first)

    monkeypatch.setattr(arena, "copying", broken)
    run.begin()
    with pytest.raises(
        DeviceError, match=r"the link is gone\n  this was c1.grad on its way from the device to the host"
    ):
        run.end()
    monkeypatch.undo()
    state = run.store.state
    assert sorted(run.updated) == [0, 2]
    assert not state.updates
    assert not state.in_flight
    assert [state.is_free(ref) for ref in GRADS] == [True, False, True]
    assert state.newest[GRADS[1]] == {D}
    run.store.carry_out([Issue.copy(GRADS[1], D, H), Issue.update(1, H)], update_work=run.work)
    run.store.forget(GRADS[1])
    run.store.carry_out([Wait(Work.update(1, H))])
    assert run.values(H) == [3.0, 4.0, 5.0]
