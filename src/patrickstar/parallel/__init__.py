"""Long sequences and large layers over ranks, with `patrickstar.manage` and without it. Each name is imported when it is first asked for."""

import importlib as _importlib
import types as _types
import typing as _typing

import patrickstar.parallel.costs as costs  # noqa: PLR0402  (it has no torch; importing it from this very module would be a circle)

if _typing.TYPE_CHECKING:
    from patrickstar.parallel.context_parallel import ContextParallel, Verification
    from patrickstar.parallel.summa import summa_ab, summa_abt, summa_atb
    from patrickstar.parallel.tensor_2d import Tensor2D
    from patrickstar.parallel.traffic_counter import Traffic, traffic

__all__ = [
    "ContextParallel",
    "Tensor2D",
    "Traffic",
    "Verification",
    "costs",
    "summa_ab",
    "summa_abt",
    "summa_atb",
    "traffic",
]

_PLACES = _types.MappingProxyType(
    {"Tensor2D": "tensor_2d"}
    | dict.fromkeys(("ContextParallel", "Verification"), "context_parallel")
    | dict.fromkeys(("Traffic", "traffic"), "traffic_counter")
    | dict.fromkeys(("summa_ab", "summa_abt", "summa_atb"), "summa")
)


def __getattr__(name: str) -> _typing.Any:
    if name in _PLACES:
        return getattr(_importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
