"""Rows of the table: ZeRO, offloading, the disk, activations."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from patrickstar.config.engine.key import Key, honoured, no_effect, refused
from patrickstar.config.engine.kinds import (
    ANYTHING,
    COUNT,
    FLAG,
    FRACTION,
    LIST,
    OBJECT,
    TEXT,
    WHOLE,
    or_null,
    whole,
    word,
)

__all__ = ["MEMORY"]

_DEVICE: Final = word("none", "cpu", "nvme")
_PLANNED: Final = "what is in fast memory when is planned from a trace of the step, within the budget"
_RANKS: Final = "it says how ranks share and talk, and there is one; several arrive in a later version"
_BUFFERS: Final = "the session sizes its own buffers, within the budget"

_ZERO: Final = (
    *no_effect(
        "",
        "the form of DeepSpeed 0.2: as `zero_optimization.stage`",
        zero_optimization=replace(FLAG, words="an object, or true or false"),
    ),
    *no_effect(
        "zero_optimization",
        "every stage shares states over ranks, and there is one; states move between the tiers of memory at any stage",
        stage=whole(0, 3),
    ),
    *no_effect(
        "zero_optimization",
        _RANKS,
        allgather_partitions=FLAG,
        allgather_bucket_size=WHOLE,
        allgather_size=WHOLE,
        overlap_comm=or_null(FLAG),
        reduce_scatter=FLAG,
        reduce_bucket_size=WHOLE,
        use_multi_rank_bucket_allreduce=FLAG,
        round_robin_gradients=FLAG,
        zero_hpz_partition_size=WHOLE,
        zero_quantized_weights=FLAG,
        zero_quantized_gradients=FLAG,
        zeropp_loco_param=or_null(OBJECT),
        mics_shard_size=whole(-1),
        mics_hierarchical_params_gather=FLAG,
        stage3_use_all_reduce_for_fetch_params=FLAG,
        stage3_allgather_sequential=FLAG,
        use_all_reduce_for_fetch_params=FLAG,
        allgather_sequential=FLAG,
        legacy_stage1=FLAG,
        pipeline_loading_checkpoint=FLAG,
    ),
    *no_effect("zero_optimization.zeropp_loco_param", _RANKS, err_beta=FRACTION, reset_T=COUNT),
    *no_effect(
        "zero_optimization",
        _PLANNED,
        stage3_max_live_parameters=WHOLE,
        stage3_max_reuse_distance=WHOLE,
        stage3_prefetch_bucket_size=WHOLE,
        stage3_param_persistence_threshold=WHOLE,
        stage3_model_persistence_threshold=WHOLE,
        stage3_module_granularity_threshold=WHOLE,
        stage3_partition_stream_chunk_size=WHOLE,
        max_live_parameters=WHOLE,
        max_reuse_distance=WHOLE,
        prefetch_bucket_size=WHOLE,
        param_persistence_threshold=WHOLE,
        model_persistence_threshold=WHOLE,
        module_granularity_threshold=WHOLE,
        sub_group_size=WHOLE,
        contiguous_gradients=FLAG,
        parameter_alignment=FLAG,
        memory_efficient_linear=FLAG,
        override_module_apply=FLAG,
        leaf_module=OBJECT,
    ),
    *no_effect("zero_optimization.leaf_module", _PLANNED, classes=LIST, names=LIST, name_suffixes=LIST),
    *no_effect(
        "zero_optimization",
        "masters are fp32 and always saved; checkpoints load under any budget",
        load_from_fp32_weights=FLAG,
        elastic_checkpoint=FLAG,
        save_muon_momentum_buffer_in_memory=FLAG,
    ),
    *no_effect(
        "zero_optimization",
        "`session.export(dir)` writes whole weights, in fp32",
        stage3_gather_16bit_weights_on_model_save=FLAG,
        stage3_gather_fp16_weights_on_model_save=FLAG,
        gather_16bit_weights_on_model_save=FLAG,
    ),
    *no_effect(
        "zero_optimization",
        "a parameter without a gradient is left alone, as in PyTorch",
        ignore_unused_parameters=FLAG,
    ),
    *no_effect(
        "zero_optimization",
        "steps that were not as planned are in `session.stats()`, with the reason",
        log_trace_cache_warnings=FLAG,
        enable_sanity_checks=FLAG,
    ),
    *no_effect(
        "zero_optimization",
        "the norm is computed where it is clipped, and only there",
        compute_grad_norm=FLAG,
    ),
    refused(
        "zero_optimization.zero_quantized_nontrainable_weights",
        FLAG,
        "leave it out: frozen weights keep their values",
    ),
    refused(
        "zero_optimization.zenflow",
        or_null(OBJECT),
        "leave it out: it updates part of the weights late, and other numbers come of it",
    ),
    *no_effect(
        "zero_optimization.zenflow",
        "without zero_optimization.zenflow",
        topk_ratio=FRACTION,
        select_strategy=TEXT,
        select_interval=ANYTHING,
        update_interval=ANYTHING,
        overlap_step=FLAG,
        offload=FLAG,
        auto_ratio=FRACTION,
        full_warm_up_rounds=WHOLE,
        pt_reserved_cores_perc=FRACTION,
        steps_per_epoch=or_null(WHOLE),
    ),
)

_OFFLOADING: Final = (
    honoured(
        "zero_optimization.offload_param.device",
        _DEVICE,
        '`"nvme"`: the disk below the memory, where what does not fit rests. `"cpu"` and `"none"`: no disk; the host is below a device in any case. '
        'Default `"none"`.',
    ),
    honoured("zero_optimization.offload_param.nvme_path", or_null(TEXT), "Directory of the disk (`disk` of `manage`)."),
    honoured("zero_optimization.offload_optimizer.device", _DEVICE, "As of `offload_param`; the two are one disk."),
    honoured(
        "zero_optimization.offload_optimizer.nvme_path", or_null(TEXT), "As of `offload_param`: the same directory."
    ),
    *no_effect(
        "zero_optimization.offload_param",
        _BUFFERS,
        pin_memory=FLAG,
        buffer_count=WHOLE,
        buffer_size=WHOLE,
        max_in_cpu=WHOLE,
    ),
    *no_effect(
        "zero_optimization.offload_optimizer",
        _BUFFERS,
        pin_memory=FLAG,
        buffer_count=WHOLE,
        pipeline=FLAG,
        pipeline_read=FLAG,
        pipeline_write=FLAG,
        fast_init=FLAG,
    ),
    *no_effect(
        "zero_optimization.offload_optimizer",
        "a plan chooses whether a chunk is updated where it computes or where its states rest",
        ratio=FRACTION,
        super_offload=FLAG,
        convert_grad_on_cpu=FLAG,
        cpuadam_cores_perc=FRACTION,
    ),
    *no_effect(
        "zero_optimization",
        "the form of DeepSpeed 0.3: the host is below a device in any case",
        cpu_offload=or_null(FLAG),
        cpu_offload_params=or_null(FLAG),
        cpu_offload_param=or_null(FLAG),
        cpu_offload_use_pin_memory=or_null(FLAG),
    ),
    *no_effect(
        "aio",
        "the disk is read and written by `pread` and `pwrite`, past the page cache where it can be",
        block_size=COUNT,
        queue_depth=COUNT,
        thread_count=COUNT,
        intra_op_parallelism=COUNT,
        single_submit=FLAG,
        overlap_events=FLAG,
        use_gds=FLAG,
    ),
)

_ACTIVATIONS: Final = (
    *no_effect(
        "activation_checkpointing",
        "activations are as the model has them: call its own `gradient_checkpointing_enable()`, or use torch.utils.checkpoint in it",
        loud=True,
        partition_activations=FLAG,
        cpu_checkpointing=FLAG,
        contiguous_memory_optimization=FLAG,
        number_checkpoints=or_null(WHOLE),
        synchronize_checkpoint_boundary=FLAG,
        profile=FLAG,
        use_reentrant=FLAG,
    ),
)

MEMORY: Final[tuple[Key, ...]] = (*_ZERO, *_OFFLOADING, *_ACTIVATIONS)
