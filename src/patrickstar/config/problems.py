"""Problems of an option group: phrases that are collected, and told all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from patrickstar.config.kinds import OTHER_NAMES, Kind
from patrickstar.errors import ConfigError, nearest


def problems_of(group: object, kinds: Mapping[str, Kind]) -> list[str]:
    """The problems of the fields of a group that are not of their kinds."""
    return [problem for name, kind in kinds.items() for problem in kind.problems(name, getattr(group, name))]


def unknown_argument(name: str, known: Iterable[str]) -> str:
    """A message about an argument nobody knows: the nearest spelling, and all there are."""
    known = sorted(known)
    near = nearest(OTHER_NAMES.get(name, name), known)
    return (
        f"there is no argument {name!r}{near}{' The arguments' if near else '; the arguments'} are {', '.join(known)}"
    )


def parsed(parse: Callable[..., object], value: object, **how: object) -> list[str]:
    """The problem of a text or number that something else reads, and None may stand in the place of."""
    try:
        if value is not None:
            parse(value, **how)
    except ConfigError as error:
        return [str(error)]
    return []


def refuse(problems: Sequence[str], *, of: str) -> None:
    """Nothing, where there are no problems. ConfigError: there are; the message has every one."""
    if len(problems) == 1:
        raise ConfigError(f"{of}: {problems[0]}", problems=problems)
    if problems:
        raise ConfigError("\n  ".join([f"{of}: {len(problems)} problems", *problems]), problems=problems)
