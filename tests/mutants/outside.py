"""Faults of what comes in and goes out: hands on weights and gradients, other sessions, files, models without memory."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import always, assign, drop, never, replace, returns, without

BOUND = "tests/session/test_host_bound.py"
DISK = "tests/session/test_disk_tier.py"
EXTRA = "tests/checkpoint/test_extra.py"
HANDS = "tests/session/test_hand_changes.py"
DEFERRED = "tests/parameters/test_deferred_init.py"
PARITY = "tests/parity/test_parity.py::test_no_bit_depends_on_where_model_data_lives_in_any_combination"
LINE = "tests/session/test_scripts.py::test_a_line_means_what_it_means_in_plain_pytorch"
DROPPED = "tests/session/test_after_manage.py::test_a_session_that_is_dropped_with_its_model_leaves_nothing"

OUTSIDE: tuple[Mutant, ...] = (
    Fault(
        "an-interruption-comes-between-bytes-and-what-is-noted-of-them",
        "memory.interruptions:InterruptionsPutOff.__enter__",
    ).by(
        never("callable(handler) and ..."),
        "tests/memory/test_interruptions.py::test_what_has_begun_ends_and_whoever_asked_is_told_then",
    ),
    Fault("an-interruption-that-was-put-off-is-forgotten", "memory.interruptions:InterruptionsPutOff.__exit__").by(
        drop("if len(self._handler_and_came) > 1: ..."),
        "tests/memory/test_interruptions.py::test_what_has_begun_ends_and_whoever_asked_is_told_then",
    ),
    Fault("a-work-is-taken-before-its-owner-is-noted", "memory.lanes:Workers._next").by(
        drop("_taken", nth=2), "tests/memory/test_lanes.py::test_a_thread_that_ends_between_two_works_loses_none"
    ),
    Fault("what-ends-a-thread-interrupts-whoever-waits", "memory.lanes:Job.do").by(
        replace("DeviceError(...)", "ending"),
        "tests/memory/test_lanes.py::test_a_work_that_ends_its_thread_is_a_failure_like_any_other",
    ),
    Fault("a-forecast-depends-on-those-before", "tracing.trial_operations:result_of").by(
        never("func", nth=5),
        "tests/session/test_forecasts.py::test_a_forecast_is_the_same_whatever_was_traced_before[lstm]",
    ),
    Fault("torch-holds-a-session-by-a-hook", "parameters.gradient_access:GradientAccess.watch").by(
        assign("take", "self._take"), f"{DROPPED}[cpu+disk-nothing]"
    ),
    Fault("a-meter-that-is-on-holds-a-session", "step.room:Room.start_meter").by(
        replace("(weakref.proxy(...), weakref.proxy(...))", "(self._store.leases, self)"),
        f"{DROPPED}[emulated-a forward]",
    ),
    Fault("the-meter-of-a-dropped-session-stays-on", "step.room:Room.start_meter").by(
        replace("meter.retire", "meter.restart_peak"), f"{DROPPED}[emulated-a forward]"
    ),
    Fault("what-completes-masters-is-let-go-before-they-are-given-back", "session.close:Closing._return_weights").by(
        replace("ref.plane not in (WEIGHT, REST)", "ref.plane != WEIGHT"),
        "tests/session/test_scripts.py::test_masters_come_back_whole[bf16-64MiB]",
    ),
    Fault("what-is-detached-in-backward-is-a-stand-in", "parameters.attributes:Attributes._detach").by(
        returns("self._detached.make(bound, bound.tensor().detach())"),
        f"{PARITY}[function-non-reentrant-x1-noclip-in_backward-lru-minimum-emulated]",
    ),
    Fault("an-address-that-was-handed-out-keeps-no-slot", "parameters.attributes:Attributes._escape").by(
        drop("hold"), f"{HANDS}::test_the_address_of_an_alias_stays_its_address"
    ),
    Fault("the-other-session-of-an-operation-is-not-asked", "parameters.binding:Binding._add").by(
        drop("others.append"), "tests/session/test_together.py::test_one_operation_on_parameters_of_two_sessions"
    ),
    Fault(
        "every-piece-is-updated-from-the-first-of-its-gradient", "step.optimizer_step:OptimizerStep._update_together"
    ).by(
        replace("flat[span]", "flat[: weight.numel()]"),
        "tests/session/test_whole.py::test_a_tensor_of_any_length_is_updated_wholly[longer than a chunk]",
    ),
    Fault("moments-outlive-a-checkpoint-that-has-none", "session.saving:Saving._take_tensors").by(
        drop("clear_averages"), "tests/session/test_checkpoints.py::test_a_checkpoint_before_the_first_step"
    ),
    Fault("groups-of-other-parameters-take-a-checkpoint", "session.saving:Saving._check_groups").by(
        never("saved"),
        "tests/session/test_checkpoints.py::test_a_checkpoint_of_another_model_or_other_groups_is_refused_before_anything_has_changed[other groups]",
    ),
    Fault("larger-shapes-go-by-the-plan-of-smaller-ones", "tracing.inputs:Signature.dominates").by(
        replace("ours >= theirs", "ours <= theirs"),
        "tests/tracing/test_inputs.py::test_a_forward_dominates_those_of_smaller_shapes_alone",
    ),
    Fault("bytes-that-cross-a-link-count-twice", "memory.store:ChunkStore._issue").by(
        replace("self.ledger.move(...)", "self.ledger.move(src, tier, 2 * self.state.unit_bytes(ref))"),
        "tests/session/test_simulation.py::test_reactive_steps_move_what_the_pilot_decided_and_nothing_else[cpu+disk]",
    ),
    Fault("growth-is-counted-from-the-last-peak", "step.room:HostRoom._rise_bytes").by(
        replace(
            "return self._making_bytes + moment.nonmodel_bytes - moment.live_bytes",
            (
                "before = stretch.course.trace.moments[max(0, stretch.position - 2)]; return self._making_bytes + "
                "max(0, moment.nonmodel_bytes - before.nonmodel_bytes)"
            ),
        ),
        f"{BOUND}::test_the_guard_is_told_of_what_takes_the_place_of_something_that_is_gone",
    ),
    Fault("the-allocator-is-asked-without-what-is-to-come", "step.room:HostRoom.excess_bytes").by(
        replace(
            "resident + growth_bytes > min(...)",
            "resident + growth_bytes > limit or resident > self._least_bytes + _STEP_BYTES",
        ),
        f"{BOUND}::test_near_the_bound_the_allocator_is_asked_before_the_process_grows_by_much",
    ),
    Fault("nothing-is-alive-as-a-moment-begins", "tracing.live_bytes:TraceRecorder.trace").by(
        assign("live_bytes", "0"),
        "tests/session/test_simulation.py::test_every_model_is_executed_as_simulated_and_as_foreseen[gpt2-fp32]",
    ),
    Fault("zeros-are-for-every-gradient-of-a-chunk", "step.gradients:Gradients.fill_with_zeros").by(
        without("piece.name in names"),
        "tests/session/test_gradients.py::test_zeros_are_for_the_groups_parameters_only_also_inside_of_a_chunk",
    ),
    Fault("a-weight-in-another-order-of-memory-is-read-as-it-is-saved", "session.saving:Saving._take").by(
        always("shape_only"),
        "tests/session/test_checkpoints.py::test_weights_in_another_order_of_memory_come_back_with_their_moments",
    ),
    Fault("what-is-to-come-is-no-part-of-the-resident-size", "step.room:HostRoom.excess_bytes").by(
        without("growth_bytes", nth=3), f"{BOUND}::test_the_guard_counts_what_is_coming_beside_what_is_there"
    ),
    Fault("a-16-bit-gradient-takes-a-second-backward", "step.gradients:Gradients._make_ready").by(
        never("name", nth=1),
        "tests/session/test_sixteen_bits.py::test_a_second_backward_makes_room_for_gradients_in_fp32[bf16]",
    ),
    Fault("what-had-come-is-lost-when-gradients-are-widened", "step.late_planes:LatePlanes.widen_gradients").by(
        assign("keep", "None", nth=1),
        "tests/session/test_sixteen_bits.py::test_a_second_backward_makes_room_for_gradients_in_fp32[bf16]",
    ),
    Fault("values-are-made-from-another-random-state", "deferred.recipe:_carry_out").by(
        drop("set_rng_state"), f"{DEFERRED}::test_the_values_are_those_of_ordinary_construction"
    ),
    Fault("weights-of-another-shape-are-taken", "checkpoint.matching:_misfit").by(
        never("shape"), "tests/checkpoint/test_matching.py::test_another_shape_is_refused_however_many_elements_it_has"
    ),
    Fault("tied-tensors-that-differ-are-taken", "checkpoint.matching:_expect_same").by(
        never("equal"), "tests/checkpoint/test_matching.py::test_tied_tensors_that_differ_are_refused"
    ),
    Fault("what-could-not-be-read-back-is-saved", "checkpoint.extra:_take").by(
        drop("_expect_readable"),
        f"{EXTRA}::test_what_could_not_be_read_back_is_refused_with_its_place_before_anything_is_written",
    ),
    Fault("values-are-read-by-a-reader-that-runs-code", "checkpoint.extra:read_values").by(
        assign("weights_only", "False"),
        f"{EXTRA}::test_forged_values_under_a_right_checksum_are_refused_and_run_nothing",
    ),
    Fault("bytes-of-a-checkpoint-are-not-held-against-their-checksum", "checkpoint.reader:StepReader.source").by(
        never("sha256"),
        "tests/checkpoint/test_corruption.py::test_one_flipped_bit_anywhere_is_found_and_its_file_named",
    ),
    Fault("an-update-is-taken-for-a-change-behind-torchs-back", "step.events:Events.updated").by(
        drop("renew"), f"{LINE}[memory(2) train(2) write(4)=1 read free train-bf16-emulated]"
    ),
    Fault(
        "what-is-written-unseen-after-a-step-comes-before-it", "session.optimizer_target:OptimizerTarget.step_groups"
    ).by(never("watched"), f"{LINE}[memory(2) forward backward step unseen(2) zero free read train-bf16-emulated]"),
    Fault("what-is-written-unseen-is-not-looked-for-before-state-is-read", "session.parts:Parts.begin_access").by(
        drop("check_watch"), f"{LINE}[train unseen(2) read train unseen(2) forward backward step-bf16-emulated]"
    ),
    Fault("memory-that-was-written-unseen-and-let-go-is-lost", "parameters.changes:EscapedMemory.check").by(
        assign("_kept", "[]"), f"{LINE}[memory(2) forward backward step unseen(2) zero free read train-fp16-cpu+disk]"
    ),
    Fault("a-directory-that-cannot-be-written-is-a-lack-of-memory", "session.manage:_assembled").by(
        drop("expect_usable"), f"{DISK}::test_a_directory_that_cannot_be_written_is_no_lack_of_memory[is there-EROFS]"
    ),
    Fault("the-file-that-tries-a-directory-stays", "memory.disk:expect_usable").by(
        drop("callback", nth=2),
        "tests/memory/test_filesystem.py::test_a_directory_is_tried_and_left_as_it_was[is there]",
    ),
)
