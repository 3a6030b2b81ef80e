"""Rows of the table: what changes the model, the data, or who computes which part of it."""

from __future__ import annotations

from typing import Final

from patrickstar.config.engine.key import Key, no_effect, refused, switched
from patrickstar.config.engine.kinds import (
    ANYTHING,
    COUNT,
    FLAG,
    FRACTION,
    LIST,
    NUMBER,
    OBJECT,
    TEXT,
    WHOLE,
    Kind,
    or_null,
    word,
)

__all__ = ["MODELS"]

_CURRICULUM: Final = "write the order of the data into the data loader: the loop is the user's"
_OWN_MODEL: Final = "the model is used as it is: no layer of it is replaced"
_WIDE: Final = (
    "several ranks arrive in a later version; one rank holds the whole model, within a budget smaller than it"
)
_COMPRESS: Final = f"leave it out: {_OWN_MODEL}; torch.ao and the model's own library prune and quantise"


def _compression(name: str, **shared: Kind) -> tuple[Key, ...]:
    """One technique of compression: parameters of all groups, and groups that the user names."""
    within = f"compression_training.{name}"
    off = f"without {within}.shared_parameters.enabled"
    return (
        *switched(
            f"{within}.shared_parameters",
            _COMPRESS,
            {
                "schedule_offset": WHOLE,
                **shared,
            },
        ),
        *no_effect(f"{within}.different_groups.*", off, params=OBJECT, modules=LIST, related_modules=or_null(LIST)),
        *no_effect(
            f"{within}.different_groups.*.params",
            off,
            start_bits=COUNT,
            target_bits=COUNT,
            bits=COUNT,
            quantization_period=WHOLE,
            dense_ratio=FRACTION,
            num_heads=COUNT,
        ),
    )


_SPARSE: Final = (
    refused(
        "sparse_attention",
        or_null(OBJECT),
        "leave it out: attention is the model's own; take a model that has the sparse kind",
    ),
    *no_effect(
        "sparse_attention",
        "without sparse_attention",
        mode=word("dense", "fixed", "variable", "bigbird", "bslongformer"),
        block=COUNT,
        different_layout_per_head=FLAG,
        num_local_blocks=COUNT,
        num_global_blocks=COUNT,
        attention=word("bidirectional", "unidirectional"),
        horizontal_global_attention=FLAG,
        num_different_global_patterns=COUNT,
        num_random_blocks=WHOLE,
        local_window_blocks=LIST,
        global_block_indices=LIST,
        global_block_end_indices=or_null(LIST),
        num_sliding_window_blocks=COUNT,
    ),
)

