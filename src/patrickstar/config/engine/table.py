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


_OFFLOAD: Final = Key(k.word("none", "cpu", "nvme"), '`"nvme"`: offloads to the disk as needed. Default `"none"`.')
_DISK: Final = Key(k.TEXT_OR_NULL, "Directory of the disk (`disk` of `manage`), of which there is one.")

_HONOURED: Final = MappingProxyType(
    {
        "train_micro_batch_size_per_gpu": Key(k.COUNT, "Samples of one forward."),
        "gradient_accumulation_steps": Key(k.COUNT, "Micro-batches of a step. `backward` divides by it. Default 1."),
        "train_batch_size": Key(k.COUNT, "Micro batch x accumulation x 1 rank; two of the three give the third."),
        "gradient_clipping": Key(k.NORM, "Largest global norm of the gradients of a step; 0 and -1: any."),
        "steps_per_print": Key(k.COUNT_OR_NULL, "Steps between two lines of progress. Default: none."),
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
        "scheduler.params.cycle_second_step_size": Key(k.COUNT_OR_NULL, "Steps of the fall; null: as of the rise."),
        "scheduler.params: lr_range_test_step_rate cycle_min_lr cycle_max_lr warmup_min_lr decay_lr_rate decay_mom_rate": Key(
            k.RATE, "Growth by interval, ends of the rates, decay by interval."
        ),
        "scheduler.params.lr_range_test_min_lr": Key(k.POSITIVE, "Where the rate begins."),
        "scheduler.params.warmup_max_lr": Key(k.RATE_OR_NULL, "Where the warm-up ends; null: `optimizer.params.lr`."),
        "scheduler.params: cycle_min_mom cycle_max_mom warmup_min_ratio cos_min_ratio": Key(
            k.FRACTION, "Ends of the first beta, and of the rate as shares of `optimizer.params.lr`."
        ),
        "scheduler.params.cycle_first_stair_count": Key(k.WHOLE, "Stairs up; 0: none."),
        "scheduler.params.cycle_second_stair_count": Key(k.WHOLE_OR_NULL, "Stairs down; null: as up."),
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
        "zero_optimization.offload_param.device": _OFFLOAD,
        "zero_optimization.offload_param.nvme_path": _DISK,
        "zero_optimization.offload_optimizer.device": _OFFLOAD,
        "zero_optimization.offload_optimizer.nvme_path": _DISK,
        "client.nvme_base_dir": _DISK,
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
        "write train_batch_size and train_micro_batch_size_per_gpu: there is one rank": "elasticity.enabled",
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
        "leave it out: several ranks arrive in a later version; one holds the whole model, in a smaller budget": """
            patrickstar.mesh tensor_parallel.autotp_size sequence_parallel_size pipeline.stages expert_parallel.enabled""",
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

_OPEN: Final = "It belongs to such an object, and has keys of its own, which may be any"
REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Updates are the same arithmetic everywhere; types are those of `fp16`, `bf16` or neither": """
            use_hybrid_adam torch_adam fused foreach legacy_fusion zero_allow_untested_optimizer
            zero_force_ds_cpu_optimizer auto_cast fused_mode immediate_grad_update check_grad_overflow check_overflow
            sparse_gradients data_types grad_accum_dtype param_dtype buffer_dtype""",
        "It says how ranks share and talk, and there is one": """
            communication_data_type seq_parallel_communication_data_type seq_parallel_comm_data_type
            gradient_allreduce_op prescale_gradients gradient_predivide_factor disable_allgather data_parallel_size
            use_data_before_expert_parallelism zero_optimization stage allgather_partitions allgather_bucket_size
            allgather_size overlap_comm reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
            round_robin_gradients zero_hpz_partition_size zero_quantized_weights zero_quantized_gradients
            zeropp_loco_param err_beta reset_T mics_shard_size mics_hierarchical_params_gather
            stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential use_all_reduce_for_fetch_params
            allgather_sequential legacy_stage1 use_fake_dist comms_logger verbose prof_all debug prof_ops""",
        "What is in fast memory when is planned, and how it gets there: parameters are made straight into chunks": """
            stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size
            stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_module_granularity_threshold
            stage3_partition_stream_chunk_size max_live_parameters max_reuse_distance prefetch_bucket_size
            param_persistence_threshold model_persistence_threshold module_granularity_threshold sub_group_size
            contiguous_gradients parameter_alignment memory_efficient_linear override_module_apply leaf_module classes
            names name_suffixes ignore_unused_parameters compute_grad_norm log_trace_cache_warnings
            enable_sanity_checks pin_memory buffer_count buffer_size max_in_cpu pipeline pipeline_read pipeline_write
            fast_init ratio super_offload convert_grad_on_cpu cpuadam_cores_perc cpu_offload cpu_offload_params
            cpu_offload_param cpu_offload_use_pin_memory aio block_size queue_depth thread_count intra_op_parallelism
            single_submit overlap_events use_gds release_after_init use_async_mem_monitor warmup_gpu_chunk_mem_ratio
            margin_use_ratio with_static_partition opts with_mem_saving_comm with_mem_cache with_async_move""",
        "Activations are as the model has them: call its own `gradient_checkpointing_enable()`": """
            activation_checkpointing partition_activations cpu_checkpointing contiguous_memory_optimization
            number_checkpoints synchronize_checkpoint_boundary profile use_reentrant""",
        "Checkpoints have one form, with fp32 weights, which loads under any budget: `engine.save_checkpoint(dir)`": """
            load_from_fp32_weights elastic_checkpoint save_muon_momentum_buffer_in_memory pipeline_loading_checkpoint
            stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
            gather_16bit_weights_on_model_save checkpoint tag_validation load_universal use_node_local_storage
            parallel_write checkpoint_serialization writer pipeline_stage type io_buffer_size io_buffer_double
            show_statistics data_parallel decoupled io_multiplier datastates_ckpt nebula persistent_storage_path
            persistent_time_interval num_of_version_in_retention enable_nebula_load load_path""",
        "The loop, its data and its log are the user's; `session.stats()` has seconds, bytes and peaks": """
            wall_clock_breakdown memory_breakdown log_level dump_state dataloader_drop_last disable_python_gc
            vocabulary_size timers throughput enabled synchronized tensorboard output_path job_name csv_monitor wandb
            group team project comet samples_log_interval workspace api_key experiment_name experiment_key online mode
            trackio flops_profiler recompute_fwd_factor profile_step module_depth top_modules detailed output_file""",
        "It belongs to an object that is refused when it is switched on": """
            dtype lower_precision_safe_modules results_dir exps_dir overwrite metric metric_path start_step end_step
            start_profile_step end_profile_step fast max_train_batch_size min_train_batch_size
            max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu mp_size num_tuning_micro_batch_sizes
            tuner_type tuner_early_stopping tuner_num_trials model_info_path micro_batch_sizes min_gpus max_gpus
            min_time prefer_large_batch prefer_larger_batch ignore_non_elastic_batch_info version model_parallel_size
            num_gpus_per_node curriculum_type min_difficulty max_difficulty schedule_type schedule_config
            total_curriculum_step difficulty_step root_degree difficulty max_step seed schedule_offset
            quantizer_kernel quantize_groups quantize_verbose quantization_type quantize_weight_in_forward rounding
            fp16_mixed_quantize quantize_change_ratio range_calibration method schedule_offset_end
            schedule_offset_stride block_pattern dense_ratio excluded_modules num_heads keep_number_layer
            keep_number_layers module_name_prefix teacher_layer other_module_name max_iter tol stability
            gas_boundary_resolution layer_name layer_num theta gamma preset_model tp_overlap_comm
            vocab_parallel_lm_head partition_config keep_module_on_host use_default_specs layer_specs autoep_size
            expert_tensor_parallel_size async_split_plan use_grouped_mm disable_triton_grouped_mm comm_backend
            moe_layer_pattern router_pattern expert_pattern score_func score_apply combine_impl route_norm route_scale
            top_k routed_scaling_factor num_expert_groups num_limited_groups load_balance_coeff expert_w1 expert_w2
            expert_w3 num_experts_attr top_k_attr has_shared_experts shared_experts_pattern partition seed_layers
            activation_checkpoint_interval pipe_partitioned grad_partitioned max_out_tokens inference_tp_size
            release_inference_cache pin_parameters tp_gather_partition_size enable_cuda_graph free_activation
            free_activation_threshold offload_activation offload_activation_pin_memory offload_opt_states
            offload_parameters double_buffer symmetric_memory debug_log sync_before_reduce sync_after_reduce
            sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes backend""",
        _OPEN: "arg_mappings data_routing data_sampling different_groups kwargs model_info quantize-algo tp",
    }
)
"""Names without effect, wherever they stand, by reason."""

IGNORED: Final = frozenset(" ".join(REASONS.values()).split())
OPAQUE: Final = frozenset(REASONS[_OPEN].split()) | {"amp"}
"""Objects whose keys may be any."""
