"""Memory settings of a config that was looked up: precision, loss scale, and the arguments of `manage`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from patrickstar.config.arguments import MemoryOptions, check_arguments
from patrickstar.config.engine.scan import Scan
from patrickstar.config.engine.settings import Note
from patrickstar.config.loss_scale import LossScale
from patrickstar.config.options import Options
from patrickstar.errors import ConfigError

__all__ = ["memory_of", "percent"]

_OWN: Final = "patrickstar."
_OFFLOADS: Final = ("zero_optimization.offload_param", "zero_optimization.offload_optimizer")
_CPU_SHARE: Final = "client.mem_tracer.overall_cpu_mem_ratio"
_TILE_ROWS: Final = 8192  # which tables of words have more of, and most other weights have not


def memory_of(found: Scan, *, accumulate: int, notes: list[Note]) -> MemoryOptions | None:
    """The arguments of `manage`; None where these have problems, which are noted."""
    given = {path.removeprefix(_OWN): value for path, value in found.values.items() if path.startswith(_OWN)}
    given["precision"] = _precision(found)
    _add_disk(found, given, notes)
    if _CPU_SHARE in found.values:
        if given.get("host_memory") is not None:
            found.blame("patrickstar.host_memory", f"{_CPU_SHARE} says it too: leave one of them out")
        given["host_memory"] = percent(found.values[_CPU_SHARE])
    clip = max(found.values.get("gradient_clipping", 0.0), 0.0) or None
    if given.get("step") == "in_backward":
        for path, on in (("gradient_clipping", clip is not None), ("gradient_accumulation_steps", accumulate > 1)):
            if on:
                why = 'with patrickstar.step "in_backward", which uses gradients as they arrive: write "deferred"'
                found.blame(path, why)
        clip, accumulate = None, 1
    own = given.pop("options", {})
    if "chunk_size" in own and "default_chunk_size" in found.values:
        notes.append(Note("no effect: default_chunk_size (patrickstar.options.chunk_size says it)"))
    if found.values.get("use_cpu_embedding") and "tile_rows" not in own:
        own = {**own, "tile_rows": _TILE_ROWS}
        notes.append(
            Note(
                f"use_cpu_embedding: weights of embeddings and linears with more than {_TILE_ROWS:,} rows are used in tiles of so many, "
                "and products in tiles may have other bits (patrickstar.options.tile_rows says another number)",
                loud=True,
            )
        )
    options = _options(found, own, accumulate=accumulate, loss_scale=_loss_scale(found, notes))
    try:
        checked = check_arguments(**given, max_grad_norm=clip, options=options)
    except ConfigError as error:
        _blame(found, "patrickstar", error)
        return None
    return None if options is None else checked


def percent(share: float) -> str:
    """A share as a size: 0.8 is "80%"."""
    return f"{share * 100:.10g}%"


def _precision(found: Scan) -> str | None:
    """The precision that `manage` is asked for: the patrickstar section's, else fp16, bf16, or fp32 where neither is on."""
    switches = [f"{name}.enabled" for name in ("fp16", "bf16", "bfloat16")]
    on = [path for path in switches if found.values.get(path) is True]
    asked = None if not on else "fp16" if on[0] == "fp16.enabled" else "bf16"
    if asked == "fp16" and len(on) > 1:
        found.blame(on[1], f"true, and so is {on[0]}: a run has one type; write false for the other")
    if "patrickstar.precision" in found.values:
        own: str | None = found.values["patrickstar.precision"]
        if asked is not None and own != asked:
            found.blame("patrickstar.precision", f"{own!r}, and {on[0]} is true: leave one of them out")
        return own
    return asked or "fp32"


def _loss_scale(found: Scan, notes: list[Note]) -> LossScale | None:
    given = {path.removeprefix("fp16."): value for path, value in found.values.items() if path.startswith("fp16.")}
    if given.pop("enabled", False) is not True:
        if given:
            notes.append(Note(f"no effect: {', '.join(f'fp16.{name}' for name in given)} (fp16.enabled is not true)"))
        return None
    static = given.get("loss_scale", 0.0)
    initial = static or 2.0 ** given.get("initial_scale_power", 16)
    minimum = given.get("min_loss_scale", 1.0)
    if not static and initial < minimum:
        found.blame("fp16.min_loss_scale", f"{minimum:g} is above 2 ** fp16.initial_scale_power = {initial:g}")
        return None
    return LossScale(
        initial=initial,
        dynamic=not static,
        window=given.get("loss_scale_window", 1000),
        hysteresis=given.get("hysteresis", 2),
        consecutive_hysteresis=given.get("consecutive_hysteresis", False),
        minimum=minimum,
    )


def _add_disk(found: Scan, given: dict[str, Any], notes: list[Note]) -> None:
    """The directory of the disk tier, wherever the config names it."""
    named: dict[str, Any] = {}
    for section in _OFFLOADS:
        at, device = f"{section}.nvme_path", found.values.get(f"{section}.device")
        path = found.values.get(at)
        if device == "nvme" and not path and at not in found.problems:
            found.blame(at, 'missing, beside "device": "nvme": write a directory on that disk')
        elif device == "nvme" and path:
            named[at] = path
        elif path:
            notes.append(Note(f'no effect: {at} ({section}.device is not "nvme")'))
    for at in ("client.nvme_base_dir", "patrickstar.disk"):
        if found.values.get(at) is not None:
            named[at] = found.values[at]
    first = next(iter(named), None)
    if first is not None:
        given["disk"] = named[first]
        for at, path in named.items():
            if not _same_path(path, named[first]):
                found.blame(at, f"{path!r}, and {first} is {named[first]!r}: there is one disk; write one directory")


def _same_path(one: object, other: object) -> bool:
    if isinstance(one, str | os.PathLike) and isinstance(other, str | os.PathLike):
        return Path(one) == Path(other)
    return one == other


def _options(found: Scan, given: Mapping[Any, Any], *, accumulate: int, loss_scale: LossScale | None) -> Options | None:
    within = "patrickstar.options"
    for name, instead in (("loss_scale", "fp16"), ("accumulate", "gradient_accumulation_steps")):
        if name in given:
            found.blame(f"{within}.{name}", f"refused here: write {instead}")
    own = {str(name): value for name, value in given.items() if name not in ("loss_scale", "accumulate")}
    if isinstance(own.get("keep_fp32"), list):
        own["keep_fp32"] = tuple(own["keep_fp32"])
    try:
        return Options(**own, accumulate=accumulate, loss_scale=loss_scale)
    except ConfigError as error:
        _blame(found, within, error)
        return None


def _blame(found: Scan, within: str, error: ConfigError) -> None:
    """Problems of an option group, `name=value: why`, at the paths of their keys."""
    for problem in error.problems:
        name, equals, why = problem.partition("=")
        if equals and all(part.isidentifier() for part in name.split(".")):
            found.blame(f"{within}.{name}", why)
        else:
            found.blame(within, problem)
