"""A request of `train`: what flags say, what a config in the form of DeepSpeed and PatrickStar 0.4.6 says, and which of them wins."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from patrickstar.cli.flags import MEMORY
from patrickstar.cli.models import ModelSource
from patrickstar.cli.together import Together
from patrickstar.config.arguments import MemoryOptions
from patrickstar.config.engine.read import read_config
from patrickstar.config.json_file import read_json
from patrickstar.config.settings import EngineSettings, OptimizerSettings
from patrickstar.errors import ConfigError
from patrickstar.optim.schedules import Rates, rates_of

BETAS = (0.9, 0.999)
EPS = 1e-8
WEIGHT_DECAY = 0.01
SCHEDULES: Final = ("constant", "cosine")
# Where the cosine ends, as a share of the peak: the last steps should still learn something.
LOWEST: Final = 0.1

_PRECISIONS: Final = ("fp16.enabled", "bf16.enabled", "bfloat16.enabled", "patrickstar.precision")
# The key that says what a flag says; and others that a flag stands in the place of, sections as a whole.
_KEYS: Final = MappingProxyType(
    {name: f"patrickstar.{name}" for name in MEMORY}
    | {"batch_size": "train_micro_batch_size_per_gpu", "accumulate": "gradient_accumulation_steps"}
    | {"clip": "gradient_clipping", "lr": "optimizer.params.lr"}
)
_OTHERS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "disk": ("client.nvme_base_dir", "zero_optimization.offload_param", "zero_optimization.offload_optimizer"),
        "host_memory": ("client.mem_tracer.overall_cpu_mem_ratio",),
        "precision": _PRECISIONS,
        "schedule": ("scheduler",),
        "warmup": ("scheduler",),
    }
)


@dataclass(frozen=True, slots=True)
class WarmupSchedule:
    """The factor on `--lr` of each step; steps count from 0, as `torch.optim.lr_scheduler.LambdaLR` counts them."""

    kind: str
    warmup: int
    steps: int

    def factor(self, step: int) -> float:
        """The factor on the peak rate: rises to 1 at the end of the warmup, then stays, or falls as (1 + cos) / 2 to `LOWEST`."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant" or self.steps <= self.warmup:
            return 1.0
        share = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        return LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * share))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request of the command line. Attributes are its flags, where nothing else is said.

    Attributes:
        arguments: of `manage`. warmup: the schedule that flags ask for. together: how ranks share a batch.
    """

    source: ModelSource
    arguments: MemoryOptions
    configuration: Configuration | None
    warmup: WarmupSchedule
    together: Together

    data: Sequence[str]
    batch_size: int
    seq_len: int
    accumulate: int
    steps: int
    lr: float
    clip: float | None
    seed: int
    checkpoint_dir: Path | None
    save_every: int | None
    keep: int
    resume: bool
    compare_plain: bool
    log_json: Path | None

    @property
    def rates(self) -> Rates:
        """The rates of the config's scheduler, where it has one, else those that the factor of the flags makes of the optimizer's own."""
        of_config = None if self.configuration is None else self.configuration.settings.schedule
        own = Rates(lambda done, base: base * self.warmup.factor(done))
        return own if of_config is None else rates_of(of_config)

    @property
    def optimizer(self) -> OptimizerSettings:
        """The optimizer's settings in the config, where it has some, else AdamW at `lr`."""
        of_config = None if self.configuration is None else self.configuration.optimizer
        usual = OptimizerSettings(lr=self.lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, decoupled=True)
        return usual if of_config is None else of_config

    @property
    def shape(self) -> dict[str, Any]:
        """The shape of a batch."""
        return {"batch_size": self.batch_size, "seq_len": self.seq_len}


@dataclass(frozen=True, slots=True)
class Configuration:
    """A config, with the flags that were given on the command line in the place of its keys.

    What it does not say is as without it: `None` and empty mappings stand for that.

    Attributes:
        flags: values in the place of flags' defaults, by their names. optimizer: that of the config.
    """

    path: Path
    settings: EngineSettings
    memory: MemoryOptions
    flags: Mapping[str, Any]
    optimizer: OptimizerSettings | None


def configure(path: Path, given: Mapping[str, Any], *, explicit: Collection[str], ranks: int = 1) -> Configuration:
    """Reads a config for a run whose flags are `given`; `explicit` ones stand on the command line, and win. ConfigError: also with these in place.

    `ranks`: how many there are; a micro batch in a config is one rank's, `--batch-size` that of all.
    """
    config = read_json(path)
    for flag in explicit:
        for key in _OTHERS.get(flag, ()):
            _put(config, key, None)
        if flag in _KEYS and (flag != "lr" or isinstance(config.get("optimizer"), dict)):
            _put(config, _KEYS[flag], max(1, given[flag] // ranks) if flag == "batch_size" else given[flag])
    settings = read_config(config, of=f"config {path}", ranks=ranks)
    said = settings.values
    if said.get("steps_per_print") is not None:
        why = "steps_per_print (`train` shows its progress, and --log-json has every step)"
        settings = replace(settings, ignored=(*settings.ignored, why))
    schedule = settings.schedule
    if schedule is not None and "lr" in explicit and not schedule.follows_optimizer:
        raise ConfigError(
            f"--lr with config {path}: the rates of its scheduler, {schedule.name}, are its own; leave one of them out, "
            "or give --schedule"
        )
    if settings.memory.weights is not None:
        raise ConfigError(f"config {path}: patrickstar.weights: --model DIR starts from weights; leave it out")
    flags: dict[str, Any] = {"clip": settings.memory.max_grad_norm} if "gradient_clipping" in said else {}
    flags["accumulate"] = settings.accumulate
    if "batch_size" in explicit:
        flags["batch_size"] = given["batch_size"]
    elif settings.micro_batch_size is not None:
        flags["batch_size"] = settings.micro_batch_size * ranks
    memory = settings.memory
    if not any(key in said for key in _PRECISIONS):
        memory = replace(memory, precision=None)
    optimizer = settings.optimizer if any(key.startswith("optimizer.") for key in said) else None
    return Configuration(path, settings, memory, flags, optimizer)


def _put(config: dict[str, Any], path: str, value: object) -> None:
    """Writes a key, or with None leaves it out. What stands where a section should is left for the reader to tell."""
    *sections, name = path.split(".")
    within: Any = config
    for section in sections:
        within[section] = {} if within.get(section) is None else within[section]
        within = within[section]
        if not isinstance(within, dict):
            return
    within.pop(name, None)
    if value is not None:
        within[name] = str(value) if isinstance(value, Path) else value
