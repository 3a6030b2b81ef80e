"""Faults of the original's interface: what a config says, and the steps of an engine."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["ENGINE"]

READ = "tests/config/engine/test_read.py"
RUN = "tests/session/test_engine.py"
TRAIN = "tests/cli/test_configuration.py"

ENGINE: tuple[Mutant, ...] = (
    Mutant(
        name="the-hysteresis-is-the-factor",
        file="config/engine/read.py",
        old='renamed = {"loss_scale_window": "window",',
        new='renamed = {"hysteresis": "factor", "loss_scale_window": "window",',
        tests=(f"{READ}::test_what_keys_come_to",),
    ),
    Mutant(
        name="a-clipping-of-zero-clips-to-zero",
        file="config/engine/read.py",
        old='max(found.values.get("gradient_clipping", 0.0), 0.0) or None',
        new='found.values.get("gradient_clipping")',
        tests=(f"{READ}::test_what_keys_come_to",),
    ),
    Mutant(
        name="adam-w-mode-is-not-heard",
        file="config/engine/read.py",
        old='decoupled=params.pop("adam_w_mode", is_adamw)',
        new='decoupled=params.pop("adam_w_mode", is_adamw) and is_adamw',
        tests=(f"{READ}::test_what_keys_come_to",),
    ),
    Mutant(
        name="a-key-that-stands-twice-is-taken",
        file="config/json_file.py",
        old="if twice := sorted(",
        new="if False and sorted(",
        tests=("tests/config/test_json_file.py::test_a_file_that_is_no_config_is_refused_with_the_place",),
    ),
    Mutant(
        name="a-misspelt-key-is-passed-over",
        file="config/engine/scan.py",
        old="            elif not _has_no_effect(name, within):\n",
        new="            elif not _has_no_effect(name, within) and path in SECTIONS:\n",
        tests=("tests/config/engine/test_table.py::test_what_is_wrong_with_one_key",),
    ),
    Mutant(
        name="a-warm-up-is-one-step-ahead",
        file="optim/schedules.py",
        old="share, total = _risen(done - 1, p)",
        new="share, total = _risen(done, p)",
        tests=("tests/optim/test_schedules.py::test_a_decay_ends_at_the_low_end_and_goes_no_further",),
    ),
    Mutant(
        name="micro-batches-are-summed-not-averaged",
        file="engine/engine.py",
        old="loss = loss / self._accumulate",
        new="pass",
        tests=(f"{RUN}::test_accumulation_and_clipping_take_effect",),
    ),
    Mutant(
        name="gradients-are-zeroed-between-boundaries",
        file="engine/engine_optimizer.py",
        old="        if self._micro_steps == 0:\n",
        new="        if True:\n",
        tests=(f"{RUN}::test_accumulation_and_clipping_take_effect",),
    ),
    Mutant(
        name="the-schedule-does-not-wait-for-an-update",
        file="engine/engine_optimizer.py",
        old="        if self._updated:\n",
        new="        if True:\n",
        tests=(f"{RUN}::test_a_step_that_overflows_is_skipped_and_the_schedule_waits",),
    ),
    Mutant(
        name="an-engine-warns-of-what-the-original-never-closed",
        file="engine/initialize.py",
        old="session.unclosed.detach()",
        new="pass",
        tests=(f"{RUN}::test_an_engine_need_not_be_closed_as_in_the_original",),
    ),
    Mutant(
        name="a-chunk-size-that-is-a-bound-is-taken-for-the-size",
        file="engine/initialize.py",
        old="and hint < target_numel(numel)",
        new="and hint > 0",
        tests=(f"{RUN}::test_a_chunk_size_is_an_upper_bound_and_never_more_than_the_model_needs",),
    ),
    Mutant(
        name="a-flag-is-not-heard-beside-a-config",
        file="cli/configuration.py",
        old="        if name in _KEYS:\n",
        new="        if False:\n",
        tests=(f"{TRAIN}::test_a_flag_on_the_command_line_stands_in_the_place_of_its_key",),
    ),
    Mutant(
        name="the-schedule-of-a-run-advances-where-a-step-is-skipped",
        file="cli/loop.py",
        old="        if stats.steps > before.steps:",
        new="        if True:",
        tests=(f"{TRAIN}::test_the_same_config_gives_the_bits_of_an_engine",),
    ),
    Mutant(
        name="the-plain-run-has-no-l2-decay",
        file="cli/compare.py",
        old="    elif hyper.weight_decay:\n",
        new="    elif False:\n",
        tests=(f"{TRAIN}::test_plain_pytorch_gives_the_same_bits",),
    ),
)
