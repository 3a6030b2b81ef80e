"""Faults of chunks that a backward updates whole: too early, without room, with gradients that have not come, or never."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["WHOLE_CHUNKS"]

PLAN = "tests/plan/test_whole_chunks.py"
SESSION = "tests/session/test_whole_updates.py"
FORECAST = "tests/session/test_gradient_homes.py"
ON_HOST = "tests/session/test_host_updates.py"

WHOLE_CHUNKS: tuple[Mutant, ...] = (
    Mutant(
        name="what-is-held-on-a-device-is-updated-on-the-host",
        file="plan/whole_chunks.py",
        old="for chunk, update in updates.items() if chunk not in held_later",
        new="for chunk, update in updates.items()",
        tests=(f"{PLAN}::test_what_is_held_after_its_last_gradient_is_updated_where_it_is",),
    ),
    Mutant(
        name="a-host-takes-more-gradients-of-a-backward-than-it-has-room-for",
        file="plan/update_choice.py",
        old="        if room < 0:\n            break\n",
        new="",
        tests=(f"{ON_HOST}::test_a_backward_updates_as_many_chunks_on_the_host_as_that_has_room_for_gradients",),
    ),
    Mutant(
        name="a-place-on-the-host-is-kept-when-its-gradient-is-gone",
        file="memory/store.py",
        old="self.ledger.remove(self.state.home[ref], self.state.unit_bytes(ref))\n        self.state.shrink",
        new="pass\n        self.state.shrink",
        tests=(f"{ON_HOST}::test_a_backward_updates_as_many_chunks_on_the_host_as_that_has_room_for_gradients",),
    ),
    Mutant(
        name="what-waits-for-its-update-has-the-room-of-what-must-be-kept",
        file="step/late_planes.py",
        old="            if self._open:\n",
        new="            if False:\n",
        tests=(f"{FORECAST}::test_a_gradient_that_must_wait_although_its_trace_had_not_shown_it_gets_room",),
    ),
    Mutant(
        name="a-chunk-is-updated-with-its-first-gradient",
        file="plan/whole_chunks.py",
        old="if index == came[chunk][-1]:",
        new="if index == came[chunk][0]:",
        tests=(f"{PLAN}::test_a_chunk_is_updated_after_its_last_gradient",),
    ),
    Mutant(
        name="what-waits-has-no-room-to-be-used-at-any-moment",
        file="plan/whole_chunks.py",
        old="        - max(largest, _passing(moment, state, at_home))\n",
        new="        - _passing(moment, state, at_home)\n",
        tests=(f"{PLAN}::test_a_chunk_without_room_in_between_is_updated_parameter_by_parameter",),
    ),
    Mutant(
        name="gradients-that-wait-take-no-room-of-each-other",
        file="plan/whole_chunks.py",
        old="                    room[index] -= slots[chunk]\n",
        new="                    room[index] -= 0\n",
        tests=(f"{PLAN}::test_gradients_of_two_chunks_that_wait_at_once_need_room_for_both",),
    ),
    Mutant(
        name="a-gradient-goes-before-its-update-has-had-time",
        file="plan/whole_chunks.py",
        old="for end in (last if following is None else following, last):",
        new="for end in (last,):",
        tests=(f"{SESSION}::test_an_update_goes_on_beside_the_backward_until_something_needs_it",),
    ),
    Mutant(
        name="a-chunk-with-a-gradient-that-must-wait-is-updated-whole",
        file="plan/whole_chunks.py",
        old="if chunk not in kept and state.home",
        new="if state.home",
        tests=(f"{PLAN}::test_a_gradient_that_must_wait_or_has_a_home_below_is_left_to_the_other_way",),
    ),
    Mutant(
        name="a-gradient-that-waits-may-be-written-back",
        file="plan/whole_chunks.py",
        old="if chunk not in kept and state.home.get(PlaneRef(chunk, GRAD), state.compute) is state.compute",
        new="if chunk not in kept",
        tests=(f"{PLAN}::test_a_gradient_that_must_wait_or_has_a_home_below_is_left_to_the_other_way",),
    ),
    Mutant(
        name="what-is-held-as-a-gradient-arrives-is-forgotten",
        file="plan/whole_chunks.py",
        old="held = {*moment.held, *(touch.ref for touch in moment.touches if touch.ref in before)}",
        new="held = {*moment.held}",
        tests=(f"{PLAN}::test_what_is_held_when_a_gradient_arrives_is_so_in_its_chunk_too",),
    ),
    Mutant(
        name="gradients-that-have-not-come-are-used-with-the-others",
        file="step/pending_step.py",
        old="return pieces if came is None else [piece for piece in pieces if piece.start in came]",
        new="return pieces",
        tests=(f"{SESSION}::test_a_step_that_is_closed_is_about_what_has_come_alone",),
    ),
    Mutant(
        name="what-has-come-of-a-chunk-is-lost-when-the-plan-is-left",
        file="step/pending_step.py",
        old="        self.waiting.update((chunk, self._moments[chunk]) for chunk in self.arrivals if self._came[chunk])\n",
        new="",
        tests=(f"{SESSION}::test_what_waits_is_used_before_the_first_moment_that_the_plan_did_not_have",),
    ),
    Mutant(
        name="a-step-is-over-before-its-last-gradient-has-come",
        file="step/pending_step.py",
        old="return not self.arrivals and not self.waiting and not self.under_way",
        new="return not self.waiting and not self.under_way",
        tests=(f"{SESSION}::test_a_gradient_that_does_not_come_leaves_its_chunk_to_those_that_have",),
    ),
    Mutant(
        name="what-waits-stays-when-moments-are-decided-on-the-spot",
        file="step/executor.py",
        old="                self._use_what_came()\n                actions = pilot",
        new="                actions = pilot",
        tests=(f"{SESSION}::test_what_waits_is_used_before_the_first_moment_that_the_plan_did_not_have",),
    ),
    Mutant(
        name="what-an-exception-has-left-waiting-is-not-used",
        file="step/executor.py",
        old="            if backward_id() == -1:\n                pending.close()",
        new="            if False:\n                pending.close()",
        tests=(f"{SESSION}::test_a_backward_that_raises_while_a_chunk_waits_for_its_last_gradient",),
    ),
    Mutant(
        name="a-plan-waits-for-an-update-that-somebody-has-waited-for",
        file="step/executor.py",
        old='                self.pilot.stretch.depart("the optimizer\'s updates were waited for at once")\n',
        new="                pass\n",
        tests=(f"{SESSION}::test_whoever_looks_in_the_middle_of_a_backward_changes_no_bit",),
    ),
    Mutant(
        name="a-copy-that-is-held-shows-what-was-before-the-update",
        file="step/whole_updates.py",
        old="if self._is_watched() or self._binding.is_shown(bound.name):",
        new="if self._is_watched():",
        tests=(f"{SESSION}::test_a_copy_that_is_held_while_its_gradient_arrives_shows_the_update",),
    ),
    Mutant(
        name="a-gradient-that-is-kept-goes-with-those-that-are-used",
        file="step/whole_updates.py",
        old="if any(map(self._order.takes, parts)):",
        new="if False:",
        tests=(f"{SESSION}::test_a_parameter_that_leaves_its_group_is_updated_no_more",),
    ),
    Mutant(
        name="a-gradient-that-comes-as-the-plan-is-left-waits-for-ever",
        file="step/whole_updates.py",
        old="            self._executor.pending = order\n            self._executor.update",
        new="            self._executor.update",
        tests=(f"{SESSION}::test_a_plan_that_is_left_because_a_unit_is_held_loses_no_gradient",),
    ),
    Mutant(
        name="what-a-failed-update-has-left-stays-for-ever",
        file="step/whole_updates.py",
        old="            self._executor.release(gradient)\n",
        new="            pass\n",
        tests=(f"{SESSION}::test_a_kernel_that_raises_leaves_weights_of_no_one_step_which_is_said",),
    ),
    Mutant(
        name="gradients-that-waited-keep-homes",
        file="step/stretches.py",
        old="        self._late_planes.close()\n",
        new="",
        tests=(f"{SESSION}::test_chunks_are_updated_whole_in_the_order_in_which_their_last_gradients_come",),
    ),
    Mutant(
        name="a-forecast-knows-of-no-chunk-that-is-updated-whole",
        file="session/forecast.py",
        old="if in_backward and not choice.apart",
        new="if False",
        tests=(f"{FORECAST}::test_a_forecast_has_the_peaks_and_the_moves_of_a_run",),
    ),
)
