"""Faults of the original's interface: what a config says, and the steps of an engine."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import always, assign, drop, never, replace, without

READ = "tests/config/engine/test_read.py"
RUN = "tests/session/test_engine.py"
TRAIN = "tests/cli/test_configuration.py"

ENGINE: tuple[Mutant, ...] = (
    Fault("the-hysteresis-is-the-factor", "config.engine.read:_loss_scale").by(
        assign("renamed", "{'hysteresis': 'factor', 'loss_scale_window': 'window', 'min_loss_scale': 'minimum'}"),
        f"{READ}::test_what_keys_come_to",
    ),
    Fault("a-clipping-of-zero-clips-to-zero", "config.engine.read:_memory").by(
        assign("given", "found.values.get('gradient_clipping')", nth=3), f"{READ}::test_what_keys_come_to"
    ),
    Fault("adam-w-mode-is-not-heard", "config.engine.read:_optimizer").by(
        replace("params.pop(...)", "_ and is_adamw"), f"{READ}::test_what_keys_come_to"
    ),
    Fault("a-key-that-stands-twice-is-taken", "config.json_file:_once").by(
        replace("(twice := sorted(...))", "False and sorted({name for name in names if names.count(name) > 1})"),
        "tests/config/test_json_file.py::test_a_file_that_is_no_config_is_refused_with_the_place",
    ),
    Fault("a-misspelt-key-is-passed-over", "config.engine.read:Scan.look_up").by(
        replace("not _has_no_effect(...)", "_ and path in SECTIONS"),
        "tests/config/engine/test_table.py::test_what_is_wrong_with_one_key",
    ),
    Fault("a-warm-up-is-one-step-ahead", "optim.schedules:_warmup").by(
        without("1", nth=1), "tests/optim/test_schedules.py::test_a_decay_ends_at_the_low_end_and_goes_no_further"
    ),
    Fault("micro-batches-are-summed-not-averaged", "engine:Engine.backward").by(
        drop("loss"), f"{RUN}::test_accumulation_and_clipping_take_effect"
    ),
    Fault("gradients-are-zeroed-between-boundaries", "engine:EngineOptimizer.zero_grad").by(
        always("micro_steps"), f"{RUN}::test_accumulation_and_clipping_take_effect"
    ),
    Fault("the-schedule-does-not-wait-for-an-update", "engine:EngineOptimizer.step").by(
        always("_updated"), f"{RUN}::test_a_step_that_overflows_is_skipped_and_the_schedule_waits"
    ),
    Fault("an-engine-warns-of-what-the-original-never-closed", "engine:initialize_engine").by(
        drop("detach"), f"{RUN}::test_an_engine_need_not_be_closed_as_in_the_original"
    ),
    Fault("a-chunk-size-that-is-a-bound-is-taken-for-the-size", "engine:memory_for").by(
        replace("hint < target_numel(numel)", "hint > 0"),
        f"{RUN}::test_a_chunk_size_is_an_upper_bound_and_never_more_than_the_model_needs",
    ),
    Fault("a-flag-is-not-heard-beside-a-config", "cli.request:configure").by(
        never("_KEYS"), f"{TRAIN}::test_a_flag_on_the_command_line_stands_in_the_place_of_its_key"
    ),
    Fault("the-schedule-of-a-run-advances-where-a-step-is-skipped", "cli.loop:TrainingRun._step").by(
        always("steps"), f"{TRAIN}::test_the_same_config_gives_the_bits_of_an_engine"
    ),
    Fault("l2-decay-is-decoupled", "optim.hyper:build_optimizer").by(
        always("settings.decoupled"),
        "tests/optim/test_configured.py::test_an_optimizer_is_torch_s_own_with_the_settings",
    ),
)
