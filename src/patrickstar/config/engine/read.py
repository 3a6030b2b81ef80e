"""Reads a config in the form of PatrickStar 0.4.6 and DeepSpeed into settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from patrickstar.config.engine.json_file import read_json
from patrickstar.config.engine.key import Verdict
from patrickstar.config.engine.memory import memory_of, percent
from patrickstar.config.engine.scan import Scan, scan
from patrickstar.config.engine.schedules import SCHEDULES, Schedule
from patrickstar.config.engine.settings import EngineSettings, Note, OptimizerSettings
from patrickstar.config.engine.table import TABLE
from patrickstar.config.problems import refuse
from patrickstar.errors import ConfigError

__all__ = ["read_config"]

_PARAMS = "optimizer.params."
_OFFLOADS = ("zero_optimization.offload_param", "zero_optimization.offload_optimizer")


def read_config(config: Mapping[str, Any] | str | os.PathLike[str] | None, *, world_size: int = 1) -> EngineSettings:
    """The settings that a config, or the JSON file at a path, comes to. None: those of an empty config.

    Raises:
        ConfigError: with every problem: keys that there are not, values, what is refused, and what does not go together.
    """
    of = "config"
    if isinstance(config, str | os.PathLike):
        of, config = f"config {os.fspath(config)}", read_json(config)
    if config is None:
        config = {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"config is a {type(config).__name__}: expected a dict, or the path of a JSON file")
    found = scan(config)
    if "optimizer.type" in found.problems:  # of another optimizer: what else it has is not the point
        for path in [path for path in found.problems if path.startswith(_PARAMS) and _is_refused(path)]:
            del found.problems[path]
    notes: list[Note] = []
    optimizer = _optimizer(found, notes)
    schedule = _schedule(found)
    accumulate, micro_batch_size = _batch_sizes(found, world_size)
    memory = memory_of(found, accumulate=accumulate, notes=notes)
    refuse(found.messages(), of=of)
    assert memory is not None, "what cannot be read is a problem"
    share = found.values.get("client.mem_tracer.overall_gpu_mem_ratio")
    return EngineSettings(
        optimizer=optimizer,
        schedule=schedule,
        accumulate=accumulate,
        micro_batch_size=micro_batch_size,
        memory=memory,
        chunk_hint=found.values.get("default_chunk_size"),
        device_share=None if share is None else percent(share),
        steps_per_print=found.values.get("steps_per_print"),
        said=frozenset(found.sections | found.values.keys()),
        notes=(*notes, *_idle_notes(found)),
    )


def _optimizer(found: Scan, notes: list[Note]) -> OptimizerSettings:
    params = {path.removeprefix(_PARAMS): value for path, value in found.values.items() if path.startswith(_PARAMS)}
    mode = params.pop("adam_w_mode", None)
    is_adamw = found.values.get("optimizer.type", "Adam") == "AdamW"
    optimizer = OptimizerSettings(**params, decoupled=is_adamw if mode is None else mode)
    if not is_adamw and mode is None and optimizer.weight_decay:
        notes.append(
            Note(
                f'optimizer.type "Adam" with weight_decay={optimizer.weight_decay:g} has L2 decay, as in torch and PatrickStar; '
                'DeepSpeed decouples it. Write "AdamW", or optimizer.params.adam_w_mode, to say which',
                loud=True,
            )
        )
    if "lr" not in params and "optimizer" in found.sections:
        notes.append(Note(f"optimizer.params.lr is not given: {optimizer.lr:g}", loud=True))
    return optimizer


def _is_refused(path: str) -> bool:
    return path not in TABLE or TABLE[path].verdict is Verdict.REFUSED


def _schedule(found: Scan) -> Schedule | None:
    prefix = "scheduler.params."
    params = {path.removeprefix(prefix): value for path, value in found.values.items() if path.startswith(prefix)}
    name = found.values.get("scheduler.type")
    if name is None:
        if params and "scheduler.type" not in found.problems:
            found.blame("scheduler.type", f"missing, beside params: write one of {', '.join(SCHEDULES)}")
        return None
    kind = SCHEDULES[name]
    known = [field.name for field in fields(kind)]
    for param in [param for param in params if param not in known]:
        found.blame(prefix + param, f"not a parameter of {name}, whose parameters are {', '.join(known)}")
    missing = [param for param in kind.required if param not in params]
    for param in missing:
        if prefix + param not in found.problems:
            found.blame(prefix + param, f"missing: {name} needs it")
    if missing:
        return None
    return kind(**{param: value for param, value in params.items() if param in known})


def _batch_sizes(found: Scan, world_size: int) -> tuple[int, int | None]:
    """Micro-batches a step and samples of each, as DeepSpeed infers them; None: not given."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, accumulate = (found.values.get(name) for name in names)
    if any(name in found.problems for name in names):
        return accumulate or 1, micro
    if whole is not None:
        if micro is None:
            micro = whole // world_size // (accumulate or 1)
        if accumulate is None:
            accumulate = whole // micro // world_size if micro else 0
        if micro * accumulate * world_size != whole:
            ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
            possible = max(micro, 1) * max(accumulate, 1) * world_size
            found.blame(
                names[0],
                f"{whole} is not {names[1]} x {names[2]} x ranks = {micro} x {accumulate} x {ranks}: write {possible}, or "
                "another of the three (what several ranks did at once, one does with more accumulation)",
            )
    return accumulate or 1, micro


def _idle_notes(found: Scan) -> list[Note]:
    """Keys without effect, those of one reason together; the loud ones only where they ask for something."""
    by_reason: dict[tuple[str, bool], list[str]] = {}
    for path, (key, value) in found.idle.items():
        switch = found.idle.get(f"{path.rpartition('.')[0]}.enabled")
        asks = value is not None and value is not False and (switch is None or switch[1] is True)
        by_reason.setdefault((key.why, key.loud and asks), []).append(path)
    return [Note(f"no effect: {', '.join(paths)} ({why})", loud=loud) for (why, loud), paths in by_reason.items()]
