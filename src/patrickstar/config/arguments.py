"""The arguments of `manage`, checked before anything is looked at or changed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from patrickstar.config.kinds import RATE, Kind, choice, near, option, parsed, problems_of, refuse, unknown_argument
from patrickstar.config.options import Options
from patrickstar.errors import ConfigError
from patrickstar.units import MIB, parse_size

DEVICES: Final = ("cpu", "cuda", "emulated")
_CUDA: Final = re.compile(r"cuda(:(0|[1-9][0-9]*))?")
_ANY_TOTAL_BYTES: Final = 1 << 62  # stands in for a tier's total where only the form of "70%" is checked
_DEVICE: Final = Kind(
    '"cpu", "emulated", "cuda", "cuda:1" or None',
    lambda v: v is None or (isinstance(v, str) and (v in DEVICES or bool(_CUDA.fullmatch(v)))),
    hint=near(*DEVICES),
)
_NORM: Final = Kind("a finite norm, a number of 0 or more, or None", lambda v: v is None or RATE.takes(v))
_MESH: Final = Kind(
    'a torch.distributed.DeviceMesh with the dimension "dp", or None',
    lambda value: value is None or type(value).__name__ == "DeviceMesh",  # which this layer does not import
)
_DIRECTORY: Final = Kind("the path of a directory", lambda value: isinstance(value, Path | None))
_WEIGHTS: Final = Kind(
    "the path of a safetensors file, or of a directory as save_pretrained leaves it", _DIRECTORY.takes
)
_OPTIONS: Final = Kind("patrickstar.Options(...)", lambda value: isinstance(value, Options))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """The arguments of `manage`, valid together. `dataclasses.replace` checks again.

    Sizes keep the form in which they were given: what "70%" comes to, the tier knows. Whether a device is there the runtime finds out.
    """

    device: str | None = option(None, _DEVICE)
    precision: str | None = option(None, choice(None, "fp32", "bf16", "fp16"))
    device_memory: int | str | None = None
    host_memory: int | str | None = None
    disk: Path | None = option(None, _DIRECTORY)
    disk_memory: int | str | None = None
    states: str = option("exact", choice("exact", to_come=["compact"]))
    step: str = option("deferred", choice("deferred", "in_backward"))
    max_grad_norm: float | None = option(None, _NORM)
    weights: Path | None = option(None, _WEIGHTS)
    activations: str = option("model", choice("model", to_come=["recompute", "plan"]))
    mesh: object | None = option(None, _MESH)
    options: Options = option(Options(), _OPTIONS)

    def __post_init__(self) -> None:
        problems = problems_of(self)
        for name in ("device_memory", "host_memory", "disk_memory"):
            how = {"name": name, "total_bytes": _ANY_TOTAL_BYTES, "least_bare": MIB}
            problems += parsed(parse_size, getattr(self, name), **how)
        refuse([*problems, *self._conflicts()], of="manage")

    def _conflicts(self) -> Iterator[str]:
        """Problems of arguments that are each well."""
        if self.device == "cpu" and self.device_memory is not None:
            yield (
                f'device_memory={self.device_memory!r} with device="cpu": there is no device tier, the host computes; '
                f"give host_memory={self.device_memory!r}"
            )
        if self.disk is None and self.disk_memory is not None:
            yield f"disk_memory={self.disk_memory!r} without a disk tier: give disk, a directory, or leave it out"
        options = self.options if isinstance(self.options, Options) else Options()
        link, compute, accumulate = options.emulated_link, options.compute, options.accumulate
        if link is not None and self.device != "emulated":
            yield f'emulated_link={link!r} with device={self.device!r}: only the link of device="emulated" has a speed to be given; leave it out'
        if compute not in (None, "fp32", self.precision):
            yield f'options.compute="{compute}" with precision={self.precision!r}: weights compute in the type they are kept in, or in "fp32"'
        if self.step == "in_backward":
            if self.precision == "fp16":
                yield (
                    'precision="fp16" with step="in_backward": whether gradients overflow is known only when all have arrived, and by then '
                    'parameters are updated; use step="deferred"'
                )
            if self.max_grad_norm is not None:
                yield (
                    f'max_grad_norm={self.max_grad_norm!r} with step="in_backward": the norm is known only when every '
                    'gradient is, and by then parameters are updated; use step="deferred"'
                )
            if accumulate not in (None, 1):
                yield f'accumulate={accumulate} with step="in_backward", which promises one backward per step; use step="deferred"'


def check_arguments(**arguments: Any) -> MemoryOptions:
    """The keyword arguments of `manage`, as one frozen group; `options=None` becomes the default options. ConfigError: with every problem."""
    known = MemoryOptions.__dataclass_fields__
    given = {name: value for name, value in arguments.items() if name in known}
    if given.get("options") is None:
        given["options"] = Options()
    for name in ("disk", "weights"):
        if isinstance(given.get(name), str | os.PathLike) and given[name] != "":
            given[name] = Path(given[name])
    if type(given.get("device")).__name__ == "device":
        given["device"] = str(given["device"])  # a torch.device, which this layer does not import
    problems = [unknown_argument(name, known) for name in arguments if name not in known]
    try:
        checked = MemoryOptions(**given)
    except ConfigError as error:
        problems += error.problems
    refuse(problems, of="manage")
    return checked
