"""The budgets that rows of the matrix run in: found once by search, checked in, pinned by `test_parity.py`.

    python -m tests.parity.limits           searches those of every row, two rows at a time; minutes
    python -m tests.parity.limits gpt2      of rows whose names contain this

A budget that has grown or shrunk fails the rows that it belongs to. Where that is meant, search again and commit the change with its reason.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import torch
from torch.torch_version import TorchVersion

import patrickstar
from patrickstar.session.start import set_up
from tests.parity.managed import Limits, Outcome, train
from tests.parity.matrix import PAIRS, WIDE, Row
from tests.parity.zoo import STEPS

LIMITED: Final[Mapping[str, tuple[str, ...]]] = {
    "emulated": ("device",),
    "cpu+disk": ("host",),
    "emulated+disk": ("device", "host"),
}
"""The tiers that a row's budget binds, by kind of machine."""

_FILE: Final = Path(__file__).with_name("limits.json")
LIMITS: Final[Mapping[str, Limits]] = json.loads(_FILE.read_text()) if _FILE.exists() else {}
"""Bytes by tier, by row."""

PAGE_BYTES: Final = 4096
"""What the smallest budgets are exact to: of each, so much less is refused. No slot is smaller."""

_ABSURD_BYTES = 4096
# A refusal names the smallest budget that fits as far as it was known then; data may show a larger need later.
_ATTEMPTS = 12
_JOBS = 2


def is_known_here(row: Row) -> bool:
    """Whether torch runs the operations here of which the budget and the plans are checked in.

    An LSTM in 16 bits is one only on CPUs for which oneDNN has that type (in fp16: where it is evaluated), and the product of all experts on CPUs
    in fp32 only from torch 2.13 on.
    """
    if row.model == "mixtral":
        return TorchVersion(torch.__version__) >= (2, 13)
    has = {"bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported, "fp16": torch.ops.mkldnn._is_mkldnn_fp16_supported}
    return row.model != "lstm" or row.precision not in has or has[row.precision]()


def limits_of(row: Row) -> Limits:
    """The budget that a row runs in: the one that is checked in, or what is found for this processor."""
    return LIMITS[str(row)] if is_known_here(row) else search(row)


def search(row: Row) -> Limits:
    """Bytes by tier for a row's budget: none, the smallest that run, or halfway from those to where nothing moves."""
    with tempfile.TemporaryDirectory() as name:
        limits = least(row, _start(row), Path(name)).limits
        return _tightened(row, limits, Path(name)) if row.budget == "minimum" else limits


def _start(row: Row) -> Limits:
    if row.budget == "fits":
        return {}
    # What a second micro-batch needs, a fourth does; a policy changes what moves, not what fits. Where clipping needs
    # more, the refusal of the row's own run says so.
    like = replace(row, budget="minimum", clipping=False, eviction="next-use", accumulation=min(row.accumulation, 2))
    minimum, everything = _span(like)
    if row.budget == "minimum":
        return minimum
    for tier in LIMITED[row.tier]:
        assert everything[tier] > minimum[tier], f"{row}: no budget lies between {minimum[tier]} and {everything[tier]}"
    return {tier: (minimum[tier] + everything[tier]) // 2 for tier in LIMITED[row.tier]}


@lru_cache(maxsize=256)
def _span(row: Row) -> tuple[Limits, Limits]:
    """The smallest budgets that run, and those in which, one tier at a time, everything fits.

    The second counts from the first by what two runs report as peaks, so that what a budget holds beside them (a
    reserve, say) cancels.
    """
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        (top / "least").mkdir()
        smallest = least(row, dict.fromkeys(LIMITED[row.tier], _ABSURD_BYTES), top / "least", steps=2)
        everything = {}
        for tier in LIMITED[row.tier]:
            (top / tier).mkdir()
            others = {other: limit for other, limit in smallest.limits.items() if other != tier}
            full = least(row, others, top / tier, steps=2)
            everything[tier] = smallest.limits[tier] + full.stats.peak[tier] - smallest.stats.peak[tier]
    return smallest.limits, everything


def _tightened(row: Row, limits: Limits, directory: Path) -> Limits:
    """The smallest budgets of which a page less is refused: what a refusal names is an estimate where no forecast was right."""
    for tier in limits:
        refused, runs = _ABSURD_BYTES // 2, limits[tier]
        tried = runs - PAGE_BYTES  # nearly always refused, which is the end
        while tried > refused:
            if _fits(row, {**limits, tier: tried}, directory / f"{tier}-{tried}"):
                runs = tried
            else:
                refused = tried
            pages = (runs - refused - 1) // PAGE_BYTES
            tried = refused + (pages + 1) // 2 * PAGE_BYTES
        limits = {**limits, tier: runs}
    return limits


def _fits(row: Row, limits: Limits, directory: Path) -> bool:
    directory.mkdir()
    try:
        train(row, limits, directory)
    except patrickstar.BudgetError:
        return False
    return True


def least(row: Row, limits: Limits, directory: Path, *, steps: int = STEPS) -> Outcome:
    """The run in the smallest budgets at or above the given ones, as the refusals name them."""
    for attempt in range(_ATTEMPTS):
        folder = directory / str(attempt)
        folder.mkdir()
        try:
            return train(row, limits, folder / "disk", steps=steps)
        except patrickstar.BudgetError as refusal:
            tier, smallest = str(refusal.tier), refusal.smallest_bytes
            if tier not in limits:
                raise AssertionError(f"{row}: the {tier} tier has room for everything, and yet") from refusal
            if smallest <= limits[tier]:
                raise AssertionError(f"{row}: {tier} refused {limits[tier]} and named {smallest} bytes") from refusal
            limits = {**limits, tier: smallest}
    raise AssertionError(f"{row}: still refused after {_ATTEMPTS} budgets that refusals had named, the last {limits}")


def _search_all(rows: Iterable[Row]) -> dict[str, Limits]:
    torch.set_num_threads(1)
    set_up.__kwdefaults__["binding"] = "use"  # as in tests
    found = {}
    for row in rows:
        try:
            found[str(row)] = dict(search(row))
        except Exception as problem:
            print(f"{row}: {type(problem).__name__}: {problem}", file=sys.stderr)
        else:
            print(row, found[str(row)], flush=True)
    return found


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    rows = [row for row in (*PAIRS, *WIDE) if wanted in str(row)]
    by_model = [list(group) for _, group in groupby(sorted(rows, key=lambda row: row.model), key=lambda row: row.model)]
    with ProcessPoolExecutor(_JOBS, mp_context=get_context("spawn")) as pool:
        found = {name: limits for part in pool.map(_search_all, by_model) for name, limits in part.items()}
    known = {str(row): LIMITS[str(row)] for row in (*PAIRS, *WIDE) if str(row) in LIMITS} | found
    lines = (f"  {json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
    _FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(found)} of {len(rows)} rows searched")


if __name__ == "__main__":
    main()
