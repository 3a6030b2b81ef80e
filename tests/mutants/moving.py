"""Faults of what moves bytes: the store, the pilot at run time, the arena's pages."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MOVING"]

LANES = "tests/session/test_lanes.py::test_no_bit_depends_on_when_works_end"
INTERRUPTED = (
    "tests/session/test_lanes.py::test_a_forward_or_backward_that_is_interrupted_while_it_waits_can_be_done_again"
)
FAULTS = "tests/session/test_faults_caught.py"
NEAR_THE_BOUND = "tests/session/test_host_bound.py::test_near_the_bound"
DISK_TIER = "tests/session/test_disk_tier.py"
TRAINING_ON = f"{DISK_TIER}::test_no_bit_depends_on_the_machine"
# The fifth transfer over the link, and no other.
ONCE = "self._ledger.moved({link!r}) == 4 * self.state.slots[ref] * self._arenas[self._compute].slot_bytes"

MOVING: tuple[Mutant, ...] = (
    Mutant(
        name="pages-that-have-come-count-twice",
        file="step/executor.py",
        old="            arriving = store.arriving_bytes()\n",
        new="            pass\n",
        tests=(f"{NEAR_THE_BOUND}_the_guard_is_told_of_pages_that_are_to_come_and_not_of_those_that_have[True-8192]",),
    ),
    Mutant(
        name="all-pages-of-a-transfer-are-still-to-come",
        file="memory/mapping.py",
        old="    return (len(pages) - sum(pages.raw)) * PAGE_BYTES\n",
        new="    return len(pages) * PAGE_BYTES\n",
        tests=("tests/session/test_flights.py::test_slots_whose_pages_come_with_a_transfer_count_until_it_has_ended",),
    ),
    Mutant(
        name="a-wait-is-dropped",
        file="memory/store.py",
        old="            self._tickets[ref, tier].wait_until_settled()\n        except (",
        new="            pass\n        except (",
        tests=(f"{LANES}[as late as their wait-cpu+disk]",),
    ),
    Mutant(
        name="a-fence-is-ignored",
        file="memory/arena.py",
        old="return [fence for fence in dict.fromkeys(found) if not fence.done]",
        new="return []",
        tests=(f"{LANES}[in a random order-emulated]",),
    ),
    Mutant(
        name="a-unit-is-used-before-its-zeros",
        file="memory/store.py",
        old="            filling.wait()\n",
        new="            pass\n",
        tests=("tests/memory/test_store.py::test_zeros_are_there_when_a_unit_is_used",),
    ),
    Mutant(
        name="a-unit-leaves-before-its-zeros",
        file="memory/store.py",
        old="        return updates if filling is None else [filling, *updates]\n",
        new="        return updates\n",
        tests=("tests/memory/test_store.py::test_a_unit_that_leaves_at_once_leaves_with_its_zeros",),
    ),
    Mutant(
        name="slots-are-given-back-before-their-zeros",
        file="memory/store.py",
        old="fence, arena = self._filling.pop((ref, tier), None), self._arenas[tier]",
        new="self._filling.pop((ref, tier), None); fence, arena = None, self._arenas[tier]",
        tests=("tests/memory/test_store.py::test_slots_that_are_given_back_at_once_have_their_zeros_behind_them",),
    ),
    Mutant(
        name="pages-go-back-before-works-end",
        file="memory/arena.py",
        old="                    self._fences[slot].wait()  # a late write would bring pages back\n",
        new="                    pass\n",
        tests=("tests/memory/test_arena.py::test_pages_go_back_when_the_works_on_them_are_over",),
    ),
    Mutant(
        name="a-unit-on-the-disk-has-the-place-of-another",
        file="memory/disk.py",
        old="            file.end += nbytes\n",
        new="            file.end += ALIGNMENT\n",
        tests=(
            "tests/memory/test_disk.py::test_extents_are_aligned_and_apart_and_files_are_the_owners_one_for_each_plane",
        ),
    ),
    Mutant(
        name="a-fence-is-lost-with-a-wait-that-is-interrupted",
        file="memory/arena.py",
        old="                    self._fences[slot].wait()  # a late write would bring pages back\n",
        new="                    late = self._fences[slot]\n                    self._fences[slot] = DONE\n                    late.wait()\n",
        tests=(
            "tests/memory/test_arena.py::test_a_trim_that_is_interrupted_while_it_waits_leaves_the_work_to_whoever_takes_the_slots",
        ),
    ),
    Mutant(
        name="a-ticket-keeps-the-works-after-it",
        file="memory/lanes.py",
        old="            calls.pop()()\n",
        new="            call()\n",
        tests=("tests/memory/test_lanes.py::test_a_ticket_that_is_kept_keeps_nothing_of_what_comes_after_it",),
    ),
    Mutant(
        name="a-thread-waits-for-nothing",
        file="memory/thread_lane.py",
        old="        when_all_settled(before, lambda: self._start(work, before, end))",
        new="        self._start(work, (), end)",
        tests=("tests/memory/test_lanes.py::test_a_work_begins_when_all_that_it_comes_after_has_ended[thread]",),
    ),
    Mutant(
        name="a-session-ends-before-its-works",
        file="memory/store.py",
        old="        self._links.close()\n",
        new="",
        tests=("tests/session/test_lanes.py::test_close_ends_what_is_under_way",),
    ),
    Mutant(
        name="an-interruption-leaves-transfers-under-way",
        file="memory/store.py",
        old="interruption by the user, of which the next may come while this one is settled\n            self.land_all()\n",
        new="interruption by the user, of which the next may come while this one is settled\n",
        tests=(f"{INTERRUPTED}[0-1-emulated]",),
    ),
    Mutant(
        name="a-ticket-goes-before-its-arrival-is-noted",
        file="memory/store.py",
        old="            residency.apply(self.state, action)\n            if isinstance(action, Wait):",
        new="            if isinstance(action, Wait):\n                self._tickets.pop((action.ref, action.tier), None)\n"
        "            residency.apply(self.state, action)\n            if isinstance(action, Wait):",
        tests=("tests/session/test_lanes.py::test_an_interruption_between_a_wait_and_its_note_is_settled[cpu+disk-1]",),
    ),
    Mutant(
        name="a-forked-child-is-given-the-slots-of-its-parent",
        file="memory/store.py",
        old="if wrap is None or os.getpid() != self._process:",
        new="if wrap is None:",
        tests=(f"{FAULTS}::test_a_forked_child_is_given_no_slot[after its update]",),
    ),
    Mutant(
        name="what-wraps-a-slot-outlives-its-tenant",
        file="memory/store.py",
        old="        if tier is self._compute:\n            self._wrap.pop(ref, None)",
        new="        pass",
        tests=(f"{TRAINING_ON}[emulated-next-use-deferred]",),
    ),
    Mutant(
        name="the-most-that-lay-beside-chunks-is-forgotten",
        file="memory/store.py",
        old="self._most_beside_bytes = max(self._most_beside_bytes, nbytes)",
        new="self._most_beside_bytes = nbytes",
        tests=(
            "tests/session/test_budgets.py::test_activations_that_come_and_go_between_two_moves_are_part_of_the_peak",
        ),
    ),
    Mutant(
        name="a-profile-does-not-show-what-moves",
        file="memory/store.py",
        old="            if is_profiled():",
        new="            if False:",
        tests=("tests/session/test_profile.py::test_every_action_is_shown_by_its_text_where_a_profiler_looks_on",),
    ),
    Mutant(
        name="one-write-back-to-the-host-is-skipped",
        file="memory/store.py",
        old="        work = self._arenas[dst].copying(first, slots, self._arenas[src], self._at[src][ref])\n",
        new="        work = self._arenas[dst].copying(first, slots, self._arenas[src], self._at[src][ref])\n"
        f"        if src is self._compute and {ONCE.format(link='D>H')}:\n            work = lambda: None\n",
        tests=(f"{TRAINING_ON}[emulated-next-use-deferred]",),
    ),
    Mutant(
        name="one-write-back-to-the-disk-is-skipped",
        file="memory/store.py",
        old="return lane.issue(self._pool().writing(ref, from_), self._before_reading(ref, src), nbytes=nbytes)",
        new=f"return lane.issue((lambda: None) if {ONCE.format(link='H>K')} else self._pool().writing(ref, from_), "
        "self._before_reading(ref, src), nbytes=nbytes)",
        tests=(f"{TRAINING_ON}[cpu+disk-next-use-deferred]",),
    ),
    Mutant(
        name="first-contents-are-what-the-slot-held-before",
        file="memory/store.py",
        old="                self._fill(ref, tier, slots)\n",
        new="",
        tests=(f"{TRAINING_ON}[cpu+disk-next-use-deferred]",),
    ),
    Mutant(
        name="what-a-moment-writes-is-not-marked",
        file="step/executor.py",
        old="if touch.writes:",
        new="if False:",
        tests=("tests/session/test_gradients.py::test_a_gradient_that_was_read_goes_on_accumulating",),
    ),
    Mutant(
        name="a-failed-transfer-is-not-undone",
        file="memory/store.py",
        old="            self._give_up(Wait(ref, tier))\n            return False\n",
        new="            return False\n",
        tests=(f"{DISK_TIER}::test_a_forward_or_backward_whose_transfer_failed_can_be_done_again[pwritev-ENOSPC]",),
    ),
    Mutant(
        name="the-budget-is-off-by-one-slot-where-there-is-no-plan",
        file="plan/pilot.py",
        old="self.capacity_slots = (budget - withheld) // slot_bytes",
        new="self.capacity_slots = (budget - withheld) // slot_bytes + 1",
        tests=("tests/session/test_budgets.py::test_the_budget_is_never_exceeded_on_the_emulated_device",),
    ),
    Mutant(
        name="pages-of-free-slots-stay-while-others-are-taken",
        file="memory/store.py",
        old="        limit = self.limit_slots if tier is self._compute else None\n",
        new="        limit = None\n",
        tests=(f"{FAULTS}::test_no_more_slots_hold_pages_than_the_budget_has_room_for",),
    ),
    Mutant(
        name="pages-of-slots-that-activations-need-stay",
        file="step/executor.py",
        old="                store.trim()\n            store.hold_beside(now)",
        new="                pass\n            store.hold_beside(now)",
        tests=(f"{FAULTS}::test_no_more_slots_hold_pages_than_the_budget_has_room_for",),
    ),
    Mutant(
        name="trimmed-pages-are-not-given-back",
        file="memory/arena.py",
        old="if self._space.discard(start * self.slot_bytes, length * self.slot_bytes):",
        new="if False:",
        tests=("tests/memory/test_arena.py::test_trim_gives_the_pages_of_free_slots_back_at_once",),
    ),
    Mutant(
        name="a-short-transfer-is-taken-for-a-whole-one",
        file="memory/fileio.py",
        old="while done < nbytes:",
        new="while not done:",
        tests=("tests/memory/test_disk.py::test_interrupted_and_short_transfers_are_continued",),
    ),
    Mutant(
        name="a-change-comes-while-a-transfer-reads",
        file="step/executor.py",
        old='            self._land(ref, "was changed")\n',
        new="",
        tests=(
            "tests/session/test_hand_changes.py::test_the_error_for_changed_weights_is_a_state_error_that_says_what_to_do",
        ),
    ),
    Mutant(
        name="a-forked-child-waits-for-its-parents-transfers",
        file="memory/store.py",
        old="            self._arenas[self._compute].expect_open()",
        new="            pass",
        tests=("tests/session/test_flights.py::test_a_forked_child_does_not_wait_for_its_parents_transfers",),
    ),
    Mutant(
        name="a-plan-is-followed-after-one-of-its-transfers-has-failed",
        file="step/executor.py",
        old='            self.pilot.stretch.depart(f"a transfer at {during} was not done")',
        new="            pass",
        tests=("tests/session/test_flights.py::test_a_forward_goes_on_where_one_of_its_transfers_has_failed",),
    ),
    Mutant(
        name="pages-that-come-with-a-transfer-do-not-count",
        file="memory/store.py",
        old="return [ref for ref in self._fresh if not self._tickets[ref, self._compute].done]",
        new="return []",
        tests=("tests/session/test_flights.py::test_slots_whose_pages_come_with_a_transfer_count_until_it_has_ended",),
    ),
)
