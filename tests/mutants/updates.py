"""Faults of updates that are done between the moments of a forward: late, twice, never, or with the numbers of another step."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["UPDATES"]

PENDING = "tests/session/test_pending_steps.py"
WEAVE = "tests/plan/test_weave.py"
STORE = "tests/memory/test_store.py"
RESIDENCY = "tests/plan/test_residency.py"
LANES = "tests/session/test_lanes.py"
HOST = "tests/session/test_host_updates.py"
RUN = "tests/memory/test_updates_of_a_run.py"
ON_THEIR_WAY = "tests/session/test_gradients_on_their_way.py"

UPDATES: tuple[Mutant, ...] = (
    Mutant(
        name="a-chunk-is-updated-again-by-whoever-asks-again",
        file="step/pending_step.py",
        old="            if self.waiting.pop(chunk, None) is None:\n                return False\n",
        new="            if self.waiting.get(chunk) is None:\n                return False\n",
        tests=(f"{PENDING}::test_updates_are_part_of_the_next_forward_in_the_order_in_which_it_needs_them",),
    ),
    Mutant(
        name="what-the-forward-does-not-need-is-not-updated",
        file="plan/weave.py",
        old="    in_order = sorted(updates.moments, key=",
        new="    in_order = sorted((one for one in updates.moments if any(touch.ref in first_use for touch in one.touches)), key=",
        tests=(f"{WEAVE}::test_what_the_forward_does_not_need_comes_before_its_last_moment",),
    ),
    Mutant(
        name="an-update-comes-after-the-first-use",
        file="plan/weave.py",
        old="        woven += [*before.get(index, ()), moment]",
        new="        woven += [moment, *before.get(index, ())]",
        tests=(f"{WEAVE}::test_each_update_is_there_once_before_it_is_needed_and_takes_no_more_room_than_before",),
    ),
    Mutant(
        name="an-update-takes-room-that-activations-need-later",
        file="plan/weave.py",
        old="if own + alive <= room else 0",
        new="if True else 0",
        tests=(f"{PENDING}::test_where_an_update_fits_before_the_forward_alone_it_comes_there",),
    ),
    Mutant(
        name="a-gradient-arrives-before-the-last-one-is-used",
        file="plan/weave.py",
        old="return touch.writes or touch.ref.plane != GRAD",
        new="return touch.ref.plane != GRAD",
        tests=(f"{WEAVE}::test_a_gradient_that_is_read_needs_no_update_and_one_that_is_written_does",),
    ),
    Mutant(
        name="a-use-does-not-wait-for-its-chunks-update",
        file="plan/overlap.py",
        old="                self._needed[touch.ref] = index\n",
        new="                pass\n",
        tests=(f"{WEAVE}::test_a_unit_that_is_used_is_updated_by_then",),
    ),
    Mutant(
        name="a-held-unit-does-not-wait-for-its-chunks-update",
        file="plan/overlap.py",
        old="        self._needed.update((ref, index) for ref in moment.held)\n",
        new="        pass\n",
        tests=(f"{WEAVE}::test_a_unit_that_is_held_is_updated_by_then",),
    ),
    Mutant(
        name="it-is-legal-to-take-the-slots-of-an-update",
        file="plan/residency.py",
        old="    if _is_updated_on(state, ref, tier):",
        new="    if False:",
        tests=(f"{RESIDENCY}::test_what_an_update_uses_stays_until_its_wait",),
    ),
    Mutant(
        name="a-wait-for-an-update-that-is-left-out-is-not-noticed",
        file="plan/check.py",
        old="    updates.end((len(trace), 0))\n",
        new="",
        tests=(f"{WEAVE}::test_an_update_that_nobody_waits_for_is_noticed_at_the_end",),
    ),
    Mutant(
        name="a-unit-leaves-before-its-update-is-over",
        file="memory/store.py",
        old="        updates = [self._updates[chunk] for chunk in chunks if chunk in self._updates]\n",
        new="        updates = []\n",
        tests=(f"{STORE}::test_a_transfer_of_what_an_update_writes_comes_after_it",),
    ),
    Mutant(
        name="bytes-are-given-out-while-they-are-updated",
        file="memory/store.py",
        old="        if ref in self.state.in_update:\n            raise InvariantError(\n                10",
        new="        if False:\n            raise InvariantError(\n                10",
        tests=(f"{STORE}::test_nobody_gets_the_bytes_that_an_update_writes_before_its_wait",),
    ),
    Mutant(
        name="an-interrupted-update-is-not-waited-for",
        file="memory/store.py",
        old="            try:\n                self._wait_for_update(chunk)\n",
        new="            try:\n                pass\n",
        tests=(f"{PENDING}::test_an_update_that_is_under_way_ends_whole_when_the_user_interrupts",),
    ),
    Mutant(
        name="a-clip-factor-of-the-step-before",
        file="step/training.py",
        old="{name: self._gradients.factors[name] for name in names if name in self._gradients.factors},",
        new="self.__dict__.setdefault('_kept', []).append(dict(self._gradients.factors))\n"
        "            or self._kept[max(0, len(self._kept) - 2)],",
        tests=(f"{PENDING}::test_a_step_that_clips_has_its_own_factor_and_the_next_one_another",),
    ),
    Mutant(
        name="gradients-that-are-let-go-of-take-their-update-along",
        file="step/executor.py",
        old="            if self.pending is not None and self.pending.reads(ref):",
        new="            if False:",
        tests=(f"{PENDING}::test_gradients_that_are_let_go_of_are_not_written_back_and_others_stay",),
    ),
    Mutant(
        name="an-update-in-a-forward-is-a-change-of-what-that-has-saved",
        file="step/update.py",
        old="        if not order.is_woven:\n",
        new="        if True:\n",
        tests=(f"{PENDING}::test_updates_are_part_of_the_next_forward_in_the_order_in_which_it_needs_them[emulated]",),
    ),
    Mutant(
        name="what-departs-forgets-the-updates-that-are-left",
        file="step/executor.py",
        old="        for moment in pending.due(touches):\n            if moment",
        new="        for moment in []:\n            if moment",
        tests=(f"{PENDING}::test_a_forward_that_goes_another_way_has_what_it_needs_updated",),
    ),
    Mutant(
        name="copies-that-somebody-holds-are-not-renewed",
        file="session/assemble.py",
        old="not events.watches and all(isinstance(key, PlaneRef) for key in store.leases.living())",
        new="True",
        tests=(f"{PENDING}::test_what_somebody_holds_of_a_parameter_changes_no_step",),
    ),
    Mutant(
        name="what-is-updated-on-the-host-leaves-whoever-holds-it",
        file="step/executor.py",
        old="if tier is not self._compute and any(touch.ref in held for touch in touches):",
        new="if False:",
        tests=(f"{HOST}::test_a_weight_that_somebody_holds_is_updated_where_it_is_held",),
    ),
    Mutant(
        name="what-finds-no-room-on-the-host-is-updated-there",
        file="plan/update_choice.py",
        old="    return passing <= capacity_of(",
        new="    return True or passing <= capacity_of(",
        tests=(f"{HOST}::test_the_rule_gives_the_device_what_finds_room_and_the_host_what_it_can_do",),
    ),
    Mutant(
        name="states-that-find-room-on-the-device-are-counted-once-for-all",
        file="plan/update_choice.py",
        old="            room -= states\n",
        new="            pass\n",
        tests=(f"{HOST}::test_the_rule_gives_the_device_what_finds_room_and_the_host_what_it_can_do",),
    ),
    Mutant(
        name="a-gradient-goes-down-before-it-is-complete",
        file="plan/overlap.py",
        old="min(self._not_pinned(ref, max(index - self._ahead, self._written.get(ref, -1) + 1, 0)), index)",
        new="min(self._not_pinned(ref, max(index - self._ahead, 0)), index)",
        tests=(
            "tests/plan/test_overlap.py::test_so_do_those_of_plans_that_use_units_on_the_host",
            f"{WEAVE}::test_a_gradient_goes_down_early_and_not_before_it_is_complete",
        ),
    ),
    Mutant(
        name="a-new-gradient-comes-home-while-the-last-one-is-used-there",
        file="plan/residency.py",
        old="    if _is_updated_on(state, ref, dst):",
        new="    if False:",
        tests=(f"{RESIDENCY}::test_what_an_update_on_the_host_uses_is_not_written_over",),
    ),
    Mutant(
        name="an-update-is-made-in-the-callers-mode",
        file="step/update.py",
        old="        with self._executor.quiet():  # an evaluation",
        new="        if True:  # an evaluation",
        tests=(f"{PENDING}::test_an_evaluation_in_inference_mode_finds_the_model_updated",),
    ),
    Mutant(
        name="an-update-leaves-no-room-for-what-kernels-keep",
        file="plan/weave.py",
        old="kept = max(0, min(kept_bytes, room - own))",
        new="kept = 0",
        tests=(f"{WEAVE}::test_before_the_first_moment_there_is_what_kernels_keep_as_far_as_there_is_room",),
    ),
    Mutant(
        name="a-forward-that-was-interrupted-is-still-under-way",
        file="step/events.py",
        old="if self._depth and not _is_running(self._caller):",
        new="if False:",
        tests=(f"{LANES}::test_after_an_interruption_steps_are_planned_again",),
    ),
    Mutant(
        name="an-update-does-not-wait-for-its-gradient",
        file="memory/store.py",
        old="self._links.lane(action.tier, None).issue(work, before)",
        new="self._links.lane(action.tier, None).issue(work)",
        tests=(f"{RUN}::test_an_update_comes_after_its_gradients_way_there_which_its_wait_ends",),
    ),
    Mutant(
        name="a-chunk-of-a-run-comes-up-before-its-update",
        file="memory/store.py",
        old="update = self._updates.get(ref.chunk + number)",
        new="update = self._updates.get(ref.chunk)",
        tests=(f"{RUN}::test_the_weight_comes_up_chunk_by_chunk_each_after_its_own_update",),
    ),
    Mutant(
        name="a-gradient-is-let-go-of-though-its-update-could-not-be-done",
        file="memory/store.py",
        old="                self.state.unwanted.difference_update(residency.units_of_update(self.state, chunk))\n",
        new="                pass\n",
        tests=(f"{RUN}::test_what_could_not_come_is_not_updated_and_stays_wanted",),
    ),
    Mutant(
        name="a-gradient-is-free-while-an-update-reads-it",
        file="plan/residency.py",
        old="    if ref in state.in_update:\n        state.unwanted.add(ref)\n        return\n",
        new="",
        tests=(f"{RESIDENCY}::test_a_gradient_may_be_on_its_way_to_its_update_which_is_its_wait",),
    ),
    Mutant(
        name="an-update-may-begin-before-its-gradient-is-on-its-way",
        file="plan/residency.py",
        old="(state.is_free(ref) or _is_arriving(state, ref, tier))",
        new="True",
        tests=(f"{RESIDENCY}::test_a_gradient_may_be_on_its_way_to_its_update_which_is_its_wait",),
    ),
    Mutant(
        name="an-updates-wait-is-not-that-of-its-gradient",
        file="plan/residency.py",
        old="    for ref in arriving:\n        _arrive(state, ref)\n",
        new="",
        tests=(f"{RESIDENCY}::test_a_gradient_that_is_wanted_is_where_its_update_was",),
    ),
    Mutant(
        name="older-contents-of-a-gradient-on-their-way-are-not-noticed",
        file="plan/check.py",
        old="            if self._under_way[tier][1] != self._writer:",
        new="            if False:",
        tests=(f"{WEAVE}::test_a_gradient_on_its_way_has_the_last_contents",),
    ),
    Mutant(
        name="what-departs-decides-as-if-no-update-were-under-way",
        file="plan/pilot.py",
        old="            for wait in waits:\n                apply(state, wait)\n",
        new="",
        tests=(f"{PENDING}::test_a_forward_that_goes_another_way_has_what_it_needs_updated[cpu+disk]",),
    ),
    Mutant(
        name="slots-of-a-gradient-stay-where-there-are-not-enough",
        file="plan/overlap.py",
        old="if at == index or self._free.enough_from(slots, index, at) > index:",
        new="if at == index:",
        tests=(f"{WEAVE}::test_slots_of_a_gradient_go_when_its_update_is_over_if_nothing_needs_them_before",),
    ),
    Mutant(
        name="updates-of-a-run-wait-for-each-other",
        file="plan/overlap.py",
        old="                    if tier is not (touch.tier or compute):\n",
        new="                    if True:\n",
        tests=(f"{WEAVE}::test_updates_of_a_run_do_not_wait_for_each_other",),
    ),
    Mutant(
        name="a-gradient-goes-down-before-all-of-it-has-been-added-up",
        file="step/stretches.py",
        old="self._forwards == self._forwards_a_step",
        new="True",
        tests=(f"{ON_THEIR_WAY}::test_a_gradient_goes_down_once_a_step_when_all_of_it_has_been_added_up",),
    ),
    Mutant(
        name="what-is-held-begins-to-go-down",
        file="plan/overlap.py",
        old="at = self._not_pinned(ref, max(len(moments) - self._ahead, self._written.get(ref, -1) + 1, 0))",
        new="at = max(len(moments) - self._ahead, self._written.get(ref, -1) + 1, 0)",
        tests=(f"{WEAVE}::test_what_is_held_until_the_end_does_not_begin_to_go_down",),
    ),
    Mutant(
        name="what-will-be-written-elsewhere-is-kept-for-its-next-use",
        file="plan/eviction.py",
        old="        return used if used < lost else NEVER\n",
        new="        return used if used < NEVER else self._after.get(ref, NEVER)\n",
        tests=(
            "tests/plan/test_eviction.py::test_a_copy_that_is_written_elsewhere_before_its_next_use_is_worth_nothing",
        ),
    ),
    Mutant(
        name="of-what-is-leaving-what-was-used-last-goes-first",
        file="plan/eviction.py",
        old="            return now - NEVER\n",
        new="            return -now - NEVER\n",
        tests=(
            "tests/plan/test_eviction.py::test_of_what_will_be_written_elsewhere_or_goes_down_what_was_used_longest_ago_goes_first",
        ),
    ),
    Mutant(
        name="the-norm-fetches-what-has-gone-down",
        file="step/stretches.py",
        old="here = trace if not self._weaves or on_device else self._where_it_is(trace)",
        new="here = trace",
        tests=(f"{HOST}::test_the_norm_is_read_where_gradients_are_and_fetches_none",),
    ),
)
