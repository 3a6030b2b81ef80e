"""Rows of the table: what reports, measures, tunes and saves."""

from __future__ import annotations

from typing import Final

from patrickstar.config.engine.key import Key, honoured, no_effect, refused
from patrickstar.config.engine.kinds import (
    ANYTHING,
    COUNT,
    FLAG,
    LIST,
    NUMBER,
    OBJECT,
    TEXT,
    WHOLE,
    or_null,
    whole,
    word,
)

__all__ = ["WATCHING"]

_BY_YOURSELF: Final = "nothing is written there: log what the loop has; `train --log-json` writes every step"
_STATS: Final = "`session.stats()` has seconds, bytes moved and peaks at any time"
_CHECKPOINTS: Final = "one form of checkpoint, which loads under any budget: `engine.save_checkpoint(dir)`"

_LOGGING: Final = (
    honoured(
        "steps_per_print",
        or_null(COUNT),
        'Every so many steps the count of steps, of skipped ones, the learning rate and the betas go to `logging.getLogger("patrickstar")`. '
        "Default: never.",
    ),
    *no_effect("", _STATS, wall_clock_breakdown=FLAG, memory_breakdown=FLAG),
    *no_effect("timers", _STATS, throughput=OBJECT),
    *no_effect("timers.throughput", _STATS, enabled=FLAG, synchronized=FLAG),
    *no_effect("", 'levels are set on `logging.getLogger("patrickstar")`', log_level=TEXT, dump_state=FLAG),
    *no_effect("", "the loop and its data loader are the user's", dataloader_drop_last=FLAG, disable_python_gc=FLAG),
    *no_effect("", "a hint for tensor cores, which nothing asks for", vocabulary_size=or_null(WHOLE)),
)

_MONITORS: Final = (
    *no_effect("tensorboard", _BY_YOURSELF, loud=True, enabled=FLAG, output_path=or_null(TEXT), job_name=or_null(TEXT)),
    *no_effect("csv_monitor", _BY_YOURSELF, loud=True, enabled=FLAG, output_path=or_null(TEXT), job_name=or_null(TEXT)),
    *no_effect(
        "wandb",
        _BY_YOURSELF,
        loud=True,
        enabled=FLAG,
        group=or_null(TEXT),
        team=or_null(TEXT),
        project=or_null(TEXT),
    ),
    *no_effect(
        "comet",
        _BY_YOURSELF,
        loud=True,
        enabled=FLAG,
        samples_log_interval=COUNT,
        project=or_null(TEXT),
        workspace=or_null(TEXT),
        api_key=or_null(TEXT),
        experiment_name=or_null(TEXT),
        experiment_key=or_null(TEXT),
        online=or_null(FLAG),
        mode=or_null(word("get", "create", "get_or_create")),
    ),
    *no_effect("trackio", _BY_YOURSELF, loud=True, enabled=FLAG, project=or_null(TEXT)),
)

_PROFILERS: Final = (
    *no_effect(
        "flops_profiler",
        "`session.trace` has the memory of every moment; torch.profiler has the operations",
        loud=True,
        enabled=FLAG,
        recompute_fwd_factor=NUMBER,
        profile_step=WHOLE,
        module_depth=whole(-1),
        top_modules=COUNT,
        detailed=FLAG,
        output_file=or_null(TEXT),
    ),
    *no_effect(
        "comms_logger",
        "one rank does not communicate",
        enabled=FLAG,
        verbose=FLAG,
        prof_all=FLAG,
        debug=FLAG,
        prof_ops=LIST,
    ),
)

_TUNING: Final = (
    refused(
        "autotuning.enabled",
        FLAG,
        "write the sizes yourself: `patrickstar plan` prints the peaks, the smallest budget and the bytes a step moves, and runs nothing",
    ),
    *no_effect(
        "autotuning",
        "without autotuning.enabled",
        results_dir=or_null(TEXT),
        exps_dir=or_null(TEXT),
        overwrite=FLAG,
        metric=TEXT,
        metric_path=or_null(TEXT),
        start_step=or_null(WHOLE),
        end_step=or_null(WHOLE),
        start_profile_step=WHOLE,
        end_profile_step=WHOLE,
        fast=FLAG,
        max_train_batch_size=or_null(COUNT),
        min_train_batch_size=COUNT,
        max_train_micro_batch_size_per_gpu=COUNT,
        min_train_micro_batch_size_per_gpu=COUNT,
        mp_size=COUNT,
        num_tuning_micro_batch_sizes=COUNT,
        tuner_type=TEXT,
        tuner_early_stopping=WHOLE,
        tuner_num_trials=WHOLE,
        arg_mappings=or_null(OBJECT),
        model_info=or_null(OBJECT),
        model_info_path=or_null(TEXT),
    ),
    refused(
        "elasticity.enabled",
        FLAG,
        "write train_batch_size and train_micro_batch_size_per_gpu: there is one rank, and its number does not change",
    ),
    *no_effect(
        "elasticity",
        "without elasticity.enabled",
        max_train_batch_size=COUNT,
        micro_batch_sizes=LIST,
        min_gpus=COUNT,
        max_gpus=COUNT,
        min_time=WHOLE,
        prefer_large_batch=FLAG,
        prefer_larger_batch=FLAG,
        ignore_non_elastic_batch_info=FLAG,
        version=NUMBER,
        model_parallel_size=COUNT,
        num_gpus_per_node=COUNT,
    ),
)

_SAVING: Final = (
    *no_effect(
        "checkpoint",
        _CHECKPOINTS,
        tag_validation=word("Ignore", "Warn", "Fail", any_case=True),
        load_universal=FLAG,
        use_node_local_storage=FLAG,
        parallel_write=OBJECT,
        checkpoint_serialization=FLAG,
        writer=or_null(OBJECT),
    ),
    *no_effect("checkpoint.parallel_write", _CHECKPOINTS, pipeline_stage=FLAG),
    *no_effect(
        "checkpoint.writer",
        _CHECKPOINTS,
        type=TEXT,
        io_buffer_size=COUNT,
        io_buffer_double=FLAG,
        show_statistics=FLAG,
        data_parallel=or_null(TEXT),
        decoupled=FLAG,
        io_multiplier=COUNT,
    ),
    *no_effect(
        "nebula",
        _CHECKPOINTS,
        loud=True,
        enabled=FLAG,
        persistent_storage_path=or_null(TEXT),
        persistent_time_interval=WHOLE,
        num_of_version_in_retention=WHOLE,
        enable_nebula_load=FLAG,
        load_path=or_null(TEXT),
    ),
    *no_effect("", _CHECKPOINTS, loud=True, datastates_ckpt=ANYTHING),
)

WATCHING: Final[tuple[Key, ...]] = (*_LOGGING, *_MONITORS, *_PROFILERS, *_TUNING, *_SAVING)
