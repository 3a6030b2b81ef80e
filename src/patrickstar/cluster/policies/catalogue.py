"""Policies by name, with where each comes from and what it knows; and those of users, by module and function."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from patrickstar.cluster.job_view import Policy
from patrickstar.cluster.policies.greedy import optimus, pollux, soonest
from patrickstar.cluster.policies.ones import ones
from patrickstar.cluster.policies.rigid import fifo, las, srtf
from patrickstar.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy that comes with the package."""

    decide: Policy
    source: str
    knows: str
    resizes: bool


POLICIES: Final[Mapping[str, NamedPolicy]] = MappingProxyType(
    {
        "fifo": NamedPolicy(fifo, "first in, first out", "the order of submission", False),
        "srtf": NamedPolicy(srtf, "shortest remaining time first", "what remains", False),
        "las": NamedPolicy(las, "Tiresias (NSDI 2019)", "GPU time attained", False),
        "optimus": NamedPolicy(optimus, "Optimus (EuroSys 2018)", "what remains, speeds", True),
        "pollux": NamedPolicy(pollux, "Pollux (OSDI 2021)", "speeds, gradient noise", True),
        "ones": NamedPolicy(ones, "ONES (SC 2021)", "epochs, losses, speeds; what remains it predicts", True),
        "soonest": NamedPolicy(
            soonest, "ours; the default", "what remains, speeds, gradient noise, what a change costs", True
        ),
    }
)


def find_policy(name: str) -> Policy:
    """The policy of this name, or a user's own: `module:function`, as Python run in this directory would import it.

    Raises:
        ConfigError: there is none.
    """
    if name in POLICIES:
        return POLICIES[name].decide
    module, colon, function = name.partition(":")
    if not colon:
        known = (*POLICIES, "all")
        raise ConfigError(
            f"no policy {name!r}: {', '.join(known)}, or module:function for your own{nearest(name, known)}"
        )
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - an entry there is a text
    try:
        found = getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise ConfigError(f"--policy {name}: module {module!r} cannot be imported: {error}") from error
    except AttributeError:
        raise ConfigError(f"--policy {name}: module {module!r} has no {function!r}") from None
    finally:
        del sys.path[0]
    if not callable(found):
        raise ConfigError(f"--policy {name}: {function!r} is a {type(found).__name__}, not a function")
    policy: Policy = found
    return policy
