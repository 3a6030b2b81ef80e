"""Faults in what orders the streams of a device: each wait, fence and event left out in turn."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["STREAMS"]

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
COPIED = "            before += self._readiness.before_writing((ref, tier))\n"
COMPUTED = "            if tier is self._compute:\n                before += self._readiness.computed()\n"
FENCE = f"{COPIED}{COMPUTED}            self._readiness.forget"
STREAMS: tuple[Mutant, ...] = (
    Mutant(
        name="a-kernel-does-not-wait-for-its-weight",
        file="memory/readiness.py",
        old="                ticket.wait_on_device()\n                self._seen[place].add(number)\n",
        new="                self._seen[place].add(number)\n",
        tests=TRAINING,
    ),
    Mutant(
        name="a-stream-takes-what-another-has-waited-for",
        file="memory/readiness.py",
        old="            if ticket is not None and number not in self._seen.setdefault(place, set()):",
        new="            if ticket is not None and not self._seen.setdefault(place, set()):",
        tests=SIDE,
    ),
    Mutant(
        name="a-slot-is-given-back-before-its-kernels-are-done",
        file="memory/store.py",
        old=FENCE,
        new=FENCE.replace(COMPUTED, ""),
        tests=TRAINING,
    ),
    Mutant(
        name="a-slot-is-given-back-before-its-copies-are-done",
        file="memory/store.py",
        old=FENCE,
        new=FENCE.replace(COPIED, ""),
        tests=TRAINING,
    ),
    Mutant(
        name="a-copy-out-does-not-wait-for-what-is-computed",
        file="memory/store.py",
        old="        return [*self._under_way(ref, tier), *self._readiness.before_reading((ref, tier)), *computed]",
        new="        return [*self._under_way(ref, tier), *self._readiness.before_reading((ref, tier))]",
        tests=TRAINING,
    ),
    Mutant(
        name="a-copy-does-not-wait-for-what-brought-its-source",
        file="memory/store.py",
        old="        return [*self._under_way(ref, tier), *self._readiness.before_reading((ref, tier)), *computed]",
        new="        return [*self._under_way(ref, tier), *computed]",
        tests=(f"{STORE}::test_a_copy_comes_after_the_one_that_brought_its_source[(0.0, 0)]",),
    ),
    Mutant(
        name="an-update-does-not-wait-for-the-gradient",
        file="memory/store.py",
        old="            if action.tier is self._compute:\n                before += self._readiness.computed()\n            ticket",
        new="            ticket",
        tests=(f"{STORE}::test_a_unit_is_updated_after_what_was_computed_and_used_after_that[(0.0, 0)-True]",),
    ),
    Mutant(
        name="an-update-does-not-wait-for-what-brought-its-units",
        file="memory/store.py",
        old="                before += self._readiness.before_writing((ref, action.tier))\n",
        new="                pass\n",
        tests=TRAINING,
    ),
    Mutant(
        name="nobody-waits-for-an-update-on-the-device",
        file="memory/store.py",
        old="            for ref in units:\n                self._readiness.written((ref, action.tier), ticket)\n",
        new="",
        tests=(f"{STORE}::test_a_unit_is_updated_after_what_was_computed_and_used_after_that[(0.0, 0)-False]",),
    ),
    Mutant(
        name="only-the-first-stream-that-computes-is-waited-for",
        file="memory/readiness.py",
        old="        self._streams.setdefault(number, stream)\n",
        new="        self._streams or self._streams.setdefault(number, stream)\n",
        tests=SIDE,
    ),
    Mutant(
        name="the-host-does-not-wait-for-what-it-reads",
        file="memory/readiness.py",
        old="        for ticket in self.before_writing(place):\n            ticket.wait()\n",
        new="",
        tests=(f"{STORE}::test_a_unit_is_updated_after_what_was_computed_and_used_after_that[(0.0, 0)-False]",),
    ),
    Mutant(
        name="a-copy-that-reads-is-forgotten",
        file="memory/readiness.py",
        old="            reading.append(ticket)\n",
        new="",
        tests=TRAINING,
    ),
    Mutant(
        name="a-kernel-writes-while-a-copy-reads",
        file="memory/readiness.py",
        old="            for ticket in self._read.pop(place, ()):\n                ticket.wait_on_device()\n",
        new="            pass\n",
        tests=("tests/cuda/test_readiness.py::test_a_kernel_that_writes_waits_for_copies_that_read[(0.0, 0)-True]",),
    ),
    Mutant(
        name="a-filling-is-not-waited-for",
        file="memory/store.py",
        old="            self._readiness.written((ref, tier), ticket)\n        else:",
        new="            pass\n        else:",
        tests=TRAINING,
    ),
    Mutant(
        name="works-of-streams-wait-for-nothing",
        file="memory/stream_lane.py",
        old="                    earlier.wait_on_device()\n",
        new="                    earlier.wait_until_settled()\n",
        tests=TRAINING,
    ),
    Mutant(
        name="a-ticket-has-ended-when-it-is-queued",
        file="memory/stream_lane.py",
        old="if self._event.query():",
        new="if True:",
        tests=(f"{LANE}::test_a_work_has_not_ended_before_the_device_has_done_it[(0.0, 0)]",),
    ),
    Mutant(
        name="memory-is-taken-away-while-it-is-used",
        file="memory/arena.py",
        old="                    self._fences[slot].wait()  # a late write would bring pages back\n",
        new="",
        tests=("tests/cuda/test_spaces.py::test_trimming_waits_for_what_is_under_way[(0.0, 0)]",),
    ),
    Mutant(
        name="a-session-ends-before-what-computes-with-its-slots",
        file="memory/store.py",
        old="            for ticket in self._readiness.computed():\n                ticket.wait()\n",
        new="            pass\n",
        tests=(f"{HERE}::test_a_session_that_is_closed_waits_for_what_uses_its_slots[(0.0, 0)]",),
    ),
    Mutant(
        name="pieces-of-memory-go-with-the-first-slot-in-them",
        file="memory/device_space.py",
        old="                    if not self._prepared[piece]:\n                        self._addresses.unmap(piece)",
        new="                    if True:\n                        self._addresses.unmap(piece)",
        tests=(
            "tests/cuda/test_spaces.py::test_slots_have_memory_from_their_first_use_until_they_are_trimmed[(0.0, 0)-1048576]",
        ),
    ),
    Mutant(
        name="all-units-are-copied-as-one",
        file="memory/device_space.py",
        old="        for offset in range(0, nbytes, self._unit_bytes):  # memory of the host is pinned unit by unit\n",
        new="        self._unit_bytes = nbytes\n        for offset in range(0, nbytes, self._unit_bytes):\n",
        tests=("tests/cuda/test_spaces.py::test_bytes_go_to_the_device_and_back[(0.0, 0)-4096]",),
    ),
    Mutant(
        name="a-flag-on-the-device-is-read-at-once",
        file="step/overflow.py",
        old="if not is_finite.is_cpu:",
        new="if not is_finite.is_cpu and bool(is_finite):",
        tests=("tests/cuda/test_overflow.py::test_the_host_waits_once_for_all_gradients[(0.0, 0)]",),
    ),
    Mutant(
        name="flags-of-several-streams-share-a-block",
        file="step/overflow.py",
        old="self._used == _BLOCK or place != self._place:",
        new="self._used == _BLOCK:",
        tests=("tests/cuda/test_overflow.py::test_looks_on_several_streams_share_nothing[(0.0, 0)]",),
    ),
    Mutant(
        name="each-look-has-a-grain",
        file="step/overflow.py",
        old="self._used == _BLOCK or",
        new="self._used == 1 or",
        tests=("tests/cuda/test_overflow.py::test_many_looks_take_no_more_than_plans_have_for_them[1000]",),
    ),
    Mutant(
        name="flags-are-in-no-plan",
        file="session/start.py",
        old="fixed_bytes=budgets.fixed_bytes + flags)",
        new="fixed_bytes=budgets.fixed_bytes)",
        tests=("tests/cuda/test_overflow.py::test_plans_have_room_for_the_looks_of_every_backward",),
    ),
    Mutant(
        name="flags-have-no-room-beside-a-norm",
        file="session/start.py",
        old="norm=taken.norm + flags",
        new="norm=taken.norm",
        tests=("tests/session/test_pass_bytes.py::test_looks_for_overflows_count_in_backwards_and_in_norms",),
    ),
    Mutant(
        name="what-was-found-first-has-no-name",
        file="step/overflow.py",
        old='key=attrgetter("order")',
        new='key=attrgetter("name"), reverse=True',
        tests=("tests/cuda/test_overflow.py::test_names_come_in_the_order_of_what_was_found",),
    ),
    Mutant(
        name="slots-take-what-activations-have-left-for-a-moment",
        file="step/device_level.py",
        old="        if self._peak is None:\n            return trace\n",
        new="        if True:\n            return trace\n",
        tests=("tests/cuda/test_waits.py::test_a_step_never_waits_for_the_device[in_backward-60-(0.0, 0)]",),
    ),
    Mutant(
        name="the-host-squares-gradients-of-a-device",
        file="step/stretches.py",
        old="on_device = self._budgets.stream_device is not None",
        new="on_device = False",
        tests=("tests/cuda/test_waits.py::test_a_step_that_needs_a_number_waits_for_that_alone[fp32-(0.0, 0)]",),
    ),
    Mutant(
        name="what-a-device-has-given-out-is-not-learned",
        file="step/device_level.py",
        old="        self.rise(most)\n",
        new="",
        tests=("tests/cuda/test_waits.py::test_more_than_was_foreseen_is_said_and_planned_with",),
    ),
    Mutant(
        name="what-one-moment-took-more-is-forgotten",
        file="step/device_level.py",
        old="max(known.expected.excess_bytes, self.excess_of(known.expected) + excess)",
        new="0",
        tests=(f"{PEAKS}::test_a_budget_that_a_step_has_shown_to_be_too_small_is_refused_for_the_next",),
    ),
    Mutant(
        name="kernels-are-known-before-their-peak-has-been-seen",
        file="step/device_level.py",
        old=" and self._peak.is_seen and",
        new=" and",
        tests=(f"{PEAKS}::test_the_share_stays_free_where_no_step_has_shown_what_kernels_take",),
    ),
    Mutant(
        name="a-forward-alone-shows-what-a-step-takes",
        file="step/device_level.py",
        old=" and stretch.complete and",
        new=" and",
        tests=(f"{PEAKS}::test_the_share_stays_free_where_no_step_has_shown_what_kernels_take",),
    ),
    Mutant(
        name="a-share-is-left-for-ever",
        file="step/device_level.py",
        old="            known.expected.knows_workspaces = True\n",
        new="            pass\n",
        tests=(
            f"{PEAKS}::test_steps_stay_within_the_budget_that_a_refusal_names_whatever_kernels_take_of_the_share[deferred]",
        ),
    ),
    Mutant(
        name="kernels-are-told-of-that-take-what-was-left-for-them",
        file="step/device_level.py",
        old="        if excess > left:\n",
        new="        if excess > 0:\n",
        tests=(
            f"{PEAKS}::test_steps_stay_within_the_budget_that_a_refusal_names_whatever_kernels_take_of_the_share[deferred]",
        ),
    ),
    Mutant(
        name="a-gpu-leaves-nothing-for-kernels",
        file="step/resources.py",
        old="GPU_WORKSPACE_PERCENT if torch.version.cuda is not None else 0",
        new="0",
        tests=("tests/session/test_resources.py::test_only_a_gpu_leaves_a_share_for_workspaces_of_kernels",),
    ),
    Mutant(
        name="a-neighbours-activations-count",
        file="step/device_peak.py",
        old="            other._counts = other._is_alone = False\n",
        new="            pass\n",
        tests=(f"{PEAKS}::test_a_session_does_not_count_its_neighbours_activations",),
    ),
    Mutant(
        name="bytes-on-a-device-count-as-they-are-asked-for",
        file="tracing/live_bytes.py",
        old="cuda_block_bytes(storage.nbytes()) if self._on_device else storage.nbytes()",
        new="storage.nbytes()",
        tests=(f"{PEAKS}::test_a_forecast_is_what_the_allocator_then_gives_out",),
    ),
    Mutant(
        name="the-end-of-a-large-block-counts-for-nothing",
        file="core/cuda_blocks.py",
        old="return whole if whole <= _SMALL_BYTES else whole + _SMALL_BYTES",
        new="return whole",
        tests=(
            f"{PEAKS}::test_large_activations_stay_within_the_smallest_budget_from_the_first_step_on",
            "tests/core/test_cuda_blocks.py::test_what_is_counted_is_what_a_block_can_have",
        ),
    ),
    Mutant(
        name="gradients-of-the-users-count-as-they-are",
        file="parameters/binding.py",
        old="return self.gradients.taken_bytes() + self.assembled",
        new="return self.gradients.own_bytes() + self.assembled",
        tests=(f"{PEAKS}::test_what_the_user_takes_of_a_device_counts_as_its_blocks",),
    ),
    Mutant(
        name="tensors-put-together-count-as-they-are",
        file="memory/leases.py",
        old="self._assembled[key] = block_bytes(tensor.nbytes, tensor.device.type)",
        new="self._assembled[key] = tensor.nbytes",
        tests=(f"{PEAKS}::test_what_the_user_takes_of_a_device_counts_as_its_blocks",),
    ),
    Mutant(
        name="tensors-being-put-together-count-as-they-are",
        file="step/assembling.py",
        old="        nbytes = block_bytes(nbytes, self._device_type)\n",
        new="",
        tests=(f"{PEAKS}::test_a_tensor_that_is_put_together_needs_its_block",),
    ),
    Mutant(
        name="each-gradient-that-is-shown-has-a-number-on-the-device",
        file="parameters/assembled.py",
        old="        if dtype not in self._nans:\n",
        new="        if True:\n",
        tests=(f"{PEAKS}::test_gradients_that_nobody_reads_take_nothing_of_a_device",),
    ),
    Mutant(
        name="gradients-of-the-users-stay-on-the-device-when-weights-leave-it",
        file="session/close.py",
        old='gradient.to("cpu", self._parts',
        new="gradient.to(self._parts",
        tests=(f"{PEAKS}::test_a_gradient_of_the_users_is_left_to_the_parameter_when_the_session_is_closed",),
    ),
    Mutant(
        name="room-that-is-left-is-what-was-asked-for",
        file="step/device_peak.py",
        old="+ cuda_block_bytes(nbytes)",
        new="+ nbytes",
        tests=("tests/cuda/test_out_of_memory.py::test_the_next_step_leaves_the_room_that_was_missing",),
    ),
    Mutant(
        name="copies-of-inputs-are-not-foreseen",
        file="tracing/offline.py",
        old="                stack.enter_context(owner.meter)\n                inputs, keywords = cast_inputs((inputs, keywords), self._compute)\n",
        new="                inputs, keywords = cast_inputs((inputs, keywords), self._compute)\n                stack.enter_context(owner.meter)\n",
        tests=(f"{PEAKS}::test_copies_of_inputs_in_the_type_that_computes_are_foreseen",),
    ),
    Mutant(
        name="copies-of-inputs-are-made-before-the-stretch-begins",
        file="step/events.py",
        old="            self._stretches.begin_forward(module, self._named, args, kwargs)",
        new=(
            "            args, kwargs = cast_inputs((args, kwargs), self._compute)\n"
            "            self._stretches.begin_forward(module, self._named, args, kwargs)"
        ),
        tests=(f"{PEAKS}::test_copies_of_inputs_in_the_type_that_computes_are_foreseen",),
    ),
    Mutant(
        name="values-of-inputs-on-a-device-are-unknown",
        file="tracing/offline.py",
        old="    with Undispatched():  # a mode of fake tensors would give a fake one, which has no values\n        return",
        new="    if True:\n        return",
        tests=(f"{PEAKS}::test_a_forecast_knows_the_values_of_inputs_on_the_device",),
    ),
    Mutant(
        name="scratch-of-a-norm-comes-before-its-room",
        file="step/update.py",
        old="        norm: Norm | None = None\n",
        new="        norm: Norm | None = self._norm()\n",
        tests=(f"{PEAKS}::test_a_norm_has_its_scratch_when_there_is_room_for_it",),
    ),
    Mutant(
        name="memory-that-torch-keeps-is-not-taken-back",
        file="memory/driver.py",
        old="            torch.accelerator.empty_cache()\n            result = create()\n",
        new="            pass\n",
        tests=("tests/cuda/test_waits.py::test_memory_that_torch_keeps_and_does_not_use_is_taken_back",),
    ),
    Mutant(
        name="a-step-is-not-told-of-memory-that-is-missing",
        file="step/out_of_memory.py",
        old="if stretch.is_over or",
        new="if True or",
        tests=(
            "tests/cuda/test_out_of_memory.py::test_a_step_without_memory_names_the_moment_and_who_has_what[backward]",
        ),
    ),
    Mutant(
        name="memory-that-was-missing-is-forgotten",
        file="step/device_level.py",
        old="        self.rise(self._peak.short_of(nbytes))\n",
        new="",
        tests=("tests/cuda/test_out_of_memory.py::test_the_next_step_leaves_the_room_that_was_missing",),
    ),
    Mutant(
        name="whoever-has-a-session-is-told-of-missing-memory",
        file="step/out_of_memory.py",
        old="if stretch.is_over or stretch.kind not in {StretchKind.TRAINING, StretchKind.EVALUATION}:",
        new="if False:",
        tests=("tests/cuda/test_out_of_memory.py::test_memory_that_is_missing_outside_of_a_step_is_torchs_own_error",),
    ),
    Mutant(
        name="memory-stays-pinned-when-it-is-given-back",
        file="memory/pinned_space.py",
        old="            _unpin(units & self._pinned, self._owner)\n",
        new="",
        tests=(
            "tests/cuda/test_spaces.py::test_memory_of_the_host_is_pinned_while_it_is_used_and_no_more_than_that[(0.0, 0)]",
        ),
    ),
    Mutant(
        name="a-ticket-of-a-failed-device-is-never-done",
        file="memory/stream_lane.py",
        old="""                    self._end = CompletedTicket()
            except torch.AcceleratorError as error:
                self._end = CompletedTicket(DeviceFailureError(error))
        return""",
        new="""                    self._end = CompletedTicket()
            except torch.AcceleratorError:
                pass
        return""",
        tests=(f"{FAILURE}::test_what_has_failed_is_done",),
    ),
    Mutant(
        name="a-failed-device-is-told-in-torchs-words-alone",
        file="memory/stream_lane.py",
        old="            how = DeviceFailureError(error)\n",
        new="            how = error\n",
        tests=(f"{FAILURE}::test_a_lane_of_a_failed_device_ends_its_tickets",),
    ),
    Mutant(
        name="a-session-that-gives-weights-up-wants-them-still",
        file="session/close.py",
        old="        self._wanted = self._keeps = False\n",
        new="",
        tests=(f"{FAILURE}::test_whoever_comes_next_is_told_and_nothing_hangs",),
    ),
    Mutant(
        name="a-lane-whose-device-has-failed-cannot-be-closed",
        file="memory/stream_lane.py",
        old="        with suppress(torch.AcceleratorError):  # which tickets have; nothing runs on a device that has failed\n",
        new="        if True:\n",
        tests=(f"{FAILURE}::test_a_lane_of_a_failed_device_ends_its_tickets",),
    ),
    Mutant(
        name="where-a-failure-was-noticed-first-is-forgotten",
        file="memory/device_failure.py",
        old="error.where or where",
        new="where",
        tests=(f"{FAILURE}::test_the_innermost_place_is_named",),
    ),
    Mutant(
        name="a-stream-does-not-wait-for-a-copy-of-anothers",
        file="memory/copy_streams.py",
        old="            ticket.wait_on_device()\n",
        new="",
        tests=VIEW,
    ),
    Mutant(
        name="a-copy-goes-while-another-stream-uses-it",
        file="memory/copy_streams.py",
        old="            copy.record_stream(stream)\n",
        new="",
        tests=VIEW,
    ),
    Mutant(
        name="memory-is-taken-away-and-waited-for",
        file="memory/device_space.py",
        old="        return self._piece_bytes == self._unit_bytes",
        new="        return False",
        tests=(f"{SPACES}::test_memory_goes_from_slots_apart_to_slots_side_by_side_without_a_wait[(0.0, 0)-True]",),
    ),
    Mutant(
        name="lent-memory-has-no-fence",
        file="memory/arena.py",
        old="                    self._fences[target] = self._fences[slot]",
        new="                    pass",
        tests=(f"{SPACES}::test_memory_goes_from_slots_apart_to_slots_side_by_side_without_a_wait[(0.0, 0)-True]",),
    ),
    Mutant(
        name="addresses-that-are-in-use-lose-their-memory",
        file="memory/arena.py",
        old="            if waits or fence is None or fence.done:\n                self._take_away(slot, fence)",
        new="            if True:\n                self._take_away(slot, None)",
        tests=(f"{SPACES}::test_memory_goes_from_slots_apart_to_slots_side_by_side_without_a_wait[(0.0, 0)-True]",),
    ),
    Mutant(
        name="more-is-lent-than-the-bound-allows",
        file="memory/arena.py",
        old="                    self._take_away(slot, self._fences.get(slot))\n",
        new="",
        tests=(f"{SPACES}::test_more_memory_than_is_needed_side_by_side_is_waited_for[(0.0, 0)]",),
    ),
    Mutant(
        name="a-device-is-asked-whether-masters-are-finite",
        file="optim/masters.py",
        old="not master.is_cpu or not bool(",
        new="not bool(",
        tests=(
            "tests/cuda/test_waits.py::test_parts_are_written_on_a_device_without_a_wait_and_as_on_the_host[False-kept0]",
        ),
    ),
    Mutant(
        name="a-refused-registration-leaves-its-error",
        file="memory/pinned_space.py",
        old="        _take_last_error()\n",
        new="",
        tests=("tests/cuda/test_spaces.py::test_a_refusal_to_pin_leaves_no_error_to_the_next_kernel[(0.0, 0)]",),
    ),
    Mutant(
        name="memory-of-a-closed-session-goes-while-it-is-used",
        file="memory/device_space.py",
        old="    torch.accelerator.synchronize(device)\n",
        new="",
        tests=(
            "tests/cuda/test_spaces.py::test_memory_of_a_closed_arena_stays_until_what_is_queued_has_used_it[(0.0, 0)]",
        ),
    ),
    Mutant(
        name="chunks-of-a-run-come-where-something-is-still-used",
        file="memory/store.py",
        old="[*before, *after]",
        new="after",
        tests=(f"{STORE}::test_chunks_of_a_run_come_up_after_kernels_that_still_read_what_was_there[(0.0, 0)]",),
    ),
    Mutant(
        name="an-update-that-has-been-queued-counts-as-done",
        file="memory/store.py",
        old="after = self._readiness.before_reading((ref, src)) if update is None else [update]",
        new="after = [] if update is None else [update]",
        tests=(f"{STORE}::test_chunks_of_a_run_go_down_after_what_was_computed_and_updated[(0.0, 0)-1]",),
    ),
    Mutant(
        name="contents-are-made-before-a-copy-has-written-what-was-there",
        file="memory/store.py",
        old="        return [*self._under_way(ref, tier), *self._readiness.before_writing((ref, tier))]",
        new="        return self._under_way(ref, tier)",
        tests=(f"{STORE}::test_new_contents_at_home_come_after_a_copy_that_still_writes_there[(0.0, 0)]",),
    ),
    Mutant(
        name="a-copy-comes-where-something-is-still-used",
        file="memory/store.py",
        old="        before = self._arenas[dst].fences(first, slots)\n        before += ",
        new="        before = ",
        tests=TRAINING,
    ),
    # Where the device is at once done, bits are right, and only the checker knows.
    Mutant(
        name="a-file-is-read-where-a-copy-still-reads",
        file="memory/store.py",
        old="reading(ref, self._arenas[dst].buffer(first, slots)), before, nbytes",
        new="reading(ref, self._arenas[dst].buffer(first, slots)), [], nbytes",
        tests=(f"{STORE}::test_the_disk_comes_after_the_device_in_both_directions",),
    ),
    Mutant(
        name="a-file-is-written-before-its-bytes-have-come",
        file="memory/store.py",
        old="writing(ref, from_), self._before_reading(ref, src), nbytes",
        new="writing(ref, from_), [], nbytes",
        tests=(f"{STORE}::test_the_disk_comes_after_the_device_in_both_directions[(1.0, 0)]",),
    ),
    Mutant(
        name="nobody-waits-for-a-copy-on-the-device",
        file="memory/store.py",
        old="        self._readiness.written((ref, dst), ticket)\n        if dst",
        new="        if dst",
        tests=TRAINING,
    ),
    Mutant(
        name="a-stream-that-has-waited-once-waits-no-more",
        file="memory/readiness.py",
        old="            self._seen.pop(place, None)\n\n    def read",
        new="\n    def read",
        tests=(f"{STORE}::test_a_unit_is_updated_after_what_was_computed_and_used_after_that[(0.0, 0)-False]",),
    ),
    Mutant(
        name="the-host-waits-until-a-work-is-queued",
        file="memory/stream_lane.py",
        old="                event.synchronize()\n",
        new="                pass\n",
        tests=(f"{LANE}::test_after_a_wait_the_host_sees_what_the_device_has_done[(0.0, 0)]",),
    ),
    Mutant(
        name="a-lane-is-drained-when-all-is-queued",
        file="memory/stream_lane.py",
        old="            self.stream.synchronize()\n\n    def close",
        new="            pass\n\n    def close",
        tests=(f"{LANE}::test_after_drain_nothing_is_under_way[(0.0, 0)]",),
    ),
    Mutant(
        name="a-work-of-the-host-begins-when-the-devices-is-queued",
        file="memory/thread_lane.py",
        old="            ticket.wait()\n",
        new="            ticket.wait_until_settled()\n",
        tests=(f"{LANE}::test_a_work_of_the_host_comes_after_one_of_the_device[(0.0, 0)]",),
    ),
    Mutant(
        name="flags-and-the-norm-are-read-one-after-the-other",
        file="step/training.py",
        old="        if clips and any(flag.on_device is not None for flag in overflowed):",
        new="        if False:",
        tests=("tests/cuda/test_waits.py::test_a_step_that_needs_a_number_waits_for_that_alone[fp16-(0.0, 0)]",),
    ),
    Mutant(
        name="a-norm-is-taken-before-a-hook-changes-gradients",
        file="session/scaler.py",
        old="before_step=not has_step_pre_hooks(optimizer)",
        new="before_step=True",
        tests=(
            "tests/cuda/test_overflow.py::test_gradients_that_a_hook_changes_before_the_step_count_as_changed_in_its_norm",
        ),
    ),
)
