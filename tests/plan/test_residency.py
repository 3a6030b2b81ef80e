"""The one rule by which residency changes: what `apply` allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.formats import FP32, Formats, PlaneFormat
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import WEIGHT, PlaneRef
from patrickstar.core.trace import Moment, Phase, Touch, Trace
from patrickstar.plan.actions import Action, Drop, Issue, Wait, is_copy
from patrickstar.plan.check import check
from patrickstar.plan.plan import Condition, Plan
from patrickstar.plan.residency import (
    InvariantError,
    apply,
    bytes_of_slot,
    give_up,
    mark_free,
    mark_written,
    release,
    slots_of,
)
from tests.plan import texts
from tests.plan.builders import PLENTY, Instance, few, instances, layout_of, state_of
from tests.plan.texts import unit, units


def test_writing_makes_a_clean_copy_dirty() -> None:
    state = state_of("c0.weight clean, c1.weight here")
    mark_written(state, unit("c0.weight"))
    mark_written(state, unit("c1.weight"))
    assert list(map(state.snapshot().condition, units("c0.weight c1.weight"))) == [Condition.DIRTY, Condition.HERE]


@pytest.mark.parametrize("condition", ["away", "free", "void"])
def test_what_has_no_contents_here_cannot_be_written(condition: str) -> None:
    with pytest.raises(InvariantError, match=r"^\(1\)"):
        mark_written(state_of(f"c0.weight {condition}"), unit("c0.weight"))


@pytest.mark.parametrize("condition", ["clean", "dirty", "here"])
def test_release_gives_the_slots_back_without_a_transfer(condition: str) -> None:
    state = state_of(f"c0.grad {condition}")
    actions = release(state, unit("c0.grad"))
    assert list(map(str, actions)) == ["c0.grad H!"]
    apply(state, actions[0])
    assert state == state_of("c0.grad free", home=state.home[unit("c0.grad")])


@pytest.mark.parametrize("condition", ["away", "free"])
def test_release_of_what_has_no_slots_takes_no_action(condition: str) -> None:
    state = state_of(f"c0.grad {condition}")
    assert release(state, unit("c0.grad")) == []
    assert state == state_of("c0.grad free")


def test_a_transfer_pins_what_it_reads() -> None:
    state = state_of("c0.weight dirty")
    apply(state, texts.action("c0.weight H>K"))
    for touch in (mark_written, mark_free):
        with pytest.raises(InvariantError, match=r"^\(5\)"):
            touch(state, unit("c0.weight"))


@pytest.mark.parametrize(
    ("condition", "tier", "after"),
    [
        ("clean,clean", Tier.DEVICE, "dirty,stale"),
        ("clean,dirty", Tier.HOST, "stale,dirty"),
        ("away,clean", Tier.HOST, "away,dirty"),
        ("clean", Tier.DEVICE, "dirty"),
    ],
)
def test_writing_on_one_tier_leaves_nothing_current_on_another(condition: str, tier: Tier, after: str) -> None:
    state = state_of(f"c0.weight {condition}", compute=Tier.DEVICE)
    mark_written(state, unit("c0.weight"), tier)
    assert str(state.snapshot()).split()[-2] == after


@pytest.mark.parametrize("action", ["c0.weight K>H", "c0.weight H>D"])
def test_a_transfer_that_failed_leaves_what_was_there(action: str) -> None:
    state = state_of("c0.weight away" if "K" in action else "c0.weight away,dirty", compute=Tier.DEVICE)
    before = state.copy()
    apply(state, texts.action(action))
    give_up(state, unit("c0.weight"))
    assert state == before


@pytest.mark.parametrize(
    ("state", "action", "number"),
    [
        ("c0.weight dirty", "c0.weight H!", 4),  # the only valid copy
        ("c0.weight here", "c0.weight H!", 4),  # its home
        ("c0.weight away", "c0.weight H!", 2),  # no slots to give back
        ("c0.weight away", "c0.weight K!", 4),  # its home
        ("c0.weight free", "c0.weight K>H", 4),  # nothing to fetch
        ("c0.weight void", "c0.weight H>K", 4),  # nothing to write back
        ("c0.weight clean", "c0.weight K>H", 5),  # its slots are taken
        ("c0.weight clean", "c0.weight H?", 5),  # never issued
        ("c0.weight clean", "c0.weight 0>H", 4),  # has contents
        ("c0.weight void", "c0.weight 0>H", 5),  # its slots are taken
        ("c0.weight free", "c0.weight 0>K", 9),  # made where it is used
        ("c0.weight here", "c0.weight H>K", 9),  # rests here
        ("c0.weight clean", "c0.weight H>D", 9),  # no such tier on its way
        ("c0.weight clean", "c0.weight H! x2", 7),  # takes one slot
        ("c0.weight clean", "c1.weight H!", 9),  # no such unit
    ],
)
def test_an_illegal_action_is_refused_by_number_and_changes_nothing(state: str, action: str, number: int) -> None:
    now = state_of(state)
    with pytest.raises(InvariantError, match=rf"^\({number}\) {action[:9]}"):
        apply(now, texts.action(action))
    assert now == state_of(state)


def test_a_wider_plane_takes_several_slots() -> None:
    layout = layout_of(1, 3)
    planes = {**FP32.planes, WEIGHT: PlaneFormat("bfloat16", 2)}
    formats = Formats(planes=planes)
    assert bytes_of_slot(layout, formats) == 32
    assert [slots_of(ref, layout, formats) for ref in units("c0.weight c1.weight c2.exp_avg")] == [1, 3, 2]


def candidates(ref: PlaneRef, slots: int) -> list[Action]:
    """Every action there is for a unit."""
    copies = [Issue.copy(ref, src, dst, slots) for src in Tier for dst in Tier]
    others = [(Wait.copy(ref, tier), Drop(ref, tier, slots), Issue.create(ref, tier, slots)) for tier in Tier]
    return [*copies, *(action for actions in others for action in actions)]


@few
@given(instance=instances(), data=st.data())
def test_apply_allows_exactly_what_the_replay_of_versions_finds_nothing_wrong_with(
    instance: Instance, data: st.DataObject
) -> None:
    # One action, and perhaps a write, per moment: what `check` finds at moments is about actions, at the end about
    # what is left in flight.
    state = instance.start.copy()
    taken: list[tuple[Action, ...]] = []
    moments: list[Moment] = []

    def violations(action: Action) -> list[str]:
        snapshot = instance.start.snapshot()
        plan = Plan(instance.layout.digest(), "any", machine, snapshot, (*taken, (action,)), snapshot)
        trace = Trace((*moments, Moment(Phase.FORWARD, "", ())))
        return [text for text in check(plan, trace, instance.layout, machine) if "the end" not in text]

    machine = Machine(state.compute, {**instance.machine.budget, state.compute: PLENTY})
    for _ in range(8):
        ref = data.draw(st.sampled_from(sorted(state.home)))
        verdicts = {}
        for action in candidates(ref, state.slots[ref]):
            after = state.copy()
            try:
                apply(after, action)
            except InvariantError:
                assert after == state
                # Two lanes may read the same bytes at once; here each unit has one transfer at a time.
                busy = is_copy(action) and ref in state.in_flight
                assert busy or violations(action), f"{action} is refused"
            else:
                assert violations(action) == [], f"{action} is allowed"
                verdicts[action] = after
        if verdicts:
            action = data.draw(st.sampled_from(list(verdicts)))
            state = verdicts[action]
            taken.append((action,))
            places = [(ref, tier) for ref, tiers in state.newest.items() for tier in tiers if tier is not Tier.DISK]
            places = sorted(place for place in places if place[0] not in state.in_flight)
            touches = [
                Touch(ref, True, None if tier is state.compute else tier)
                for ref, tier in (data.draw(st.lists(st.sampled_from(places), max_size=1)) if places else [])
            ]
            moments.append(Moment(Phase.FORWARD, "", tuple(touches)))
            for touch in touches:
                mark_written(state, touch.ref, touch.tier)


UPDATED = "c0.weight dirty, c0.exp_avg clean, c0.exp_avg_sq clean, c0.grad clean"


def updating(text: str = UPDATED):  # type: ignore[no-untyped-def]
    state = state_of(text)
    apply(state, texts.action("c0 step@H"))
    return state


def test_an_update_writes_all_but_the_gradient_and_pins_all_until_its_wait() -> None:
    state = updating()
    assert [state.is_dirty(unit(text), Tier.HOST) for text in UPDATED.split()[::2]] == [True, True, True, False]
    apply(state, texts.action("c0.weight H>K"))  # it comes after the update
    apply(state, texts.action("c0 step@H?"))
    apply(state, texts.action("c0.weight K?"))
    apply(state, texts.action("c0.grad H!"))
    assert not state.updates
    assert not state.under_way
    assert state.snapshot().newest[unit("c0.weight")] == {Tier.HOST, Tier.DISK}


@pytest.mark.parametrize(
    ("state", "action", "number"),
    [
        (UPDATED, "c0 step@H?", 10),  # none has begun
        (UPDATED.replace("weight dirty", "weight away"), "c0 step@H", 1),
        (UPDATED.replace("exp_avg clean", "exp_avg stale"), "c0 step@H", 1),
        (UPDATED.replace("weight dirty", "weight clean:H>K"), "c0 step@H", 5),
        ("c0.grad clean", "c0 step@H", 9),
    ],
)
def test_an_update_that_cannot_begin_is_refused(state: str, action: str, number: int) -> None:
    now = state_of(state)
    with pytest.raises(InvariantError, match=rf"^\({number}\)"):
        apply(now, texts.action(action))
    assert now == state_of(state)


@pytest.mark.parametrize("action", ["c0 step@H", "c0 step@D?", "c0.weight H!", "c0.grad H!", "c0.exp_avg H!"])
def test_what_an_update_uses_stays_until_its_wait(action: str) -> None:
    now = updating()
    with pytest.raises(InvariantError, match=r"^\(10\)"):
        apply(now, texts.action(action))
    assert now == updating()


def test_a_transfer_of_what_is_updated_lands_after_the_update() -> None:
    state = updating()
    apply(state, texts.action("c0.weight H>K"))
    with pytest.raises(InvariantError, match=r"^\(10\)"):
        apply(state, texts.action("c0.weight K?"))


def test_the_weight_of_a_run_may_have_several_updates_on_one_tier() -> None:
    text = "c0.weight dirty, c0.exp_avg clean, c0.exp_avg_sq clean, c1.exp_avg clean, c1.exp_avg_sq clean"
    state = state_of(text, slots={"c0.weight": 2})
    apply(state, texts.action("c0 step@H"))
    apply(state, texts.action("c1 step@H"))
    with pytest.raises(InvariantError, match=r"^\(10\) c1 step@H: c. step@. uses c0.weight"):
        apply(state, texts.action("c1 step@H"))
    apply(state, texts.action("c0 step@H?"))
    apply(state, Issue.copy(unit("c0.weight"), Tier.HOST, Tier.DISK, 2))
    with pytest.raises(InvariantError, match=r"^\(10\) c0.weight K\?: c. step@H comes before it"):
        apply(state, texts.action("c0.weight K?"))
    apply(state, texts.action("c1 step@H?"))
    apply(state, texts.action("c0.weight K?"))
    assert not state.under_way


def test_the_weight_of_a_run_is_not_updated_on_two_tiers_at_once() -> None:
    text = "c0.weight clean, c0.exp_avg clean, c0.exp_avg_sq clean, c1.exp_avg clean, c1.exp_avg_sq clean"
    state = state_of(text, slots={"c0.weight": 2}, compute=Tier.DEVICE, home=Tier.HOST)
    apply(state, texts.action("c0 step@D"))
    with pytest.raises(InvariantError, match=r"^\(10\) c1 step@H: c. step@. uses c0.weight"):
        apply(state, texts.action("c1 step@H"))


def test_a_gradient_may_be_on_its_way_to_its_update_which_is_its_wait() -> None:
    text = "c0.weight away, c0.exp_avg away, c0.exp_avg_sq away, c0.grad dirty"
    state = state_of(text, compute=Tier.DEVICE, home=Tier.HOST)
    with pytest.raises(InvariantError, match=r"^\(1\) c0 step@H: the host does not hold the last contents of c0.grad"):
        apply(state, texts.action("c0 step@H"))
    apply(state, texts.action("c0.grad D>H"))
    apply(state, texts.action("c0 step@H"))
    mark_free(state, unit("c0.grad"))
    assert not state.is_free(unit("c0.grad"))
    with pytest.raises(InvariantError, match=r"^\(5\) c0.grad D!: c0.grad D>H still uses what is there"):
        apply(state, texts.action("c0.grad D!"))
    apply(state, texts.action("c0 step@H?"))
    assert state.is_free(unit("c0.grad"))
    assert not state.in_flight
    apply(state, texts.action("c0.grad D!"))


@pytest.mark.parametrize("waits", [("c0 step@H?",), ("c0.grad H?", "c0 step@H?")])
def test_a_gradient_that_is_wanted_is_where_its_update_was(waits: tuple[str, ...]) -> None:
    text = "c0.weight away, c0.exp_avg away, c0.exp_avg_sq away, c0.grad dirty"
    state = state_of(text, compute=Tier.DEVICE, home=Tier.HOST)
    for action in ("c0.grad D>H", "c0 step@H", *waits):
        apply(state, texts.action(action))
    assert not state.under_way
    assert state.newest[unit("c0.grad")] == {Tier.DEVICE, Tier.HOST}


def test_what_an_update_on_the_host_uses_is_not_written_over() -> None:
    text = "c0.weight away, c0.exp_avg away, c0.exp_avg_sq away, c0.grad clean"
    state = state_of(text, compute=Tier.DEVICE, home=Tier.HOST)
    apply(state, texts.action("c0 step@H"))
    with pytest.raises(InvariantError, match=r"^\(10\) c0.grad D>H: c0 step@H still uses what is there"):
        apply(state, texts.action("c0.grad D>H"))
    apply(state, texts.action("c0.grad D!"))  # the host alone has what the update uses
    mark_free(state, unit("c0.grad"))
    with pytest.raises(InvariantError, match=r"^\(4\) c0.grad 0>D: it has contents"):
        apply(state, texts.action("c0.grad 0>D"))
