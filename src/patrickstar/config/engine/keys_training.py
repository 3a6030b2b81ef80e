"""Rows of the table: batch sizes, optimizer, scheduler, precision, clipping."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from patrickstar.config.engine.key import Key, foreign, honoured, no_effect, refused
from patrickstar.config.engine.kinds import (
    ANYTHING,
    BETAS,
    COUNT,
    FLAG,
    FRACTION,
    LIST,
    NUMBER,
    POSITIVE,
    TEXT,
    WHOLE,
    Kind,
    number,
    or_null,
    same_value,
    whole,
    word,
)
from patrickstar.config.engine.schedules import SCHEDULES

__all__ = ["TRAINING"]

_INSTEAD: Final = 'this optimizer is not there; write "AdamW" or "Adam", with a learning rate that suits it'
_OTHERS: Final = (
    *("Lamb", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "MuAdam", "MuAdamW", "MuSGD", "Lion", "Muon"),
    *("Adagrad", "SGD", "RMSprop", "Adamax", "NAdam", "RAdam", "SparseAdam", "Adafactor", "LBFGS"),
)
_OPTIMIZERS: Final = replace(
    word("Adam", "AdamW", any_case=True), elsewhere=MappingProxyType({name.lower(): _INSTEAD for name in _OTHERS})
)
_TORCHS: Final = (
    *("StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR", "CosineAnnealingLR"),
    *("CosineAnnealingWarmRestarts", "ReduceLROnPlateau", "CyclicLR", "OneCycleLR", "LambdaLR"),
)
_BUILT_BY_HAND: Final = (
    "a scheduler of torch is built on the optimizer that initialize_engine gives, not named here; "
    f"or write one of {', '.join(SCHEDULES)}"
)
_SCHEDULERS: Final = replace(
    word(*SCHEDULES), elsewhere=MappingProxyType({name.lower(): _BUILT_BY_HAND for name in _TORCHS})
)
_RATE: Final = number(0)
_TYPES: Final = word("fp32", "fp16", "bf16")
_COMMUNICATED: Final = word("fp32", "fp16", "bf16", any_case=True)
_CLIP: Final = Kind(
    "a finite number of 0 or more, or -1",
    lambda value: number(0).takes(value) or same_value(value, -1),
    NUMBER.convert,
)
_OTHER_PARAMETERS: Final = "leave it out: it belongs to another optimizer than Adam and AdamW"

_BATCH: Final = (
    honoured(
        "train_micro_batch_size_per_gpu",
        COUNT,
        "The samples of one forward. `train` makes its batches so; with `initialize_engine` the user does, and it is checked with the two others.",
    ),
    honoured(
        "gradient_accumulation_steps",
        COUNT,
        "Forwards and backwards of one step. `backward` divides by it; `optimizer.step()` and `zero_grad()` do nothing in between. "
        "Default: what the batch sizes come to, else 1.",
    ),
    honoured(
        "train_batch_size",
        COUNT,
        "Samples of one step: micro batch x accumulation x ranks, of which there is one. Two of the three give the third.",
    ),
    refused(
        "managed_gradient_accumulation",
        FLAG,
        "write gradient_accumulation_steps = 1, divide the loss yourself, and call step() where a step ends",
        harmless=(None, True),
    ),
)

_OPTIMIZER: Final = (
    honoured(
        "optimizer.type",
        _OPTIMIZERS,
        "`Adam` has L2 weight decay, `AdamW` decoupled; in any case of letters. Default `Adam`. DeepSpeed's `Adam` is decoupled unless `adam_w_mode` "
        "is false: a warning says so where there is weight decay.",
    ),
    honoured(
        "optimizer.params.lr", _RATE, "Learning rate. Default 1e-3, as in torch and DeepSpeed; PatrickStar had 1e-2."
    ),
    honoured("optimizer.params.betas", BETAS, "Of the two moments. Default 0.9 and 0.999."),
    honoured("optimizer.params.eps", _RATE, "Added to the root of the second moment. Default 1e-8."),
    honoured("optimizer.params.weight_decay", _RATE, "Default 0, as in DeepSpeed and PatrickStar."),
    honoured("optimizer.params.adam_w_mode", FLAG, "true: `Adam` decays as `AdamW`; false: `AdamW` as `Adam`."),
    *no_effect(
        "optimizer.params",
        "every update is the same arithmetic, chunk by chunk, where the chunk lies",
        use_hybrid_adam=FLAG,
        torch_adam=FLAG,
        fused=or_null(FLAG),
        foreach=or_null(FLAG),
    ),
    refused(
        "optimizer.params.bias_correction",
        FLAG,
        "leave it out: Adam corrects its bias; with a warm-up of the learning rate the difference is small",
        harmless=(None, True),
    ),
    refused(
        "optimizer.params.max_grad_norm",
        or_null(NUMBER),
        "write gradient_clipping, beside optimizer (DeepSpeed refuses it here too)",
        harmless=(None, 0),
    ),
    refused("optimizer.params.amsgrad", FLAG, "leave it out: the largest second moment is not kept"),
    *(
        refused(f"optimizer.params.{name}", FLAG, "leave it out: it would change the update")
        for name in ("maximize", "capturable", "differentiable")
    ),
    refused(
        "optimizer.params.fp32_optimizer_states",
        FLAG,
        "leave it out: moments are fp32",
        harmless=(None, True),
    ),
    *(
        refused(f"optimizer.params.{name}", ANYTHING, _OTHER_PARAMETERS)
        for name in (
            *("momentum", "nesterov", "dampening", "muon_lr", "adam_lr", "ns_method", "per_head_muon", "max_coeff"),
            *("min_coeff", "freeze_step", "cuda_aware", "comm_backend_name", "coeff_beta", "factor_max", "factor_min"),
            *("factor_threshold", "var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"),
        )
    ),
    *no_effect("optimizer", "there is no fused optimizer to fall back from", legacy_fusion=FLAG),
    *no_effect(
        "",
        "Adam and AdamW are what there is, and are tested",
        zero_allow_untested_optimizer=FLAG,
        zero_force_ds_cpu_optimizer=FLAG,
    ),
)

_SCHEDULER: Final = (
    honoured(
        "scheduler.type",
        _SCHEDULERS,
        "Sets the learning rate after every step that updates (not where fp16 skipped one), by DeepSpeed's formulas.",
    ),
    honoured("scheduler.params.lr_range_test_min_lr", POSITIVE, "`LRRangeTest`: where it begins. Default 1e-3."),
    honoured("scheduler.params.lr_range_test_step_size", COUNT, "`LRRangeTest`: steps of an interval. Default 2000."),
    honoured("scheduler.params.lr_range_test_step_rate", number(0), "`LRRangeTest`: growth by interval. Default 1."),
    honoured("scheduler.params.lr_range_test_staircase", FLAG, "`LRRangeTest`: in stairs. Default false."),
    honoured("scheduler.params.cycle_min_lr", _RATE, "`OneCycle`: where the cycle begins and ends. Required."),
    honoured("scheduler.params.cycle_max_lr", _RATE, "`OneCycle`: its top. Required."),
    honoured("scheduler.params.decay_lr_rate", _RATE, "`OneCycle`: decay after the cycle, by interval. Default 0."),
    honoured("scheduler.params.cycle_first_step_size", COUNT, "`OneCycle`: steps up. Default 2000."),
    honoured("scheduler.params.cycle_second_step_size", or_null(COUNT), "`OneCycle`: steps down. Default: as up."),
    honoured("scheduler.params.cycle_first_stair_count", WHOLE, "`OneCycle`: stairs up; 0: none. Default 0."),
    honoured("scheduler.params.cycle_second_stair_count", or_null(WHOLE), "`OneCycle`: stairs down. Default: as up."),
    honoured(
        "scheduler.params.decay_step_size", WHOLE, "`OneCycle`: steps of a decay interval; 0: no decay. Default 0."
    ),
    honoured(
        "scheduler.params.cycle_momentum",
        FLAG,
        "`OneCycle`: whether the first beta cycles against the learning rate; the second is 0.99 then, whatever `betas` says. Default true.",
    ),
    honoured("scheduler.params.cycle_min_mom", FRACTION, "`OneCycle`: the first beta at the top. Default 0.8."),
    honoured("scheduler.params.cycle_max_mom", FRACTION, "`OneCycle`: the first beta at both ends. Default 0.9."),
    honoured("scheduler.params.decay_mom_rate", _RATE, "`OneCycle`: its growth after the cycle. Default 0."),
    honoured("scheduler.params.warmup_min_lr", _RATE, "`WarmupLR`, `WarmupDecayLR`: where it begins. Default 0."),
    honoured(
        "scheduler.params.warmup_max_lr",
        or_null(_RATE),
        "`WarmupLR`, `WarmupDecayLR`: where the warm-up ends. Default: `optimizer.params.lr`; with `WarmupDecayLR` 1e-3.",
    ),
    honoured(
        "scheduler.params.warmup_num_steps", COUNT, "`Warmup...`: steps of the warm-up, at least 2. Default 1000."
    ),
    honoured("scheduler.params.warmup_type", word("log", "linear"), "`Warmup...`: how it rises. Default `log`."),
    honoured("scheduler.params.total_num_steps", COUNT, "`WarmupDecayLR`, `WarmupCosineLR`: the whole run. Required."),
    honoured("scheduler.params.warmup_min_ratio", FRACTION, "`WarmupCosineLR`: where it begins, of `lr`. Default 0."),
    honoured("scheduler.params.cos_min_ratio", FRACTION, "`WarmupCosineLR`: where it ends, of `lr`. Default 1e-4."),
    refused("scheduler.params.last_batch_iteration", whole(-1), "load a checkpoint instead", harmless=(None, -1)),
)

_PRECISION: Final = (
    honoured(
        "fp16.enabled",
        FLAG,
        '16-bit weights with an fp32 master (`precision="fp16"`). Without it and `bf16`: fp32, as in DeepSpeed.',
    ),
    honoured("fp16.loss_scale", number(0, 2.0**127), "0: a dynamic scale; another number: a static one. Default 0."),
    honoured("fp16.initial_scale_power", whole(0, 127), "The dynamic scale begins at 2 to this power. Default 16."),
    honoured("fp16.loss_scale_window", COUNT, "Steps without overflow until it doubles. Default 1000."),
    honoured(
        "fp16.hysteresis",
        COUNT,
        "Overflows before it halves. Default 2. PatrickStar 0.4.6 took it for the factor, by mistake.",
    ),
    honoured("fp16.consecutive_hysteresis", FLAG, "Whether a step without overflow counts them anew. Default false."),
    honoured("fp16.min_loss_scale", POSITIVE, "It never becomes less. Default 1."),
    *no_effect("fp16", "floating inputs are always cast to the type of the weights", auto_cast=FLAG),
    refused("fp16.fp16_master_weights_and_grads", FLAG, "leave it out: masters are fp32"),
    *no_effect("fp16", "there is one implementation of the loss scale", fused_mode=FLAG),
    honoured("bf16.enabled", FLAG, '16-bit weights with a split fp32 master (`precision="bf16"`), no loss scale.'),
    *no_effect("bf16", "gradients go to their chunks as they arrive", immediate_grad_update=FLAG),
    *no_effect(
        "bf16",
        "bf16 has the range of fp32: there is no overflow to look for",
        check_grad_overflow=FLAG,
        check_overflow=FLAG,
    ),
    refused(
        "bf16.bf16_master_weights_and_grads",
        FLAG,
        "leave it out: the split master is exact and takes 4 bytes, weight included",
    ),
    refused(
        "bf16.bf16_optimizer_states", FLAG, "leave it out: moments are fp32; smaller states arrive in a later version"
    ),
    honoured("bfloat16.enabled", FLAG, "DeepSpeed's old name of `bf16.enabled`."),
    refused(
        "amp.enabled",
        FLAG,
        "write bf16.enabled or fp16.enabled, or use torch.autocast in the model's forward: Apex is not used here",
    ),
    *no_effect("amp", "without amp.enabled", opt_level=TEXT),
    foreign("amp", "what Apex takes, without amp.enabled"),
    refused(
        "torch_autocast.enabled",
        FLAG,
        "write bf16.enabled or fp16.enabled, or use torch.autocast in the model's forward, which works as it is",
    ),
    *no_effect("torch_autocast", "without torch_autocast.enabled", dtype=TEXT, lower_precision_safe_modules=LIST),
    *no_effect(
        "data_types",
        "gradients of one backward add up in the type of the weight, those of several in fp32",
        grad_accum_dtype=or_null(_TYPES),
    ),
    *no_effect(
        "data_types",
        "the type of weights is that of fp16, bf16 or neither; buffers follow, what a model keeps in fp32 aside",
        param_dtype=or_null(_TYPES),
        buffer_dtype=or_null(_TYPES),
    ),
)

_CLIPPING: Final = (
    honoured(
        "gradient_clipping",
        _CLIP,
        "Largest global norm of the gradients of a step. 0 is off, as in DeepSpeed, and so is -1, as in PatrickStar 0.4.6, "
        "which clamped elements instead.",
    ),
    *no_effect(
        "",
        "gradients are averaged over ranks, and there is one; several arrive in a later version",
        communication_data_type=or_null(_COMMUNICATED),
        seq_parallel_communication_data_type=or_null(_COMMUNICATED),
        seq_parallel_comm_data_type=or_null(_COMMUNICATED),
        gradient_allreduce_op=word("mean", "sum", any_case=True),
        prescale_gradients=FLAG,
        gradient_predivide_factor=POSITIVE,
        disable_allgather=FLAG,
    ),
    *no_effect("", "gradients of embeddings are dense", sparse_gradients=FLAG),
)

TRAINING: Final[tuple[Key, ...]] = (*_BATCH, *_OPTIMIZER, *_SCHEDULER, *_PRECISION, *_CLIPPING)
