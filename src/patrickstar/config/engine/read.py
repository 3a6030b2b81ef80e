"""Reads a config in the form of PatrickStar 0.4.6 and DeepSpeed into settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from patrickstar.config.arguments import check_arguments
from patrickstar.config.engine.table import IGNORED, OPAQUE, SECTIONS, TABLE, Key
from patrickstar.config.json_file import read_json
from patrickstar.config.kinds import refuse
from patrickstar.config.options import LossScale, Options
from patrickstar.config.settings import EngineSettings, OptimizerSettings, Schedule
from patrickstar.errors import ConfigError, nearest

_BATCH: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def read_config(
    config: Mapping[str, Any] | str | os.PathLike[str] | None, *, of: str = "config", ranks: int = 1
) -> EngineSettings:
    """The settings that a config, or the JSON file at a path, comes to. None: those of an empty config.

    Args:
        of: the config, in messages. ranks: how many there are, which a whole batch is of.
    Raises:
        ConfigError: with every problem: keys that there are not, values, what is refused, and what does not go together.
    """
    if isinstance(config, str | os.PathLike):
        of, config = f"config {os.fspath(config)}", read_json(config)
    if not isinstance(config, Mapping | None):
        raise ConfigError(f"config is a {type(config).__name__}: expected a dict, or the path of a JSON file")
    found = Scan()
    found.look_up(config or {})
    notes: list[str] = []
    optimizer, schedule = _optimizer(found, notes), _schedule(found)
    accumulate, micro_batch_size = _batch(found, ranks)
    memory = _memory(found, accumulate)
    refuse([f"{path}: {why}" for path, why in found.problems.items()], of=of)
    return EngineSettings(
        optimizer=optimizer,
        schedule=schedule,
        accumulate=accumulate,
        micro_batch_size=micro_batch_size,
        memory=memory,
        values=found.values,
        ignored=tuple(found.ignored),
        notes=tuple(notes),
    )


def _optimizer(found: Scan, notes: list[str]) -> OptimizerSettings:
    params, is_adamw = found.of("optimizer.params"), found.values.get("optimizer.type") == "AdamW"
    if params.get("weight_decay") and not is_adamw and "adam_w_mode" not in params:
        notes.append(
            f'optimizer.type "Adam" with weight_decay={params["weight_decay"]:g} has L2 decay, as in torch and PatrickStar; '
            'DeepSpeed decouples it. Write "AdamW", or optimizer.params.adam_w_mode, to say which'
        )
    optimizer = OptimizerSettings(decoupled=params.pop("adam_w_mode", is_adamw), **params)
    if "lr" not in params and found.of("optimizer"):
        notes.append(f"optimizer.params.lr is not given: {optimizer.lr:g}")
    return optimizer


def _schedule(found: Scan) -> Any:
    given, name = found.of("scheduler.params"), found.values.get("scheduler.type")
    if name is None and given and "scheduler.type" not in found.problems:
        found.blame("scheduler.type", "missing, beside params")
    return None if name is None else _made(found, "scheduler.params", Schedule, name=name, given=given)


def _batch(found: Scan, ranks: int) -> tuple[int, int | None]:
    """Micro-batches a step and samples of each on one rank, as DeepSpeed infers them; None: not given."""
    whole, micro, accumulate = map(found.values.get, _BATCH)
    if whole is not None and found.problems.keys().isdisjoint(_BATCH):
        micro = whole // ranks // (accumulate or 1) if micro is None else micro
        accumulate = whole // ranks // max(micro, 1) if accumulate is None else accumulate
        if micro * accumulate * ranks != whole:
            found.blame(
                "train_batch_size",
                f"{whole} is not {' x '.join(_BATCH[1:])} x ranks = {micro} x {accumulate} x {ranks} rank{'s' * (ranks > 1)}: "
                f"write {max(micro, 1) * max(accumulate, 1) * ranks}, or another of the three",
            )
    return accumulate or 1, micro


def _memory(found: Scan, accumulate: int) -> Any:
    """The arguments of `manage`, a `MemoryOptions`; None where these have problems, which are noted."""
    given = found.of("patrickstar") | {"precision": _precision(found), "disk": _disk(found)}
    share = found.values.get("client.mem_tracer.overall_cpu_mem_ratio")
    if share is not None:
        if given.get("host_memory") is not None:
            found.blame("patrickstar.host_memory", "client.mem_tracer.overall_cpu_mem_ratio says it too")
        given["host_memory"] = f"{share * 100:.10g}%"
    given["max_grad_norm"] = max(found.values.get("gradient_clipping", 0.0), 0.0) or None
    own = {str(name): value for name, value in given.pop("options", {}).items()}
    if "chunk_size" in own and "default_chunk_size" in found.values:
        found.ignored.append("default_chunk_size (patrickstar.options.chunk_size says it)")
    for path in [f"patrickstar.options.{name}" for name in own if f"patrickstar.options.{name}" in TABLE]:
        found.blame(path, f"refused here: {TABLE[path].text}")
        del own[path.rpartition(".")[2]]
    if isinstance(own.get("keep_fp32"), list):
        own["keep_fp32"] = tuple(own["keep_fp32"])
    own |= {"accumulate": accumulate, "loss_scale": _loss_scale(found)}
    options = _made(found, "patrickstar.options", Options, **own)
    return _made(found, "patrickstar", check_arguments, **given, options=options)


def _made(found: Scan, within: str, make: Callable[..., Any], /, **fields: Any) -> Any:
    """An option group; where it is refused, None, and its problems at the paths of their keys, but for keys that have one already."""
    try:
        return make(**fields)
    except ConfigError as error:
        places = {"max_grad_norm": "gradient_clipping", "accumulate": "gradient_accumulation_steps"}
        places["initial"] = "fp16.initial_scale_power"
        for problem in error.problems:
            name, equals, why = problem.partition("=")
            if equals:
                found.problems.setdefault(places.get(name, f"{within}.{name}"), why)
            else:
                found.blame(within, problem)
        return None


def _precision(found: Scan) -> str | None:
    """The precision that `manage` is asked for: the patrickstar section's, else fp16, bf16, or fp32 where neither is on."""
    on = [name for name in ("fp16", "bf16", "bfloat16") if found.values.get(f"{name}.enabled")]
    asked = "fp32" if not on else "fp16" if on[0] == "fp16" else "bf16"
    if asked == "fp16" and len(on) > 1:
        found.blame(f"{on[1]}.enabled", "true, and so is fp16.enabled: a run has one type; write false for the other")
    own: str | None = found.values.get("patrickstar.precision", asked)
    if on and own != asked:
        found.blame("patrickstar.precision", f"{own!r}, and {on[0]}.enabled is true: leave one of them out")
    return own


