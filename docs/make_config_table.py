"""Writes the tables of config keys into `deepspeed.md`, from the table that reads configs.

    python docs/make_config_table.py [--check]

A place is what stands between `<!-- keys: NAME -->` and `<!-- end of keys -->`. With `--check` nothing is written; the exit status is 1
where the page is not up to date.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path

from places import fill

from patrickstar.config.engine.table import IGNORED, TABLE
from patrickstar.config.settings import REQUIRED, SCHEDULES

PAGE = Path(__file__).parent / "deepspeed.md"


def honoured() -> str:
    rows = ["| key | values | here |", "|---|---|---|"]
    for key, group in groupby((path for path in TABLE if TABLE[path].kind), key=TABLE.__getitem__):
        values = "" if key.kind.words == "anything" else key.kind.words
        rows.append(f"| {spans(group)} | {values} | {key.text} |")
    return "\n".join(rows)


def schedules() -> str:
    rows = ["| `scheduler.type` | `scheduler.params`, with their defaults |", "|---|---|"]
    for name, parameters in SCHEDULES.items():
        said = (f"`{p}` ({'required' if v is REQUIRED else json.dumps(v)})" for p, v in parameters.items())
        rows.append(f"| `{name}` | {', '.join(said)} |")
    return "\n".join(rows)


def refused() -> str:
    rows = ["| key | unless | instead |", "|---|---|---|"]
    for key, group in groupby((path for path in TABLE if not TABLE[path].kind), key=TABLE.__getitem__):
        harmless = " or ".join(f"`{json.dumps(value)}`" for value in key.harmless)
        rows.append(f"| {spans(group)} | {harmless} | {key.text} |")
    return "\n".join(rows)


def ignored() -> str:
    return spans(sorted(IGNORED))


def spans(names: object) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    texts = {"Honoured": honoured, "Schedules": schedules, "Refused": refused, "Without effect": ignored}
    sys.exit(fill([PAGE], "keys", texts, script=Path(__file__).name))
