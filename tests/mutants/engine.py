"""Faults of the original's interface: what a config says, and the steps of an engine."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import always, assign, drop, never, replace, returns, without

__all__ = ["ENGINE"]

READ = "tests/config/engine/test_read.py"
RUN = "tests/session/test_engine.py"
TRAIN = "tests/cli/test_configuration.py"

ENGINE: tuple[Mutant, ...] = (
    Fault("the-hysteresis-is-the-factor", "config.engine.memory:_loss_scale").by(
        returns(
            (
                "LossScale(initial=initial, dynamic=not static, window=given.get('loss_scale_window', 1000), "
                "factor=given.get('hysteresis', 2), consecutive_hysteresis=given.get('consecutive_hysteresis', "
                "False), minimum=minimum)"
            ),
            nth=3,
        ),
        f"{READ}::test_the_loss_scale_is_deepspeed_s",
    ),
    Fault("a-clipping-of-zero-clips-to-zero", "config.engine.memory:memory_of").by(
        assign("clip", "found.values.get('gradient_clipping')"), f"{READ}::test_zero_and_minus_one_clip_nothing"
    ),
    Fault("adam-w-mode-is-not-heard", "config.engine.read:_optimizer").by(
        assign("decoupled", "is_adamw"), f"{READ}::test_how_weights_decay"
    ),
    Fault("a-key-that-stands-twice-is-taken", "config.engine.json_file:read_json").by(
        never("twice"), "tests/config/engine/test_json_file.py::test_a_file_that_is_no_config_is_refused_with_the_place"
    ),
    Fault("a-misspelt-key-is-passed-over", "config.engine.scan:_scan_object").by(
        drop("blame"), "tests/config/engine/test_table.py::test_what_is_wrong_with_one_key"
    ),
    Fault("a-warm-up-is-one-step-ahead", "config.engine.schedules:WarmupLR.lr").by(
        without("1"), "tests/config/engine/test_schedules.py::test_a_decay_ends_at_the_low_end_and_goes_no_further"
    ),
    Fault("micro-batches-are-summed-not-averaged", "engine.engine:Engine.backward").by(
        drop("loss"), f"{RUN}::test_accumulation_and_clipping_take_effect"
    ),
    Fault("gradients-are-zeroed-between-boundaries", "engine.engine_optimizer:EngineOptimizer.zero_grad").by(
        always("_micro_steps"), f"{RUN}::test_accumulation_and_clipping_take_effect"
    ),
    Fault("the-schedule-does-not-wait-for-an-update", "engine.engine_optimizer:EngineOptimizer.step").by(
        always("_updated"), f"{RUN}::test_a_step_that_overflows_is_skipped_and_the_schedule_waits"
    ),
    Fault("an-engine-warns-of-what-the-original-never-closed", "engine.initialize:initialize_engine").by(
        drop("detach"), f"{RUN}::test_an_engine_need_not_be_closed_as_in_the_original"
    ),
    Fault("a-chunk-size-that-is-a-bound-is-taken-for-the-size", "engine.initialize:memory_for").by(
        replace("hint < target_numel(numel)", "hint > 0"),
        f"{RUN}::test_a_chunk_size_is_an_upper_bound_and_never_more_than_the_model_needs",
    ),
    Fault("a-flag-is-not-heard-beside-a-config", "cli.configuration:_with_flags").by(
        never("_KEYS"), f"{TRAIN}::test_a_flag_on_the_command_line_stands_in_the_place_of_its_key"
    ),
    Fault("the-schedule-of-a-run-advances-where-a-step-is-skipped", "cli.loop:TrainingRun._step").by(
        always("steps"), f"{TRAIN}::test_the_same_config_gives_the_bits_of_an_engine"
    ),
    Fault("the-plain-run-has-no-l2-decay", "cli.compare:update_").by(
        never("weight_decay"), f"{TRAIN}::test_plain_pytorch_gives_the_same_bits"
    ),
)
