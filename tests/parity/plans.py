"""The plans of every row, by digest: what must not change unless it is meant to.

    python -m tests.parity.plans                      makes the digests of every row anew, two rows at a time; minutes
    python -m tests.parity.plans gpt2                 those of rows whose names contain this
    python -m tests.parity.plans ROW --dump FILE      writes the plans of one row
    python -m tests.parity.plans --diff FILE FILE     what is different in the second's

The digests of `FORECASTS`, larger models that are planned and not run, stand beside those of rows.

A digest is over every plan that a run makes, in order: actions, frees, start and end. The line of the machine is left out; all tiers have
budgets that are given. Transfers are where they are needed, at a depth of 0, whatever the run's: that others begin earlier changes nothing else.
Updates have a stretch of their own, and are left out themselves.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from difflib import unified_diff
from itertools import groupby, zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import torch

from patrickstar import BudgetError, Options
from patrickstar.cli.models import ModelSource
from patrickstar.core.fixed_costs import FixedCosts
from patrickstar.core.planes import STEP
from patrickstar.plan import make, planner
from patrickstar.plan.plan import Plan
from patrickstar.plan.update_choice import UpdateChoice
from patrickstar.session.forecast import forecast
from patrickstar.session.start import set_up
from patrickstar.units import GIB, MIB
from tests.parity.limits import LIMITS
from tests.parity.managed import train
from tests.parity.matrix import PAIRS, WIDE, Row

_FILE: Final = Path(__file__).with_name("plans.json")
DIGESTS: Final[Mapping[str, str]] = json.loads(_FILE.read_text()) if _FILE.exists() else {}
"""By row: 16 hexadecimal digits."""

_JOBS = 2
APART: Final = UpdateChoice(apart=True)
"""The choice under which plans are recorded."""


@contextmanager
def recorded() -> Iterator[list[Plan]]:
    """Collects every plan that is made, by whoever imported `make_plan`, as it would be if nothing began early."""
    plans: list[Plan] = []
    real = make.make_plan

    def make_plan(*args: Any, **kwargs: Any) -> Plan:
        plans.append(real(*args, **{**kwargs, "prefetch": 0}))
        return real(*args, **kwargs)

    importers = [module for name, module in sorted(sys.modules.items()) if name.startswith("patrickstar.")]
    places = [module for module in importers if getattr(module, "make_plan", None) is real]
    assert planner in places, "a session would make its plans unseen"
    try:
        for module in places:
            module.make_plan = make_plan  # type: ignore[attr-defined]
        yield plans
    finally:
        for module in places:
            module.make_plan = real  # type: ignore[attr-defined]


_ROOM_OF_A_GIB: Final = GIB + FixedCosts(floor_bytes=256 * MIB).beside(GIB)
"""For chunks and activations, with what the process takes beside."""

FORECASTS: Final[Mapping[str, Mapping[str, Any]]] = {
    f"forecast-{model}-{tier}-{precision}-{step}": {
        "model": model,
        "device": "cpu" if tier == "cpu+disk" else "emulated",
        "precision": precision.partition("-")[0],
        "options": Options(compute=precision.rpartition("-")[2]),
        "step": step,
        "host_memory": _ROOM_OF_A_GIB if tier == "cpu+disk" else "8GiB" if tier == "emulated" else "256MiB",
        **({} if tier == "cpu+disk" else {"device_memory": "800MiB"}),
        **({} if tier == "emulated" else {"disk": Path(), "disk_memory": "16GiB"}),
    }
    for model in ("gpt2-120m", "qwen2.5-0.5b")
    for tier in ("emulated", "cpu+disk", "emulated+disk")
    for precision in ("fp32", "bf16", "bf16-fp32")
    for step in ("deferred", "in_backward")
}
"""Arguments of a forecast, by name."""

_THREADS = 2


def forecast_digest(name: str) -> str:
    """Of the plans of a forecast, on two threads: what kernels keep depends on their number. Of its refusal, where it does not fit."""
    arguments = dict(FORECASTS[name])
    threads = torch.get_num_threads()
    torch.set_num_threads(_THREADS)
    try:
        with torch.device("meta"):
            model = ModelSource.find(arguments.pop("model")).build()
        tokens = torch.zeros(1, 256, dtype=torch.long)
        with recorded() as plans:
            found = forecast(
                model,
                {"input_ids": tokens, "labels": tokens},
                clip=arguments["step"] == "deferred",
                choice=APART,
                **arguments,
            )
        return digest(plans) if found.fits else hashlib.sha256(found.refusal.encode()).hexdigest()[:16]
    finally:
        torch.set_num_threads(threads)


def digest(plans: Iterable[Plan]) -> str:
    """Equal for equal plans in the same order, but for the machine."""
    lines = (
        line for plan in plans for line in str(without_updates(plan)).splitlines() if not line.startswith("machine ")
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def without_updates(plan: Plan) -> Plan:
    """The plan's transfers alone."""
    moments = tuple(tuple(action for action in actions if action.of.plane != STEP) for actions in plan.moments)
    return replace(plan, moments=moments)


def plans_of(row: Row) -> list[Plan]:
    """The plans of a run at the row's budget."""
    with tempfile.TemporaryDirectory() as name, recorded() as plans:
        train(row, LIMITS[str(row)], Path(name) / "disk", prefetch=0, choice=APART)
    return plans


def _digest_all(names: Sequence[str]) -> dict[str, str]:
    torch.set_num_threads(1)
    set_up.__kwdefaults__["binding"] = "use"  # as in tests
    found = {}
    for name in names:
        try:
            found[name] = forecast_digest(name) if name in FORECASTS else digest(plans_of(Row.parse(name)))
        except BudgetError as refusal:  # it is told in test_parity.py too
            print(f"{name} is refused at {LIMITS[name]}: {refusal}", file=sys.stderr)
    return found


def _make_anew(wanted: str) -> None:
    names = [*map(str, sorted((*PAIRS, *WIDE), key=lambda row: row.model)), *FORECASTS]
    chosen = [name for name in names if wanted in name]
    together = [list(group) for _, group in groupby(chosen, key=lambda name: name.partition("-")[0])]
    with ProcessPoolExecutor(_JOBS, mp_context=get_context("spawn")) as pool:
        found = {name: text for part in pool.map(_digest_all, together) for name, text in part.items()}
    for name, text in sorted(found.items()):
        if DIGESTS.get(name) != text:
            print(f"{name}: {DIGESTS.get(name, 'new')} -> {text}")
    known = {name: DIGESTS[name] for name in names if name in DIGESTS} | found
    _FILE.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


def _read(file: Path) -> list[str]:
    return file.read_text().split("\n\n")


def _show_difference(before: list[str], after: list[str]) -> None:
    for number, (old, new) in enumerate(zip_longest(before, after, fillvalue="")):
        for line in unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm=""):
            print(f"plan {number}: {line}")


def main() -> None:
    match sys.argv[1:]:
        case [row, "--dump", file]:
            Path(file).write_text("\n\n".join(map(str, plans_of(Row.parse(row)))))
        case ["--diff", before, after]:
            _show_difference(_read(Path(before)), _read(Path(after)))
        case [wanted]:
            _make_anew(wanted)
        case []:
            _make_anew("")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