_DATA: Final = (
    *switched(
        "curriculum_learning",
        _CURRICULUM,
        {
            "curriculum_type": TEXT,
            "min_difficulty": WHOLE,
            "max_difficulty": WHOLE,
            "schedule_type": TEXT,
            "schedule_config": OBJECT,
        },
    ),
    *no_effect(
        "curriculum_learning.schedule_config",
        "without curriculum_learning.enabled",
        total_curriculum_step=COUNT,
        difficulty_step=COUNT,
        root_degree=COUNT,
        difficulty=LIST,
        max_step=LIST,
    ),
    *switched(
        "data_efficiency",
        _CURRICULUM,
        {
            "seed": WHOLE,
            "data_routing": OBJECT,
            "data_sampling": OBJECT,
        },
    ),
    *no_effect("data_efficiency.data_routing", "without data_efficiency.enabled", enabled=FLAG, random_ltd=OBJECT),
    *no_effect(
        "data_efficiency.data_routing.random_ltd",
        "without data_efficiency.enabled",
        enabled=FLAG,
        total_layer_num=COUNT,
        random_ltd_layer_num=WHOLE,
        random_ltd_layer_id=LIST,
        model_mask_name=or_null(TEXT),
        model_type=TEXT,
        hidden_state_order=TEXT,
        random_ltd_schedule=OBJECT,
        layer_token_lr_schedule=OBJECT,
    ),
    *no_effect(
        "data_efficiency.data_routing.random_ltd.random_ltd_schedule",
        "without data_efficiency.enabled",
        min_value=WHOLE,
        max_value=WHOLE,
        schedule_type=TEXT,
        schedule_config=OBJECT,
    ),
    *no_effect(
        "data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config",
        "without data_efficiency.enabled",
        require_steps=COUNT,
        seq_per_step=COUNT,
    ),
    *no_effect(
        "data_efficiency.data_sampling",
        "without data_efficiency.enabled",
        enabled=FLAG,
        num_epochs=COUNT,
        num_workers=WHOLE,
        pin_memory=FLAG,
        dynamic_batching=OBJECT,
        curriculum_learning=OBJECT,
    ),
    *no_effect(
        "data_efficiency.data_sampling.curriculum_learning",
        "without data_efficiency.enabled",
        enabled=FLAG,
        data_cluster_path=TEXT,
        curriculum_metrics=OBJECT,
    ),
    *no_effect(
        "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*",
        "without data_efficiency.enabled",
        index_to_sample_path=TEXT,
        index_to_metric_path=TEXT,
        difficulty_type=word("value", "percentile"),
        clustering_type=word("schedule_based", "single_cluster"),
        min_difficulty=WHOLE,
        max_difficulty=WHOLE,
        schedule_type=TEXT,
        schedule_config=OBJECT,
    ),
    *no_effect(
        "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config",
        "without data_efficiency.enabled",
        total_curriculum_step=COUNT,
        difficulty_step=COUNT,
        root_degree=COUNT,
        difficulty=LIST,
        max_step=LIST,
    ),
)

_COMPRESSION: Final = (
    *_compression(
        "weight_quantization",
        quantizer_kernel=FLAG,
        quantize_groups=COUNT,
        quantize_verbose=FLAG,
        quantization_type=TEXT,
        quantize_weight_in_forward=FLAG,
        rounding=TEXT,
        fp16_mixed_quantize=OBJECT,
    ),
    *no_effect(
        "compression_training.weight_quantization.shared_parameters.fp16_mixed_quantize",
        "without compression_training.weight_quantization.shared_parameters.enabled",
        enabled=FLAG,
        quantize_change_ratio=NUMBER,
    ),
    *_compression("activation_quantization", quantization_type=TEXT, range_calibration=TEXT),
    *_compression(
        "sparse_pruning",
        method=TEXT,
        schedule_offset_end=WHOLE,
        schedule_offset_stride=COUNT,
        block_pattern=TEXT,
        dense_ratio=FRACTION,
        excluded_modules=LIST,
    ),
    *_compression("row_pruning", method=TEXT),
    *_compression("head_pruning", method=TEXT, num_heads=COUNT),
    *_compression("channel_pruning", method=TEXT),
    *switched(
        "compression_training.layer_reduction",
        _COMPRESS,
        {
            "keep_number_layer": COUNT,
            "keep_number_layers": COUNT,
            "module_name_prefix": TEXT,
            "teacher_layer": LIST,
            "other_module_name": LIST,
        },
    ),
    *switched(
        "quantize_training",
        _COMPRESS,
        {
            "quantize_verbose": FLAG,
            "quantizer_kernel": FLAG,
            "quantize-algo": OBJECT,
        },
    ),
    *switched(
        "eigenvalue",
        _COMPRESS,
        {
            "verbose": FLAG,
            "max_iter": COUNT,
            "tol": NUMBER,
            "stability": NUMBER,
            "gas_boundary_resolution": COUNT,
            "layer_name": TEXT,
            "layer_num": WHOLE,
        },
    ),
    *switched(
        "progressive_layer_drop",
        "leave it out, and drop layers in the model, where it offers that (`layerdrop` of transformers)",
        {
            "theta": NUMBER,
            "gamma": NUMBER,
        },
    ),
    refused("weight_quantization", or_null(OBJECT), _COMPRESS),
)

