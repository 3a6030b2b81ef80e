"""The ways in which `step.py` takes one and the same step: every optimization by itself, switched on or off.

A variant has a text form that parses back: `plain precision=bf16`, `managed budget=half eviction=lru`. What is left out is off or as by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Final

__all__ = ["DEFAULT", "Variant"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way. Prints as its text form."""

    managed: bool = True
    """By the library, or by plain PyTorch."""

    precision: str = "fp32"
    """Of plain PyTorch, bf16 means `torch.autocast` over fp32 weights: what a model without us would train in."""

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

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                raise ValueError(f"{name}={getattr(self, name)}: one of {', '.join(words)}")
        if self.budget not in ("all", "half", "minimum") and not _is_share(self.budget):
            raise ValueError(f"budget={self.budget}: all, half, minimum, or a share of the model data such as 0.75")
        if not self.managed:
            given = [name for name in self._said() if name not in _PLAIN]
            if given:
                raise ValueError(f"plain PyTorch has no {', '.join(given)}")
            if self.precision == "fp16":
                raise ValueError("plain PyTorch in fp16: its CPU kernels have no training baseline to offer")
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
            given[name] = int(value) if name == "chunk" else value
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


# One thing at a time against the line above it: where everything fits, then with memory for half, then the least.
DEFAULT: Final = tuple(
    map(
        Variant.parse,
        (
            "plain",
            "plain checkpointing=on",
            "plain precision=bf16",
            "managed",
            "managed checkpointing=on",
            "managed step=in_backward",
            "managed precision=bf16",
            "managed precision=fp16",
            "managed budget=1.25 disk=on",
            "managed budget=half disk=on",
            "managed budget=half disk=on eviction=lru",
            "managed budget=half disk=on chunk=262144",
            "managed budget=half disk=on step=in_backward",
            "managed budget=half disk=on precision=bf16",
            "managed budget=minimum disk=on",
            "managed budget=half device=emulated",
        ),
    )
)
