"""Branches of the library that the suite takes, and whether a change has lost some.

    make coverage                            runs `make test-full`, child processes included, under coverage, and compares
    python -m tests.branches DATA            compares what a run has recorded with `tests/branches.json`
    python -m tests.branches DATA --write    takes it down as what is to be compared with

A branch is lost where both its ends stand in lines that have not changed since, it was taken then, and is not now.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Final

import coverage

ROOT: Final = Path(__file__).parents[1]
_FILE: Final = Path(__file__).with_name("branches.json")

Branch = tuple[int, int]


def lost(
    before: Sequence[str], missing_before: set[Branch], after: Sequence[str], missing_after: set[Branch]
) -> list[Branch]:
    """Branches, by their lines after, that were taken before and are not after. A line below zero is the exit of what begins there."""
    was = {0: 0}
    for run in SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks():
        was |= {run.b + offset + 1: run.a + offset + 1 for offset in range(run.size)}

    def line_before(line: int) -> int | None:
        found = was.get(abs(line))
        return found if found is None or line >= 0 else -found

    ends = {(start, stop): (line_before(start), line_before(stop)) for start, stop in missing_after}
    return sorted(branch for branch, old in ends.items() if None not in old and old not in missing_before)


def _recorded(data: Path) -> dict[str, list[list[int]]]:
    """The branches that were not taken, by file."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.json"
        found = coverage.Coverage(data_file=str(data), branch=True)
        found.load()
        found.json_report(
            outfile=str(report), include=[str(ROOT / "src" / "*")]
        )  # mutants are copies elsewhere, gone by now
        files: Mapping[str, Any] = json.loads(report.read_text())["files"]
    return {
        f"src/{path.partition('src/')[2]}": sorted(entry["missing_branches"]) for path, entry in sorted(files.items())
    }


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> int:
    match sys.argv[1:]:
        case [data, "--write"]:
            known = {"commit": _git("rev-parse", "HEAD").strip(), "missing": _recorded(Path(data))}
            _FILE.write_text(json.dumps(known, separators=(",", ":")).replace('],"', '],\n"') + "\n")
            print(f"{sum(map(len, known['missing'].values()))} branches are not taken")
            return 0
        case [data]:
            return _compare(Path(data))
    print(__doc__)
    return 2


def _names_before(commit: str) -> dict[str, str]:
    """What files that have another name since that commit were called then."""
    lines = _git("diff", "--find-renames=40%", "--diff-filter=R", "--name-status", commit, "--", "src").splitlines()
    return {now: before for _, before, now in (line.split("\t") for line in lines)}


def _compare(data: Path) -> int:
    known = json.loads(_FILE.read_text())
    was, were = _names_before(known["commit"]), _git("ls-tree", "-r", "--name-only", known["commit"]).splitlines()
    count = 0
    for file, missing in _recorded(data).items():
        name = was.get(file, file)
        if name not in known["missing"] or name not in were or not (ROOT / file).exists():
            continue
        before = _git("show", f"{known['commit']}:{name}").splitlines()
        after = (ROOT / file).read_text().splitlines()
        old = {(start, stop) for start, stop in known["missing"][name]}
        for start, stop in lost(before, old, after, {(start, stop) for start, stop in missing}):
            count += 1
            print(
                f"{file}:{start}: no test goes from here to line {abs(stop)} any more: {after[abs(start) - 1].strip()}"
            )
    print(f"{count} branches lost")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
