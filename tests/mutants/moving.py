"""Faults of what moves bytes: the store, the pilot at run time, the arena's pages."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import assign, drop, never, replace, returns, without

LINE = "tests/session/test_scripts.py::test_a_line_means_what_it_means_in_plain_pytorch"
LANES = "tests/session/test_lanes.py::test_no_bit_depends_on_when_works_end"
INTERRUPTED = (
    "tests/session/test_lanes.py::test_a_forward_or_backward_that_is_interrupted_while_it_waits_can_be_done_again"
)
HOST_BOUND = "tests/session/test_host_bound.py"
NEAR_THE_BOUND = f"{HOST_BOUND}::test_near_the_bound"
DISK_TIER = "tests/session/test_disk_tier.py"
TRAINING_ON = f"{DISK_TIER}::test_no_bit_depends_on_the_machine"

MOVING: tuple[Mutant, ...] = (
    Fault("pages-that-have-come-count-twice", "step.room:HostRoom.within").by(
        drop("arriving", nth=2),
        f"{NEAR_THE_BOUND}_the_guard_is_told_of_pages_that_are_to_come_and_not_of_those_that_have[True-8192]",
    ),
    Fault("all-pages-of-a-transfer-are-still-to-come", "memory.mapping:absent_bytes").by(
        without("sum(...)"),
        "tests/session/test_flights.py::test_slots_whose_pages_come_with_a_transfer_count_until_it_has_ended",
    ),
    Fault("a-wait-is-dropped", "memory.store:ChunkStore._wait").by(
        drop("wait_until_settled"), f"{LANES}[as late as their wait-cpu+disk]"
    ),
    Fault("a-fence-is-ignored", "memory.arena:Arena.fences").by(
        returns("[]", nth=2), f"{LANES}[in a random order-emulated]"
    ),
    Fault("a-unit-is-used-before-its-zeros", "memory.works_under_way:WorksUnderWay.wait_for_zeros").by(
        drop("wait"), "tests/memory/test_store.py::test_zeros_are_there_when_a_unit_is_used"
    ),
    Fault("a-unit-leaves-before-its-zeros", "memory.works_under_way:WorksUnderWay._before_reading").by(
        drop("before", nth=2), "tests/memory/test_store.py::test_a_unit_that_leaves_at_once_leaves_with_its_zeros"
    ),
    Fault("slots-are-given-back-before-their-zeros", "memory.works_under_way:WorksUnderWay.give_slots").by(
        assign("fence", "None", nth=1),
        "tests/memory/test_store.py::test_slots_that_are_given_back_at_once_have_their_zeros_behind_them",
    ),
    Fault("pages-go-back-before-works-end", "memory.arena:Arena._take_away").by(
        drop("wait"), "tests/memory/test_arena.py::test_pages_go_back_when_the_works_on_them_are_over"
    ),
    Fault("a-unit-on-the-disk-has-the-place-of-another", "memory.disk:DiskPool.extent").by(
        assign("end", "ALIGNMENT"),
        "tests/memory/test_disk.py::test_extents_are_aligned_and_apart_and_files_are_the_owners_one_for_each_plane",
    ),
    Fault("a-fence-is-lost-with-a-wait-that-is-interrupted", "memory.arena:Arena._take_away").by(
        replace("with suppress(Exception): ...", "fences.pop(slot); fence.wait()"),
        "tests/memory/test_arena.py::test_a_trim_that_is_interrupted_while_it_waits_leaves_the_work_to_whoever_takes_the_slots",
    ),
    Fault("a-ticket-keeps-the-works-after-it", "memory.lanes:when_all_settled.one_less").by(
        replace("calls.pop()", "call"),
        "tests/memory/test_lanes.py::test_a_ticket_that_is_kept_keeps_nothing_of_what_comes_after_it",
    ),
    Fault("a-thread-waits-for-nothing", "memory.lanes:ThreadLane.issue").by(
        replace("when_all_settled(...)", "self._start(work, (), end)"),
        "tests/memory/test_lanes.py::test_a_work_begins_when_all_that_it_comes_after_has_ended[thread]",
    ),
    Fault("a-session-ends-before-its-works", "memory.store:ChunkStore.close").by(
        drop("close", nth=1), "tests/session/test_lanes.py::test_close_ends_what_is_under_way"
    ),
    Fault("an-interruption-leaves-transfers-under-way", "memory.store:ChunkStore._do").by(
        drop("land_all"), f"{INTERRUPTED}[0-1-emulated]"
    ),
    Fault("a-forked-child-is-given-the-slots-of-its-parent", "memory.store:ChunkStore.tensor").by(
        without("os.getpid() != self._process"),
        "tests/session/test_flights.py::test_a_forked_child_is_given_no_slot[after its update]",
    ),
    Fault("what-wraps-a-slot-outlives-its-tenant", "memory.store:ChunkStore._give").by(
        drop("if tier is self._compute: ..."), f"{TRAINING_ON}[emulated-next-use-deferred]"
    ),
    Fault("the-most-that-lay-beside-chunks-is-forgotten", "core.ledger:Ledger.nonmodel").by(
        drop("peak"),
        "tests/session/test_budgets.py::test_activations_that_come_and_go_between_two_moves_are_part_of_the_peak",
    ),
    Fault("a-profile-does-not-show-what-moves", "memory.store:ChunkStore._do").by(
        never("is_profiled"),
        "tests/session/test_stats.py::test_every_action_is_shown_by_its_text_where_a_profiler_looks_on",
    ),
    # The fifth transfer over the link, and no other.
    Fault("one-write-back-to-the-host-is-skipped", "memory.unit_bytes:UnitBytes.moving").by(
        replace(
            "arena.copying(...)",
            (
                "(lambda: None) if src is self._compute and self.ledger.moved['D>H'] == 4 * slots * "
                "self.arenas[self._compute].slot_bytes else _"
            ),
        ),
        f"{TRAINING_ON}[emulated-next-use-deferred]",
    ),
    Fault("one-write-back-to-the-disk-is-skipped", "memory.unit_bytes:UnitBytes.moving").by(
        replace(
            "self._pool().writing(...)",
            ("(lambda: None) if self.ledger.moved['H>K'] == 4 * slots * self.arenas[self._compute].slot_bytes else _"),
        ),
        f"{TRAINING_ON}[cpu+disk-next-use-deferred]",
    ),
    Fault("first-contents-are-what-the-slot-held-before", "memory.unit_bytes:UnitBytes.moving").by(
        replace("arena.filling(...)", "(lambda: None)"), f"{TRAINING_ON}[cpu+disk-next-use-deferred]"
    ),
    Fault("what-a-moment-writes-is-not-marked", "step.executor:Executor._moment").by(
        never("writes"), f"{LINE}[forward backward grad(0) forward backward grad(0) step-fp32-emulated]"
    ),
    Fault("a-gradient-is-put-where-the-others-of-its-chunk-were-let-go-of", "step.executor:Executor.use").by(
        replace("state.newest.get(...) != {self._compute}", "False"),
        "tests/session/test_blocks.py::test_gradients_that_are_used_between_two_of_a_block_have_the_same_bits[let go of]",
    ),
    Fault("a-failed-transfer-is-not-undone", "memory.store:ChunkStore._land").by(
        replace("with InterruptionsPutOff(): ...", "self._note([issue]); pass"),
        "tests/session/test_flights.py::test_a_transfer_that_fails_moments_later_names_what_issued_it_and_can_be_done_again",
    ),
    Fault("the-budget-is-off-by-one-slot-where-there-is-no-plan", "plan.pilot:Pilot.decided").by(
        assign("capacity_slots", "_ + 1", nth=1),
        "tests/session/test_budgets.py::test_the_budget_is_never_exceeded_on_the_emulated_device",
    ),
    Fault("pages-of-free-slots-stay-while-others-are-taken", "memory.unit_bytes:UnitBytes.take").by(
        assign("limit", "None"), f"{HOST_BOUND}::test_no_more_slots_hold_pages_than_the_budget_has_room_for"
    ),
    Fault("pages-of-slots-that-activations-need-stay", "step.room:Room.make").by(
        drop("trim"), f"{HOST_BOUND}::test_no_more_slots_hold_pages_than_the_budget_has_room_for"
    ),
    Fault("trimmed-pages-are-not-given-back", "memory.arena:Arena._take_away").by(
        never("space"), "tests/memory/test_arena.py::test_trim_gives_the_pages_of_free_slots_back_at_once"
    ),
    Fault("a-short-transfer-is-taken-for-a-whole-one", "memory.fileio:_transfer").by(
        replace("done < nbytes", "not done"),
        "tests/memory/test_disk.py::test_interrupted_and_short_transfers_are_continued",
    ),
    Fault("a-change-comes-while-a-transfer-reads", "step.executor:Executor.wrote").by(
        drop("_land"),
        "tests/session/test_hand_changes.py::test_the_error_for_changed_weights_is_a_state_error_that_says_what_to_do",
    ),
    Fault("a-forked-child-waits-for-its-parents-transfers", "memory.store:ChunkStore.carry_out").by(
        drop("expect_open"),
        "tests/session/test_flights.py::test_a_forked_child_does_not_wait_for_its_parents_transfers",
    ),
    Fault("a-plan-is-followed-after-one-of-its-transfers-has-failed", "step.room:Room.carry_out").by(
        drop("depart"), "tests/session/test_flights.py::test_a_forward_goes_on_where_one_of_its_transfers_has_failed"
    ),
    Fault("pages-that-come-with-a-transfer-do-not-count", "memory.works_under_way:WorksUnderWay.arriving_slots").by(
        returns("0"),
        "tests/session/test_flights.py::test_slots_whose_pages_come_with_a_transfer_count_until_it_has_ended",
    ),
)
