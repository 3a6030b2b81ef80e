"""The order in which units leave, exactly: it is a contract between ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.machine import Tier
from patrickstar.core.trace import Trace
from patrickstar.plan.actions import Drop
from patrickstar.plan.eviction import NEVER, POLICIES, Ranking, Uses, eviction_order
from patrickstar.plan.residency import apply, mark_written
from tests.plan.builders import Instance, few, instances, state_of, trace_of
from tests.plan.texts import unit, units

TRACE = trace_of("c0.weight", "c1.weight", "c2.weight", "c1.weight", "c0.weight")


def order(policy: str, state: str, now: int, trace: Trace = TRACE, following: Trace | None = None) -> list[str]:
    residency = state_of(state)
    worth = POLICIES[policy](Uses(trace, following))
    return list(
        map(str, eviction_order(residency.taken[Tier.HOST], state=residency, tier=Tier.HOST, worth=worth, now=now))
    )


def test_next_use_gives_up_what_is_used_furthest_away() -> None:
    assert order("next-use", "c0.weight clean, c1.weight clean, c2.weight clean", now=1) == [
        "c0.weight", "c1.weight", "c2.weight",
    ]  # fmt: skip


def test_next_use_gives_up_first_what_is_never_used_again() -> None:
    assert order("next-use", "c0.weight clean, c9.weight dirty", now=1) == ["c9.weight", "c0.weight"]


def test_lru_gives_up_what_was_used_longest_ago() -> None:
    assert order("lru", "c0.weight clean, c1.weight clean, c2.weight clean", now=3) == [
        "c0.weight", "c2.weight", "c1.weight",
    ]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
def test_ties_go_clean_before_dirty_and_then_by_id(policy: str) -> None:
    together = trace_of("c0.weight c1.weight c2.weight c3.weight", "c9.weight")
    state = "c3.weight clean, c2.weight dirty, c1.weight clean, c0.weight dirty"
    assert order(policy, state, now=1, trace=together) == ["c1.weight", "c3.weight", "c0.weight", "c2.weight"]


@few
@given(instance=instances())
def test_uses_are_those_of_the_traces_written_one_after_another(instance: Instance) -> None:
    follower = instance.following or instance.trace
    touched = [{t.ref for t in moment.touches} for moment in (instance.trace.moments + follower.moments) * 3]
    period = len(touched) // 3
    uses = Uses(instance.trace, instance.following)
    for ref in instance.start.home:
        for now in range(-1, len(instance.trace)):
            after = (at for at in range(period + now + 1, 3 * period) if ref in touched[at])
            until = (at for at in range(period + now, -1, -1) if ref in touched[at])
            assert uses.after(ref, now) == next(after, NEVER + period) - period
            assert uses.until(ref, now) == next(until, period - NEVER) - period


@few
@given(instance=instances(), policy=st.sampled_from(sorted(POLICIES)), data=st.data())
def test_a_ranking_keeps_up_the_order_as_units_are_used(instance: Instance, policy: str, data: st.DataObject) -> None:
    state = instance.start.copy()
    worth = POLICIES[policy](Uses(instance.trace, instance.following))
    ranking = Ranking(state, worth=worth)
    for now, moment in enumerate(instance.trace.moments):
        for touch in moment.touches:
            if state.in_flight or not state.is_newest(touch.ref, state.compute):
                continue
            if touch.writes:
                mark_written(state, touch.ref)
            ranking.used(now, [touch.ref])
        for tier, taken in state.taken.items():
            evictable = [ref for ref in taken if state.home[ref] is not tier and ref not in state.stale[tier]]
            touched = {ref for ref in evictable if any(ref == touch.ref for touch in moment.touches)}
            want = eviction_order(evictable, state=state, tier=tier, worth=worth, now=now)
            if all(state.is_newest(ref, state.compute) or ref not in touched for ref in evictable):
                assert list(ranking(tier, ())) == want
            gone = [ref for ref in want if not state.is_dirty(ref, tier)]
            if gone and data.draw(st.booleans()):
                ref = data.draw(st.sampled_from(gone))
                apply(state, Drop(ref, tier, state.slots[ref]))
                ranking.used(now, (), [ref])


def test_from_the_host_below_a_device_goes_first_what_saves_nothing_there() -> None:
    text = "c0.weight away,clean, c1.weight clean,clean, c2.weight clean,dirty, c3.weight away,dirty"
    state = state_of(text, compute=Tier.DEVICE)
    ranking = Ranking(state, worth=lambda _ref, _now: 0)
    assert list(ranking(Tier.HOST, ())) == units("c1.weight c0.weight c2.weight c3.weight")
    apply(state, Drop(unit("c1.weight"), Tier.DEVICE))
    ranking.used(0, (), units("c1.weight"))
    assert list(ranking(Tier.HOST, ())) == units("c0.weight c1.weight c2.weight c3.weight")


def test_a_copy_that_is_written_elsewhere_before_its_next_use_is_worth_nothing() -> None:
    uses = Uses(trace_of("c0.weight c1.weight", "c0.weight@H*", "c0.weight", "c1.weight"))
    assert [uses.after(unit("c0.weight"), now) for now in range(-1, 4)] == [0, NEVER, 2, 4, 4]
    assert [uses.after(unit("c1.weight"), now) for now in range(-1, 4)] == [0, 3, 3, 3, 4]
    follower = trace_of("c0.weight@H*", "c0.weight", "c1.weight@H")
    uses = Uses(trace_of("c0.weight c1.weight", "c1.weight"), follower)
    assert uses.after(unit("c0.weight"), 0) == NEVER
    assert uses.after(unit("c1.weight"), 1) == 5
    assert Uses(trace_of("c0.weight@H*", "c0.weight"), trace_of("c1.weight")).after(unit("c0.weight"), 1) == NEVER


def test_of_what_will_be_written_elsewhere_or_goes_down_what_was_used_longest_ago_goes_first() -> None:
    trace = trace_of("c0.weight@H* c1.weight@H*", "c2.weight", "c0.weight", "c3.grad*", "c1.weight", "c2.weight")
    worth = POLICIES["next-use"](Uses(trace, goes_down=[unit("c3.grad")]))
    last = {"c0.weight": 2, "c3.grad": 3, "c1.weight": 4, "c2.weight": 5}
    assert sorted(last, key=lambda text: worth(unit(text), last[text])) == [
        "c0.weight",
        "c3.grad",
        "c1.weight",
        "c2.weight",
    ]
    assert worth(unit("c3.grad"), 0) == -3