def _loss_scale(found: Scan) -> Any:
    given = found.of("fp16")
    if not given.pop("enabled", False):
        found.ignored += [f"fp16.{name} (fp16.enabled is not true)" for name in given]
        return None
    renamed = {"loss_scale_window": "window", "min_loss_scale": "minimum"}
    power, static = given.pop("initial_scale_power", 16), given.pop("loss_scale", 0.0)
    own = {renamed.get(name, name): value for name, value in given.items()}
    return _made(found, "fp16", LossScale, initial=static or 2.0**power, dynamic=not static, **own)


def _disk(found: Scan) -> Any:
    """The directory of the disk tier, wherever the config names it."""
    given = {at: found.values[at] for at in ("client.nvme_base_dir", "patrickstar.disk") if found.values.get(at)}
    for section in ("zero_optimization.offload_param", "zero_optimization.offload_optimizer"):
        path = found.values.get(at := f"{section}.nvme_path")
        if found.values.get(f"{section}.device") != "nvme":
            found.ignored += [f'{at} ({section}.device is not "nvme")'] if path else []
        elif path:
            given[at] = path
        elif at not in found.problems:
            found.blame(at, 'missing, beside "device": "nvme": write a directory on that disk')
    first = next(iter(given), "")
    for at, path in given.items():
        if os.path.normpath(str(path)) != os.path.normpath(str(given[first])):
            found.blame(at, f"{path!r}, and {first} is {given[first]!r}: there is one disk; write one directory")
    return given.get(first)


@dataclass(slots=True)
class Scan:
    """The keys of a config, by path: values of honoured ones, converted; problems; those without effect."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)

    def of(self, section: str) -> dict[str, Any]:
        """The values of one object, by name."""
        return {path[len(section) + 1 :]: v for path, v in self.values.items() if path.startswith(f"{section}.")}

    def blame(self, path: str, why: str) -> None:
        """Notes a problem, at the end of those of the same key."""
        self.problems[path] = f"{self.problems[path]}; {why}" if path in self.problems else why

    def look_up(self, config: Mapping[Any, Any], within: str = "") -> None:
        """Takes the keys of an object, and of the objects in it."""
        for name, value in config.items():
            path = f"{within}.{name}" if within else str(name)
            if path in TABLE:
                self._take(path, TABLE[path], value)
            elif path in SECTIONS and isinstance(value, Mapping | None):
                self.look_up(value or {}, path)
            elif not _has_no_effect(name, within):
                self.blame(path, f"{value!r}: expected an object" if path in SECTIONS else _unknown(name, within))
            elif isinstance(value, Mapping):
                self.look_up(value, path)
            else:
                self.ignored.append(path)

    def _take(self, path: str, key: Key, value: Any) -> None:
        if key.kind is None:
            is_harmless = value is None or (isinstance(value, bool | int | float | str) and value in key.harmless)
            if not is_harmless:
                self.blame(path, f"{value!r:.72} is refused here: {key.text}")
        elif key.kind.takes(value):
            self.values[path] = key.kind.convert(value)
        elif str(value) == "auto":
            why = '"auto" is for the Trainer of transformers to fill in, which is not here'
            self.blame(path, f"{why}: write {key.kind.words}")
        else:
            self.blame(path, f"{value!r:.72}: expected {key.kind.words}")


def _has_no_effect(name: object, within: str) -> bool:
    """Tells whether a name is one without effect. One that has an effect elsewhere is, in objects that have none."""
    can_have = within in {"", *SECTIONS} and any(path.endswith(f".{name}") for path in TABLE)
    return (name in IGNORED and not can_have) or not OPAQUE.isdisjoint(within.split("."))


def _unknown(name: object, within: str) -> str:
    inside = [path.removeprefix(f"{within}.") for path in TABLE if not within or path.startswith(f"{within}.")]
    here = sorted({path.partition(".")[0] for path in inside})
    elsewhere = [path for path in TABLE if path.endswith(f".{name}")]
    near = f'; did you mean "{elsewhere[0]}"?' if elsewhere else nearest(str(name), [*here, *IGNORED])
    return f"there is no such key{near or '; the keys with a meaning here are ' + ', '.join(here)}"
