"""Long sequences and large layers over ranks, with `patrickstar.manage` and without it. Each name is imported when it is first asked for."""

import importlib as _importlib
import types as _types
import typing as _typing

if _typing.TYPE_CHECKING:
    from patrickstar.parallel.context_parallel import ContextParallel
    from patrickstar.parallel.traffic_counter import Traffic, traffic
    from patrickstar.parallel.verification import Verification

__all__ = ["ContextParallel", "Traffic", "Verification", "traffic"]

_PLACES = _types.MappingProxyType(
    {
        "ContextParallel": "patrickstar.parallel.context_parallel",
        "Traffic": "patrickstar.parallel.traffic_counter",
        "Verification": "patrickstar.parallel.verification",
        "traffic": "patrickstar.parallel.traffic_counter",
    }
)


def __getattr__(name: str) -> _typing.Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