_PARALLEL: Final = (
    refused("tensor_parallel.autotp_size", WHOLE, f"leave it out: {_WIDE}", harmless=(None, 0, 1)),
    *no_effect(
        "tensor_parallel",
        "with tensor_parallel.autotp_size of 0 or 1",
        preset_model=or_null(TEXT),
        tp_overlap_comm=FLAG,
        vocab_parallel_lm_head=FLAG,
        partition_config=or_null(OBJECT),
        dtype=TEXT,
        tp=OBJECT,
        keep_module_on_host=FLAG,
    ),
    *no_effect(
        "tensor_parallel.partition_config",
        "with tensor_parallel.autotp_size of 0 or 1",
        use_default_specs=FLAG,
        layer_specs=LIST,
    ),
    *switched(
        "expert_parallel",
        f"leave it out: {_WIDE}; {_OWN_MODEL}",
        {
            "autoep_size": COUNT,
            "expert_tensor_parallel_size": COUNT,
            "async_split_plan": FLAG,
            "preset_model": or_null(TEXT),
            "use_grouped_mm": FLAG,
            "disable_triton_grouped_mm": FLAG,
            "comm_backend": TEXT,
            "moe_layer_pattern": or_null(TEXT),
            "router_pattern": or_null(TEXT),
            "expert_pattern": or_null(TEXT),
            "score_func": TEXT,
            "score_apply": TEXT,
            "combine_impl": TEXT,
            "route_norm": or_null(FLAG),
            "route_scale": NUMBER,
            "top_k": ANYTHING,
            "routed_scaling_factor": ANYTHING,
            "num_expert_groups": or_null(COUNT),
            "num_limited_groups": or_null(COUNT),
            "load_balance_coeff": or_null(NUMBER),
            "expert_w1": or_null(TEXT),
            "expert_w2": or_null(TEXT),
            "expert_w3": or_null(TEXT),
            "num_experts_attr": or_null(TEXT),
            "top_k_attr": or_null(TEXT),
            "has_shared_experts": or_null(FLAG),
            "shared_experts_pattern": or_null(TEXT),
        },
    ),
    refused("sequence_parallel_size", COUNT, f"leave it out: {_WIDE}", harmless=(None, 1)),
    *no_effect("", "with one rank", data_parallel_size=COUNT, use_data_before_expert_parallelism=FLAG),
    refused("pipeline.stages", ANYTHING, f"leave it out: {_WIDE}", harmless=(None, 1, "auto")),
    *no_effect(
        "pipeline",
        "with one stage",
        partition=TEXT,
        seed_layers=FLAG,
        activation_checkpoint_interval=WHOLE,
        pipe_partitioned=FLAG,
        grad_partitioned=FLAG,
        use_reentrant=FLAG,
    ),
)

_ENGINES: Final = (
    *switched(
        "hybrid_engine",
        "leave it out, and call `engine.module.generate()`: it runs under the same budget",
        {
            "max_out_tokens": COUNT,
            "inference_tp_size": COUNT,
            "release_inference_cache": FLAG,
            "pin_parameters": FLAG,
            "tp_gather_partition_size": COUNT,
            "enable_cuda_graph": FLAG,
        },
    ),
    *switched(
        "compile",
        "leave it out: steps are planned without compiling the model",
        {
            "free_activation": FLAG,
            "free_activation_threshold": WHOLE,
            "offload_activation": FLAG,
            "offload_activation_pin_memory": FLAG,
            "offload_opt_states": FLAG,
            "offload_parameters": FLAG,
            "double_buffer": FLAG,
            "symmetric_memory": FLAG,
            "debug_log": FLAG,
            "sync_before_reduce": FLAG,
            "sync_after_reduce": FLAG,
            "sync_before_allgather": FLAG,
            "sync_after_allgather": FLAG,
            "keep_int_input_tensors": FLAG,
            "keep_all_input_tensors": FLAG,
            "passes": or_null(LIST),
            "backend": TEXT,
            "kwargs": OBJECT,
        },
        switch="deepcompile",
    ),
    refused("compile.enabled", FLAG, "leave it out: steps are planned without compiling the model"),
    refused("graph_harvesting", FLAG, "leave it out: nothing is captured in CUDA graphs"),
)

MODELS: Final[tuple[Key, ...]] = (*_SPARSE, *_DATA, *_COMPRESSION, *_PARALLEL, *_ENGINES)
