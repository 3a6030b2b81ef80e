"""Places in pages that scripts fill: what stands between `<!-- KIND: NAME -->` and `<!-- end of KIND -->`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

__all__ = ["fill"]


def fill(pages: Iterable[Path], kind: str, texts: Mapping[str, Callable[[], str]], *, script: str) -> int:
    """Fills the places of a kind by name; gives the exit status.

    With `--check` on the command line nothing is written, and the status is 1 where a page is not up to date.
    """
    place = re.compile(rf"(<!-- {kind}: ([\w -]+) -->)\n.*?(<!-- end of {kind} -->)", re.DOTALL)
    stale = []
    for page in sorted(pages):
        text = page.read_text()
        now = place.sub(lambda found: f"{found[1]}\n{texts[found[2]]()}\n{found[3]}", text)
        if now != text:
            stale.append(page)
            if "--check" not in sys.argv[1:]:
                page.write_text(now)
    if stale and "--check" in sys.argv[1:]:
        names = ", ".join(page.name for page in stale)
        sys.stderr.write(f"{names}: not up to date: run `python docs/{script}`\n")
        return 1
    return 0
