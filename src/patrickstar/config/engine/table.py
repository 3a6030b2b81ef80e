"""The keys of PatrickStar 0.4.6, of DeepSpeed 0.19 and of our own: those that are honoured or refused, and those without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from patrickstar.config import kinds as k
from patrickstar.config.settings import SCHEDULES


@dataclass(frozen=True, slots=True)
class Key:
    """A row: what a key does; or, where it has no kind, what to write instead, unless its value is null or harmless."""

    kind: k.Kind | None
    text: str
    harmless: tuple[object, ...] = (False,)


_HONOURED: Final = MappingProxyType(
    {
        "train_micro_batch_size_per_gpu": Key(k.COUNT, "Samples of one forward on one rank."),
        "gradient_accumulation_steps": Key(k.COUNT, "Micro-batches of a step. `backward` divides by it. Default 1."),
        "train_batch_size": Key(k.COUNT, "Micro batch x accumulation x ranks; two of the three give the third."),
        "gradient_clipping": Key(k.NORM, "Largest global norm of the gradients of a step; 0 and -1: any."),
        "steps_per_print": Key(k.or_null(k.COUNT), "Steps between two lines of progress. Default: none."),
        "default_chunk_size": Key(k.COUNT, "Elements that a chunk does not exceed. A tensor may span several chunks."),
        "use_cpu_embedding": Key(k.FLAG, "Tables with more rows than any linear go in tiles, with the same bits."),
        "optimizer.type": Key(k.word("Adam", "AdamW"), "`Adam` has L2 decay, `AdamW` decoupled. Default `Adam`."),
        "optimizer.params.lr": Key(k.RATE, "Learning rate. Default 1e-3."),
        "optimizer.params.betas": Key(k.BETAS, "Default 0.9 and 0.999."),
        "optimizer.params.eps": Key(k.RATE, "Added to the root of the second moment. Default 1e-8."),
        "optimizer.params.weight_decay": Key(k.RATE, "Default 0."),
        "optimizer.params.adam_w_mode": Key(k.FLAG, "true: `Adam` decays as `AdamW`; false: `AdamW` as `Adam`."),
        "scheduler.type": Key(k.word(*SCHEDULES), "Sets the rate after every update, by DeepSpeed's formulas."),
        "scheduler.params: lr_range_test_step_size cycle_first_step_size warmup_num_steps total_num_steps": Key(
            k.COUNT, "Steps of an interval, of the rise, of the warm-up (2 at least), of the whole run."
        ),
        "scheduler.params.cycle_second_step_size": Key(k.or_null(k.COUNT), "Steps of the fall; null: as of the rise."),
        "scheduler.params: lr_range_test_step_rate cycle_min_lr cycle_max_lr warmup_min_lr decay_lr_rate decay_mom_rate": Key(
            k.RATE, "Growth by interval, ends of the rates, decay by interval."
        ),
        "scheduler.params.lr_range_test_min_lr": Key(k.POSITIVE, "Where the rate begins."),
        "scheduler.params.warmup_max_lr": Key(
            k.or_null(k.RATE), "Where the warm-up ends; null: `optimizer.params.lr`."
        ),
        "scheduler.params: cycle_min_mom cycle_max_mom warmup_min_ratio cos_min_ratio": Key(
            k.FRACTION, "Ends of the first beta, and of the rate as shares of `optimizer.params.lr`."
        ),
        "scheduler.params.cycle_first_stair_count": Key(k.WHOLE, "Stairs up; 0: none."),
        "scheduler.params.cycle_second_stair_count": Key(k.or_null(k.WHOLE), "Stairs down; null: as up."),
        "scheduler.params.decay_step_size": Key(k.WHOLE, "Steps of a decay interval; 0: no decay."),
        "scheduler.params.lr_range_test_staircase": Key(k.FLAG, "Whether the rate rises in stairs."),
        "scheduler.params.cycle_momentum": Key(k.FLAG, "Whether the first beta cycles too. The second is 0.99 then."),
        "scheduler.params.warmup_type": Key(k.word("log", "linear"), "How the rate rises."),
        "fp16.enabled": Key(k.FLAG, '16-bit weights, fp32 masters (`precision="fp16"`). Without it and `bf16`: fp32.'),
        "fp16.loss_scale": Key(k.SCALE, "0: a dynamic scale; another number: a static one. Default 0."),
        "fp16.initial_scale_power": Key(k.POWER, "The dynamic scale begins at 2 to this power. Default 16."),
        "fp16.loss_scale_window": Key(k.COUNT, "Steps without overflow until it doubles. Default 1000."),
        "fp16.hysteresis": Key(k.COUNT, "Overflows before it halves. Default 2."),
        "fp16.consecutive_hysteresis": Key(k.FLAG, "Whether a step without overflow counts them anew. Default false."),
        "fp16.min_loss_scale": Key(k.POSITIVE, "The scale is never less. Default 1."),
        "bf16.enabled": Key(k.FLAG, '16-bit weights with a split fp32 master (`precision="bf16"`), no loss scale.'),
        "bfloat16.enabled": Key(k.FLAG, "DeepSpeed's old name of `bf16.enabled`."),
        "zero_optimization.offload_param.device zero_optimization.offload_optimizer.device": Key(
            k.word("none", "cpu", "nvme"), '`"nvme"`: offloads to the disk as needed. Default `"none"`.'
        ),
        "zero_optimization.offload_param.nvme_path zero_optimization.offload_optimizer.nvme_path client.nvme_base_dir": Key(
            k.or_null(k.TEXT), "Directory of the disk (`disk` of `manage`), of which there is one."
        ),
        "client.mem_tracer.overall_cpu_mem_ratio": Key(k.SHARE, '`host_memory`, as a share: 0.8 is `"80%"`.'),
        "client.mem_tracer.overall_gpu_mem_ratio": Key(k.SHARE, "`device_memory`, where `device` is a GPU."),
        "patrickstar: device precision device_memory host_memory disk disk_memory states step weights activations": Key(
            k.ANYTHING, "As `manage` has it."
        ),
        "patrickstar.options": Key(k.OBJECT, "The fields of `patrickstar.Options`."),
    }
)

_REFUSED: Final = MappingProxyType(
    {
        "write gradient_accumulation_steps = 1, and divide the loss yourself": "managed_gradient_accumulation",
        "write gradient_clipping": "optimizer.params.max_grad_norm patrickstar.max_grad_norm",
        "write gradient_accumulation_steps": "patrickstar.options.accumulate",
        "write fp16": "patrickstar.options.loss_scale",
        "write use_cpu_embedding, or options.tile_rows: tables go in tiles": "patrickstar.options.embedding_rows",
        "write bf16.enabled or fp16.enabled, or use torch.autocast in the model": "amp.enabled torch_autocast.enabled",
        "write the order of the data into the data loader": "curriculum_learning.enabled data_efficiency.enabled",
        "write the sizes that `patrickstar plan` prints, which runs nothing": "autotuning.enabled",
        "write train_batch_size and train_micro_batch_size_per_gpu: the number of ranks stays": "elasticity.enabled",
        "leave it out: Adam corrects its bias": "optimizer.params.bias_correction",
        "leave it out: masters and optimizer states are fp32, and weights as `fp16` and `bf16` say": """
            optimizer.params.fp32_optimizer_states fp16.fp16_master_weights_and_grads bf16.bf16_master_weights_and_grads
            bf16.bf16_optimizer_states zero_optimization.zero_quantized_nontrainable_weights""",
        "leave it out: it belongs to another optimizer than Adam and AdamW": """
            optimizer.params: momentum nesterov dampening muon_lr adam_lr ns_method per_head_muon max_coeff min_coeff
            freeze_step cuda_aware comm_backend_name coeff_beta factor_max factor_min factor_threshold var_freeze_step
            var_update_scaler local_step_scaler local_step_clipper""",
        "leave it out: other numbers would come of it": """
            zero_optimization.zenflow optimizer.params: amsgrad maximize capturable differentiable""",
        "leave it out: all ranks of the process group share the model and the batch": "patrickstar.mesh",
        "leave it out: other parallelism than that of data arrives in a later version; ranks share the model all the same": """
            tensor_parallel.autotp_size sequence_parallel_size pipeline.stages expert_parallel.enabled""",
        "leave it out: no layer of the model is replaced; torch.ao and the model's own library prune and quantise": """
            weight_quantization quantize_training.enabled eigenvalue.enabled compression_training:
            weight_quantization.shared_parameters.enabled activation_quantization.shared_parameters.enabled
            sparse_pruning.shared_parameters.enabled row_pruning.shared_parameters.enabled layer_reduction.enabled
            head_pruning.shared_parameters.enabled channel_pruning.shared_parameters.enabled""",
        "leave it out, and take a model whose own attention is sparse": "sparse_attention",
        "leave it out, and drop layers in the model (`layerdrop` of transformers)": "progressive_layer_drop.enabled",
        "leave it out, and call `engine.module.generate()`: it runs under the same budget": "hybrid_engine.enabled",
        "leave it out: steps are planned, not compiled or captured": "compile.enabled compile.deepcompile graph_harvesting",
        "load a checkpoint instead": "scheduler.params.last_batch_iteration",
    }
)
# Values that ask for nothing, of refused keys for which it is not false.
_HARMLESS: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    dict.fromkeys(("managed_gradient_accumulation", "optimizer.params.bias_correction"), (True,))
    | {"optimizer.params.fp32_optimizer_states": (True,), "scheduler.params.last_batch_iteration": (-1,)}
    | {"tensor_parallel.autotp_size": (0, 1), "sequence_parallel_size": (1,), "pipeline.stages": (1, "auto")}
)


def _paths(row: str) -> Iterator[str]:
    """The paths of a row: those before `object:` are written out, names after it are in that object."""
    within = ""
    for name in row.split():
        if name.endswith(":"):
            within = f"{name[:-1]}."
        else:
            yield within + name


TABLE: Final[Mapping[str, Key]] = MappingProxyType(
    {path: key for row, key in _HONOURED.items() for path in _paths(row)}
    | {p: Key(None, why, _HARMLESS.get(p, (False,))) for why, row in _REFUSED.items() for p in _paths(row)}
)
SECTIONS: Final = frozenset(path[:end] for path in TABLE for end, letter in enumerate(path) if letter == ".")
"""The objects in which these keys are."""

_NO_EFFECT: Final = """
    activation_checkpoint_interval activation_checkpointing aio allgather_bucket_size allgather_partitions allgather_sequential allgather_size api_key
    arg_mappings async_split_plan auto_cast autoep_size backend block_pattern block_size buffer_count buffer_dtype buffer_size check_grad_overflow
    check_overflow checkpoint checkpoint_serialization classes combine_impl comet comm_backend comms_logger communication_data_type compute_grad_norm
    contiguous_gradients contiguous_memory_optimization convert_grad_on_cpu cpu_checkpointing cpu_offload cpu_offload_param cpu_offload_params
    cpu_offload_use_pin_memory cpuadam_cores_perc csv_monitor curriculum_type data_parallel data_parallel_size data_routing data_sampling data_types
    dataloader_drop_last datastates_ckpt debug debug_log decoupled dense_ratio detailed different_groups difficulty difficulty_step disable_allgather
    disable_python_gc disable_triton_grouped_mm double_buffer dtype dump_state elastic_checkpoint enable_cuda_graph enable_nebula_load
    enable_sanity_checks enabled end_profile_step end_step err_beta excluded_modules experiment_key experiment_name expert_pattern
    expert_tensor_parallel_size expert_w1 expert_w2 expert_w3 exps_dir fast fast_init flops_profiler foreach fp16_mixed_quantize free_activation
    free_activation_threshold fused fused_mode gamma gas_boundary_resolution gather_16bit_weights_on_model_save grad_accum_dtype grad_partitioned
    gradient_allreduce_op gradient_predivide_factor group has_shared_experts ignore_non_elastic_batch_info ignore_unused_parameters
    immediate_grad_update inference_tp_size intra_op_parallelism io_buffer_double io_buffer_size io_multiplier job_name keep_all_input_tensors
    keep_int_input_tensors keep_module_on_host keep_number_layer keep_number_layers kwargs layer_name layer_num layer_specs leaf_module legacy_fusion
    legacy_stage1 load_balance_coeff load_from_fp32_weights load_path load_universal log_level log_trace_cache_warnings lower_precision_safe_modules
    margin_use_ratio max_difficulty max_gpus max_in_cpu max_iter max_live_parameters max_out_tokens max_reuse_distance max_step max_train_batch_size
    max_train_micro_batch_size_per_gpu memory_breakdown memory_efficient_linear method metric metric_path micro_batch_sizes
    mics_hierarchical_params_gather mics_shard_size min_difficulty min_gpus min_time min_train_batch_size min_train_micro_batch_size_per_gpu mode
    model_info model_info_path model_parallel_size model_persistence_threshold module_depth module_granularity_threshold module_name_prefix
    moe_layer_pattern mp_size name_suffixes names nebula num_expert_groups num_experts_attr num_gpus_per_node num_heads num_limited_groups
    num_of_version_in_retention num_tuning_micro_batch_sizes number_checkpoints offload_activation offload_activation_pin_memory offload_opt_states
    offload_parameters online opts other_module_name output_file output_path overlap_comm overlap_events override_module_apply overwrite
    parallel_write param_dtype param_persistence_threshold parameter_alignment partition partition_activations partition_config passes
    persistent_storage_path persistent_time_interval pin_memory pin_parameters pipe_partitioned pipeline pipeline_loading_checkpoint pipeline_read
    pipeline_stage pipeline_write prefer_large_batch prefer_larger_batch prefetch_bucket_size prescale_gradients preset_model prof_all prof_ops
    profile profile_step project quantization_type quantize-algo quantize_change_ratio quantize_groups quantize_verbose quantize_weight_in_forward
    quantizer_kernel queue_depth range_calibration ratio recompute_fwd_factor reduce_bucket_size reduce_scatter release_after_init
    release_inference_cache reset_T results_dir root_degree round_robin_gradients rounding route_norm route_scale routed_scaling_factor router_pattern
    samples_log_interval save_muon_momentum_buffer_in_memory schedule_config schedule_offset schedule_offset_end schedule_offset_stride schedule_type
    score_apply score_func seed seed_layers seq_parallel_comm_data_type seq_parallel_communication_data_type shared_experts_pattern show_statistics
    single_submit sparse_gradients stability stage stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save
    stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold
    stage3_module_granularity_threshold stage3_param_persistence_threshold stage3_partition_stream_chunk_size stage3_prefetch_bucket_size
    stage3_use_all_reduce_for_fetch_params start_profile_step start_step sub_group_size super_offload symmetric_memory sync_after_allgather
    sync_after_reduce sync_before_allgather sync_before_reduce synchronize_checkpoint_boundary synchronized tag_validation teacher_layer team
    tensorboard theta thread_count throughput timers tol top_k top_k_attr top_modules torch_adam total_curriculum_step tp tp_gather_partition_size
    tp_overlap_comm trackio tuner_early_stopping tuner_num_trials tuner_type type use_all_reduce_for_fetch_params use_async_mem_monitor
    use_data_before_expert_parallelism use_default_specs use_fake_dist use_gds use_grouped_mm use_hybrid_adam use_multi_rank_bucket_allreduce
    use_node_local_storage use_reentrant verbose version vocab_parallel_lm_head vocabulary_size wall_clock_breakdown wandb warmup_gpu_chunk_mem_ratio
    with_async_move with_mem_cache with_mem_saving_comm with_static_partition workspace writer zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer zero_hpz_partition_size zero_optimization zero_quantized_gradients zero_quantized_weights zeropp_loco_param
"""
IGNORED: Final = frozenset(_NO_EFFECT.split())
"""Names without effect, wherever they stand."""

_ANY_KEYS: Final = "amp arg_mappings data_routing data_sampling different_groups kwargs model_info quantize-algo tp"
OPAQUE: Final = frozenset(_ANY_KEYS.split())
"""Objects whose keys may be any."""
