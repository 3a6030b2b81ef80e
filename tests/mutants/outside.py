"""Faults of what comes in and goes out: hands on weights and gradients, other sessions, files, models without memory."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["OUTSIDE"]

BOUND = "tests/session/test_host_bound.py"
DISK = "tests/session/test_disk_tier.py"
EXTRA = "tests/checkpoint/test_extra.py"
HANDS = "tests/session/test_hand_changes.py"
DEFERRED = "tests/parameters/test_deferred_init.py"
PARITY = "tests/parity/test_parity.py::test_no_bit_depends_on_where_model_data_lives_in_any_combination"
LINE = "tests/session/test_scripts.py::test_a_line_means_what_it_means_in_plain_pytorch"
DROPPED = "tests/session/test_after_manage.py::test_a_session_that_is_dropped_with_its_model_leaves_nothing"

OUTSIDE: tuple[Mutant, ...] = (
    Mutant(
        name="an-interruption-comes-between-bytes-and-what-is-noted-of-them",
        file="memory/interruptions.py",
        old="        if not callable(handler) or",
        new="        if callable(handler) or",
        tests=("tests/memory/test_interruptions.py::test_what_has_begun_ends_and_whoever_asked_is_told_then",),
    ),
    Mutant(
        name="an-interruption-that-was-put-off-is-forgotten",
        file="memory/interruptions.py",
        old="        if self._came:\n            self._handler(*self._came[-1])\n",
        new="",
        tests=("tests/memory/test_interruptions.py::test_what_has_begun_ends_and_whoever_asked_is_told_then",),
    ),
    Mutant(
        name="a-work-is-taken-before-its-owner-is-noted",
        file="memory/workers.py",
        old="            self._taken[me] = self._jobs[0]\n",
        new="",
        tests=("tests/memory/test_lanes.py::test_a_thread_that_ends_between_two_works_loses_none",),
    ),
    Mutant(
        name="what-ends-a-thread-interrupts-whoever-waits",
        file="memory/thread_lane.py",
        old='        failure = DeviceError(f"a work of the lane {lane} was ended by {error!r}")\n        failure.__cause__ = error\n',
        new="        failure = error\n",
        tests=("tests/memory/test_lanes.py::test_a_work_that_ends_its_thread_is_a_failure_like_any_other",),
    ),
    Mutant(
        name="a-forecast-depends-on-those-before",
        file="tracing/missing.py",
        old="if func is _aten.mkldnn_rnn_layer_backward.default:",
        new="if False:",
        tests=("tests/session/test_forecasts.py::test_a_forecast_is_the_same_whatever_was_traced_before[lstm]",),
    ),
    Mutant(
        name="torch-holds-a-session-by-a-hook",
        file="parameters/gradient_access.py",
        old="take = partial(GradientAccess._take, weakref.proxy(self))",
        new="take = self._take",
        tests=(f"{DROPPED}[cpu+disk-nothing]",),
    ),
    Mutant(
        name="a-meter-that-is-on-holds-a-session",
        file="step/metering.py",
        old="weakref.proxy(self._executor.store.leases), weakref.proxy(self._executor)",
        new="self._executor.store.leases, self._executor",
        tests=(f"{DROPPED}[emulated-a forward]",),
    ),
    Mutant(
        name="the-meter-of-a-dropped-session-stays-on",
        file="step/metering.py",
        old="weakref.finalize(self, meter.retire)",
        new="weakref.finalize(self, meter.restart_peak)",
        tests=(f"{DROPPED}[emulated-a forward]",),
    ),
    Mutant(
        name="what-completes-masters-is-let-go-before-they-are-given-back",
        file="session/close.py",
        old="if ref.plane not in (WEIGHT, REST):",
        new="if ref.plane != WEIGHT:",
        tests=("tests/session/test_sixteen_bits.py::test_masters_come_back_whole[bf16-64MiB]",),
    ),
    Mutant(
        name="what-is-detached-in-backward-is-a-stand-in",
        file="parameters/attributes.py",
        old="return self._in_its_slot(bound) if backward_id() != -1 else self._detached.make(bound, bound.tensor().detach())",
        new="return self._detached.make(bound, bound.tensor().detach())",
        tests=(f"{PARITY}[function-non-reentrant-x1-noclip-in_backward-lru-minimum-emulated]",),
    ),
    Mutant(
        name="an-address-that-was-handed-out-keeps-no-slot",
        file="parameters/attributes.py",
        old="                bound.lease = leased\n",
        new="                pass\n",
        tests=(f"{HANDS}::test_the_address_of_an_alias_stays_its_address",),
    ),
    Mutant(
        name="the-other-session-of-an-operation-is-not-asked",
        file="parameters/binding.py",
        old="found.others.append(other)",
        new="pass",
        tests=("tests/session/test_together.py::test_one_operation_on_parameters_of_two_sessions",),
    ),
    Mutant(
        name="every-piece-is-updated-from-the-first-of-its-gradient",
        file="step/update.py",
        old="slice(piece.tensor_start, piece.tensor_start + piece.stop - piece.start)",
        new="slice(0, piece.stop - piece.start)",
        tests=("tests/session/test_unbounded.py::test_tensors_longer_than_a_chunk",),
    ),
    Mutant(
        name="moments-outlive-a-checkpoint-that-has-none",
        file="session/saving.py",
        old="                    self._weights.clear_averages(name)",
        new="                    pass",
        tests=("tests/session/test_checkpoints.py::test_a_checkpoint_before_the_first_step",),
    ),
    Mutant(
        name="groups-of-other-parameters-take-a-checkpoint",
        file="session/saving.py",
        old="if saved != present:",
        new="if False:",
        tests=("tests/session/test_checkpoints.py::test_groups_of_the_same_number_and_other_parameters_are_refused",),
    ),
    Mutant(
        name="larger-shapes-go-by-the-plan-of-smaller-ones",
        file="tracing/signature.py",
        old="ours >= theirs",
        new="ours <= theirs",
        tests=("tests/tracing/test_signature.py::test_a_forward_dominates_those_of_smaller_shapes_alone",),
    ),
    Mutant(
        name="bytes-that-cross-a-link-count-twice",
        file="memory/store.py",
        old="self._ledger.move(src, dst, nbytes)",
        new="self._ledger.move(src, dst, 2 * nbytes)",
        tests=(
            "tests/session/test_simulation.py::test_reactive_steps_move_what_the_pilot_decided_and_nothing_else[cpu+disk]",
        ),
    ),
    Mutant(
        name="growth-is-counted-from-the-last-peak",
        file="step/executor.py",
        old="return self._making_bytes + moment.nonmodel_bytes - moment.live_bytes",
        new="before = stretch.course.trace.moments[max(0, stretch.position - 2)]\n"
        "        return self._making_bytes + max(0, moment.nonmodel_bytes - before.nonmodel_bytes)",
        tests=(f"{BOUND}::test_the_guard_is_told_of_what_takes_the_place_of_something_that_is_gone",),
    ),
    Mutant(
        name="the-allocator-is-asked-without-what-is-to-come",
        file="step/pressure.py",
        old="if resident + growth_bytes > min(self._limit_bytes, self._least_bytes + _STEP_BYTES):",
        new="if resident + growth_bytes > self._limit_bytes or resident > self._least_bytes + _STEP_BYTES:",
        tests=(f"{BOUND}::test_near_the_bound_the_allocator_is_asked_before_the_process_grows_by_much",),
    ),
    Mutant(
        name="nothing-is-alive-as-a-moment-begins",
        file="plan/recorder.py",
        old="live_bytes=live,",
        new="live_bytes=0,",
        tests=(
            "tests/session/test_simulation.py::test_every_model_is_executed_as_simulated_and_as_foreseen[gpt2-fp32]",
        ),
    ),
    Mutant(
        name="zeros-are-for-every-gradient-of-a-chunk",
        file="step/gradients.py",
        old="if piece.name in self.names and piece.name in names:",
        new="if piece.name in self.names:",
        tests=(
            "tests/session/test_gradients.py::test_zeros_are_for_the_groups_parameters_only_also_inside_of_a_chunk",
        ),
    ),
    Mutant(
        name="a-weight-in-another-order-of-memory-is-read-as-it-is-saved",
        file="session/saving.py",
        old="if not bound.shape_only.is_contiguous():\n            self._weights.fill(bound, reader.read(name))",
        new="if False:\n            self._weights.fill(bound, reader.read(name))",
        tests=(
            "tests/session/test_checkpoints.py::test_weights_in_another_order_of_memory_come_back_with_their_moments",
        ),
    ),
    Mutant(
        name="gradients-that-no-update-takes-are-put-in-the-plane-for-it",
        file="step/training.py",
        old="InPlane(self._binding, self._gradients, order.hypers)",
        new="InPlane(self._binding, self._gradients, self._gradients.names)",
        tests=(f"{LINE}[step grad(7)=.1 forward backward step read-bf16-fp32-cpu+disk]",),
    ),
    Mutant(
        name="what-is-to-come-is-no-part-of-the-resident-size",
        file="step/pressure.py",
        old="excess = max(0, resident + growth_bytes - self._limit_bytes)",
        new="excess = max(0, resident - self._limit_bytes)",
        tests=(f"{BOUND}::test_the_guard_counts_what_is_coming_beside_what_is_there",),
    ),
    Mutant(
        name="a-16-bit-gradient-takes-a-second-backward",
        file="step/gradients.py",
        old="if name in self.whole and self.dtype(bound) is not torch.float32:",
        new="if False:",
        tests=("tests/session/test_sixteen_bits.py::test_a_second_backward_makes_room_for_gradients_in_fp32[bf16]",),
    ),
    Mutant(
        name="what-had-come-is-lost-when-gradients-are-widened",
        file="step/late_planes.py",
        old="            keep = None if state.is_free(ref) else ref",
        new="            keep = None",
        tests=("tests/session/test_sixteen_bits.py::test_a_second_backward_makes_room_for_gradients_in_fp32[bf16]",),
    ),
    Mutant(
        name="values-are-made-from-another-random-state",
        file="deferred/recipe.py",
        old="        torch.set_rng_state(call.random_state)\n",
        new="        pass\n",
        tests=(f"{DEFERRED}::test_the_values_are_those_of_ordinary_construction",),
    ),
    Mutant(
        name="weights-of-another-shape-are-taken",
        file="checkpoint/matching.py",
        old="if shape != one.shape:",
        new="if False:",
        tests=("tests/checkpoint/test_matching.py::test_another_shape_is_refused_however_many_elements_it_has",),
    ),
    Mutant(
        name="tied-tensors-that-differ-are-taken",
        file="checkpoint/matching.py",
        old="if not torch.equal(_bits(left), _bits(right)):",
        new="if False:",
        tests=("tests/checkpoint/test_matching.py::test_tied_tensors_that_differ_are_refused",),
    ),
    Mutant(
        name="what-could-not-be-read-back-is-saved",
        file="checkpoint/extra.py",
        old="        _expect_readable(value, path)\n",
        new="",
        tests=(f"{EXTRA}::test_what_could_not_be_read_back_is_refused_with_its_place_before_anything_is_written",),
    ),
    Mutant(
        name="values-are-read-by-a-reader-that-runs-code",
        file="checkpoint/extra.py",
        old='weights_only=True, map_location="cpu"',
        new='weights_only=False, map_location="cpu"',
        tests=(f"{EXTRA}::test_forged_values_under_a_right_checksum_are_refused_and_run_nothing",),
    ),
    Mutant(
        name="bytes-of-a-checkpoint-are-not-held-against-their-checksum",
        file="checkpoint/reader.py",
        old="if checksum.hexdigest() != record.sha256:",
        new="if False:",
        tests=("tests/checkpoint/test_corruption.py::test_one_flipped_bit_anywhere_is_found_and_its_file_named",),
    ),
    Mutant(
        name="an-update-is-taken-for-a-change-behind-torchs-back",
        file="step/events.py",
        old="            self._escaped.renew()",
        new="            pass",
        tests=(
            "tests/session/test_sixteen_bits.py::test_memory_that_is_handed_out_and_not_written_changes_nothing[bf16]",
        ),
    ),
    Mutant(
        name="what-is-written-unseen-after-a-step-comes-before-it",
        file="session/session.py",
        old="        if events.watches:",
        new="        if False:",
        tests=(
            "tests/session/test_sixteen_bits.py::test_a_change_behind_torchs_back_comes_where_it_came[bf16-after the step]",
        ),
    ),
    Mutant(
        name="what-is-written-unseen-is-not-looked-for-before-state-is-read",
        file="session/session.py",
        old="        self._parts.events.check_watch()\n        self._parts.stretches.pause()",
        new="        self._parts.stretches.pause()",
        tests=(
            "tests/session/test_sixteen_bits.py::test_a_change_behind_torchs_back_is_carried_before_anything_is_read[bf16]",
        ),
    ),
    Mutant(
        name="memory-that-was-written-unseen-and-let-go-is-lost",
        file="parameters/escapes.py",
        old="        self._kept = [self._lease(ref) for ref in self.watched]",
        new="        self._kept = []",
        tests=(
            "tests/session/test_sixteen_bits.py::test_a_change_behind_torchs_back_comes_where_it_came[fp16-host-after the step]",
        ),
    ),
    Mutant(
        name="a-directory-that-cannot-be-written-is-a-lack-of-memory",
        file="session/assemble.py",
        old="        expect_usable(memory.disk)",
        new="        pass",
        tests=(f"{DISK}::test_a_directory_that_cannot_be_written_is_no_lack_of_memory[is there-EROFS]",),
    ),
    Mutant(
        name="the-file-that-tries-a-directory-stays",
        file="memory/filesystem.py",
        old="        undo.callback(_remove, io, probe)",
        new="        pass",
        tests=("tests/memory/test_filesystem.py::test_a_directory_is_tried_and_left_as_it_was[is there]",),
    ),
)
