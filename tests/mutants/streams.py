"""Faults in what orders the streams of a device: each wait, fence and event left out in turn."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import always, assign, drop, never, replace, returns, without

HERE = "tests/cuda/test_streams.py"
TRAINING = tuple(
    f"{HERE}::test_training_in_less_memory_has_the_bits_of_plain_pytorch[{schedule}-{way}]"
    for schedule in ("(0.0, 0)", "(0.3, 1)", "(1.0, 0)")
    for way in ("deferred", "in_backward", "clipped", "updated on the device")
)
SIDE = tuple(
    f"{HERE}::test_{test}[{schedule}]"
    for test in (
        "a_weight_that_two_streams_use_is_ready_on_both",
        "a_forward_on_a_stream_of_the_users_waits_and_is_waited_for",
    )
    for schedule in ("(0.0, 0)", "(0.3, 1)", "(1.0, 0)")
)
VIEW = tuple(
    f"{HERE}::test_a_view_of_a_weight_from_another_stream_is_ready[{schedule}-{precision}]"
    for schedule in ("(0.0, 0)", "(0.3, 1)")
    for precision in ("bf16 in fp32", "fp16 in fp32")
)
PEAKS = "tests/cuda/test_peaks.py"
FAILURE = "tests/cuda/test_device_failure.py"
LANE = "tests/cuda/test_stream_lane.py"
STORE = "tests/cuda/test_store.py"
SPACES = "tests/cuda/test_spaces.py"
RANKS = tuple(
    f"tests/cuda/test_ranks.py::test_what_runs_on_streams_of_the_users_waits_and_is_waited_for[{kept}]"
    for kept in ("fp32", "bf16")
)

STREAMS: tuple[Mutant, ...] = (
    Fault("a-collective-does-not-wait-for-its-inputs", "comm.transport:Transport.after_now").by(
        drop("wait_event"), *RANKS
    ),
    Fault("a-collective-is-over-while-its-sum-is-queued", "comm.transport:Transport.after_now").by(
        drop("synchronize"), *RANKS
    ),
    Fault("what-was-gathered-is-not-waited-for", "parameters.call_order:BlockWeights.wait").by(drop("written"), *RANKS),
    Fault("a-share-has-been-used-by-its-own-stream-only", "parameters.exchange:_shares").by(
        drop("record_stream"), *RANKS
    ),
    Fault("gradients-of-other-streams-are-not-waited-for", "parameters.exchange:BackwardSums.take").by(
        drop("use"), *RANKS
    ),
    Fault("a-kernel-does-not-wait-for-its-weight", "memory.works_under_way:Readiness.compute").by(
        drop("wait_on_device", nth=1), *TRAINING
    ),
    Fault("a-stream-takes-what-another-has-waited-for", "memory.works_under_way:Readiness.compute").by(
        replace("number not in self._seen.setdefault(...)", "not self._seen.setdefault(place, set())"), *SIDE
    ),
    Fault("a-slot-is-given-back-before-its-kernels-are-done", "memory.works_under_way:WorksUnderWay.give_slots").by(
        drop("if tier is self._compute: ..."), *TRAINING
    ),
    Fault("a-slot-is-given-back-before-its-copies-are-done", "memory.works_under_way:WorksUnderWay.give_slots").by(
        drop("before", nth=2), *TRAINING
    ),
    Fault("a-copy-out-does-not-wait-for-what-is-computed", "memory.works_under_way:WorksUnderWay._before_reading").by(
        drop("if tier is self._compute: ..."), *TRAINING
    ),
    Fault(
        "a-copy-does-not-wait-for-what-brought-its-source", "memory.works_under_way:WorksUnderWay._before_reading"
    ).by(drop("before", nth=3), f"{STORE}::test_a_copy_comes_after_the_one_that_brought_its_source[(0.0, 0)]"),
    Fault("an-update-does-not-wait-for-the-gradient", "memory.works_under_way:WorksUnderWay._before_writing").by(
        drop("if tier is self._compute and not takes: ..."),
        f"{STORE}::test_a_unit_is_updated_after_what_was_computed_and_used_after_that[(0.0, 0)-True]",
    ),
    Fault(
        "an-update-does-not-wait-for-what-brought-its-units", "memory.works_under_way:WorksUnderWay._before_writing"
    ).by(drop("before", nth=3), *TRAINING),
    Fault("nobody-waits-for-an-update-on-the-device", "memory.works_under_way:WorksUnderWay._note_places").by(
        replace("writes(...)", "(() if kind is WorkKind.UPDATE else _)"),
        f"{STORE}::test_a_unit_is_updated_after_what_was_computed_and_used_after_that[(0.0, 0)-False]",
    ),
    Fault("only-the-first-stream-that-computes-is-waited-for", "memory.works_under_way:Readiness.compute").by(
        replace("self._streams.setdefault(...)", "self._streams or _"), *SIDE
    ),
    Fault("the-host-does-not-wait-for-what-it-reads", "memory.works_under_way:Readiness.wait").by(
        drop("for ticket in self.before_writing(place): ..."),
        f"{STORE}::test_a_unit_is_updated_after_what_was_computed_and_used_after_that[(0.0, 0)-False]",
    ),
    Fault("a-copy-that-reads-is-forgotten", "memory.works_under_way:Readiness.read").by(drop("append"), *TRAINING),
    Fault("a-kernel-writes-while-a-copy-reads", "memory.works_under_way:Readiness.compute").by(
        drop("for ticket in self._read.pop(place, ()): ..."),
        "tests/cuda/test_readiness.py::test_a_kernel_that_writes_waits_for_copies_that_read[(0.0, 0)-True]",
    ),
    Fault("a-filling-is-not-waited-for", "memory.works_under_way:WorksUnderWay._note_places").by(
        replace("writes(...)", "(() if kind is WorkKind.CREATE else _)"), *TRAINING
    ),
    Fault("works-of-streams-wait-for-nothing", "memory.stream_lane:StreamLane._queue").by(
        replace("earlier.wait_on_device", "earlier.wait_until_settled"), *TRAINING
    ),
    Fault("a-ticket-has-ended-when-it-is-queued", "memory.stream_lane:StreamTicket.done").by(
        always("query"), f"{LANE}::test_a_work_has_not_ended_before_the_device_has_done_it[(0.0, 0)]"
    ),
    Fault("memory-is-taken-away-while-it-is-used", "memory.arena:Arena._take_away").by(
        drop("with suppress(Exception): ..."),
        "tests/cuda/test_spaces.py::test_trimming_waits_for_what_is_under_way[(0.0, 0)]",
    ),
    Fault("a-session-ends-before-what-computes-with-its-slots", "memory.works_under_way:WorksUnderWay.close").by(
        drop("for ticket in self._readiness.computed(): ..."),
        f"{HERE}::test_a_session_that_is_closed_waits_for_what_uses_its_slots[(0.0, 0)]",
    ),
    Fault("pieces-of-memory-go-with-the-first-slot-in-them", "memory.space:DeviceSpace.discard").by(
        always("_prepared"),
        "tests/cuda/test_spaces.py::test_slots_have_memory_from_their_first_use_until_they_are_trimmed[(0.0, 0)-1048576]",
    ),
    Fault("all-units-are-copied-as-one", "memory.space:Space.copy_from").by(
        assign("unit_bytes", "nbytes"),
        "tests/cuda/test_spaces.py::test_bytes_go_to_the_device_and_back[(0.0, 0)-4096]",
    ),
    Fault("a-flag-on-the-device-is-read-at-once", "step.overflow:OverflowFlag.of").by(
        replace("is_finite.is_cpu", "bool(is_finite) and _"),
        "tests/cuda/test_overflow.py::test_the_host_waits_once_for_all_gradients[(0.0, 0)]",
    ),
    Fault("flags-of-several-streams-share-a-block", "step.overflow:Overflow._new_flag").by(
        without("place != self._place"),
        "tests/cuda/test_overflow.py::test_looks_on_several_streams_share_nothing[(0.0, 0)]",
    ),
    Fault("each-look-has-a-grain", "step.overflow:Overflow._new_flag").by(
        replace("_BLOCK", "1", nth=1),
        "tests/cuda/test_overflow.py::test_many_looks_take_no_more_than_plans_have_for_them[1000]",
    ),
    Fault("flags-are-in-no-plan", "session.start:with_pass_bytes").by(
        without("flags", nth=3), "tests/cuda/test_overflow.py::test_plans_have_room_for_the_looks_of_every_backward"
    ),
    Fault("flags-have-no-room-beside-a-norm", "session.start:with_pass_bytes").by(
        without("flags", nth=2),
        "tests/session/test_resources.py::test_looks_for_overflows_count_in_backwards_and_in_norms",
    ),
    Fault("what-was-found-first-has-no-name", "step.overflow:Overflow.flags").by(
        returns("_[::-1]"), "tests/cuda/test_overflow.py::test_names_come_in_the_order_of_what_was_found"
    ),
    Fault("slots-take-what-activations-have-left-for-a-moment", "plan.planner:allocator_keeps").by(
        always("planner.keeps"),
        "tests/cuda/test_waits.py::test_a_step_never_waits_for_the_device[in_backward-60-(0.0, 0)]",
    ),
    Fault("the-host-squares-gradients-of-a-device", "plan.planner:Planner.read_where_it_is").by(
        without("self.keeps"),
        "tests/cuda/test_waits.py::test_a_step_that_needs_a_number_waits_for_that_alone[fp32-(0.0, 0)]",
    ),
    Fault("what-a-device-has-given-out-is-not-learned", "step.device_room:DeviceRoom.end").by(
        drop("rise"), "tests/cuda/test_waits.py::test_more_than_was_foreseen_is_said_and_planned_with"
    ),
    Fault("what-one-moment-took-more-is-forgotten", "step.device_room:DeviceRoom.end").by(
        assign("excess_bytes", "0"),
        f"{PEAKS}::test_a_budget_that_a_step_has_shown_to_be_too_small_is_refused_for_the_next",
    ),
    Fault("kernels-are-known-before-their-peak-has-been-seen", "step.device_room:DeviceRoom.end").by(
        without("self._is_seen"), f"{PEAKS}::test_the_share_stays_free_where_no_step_has_shown_what_kernels_take"
    ),
    Fault("a-forward-alone-shows-what-a-step-takes", "step.device_room:DeviceRoom.end").by(
        without("stretch.complete"), f"{PEAKS}::test_the_share_stays_free_where_no_step_has_shown_what_kernels_take"
    ),
    Fault("a-share-is-left-for-ever", "step.device_room:DeviceRoom.end").by(
        drop("knows_workspaces"),
        f"{PEAKS}::test_steps_stay_within_the_budget_that_a_refusal_names_whatever_kernels_take_of_the_share[deferred]",
    ),
    Fault("what-libraries-keep-is-forgotten", "step.device_room:DeviceRoom.end").by(
        drop("kept_bytes"), f"{PEAKS}::test_what_libraries_keep_is_left_to_them[backward-in_backward]"
    ),
    Fault("kernels-are-told-of-that-take-what-was-left-for-them", "step.device_room:DeviceRoom.end").by(
        replace("excess > left", "excess > 0"),
        f"{PEAKS}::test_steps_stay_within_the_budget_that_a_refusal_names_whatever_kernels_take_of_the_share[deferred]",
    ),
    Fault("a-gpu-leaves-nothing-for-kernels", "step.resources:_workspace_percent").by(
        returns("0"), "tests/session/test_resources.py::test_only_a_gpu_leaves_a_share_for_workspaces_of_kernels"
    ),
    Fault("a-neighbours-activations-count", "step.device_room:DeviceRoom._give_up_last").by(
        drop("_counts"), f"{PEAKS}::test_a_session_does_not_count_its_neighbours_activations"
    ),
    Fault("bytes-on-a-device-count-as-they-are-asked-for", "tracing.live_bytes:LiveBytes.note").by(
        assign("nbytes", "storage.nbytes()"), f"{PEAKS}::test_a_forecast_is_what_the_allocator_then_gives_out"
    ),
    Fault("the-end-of-a-large-block-counts-for-nothing", "core.cuda_blocks:cuda_block_bytes").by(
        returns("whole"),
        f"{PEAKS}::test_large_activations_stay_within_the_smallest_budget_from_the_first_step_on",
        "tests/core/test_cuda_blocks.py::test_what_is_counted_is_what_a_block_can_have",
    ),
    Fault("gradients-of-the-users-count-as-they-are", "parameters.binding:Binding.taken_bytes").by(
        returns("sum(own.nbytes for _, own in self.gradients.owned()) + self.leases.assembled_bytes()"),
        f"{PEAKS}::test_what_the_user_takes_of_a_device_counts_as_its_blocks",
    ),
    Fault("tensors-put-together-count-as-they-are", "memory.leases:Leases.take_copy").by(
        assign("_assembled", "tensor.nbytes"), f"{PEAKS}::test_what_the_user_takes_of_a_device_counts_as_its_blocks"
    ),
    Fault("tensors-being-put-together-count-as-they-are", "step.assembling:Assembling._taking").by(
        drop("nbytes"), f"{PEAKS}::test_a_tensor_that_is_put_together_needs_its_block"
    ),
    Fault(
        "each-gradient-that-is-shown-has-a-number-on-the-device", "parameters.assembled:AssembledTensors.__init__"
    ).by(
        assign("_nan", "partial(placeholder, device=device)"),
        f"{PEAKS}::test_gradients_that_nobody_reads_take_nothing_of_a_device",
    ),
    Fault(
        "gradients-of-the-users-stay-on-the-device-when-weights-leave-it", "session.close:Closing._return_gradients"
    ).by(
        without("'cpu'"), f"{PEAKS}::test_a_gradient_of_the_users_is_left_to_the_parameter_when_the_session_is_closed"
    ),
    Fault("room-that-is-left-is-what-was-asked-for", "step.device_room:DeviceRoom.leave_room").by(
        replace("cuda_block_bytes(nbytes)", "nbytes"),
        "tests/cuda/test_out_of_memory.py::test_the_next_step_leaves_the_room_that_was_missing",
    ),
    Fault("copies-of-inputs-are-not-foreseen", "tracing.offline:OfflineTracer._run").by(
        replace("operations.seer = owner.meter", "inputs, keywords = cast_inputs((inputs, keywords), self.compute); _"),
        f"{PEAKS}::test_copies_of_inputs_in_the_type_that_computes_are_foreseen",
    ),
    Fault("copies-of-inputs-are-made-before-the-stretch-begins", "step.events:Events.before_forward").by(
        replace("_begin_stretch(...)", "args, kwargs = cast_inputs((args, kwargs), self.compute); _"),
        f"{PEAKS}::test_copies_of_inputs_in_the_type_that_computes_are_foreseen",
    ),
    Fault("values-of-inputs-on-a-device-are-unknown", "tracing.offline:_on_cpu").by(
        without("Undispatched()"), f"{PEAKS}::test_a_forecast_knows_the_values_of_inputs_on_the_device"
    ),
    Fault("scratch-of-a-norm-comes-before-its-room", "step.training_deferred:DeferredTraining._take_norm").by(
        assign("norm", "self._begin_norm(chunked)", nth=1),
        f"{PEAKS}::test_a_norm_has_its_scratch_when_there_is_room_for_it",
    ),
    Fault("memory-that-torch-keeps-is-not-taken-back", "memory.driver:DeviceAddresses.map").by(
        never("_OUT_OF_MEMORY", nth=1),
        "tests/cuda/test_waits.py::test_memory_that_torch_keeps_and_does_not_use_is_taken_back",
    ),
    Fault("a-step-is-not-told-of-memory-that-is-missing", "step.device_room:DeviceRoom.__call__").by(
        replace("stretch.is_over", "True"),
        "tests/cuda/test_out_of_memory.py::test_a_step_without_memory_names_the_moment_and_who_has_what[backward]",
    ),
    Fault("what-comes-after-a-failed-step-counts-as-its-own", "step.device_room:DeviceRoom.pause_meter").by(
        drop("self._counts, self._now = False, 0"),
        "tests/cuda/test_out_of_memory.py::test_a_step_without_memory_names_the_moment_and_who_has_what[forward]",
    ),
    Fault("memory-that-was-missing-is-forgotten", "step.device_room:DeviceRoom.leave_room").by(
        drop("rise"), "tests/cuda/test_out_of_memory.py::test_the_next_step_leaves_the_room_that_was_missing"
    ),
    Fault("whoever-has-a-session-is-told-of-missing-memory", "step.device_room:DeviceRoom.__call__").by(
        never("kind"),
        "tests/cuda/test_out_of_memory.py::test_memory_that_is_missing_outside_of_a_step_is_torchs_own_error",
    ),
    Fault("memory-stays-pinned-when-it-is-given-back", "memory.space:PinnedSpace.discard").by(
        drop("_unpin"),
        "tests/cuda/test_spaces.py::test_memory_of_the_host_is_pinned_while_it_is_used_and_no_more_than_that[(0.0, 0)]",
    ),
    Fault("a-ticket-of-a-failed-device-is-never-done", "memory.stream_lane:StreamTicket.done").by(
        drop("_end", nth=2), f"{FAILURE}::test_what_has_failed_is_done"
    ),
    Fault("a-failed-device-is-told-in-torchs-words-alone", "memory.stream_lane:StreamLane._queue").by(
        assign("how", "error", nth=3), f"{FAILURE}::test_a_lane_of_a_failed_device_ends_its_tickets"
    ),
    Fault("a-session-that-gives-weights-up-wants-them-still", "session.close:Closing.give_up").by(
        drop("_keeps"), f"{FAILURE}::test_whoever_comes_next_is_told_and_nothing_hangs"
    ),
    Fault("a-lane-whose-device-has-failed-cannot-be-closed", "memory.stream_lane:StreamLane.drain").by(
        without("suppress(...)"), f"{FAILURE}::test_a_lane_of_a_failed_device_ends_its_tickets"
    ),
    Fault("where-a-failure-was-noticed-first-is-forgotten", "memory.device_failure:DeviceFailureError.__init__").by(
        without("shown.where"), f"{FAILURE}::test_the_innermost_place_is_named"
    ),
    Fault("a-stream-does-not-wait-for-a-copy-of-anothers", "memory.leases:CopyStreams.use").by(
        drop("wait_on_device"), *VIEW
    ),
    Fault("a-copy-goes-while-another-stream-uses-it", "memory.leases:CopyStreams.use").by(drop("record_stream"), *VIEW),
    Fault("memory-is-taken-away-and-waited-for", "memory.space:DeviceSpace.can_lend").by(
        returns("False"),
        f"{SPACES}::test_memory_goes_from_slots_apart_to_slots_side_by_side_without_a_wait[(0.0, 0)-True]",
    ),
    Fault("lent-memory-has-no-fence", "memory.arena:Arena._lend").by(
        drop("_fences"),
        f"{SPACES}::test_memory_goes_from_slots_apart_to_slots_side_by_side_without_a_wait[(0.0, 0)-True]",
    ),
    Fault("addresses-that-are-in-use-lose-their-memory", "memory.arena:Arena._end_loans").by(
        replace("self._lent.items()", "((slot, None) for slot in self._lent)"),
        f"{SPACES}::test_memory_goes_from_slots_apart_to_slots_side_by_side_without_a_wait[(0.0, 0)-True]",
    ),
    Fault("more-is-lent-than-the-bound-allows", "memory.arena:Arena._lend").by(
        drop("_take_away"), f"{SPACES}::test_more_memory_than_is_needed_side_by_side_is_waited_for[(0.0, 0)]"
    ),
    Fault("a-device-is-asked-whether-masters-are-finite", "optim.masters:split").by(
        without("not master.is_cpu"),
        "tests/cuda/test_waits.py::test_parts_are_written_on_a_device_without_a_wait_and_as_on_the_host[False-kept0]",
    ),
    Fault("a-refused-registration-leaves-its-error", "memory.space:PinnedSpace.prepare").by(
        drop("_take_last_error"),
        "tests/cuda/test_spaces.py::test_a_refusal_to_pin_leaves_no_error_to_the_next_kernel[(0.0, 0)]",
    ),
    Fault("memory-of-a-closed-session-goes-while-it-is-used", "memory.space:_close_after").by(
        drop("synchronize"),
        "tests/cuda/test_spaces.py::test_memory_of_a_closed_arena_stays_until_what_is_queued_has_used_it[(0.0, 0)]",
    ),
    Fault(
        "chunks-of-a-run-come-where-something-is-still-used", "memory.works_under_way:WorksUnderWay._begin_by_chunk"
    ).by(
        replace("[*before, *after]", "after"),
        f"{STORE}::test_chunks_of_a_run_come_up_after_kernels_that_still_read_what_was_there[(0.0, 0)]",
    ),
    Fault("an-update-that-has-been-queued-counts-as-done", "memory.works_under_way:WorksUnderWay._begin_by_chunk").by(
        assign("after", "[] if update is None else [update.ticket]", nth=1),
        f"{STORE}::test_chunks_of_a_run_go_down_after_what_was_computed_and_updated[(0.0, 0)-1]",
    ),
    Fault(
        "contents-are-made-before-a-copy-has-written-what-was-there",
        "memory.works_under_way:WorksUnderWay._before_writing",
    ).by(never("is_queued"), f"{STORE}::test_new_contents_at_home_come_after_a_copy_that_still_writes_there[(0.0, 0)]"),
    Fault("a-copy-comes-where-something-is-still-used", "memory.works_under_way:WorksUnderWay.begin").by(
        assign("before", "[]"), *TRAINING
    ),
    # Where the device is at once done, bits are right, and only the checker knows.
    Fault("a-file-is-read-where-a-copy-still-reads", "memory.works_under_way:WorksUnderWay.begin").by(
        assign("before", "[] if src is Tier.DISK else _"),
        f"{STORE}::test_the_disk_comes_after_the_device_in_both_directions",
    ),
    Fault("a-file-is-written-before-its-bytes-have-come", "memory.works_under_way:WorksUnderWay.begin").by(
        replace("self._before_reading(...)", "([] if tier is Tier.DISK else _)"),
        f"{STORE}::test_the_disk_comes_after_the_device_in_both_directions[(1.0, 0)]",
    ),
    Fault("nobody-waits-for-a-copy-on-the-device", "memory.works_under_way:WorksUnderWay._note_places").by(
        drop("written"), *TRAINING
    ),
    Fault("a-stream-that-has-waited-once-waits-no-more", "memory.works_under_way:Readiness.written").by(
        drop("_seen.pop"),
        f"{STORE}::test_a_unit_is_updated_after_what_was_computed_and_used_after_that[(0.0, 0)-False]",
    ),
    Fault("the-host-waits-until-a-work-is-queued", "memory.stream_lane:StreamTicket.wait").by(
        drop("synchronize"), f"{LANE}::test_after_a_wait_the_host_sees_what_the_device_has_done[(0.0, 0)]"
    ),
    Fault("a-lane-is-drained-when-all-is-queued", "memory.stream_lane:StreamLane.drain").by(
        drop("synchronize"), f"{LANE}::test_after_drain_nothing_is_under_way[(0.0, 0)]"
    ),
    Fault("a-work-of-the-host-begins-when-the-devices-is-queued", "memory.lanes:end_of").by(
        replace("ticket.wait", "ticket.wait_until_settled"),
        f"{LANE}::test_a_work_of_the_host_comes_after_one_of_the_device[(0.0, 0)]",
    ),
    Fault("flags-and-the-norm-are-read-one-after-the-other", "step.training_deferred:DeferredTraining.first_of").by(
        never("clips"), "tests/cuda/test_waits.py::test_a_step_that_needs_a_number_waits_for_that_alone[fp16-(0.0, 0)]"
    ),
    Fault("a-norm-is-taken-before-a-hook-changes-gradients", "session.scaler:LossScaler.step").by(
        assign("before_step", "True"),
        "tests/cuda/test_overflow.py::test_gradients_that_a_hook_changes_before_the_step_count_as_changed_in_its_norm",
    ),
)
