"""Rows of the table: the keys of PatrickStar 0.4.6, and the memory options that neither it nor DeepSpeed has."""

from __future__ import annotations

from typing import Final

from patrickstar.config.engine.key import Key, honoured, no_effect, refused
from patrickstar.config.engine.kinds import ANYTHING, COUNT, FLAG, FRACTION, OBJECT, TEXT, number

__all__ = ["OWN", "PATRICKSTAR"]

_MEASURED: Final = "memory is measured where tensors are made, and the plan knows it for every moment of a step"
_ALWAYS: Final = "there is one way of moving and keeping chunks, and a plan that decides"
_SHARE: Final = number(high=1, above=0)

PATRICKSTAR: Final[tuple[Key, ...]] = (
    honoured(
        "default_chunk_size",
        COUNT,
        "A hint, in elements: chunks are not made larger. Their size is searched for, and usually smaller; a tensor may "
        "span several, so the largest one need not fit.",
    ),
    *no_effect(
        "",
        "parameters are made one at a time, straight into chunks, with the values of ordinary construction",
        release_after_init=FLAG,
    ),
    honoured(
        "use_cpu_embedding",
        FLAG,
        "Tables are used in tiles of 8,192 rows, and so are other weights that have more rows, as with "
        "`Options(tile_rows=8192)`: no table need fit whole. They lie in chunks, once, in the type of the rest.",
    ),
    *no_effect(
        "", "a budget is given in bytes (`patrickstar.device_memory`), not by pretending ranks", use_fake_dist=FLAG
    ),
    *no_effect(
        "client.mem_tracer",
        _MEASURED,
        use_async_mem_monitor=FLAG,
        warmup_gpu_chunk_mem_ratio=FRACTION,
        margin_use_ratio=FRACTION,
        with_static_partition=FLAG,
    ),
    *no_effect(
        "client.mem_tracer",
        "a budget is given in bytes (`patrickstar.device_memory`), not by pretending ranks",
        use_fake_dist=FLAG,
    ),
    honoured("client.mem_tracer.overall_cpu_mem_ratio", _SHARE, '`host_memory`, as a share: 0.8 is `"80%"`.'),
    honoured(
        "client.mem_tracer.overall_gpu_mem_ratio",
        _SHARE,
        "`device_memory`, as a share, where `patrickstar.device` is a GPU.",
    ),
    *no_effect("client.opts", _ALWAYS, with_mem_saving_comm=FLAG, with_mem_cache=FLAG, with_async_move=FLAG),
    honoured("client.nvme_base_dir", TEXT, "Directory of the disk (`disk` of `manage`); of PatrickStar's NVMe branch."),
)

OWN: Final[tuple[Key, ...]] = (
    honoured("patrickstar.device", ANYTHING, 'Where to compute: `"cpu"`, `"emulated"`, `"cuda"`.'),
    honoured(
        "patrickstar.precision",
        ANYTHING,
        "Instead of `fp16.enabled` and `bf16.enabled`; null: what the hardware is fast in.",
    ),
    honoured("patrickstar.device_memory", ANYTHING, 'Budget of the device, such as `"6GiB"`.'),
    honoured("patrickstar.host_memory", ANYTHING, "What the process may hold in host memory."),
    honoured("patrickstar.disk", ANYTHING, "Directory of the disk tier."),
    honoured("patrickstar.disk_memory", ANYTHING, "Budget of the disk tier."),
    honoured("patrickstar.states", ANYTHING, "How masters and moments are kept."),
    honoured("patrickstar.step", ANYTHING, '`"deferred"` or `"in_backward"`.'),
    honoured("patrickstar.weights", ANYTHING, "safetensors file or directory to start from."),
    honoured("patrickstar.activations", ANYTHING, "What happens to activations between forward and backward."),
    refused("patrickstar.max_grad_norm", ANYTHING, "write gradient_clipping", harmless=(None,)),
    refused("patrickstar.mesh", ANYTHING, "leave it out: several ranks arrive in a later version", harmless=(None,)),
    honoured("patrickstar.options", OBJECT, "The fields of `patrickstar.Options`, as an object."),
)
