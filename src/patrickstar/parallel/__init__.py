"""Long sequences and large layers over ranks, with `patrickstar.manage` and without it. Each name is imported when it is first asked for."""

import importlib as _importlib
import types as _types
import typing as _typing

if _typing.TYPE_CHECKING:
    from patrickstar.parallel.traffic_counter import Traffic, traffic

__all__ = ["Traffic", "traffic"]

_PLACES = _types.MappingProxyType(
    {
        "Traffic": "patrickstar.parallel.traffic_counter",
        "traffic": "patrickstar.parallel.traffic_counter",
    }
)


def __getattr__(name: str) -> _typing.Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
