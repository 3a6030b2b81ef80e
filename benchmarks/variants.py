"""The ways in which `step.py` takes one and the same step: every optimization by itself, switched on or off.

A variant has a text form that parses back: `plain precision=bf16`, `managed budget=half eviction=lru`. What is left out is off or as by default.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Final

__all__ = ["ALL", "DEFAULT", "Variant"]

_WORDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "precision": ("fp32", "bf16", "fp16"),
        "checkpointing": ("off", "on"),
        "step": ("deferred", "in_backward"),
        "eviction": ("next-use", "lru"),
        "disk": ("off", "on"),
        "device": ("cpu", "emulated"),
    }
)
_PLAIN: Final = frozenset({"precision", "checkpointing"})
_NUMBERS: Final = frozenset({"chunk", "tile_rows"})
# Two fields that are one decision.
_TOGETHER: Final = frozenset({"precision", "compute"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way. Prints as its text form."""

    managed: bool = True
    """By the library, or by plain PyTorch."""

    precision: str = "fp32"
    """Of plain PyTorch, bf16 means `torch.autocast` over fp32 weights: what a model without us would train in."""

    compute: str | None = None
    """What a managed model of 16 bits computes in: its own type, or fp32, to which weights are widened at each use. None: as the library decides,
    which `as_run` puts into words."""

    checkpointing: str = "off"
    """Whether every block's forward is run again in backward instead of keeping its activations."""

    step: str = "deferred"

    eviction: str = "next-use"

    budget: str = "all"
    """Of the tier that computes: `all` fits, with no bound given; `half` of the model data; `minimum`, the smallest that fits; or a share of
    the model data, such as `0.75`."""

    disk: str = "off"
    """What does not fit lies on the disk; or, on the emulated device, in host memory."""

    device: str = "cpu"

    chunk: int | None = None
    """Elements of a chunk; None: searched for."""

    tile_rows: int | None = None
    """Rows of a weight that are used at a time; None: all of them. Other tiles may give other bits."""

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                raise ValueError(f"{name}={getattr(self, name)}: one of {', '.join(words)}")
        if self.budget not in ("all", "half", "minimum") and not _is_share(self.budget):
            raise ValueError(f"budget={self.budget}: all, half, minimum, or a share of the model data such as 0.75")
        if self.compute not in (None, "fp32", self.precision):
            raise ValueError(f"compute={self.compute}: fp32, or {self.precision} as it is kept in")
        if not self.managed:
            given = [name for name in self._said() if name not in _PLAIN]
            if given:
                raise ValueError(f"plain PyTorch has no {', '.join(given)}")
            if self.precision == "fp16":
                raise ValueError("plain PyTorch in fp16: its CPU kernels have no training baseline to offer")
        elif self.compute is not None and self.precision == "fp32":
            raise ValueError(f"compute={self.compute} without precision=bf16 or fp16: fp32 computes in itself")
        elif self.budget != "all" and self.device == "cpu" and self.disk == "off":
            raise ValueError(
                f"budget={self.budget} without disk=on: with the host computing there is nowhere else to go"
            )

    @property
    def share(self) -> float | None:
        """Of the model data; None where the budget is none, or the smallest."""
        if self.budget in ("all", "minimum"):
            return None
        return 0.5 if self.budget == "half" else float(self.budget)

    @property
    def products(self) -> str:
        """The type of its matrix products, where nothing is left to the library."""
        return self.compute or self.precision

    def as_run(self, fast: Collection[str]) -> Variant:
        """With `compute=fp32` said where the library widens weights: where the processor is not fast in the type that they are kept in."""
        if self.managed and self.compute is None and self.precision not in fast:
            return replace(self, compute="fp32")
        return self

    def base_line(self, before: Sequence[Variant]) -> Variant | None:
        """What it is compared with: the first of those before it that differ in the fewest decisions, managed ones if it is managed itself."""
        return min(before, key=lambda other: (other.managed != self.managed, self._distance(other)), default=None)

    def _distance(self, other: Variant) -> int:
        differ = [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]
        return len({"precision" if name in _TOGETHER else name for name in differ})

    def __str__(self) -> str:
        said = (f"{name}={value}" for name, value in self._said().items())
        return " ".join(["managed" if self.managed else "plain", *said])

    @classmethod
    def parse(cls, text: str) -> Variant:
        """From its text form.

        Raises:
            ValueError: not one; says what may be written.
        """
        kind, *words = text.split()
        if kind not in ("plain", "managed"):
            raise ValueError(f"{text!r}: begins with plain or managed")
        known = {field.name for field in fields(cls)} - {"managed"}
        given: dict[str, Any] = {}
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or name not in known:
                raise ValueError(f"{word!r}: NAME=VALUE, with a name of {', '.join(sorted(known))}")
            given[name] = int(value) if name in _NUMBERS else value
        return cls(managed=kind == "managed", **given)

    def _said(self) -> dict[str, Any]:
        """What is not as by default."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "managed"}
        return {name: value for name, value in values.items() if value != Variant.__dataclass_fields__[name].default}


def _is_share(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def _parsed(*texts: str) -> tuple[Variant, ...]:
    return tuple(map(Variant.parse, texts))


# One thing at a time against a line above it: where everything fits, then with memory for half, then the least.
DEFAULT: Final = _parsed(
    "plain",
    "managed",
    "managed checkpointing=on",
    "managed step=in_backward",
    "managed precision=bf16",
    "managed precision=fp16",
    "managed budget=half disk=on",
    "managed budget=half disk=on eviction=lru",
    "managed budget=minimum disk=on",
    "managed budget=half device=emulated",
)

ALL: Final = _parsed(
    "plain",
    "plain checkpointing=on",
    "plain precision=bf16",
    "managed",
    "managed checkpointing=on",
    "managed step=in_backward",
    "managed precision=bf16",
    "managed precision=bf16 compute=fp32",
    "managed precision=fp16",
    "managed budget=half disk=on",
    "managed budget=half disk=on eviction=lru",
    "managed budget=half disk=on chunk=262144",
    "managed budget=half disk=on step=in_backward",
    "managed budget=half disk=on precision=bf16",
    "managed budget=minimum disk=on",
    "managed budget=minimum disk=on tile_rows=1024",
    "managed budget=1.25 disk=on",
    "managed budget=half device=emulated",
)
