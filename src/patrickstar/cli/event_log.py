"""The log of a run: one JSON object a line, each written out before the run goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

Row = Mapping[str, Any]


class EventLog(ExitStack):
    """`--log-json`: begun anew, or appended to where a run goes on. Without a file it takes rows and writes nothing.

    What was there before goes when the first row comes: a run that fails on the way to it has destroyed no log.
    """

    def __init__(self, path: Path | None, *, append: bool) -> None:
        super().__init__()
        self._file: TextIO | None = None
        self._begins_anew = not append
        if path is not None:
            self._file = self.enter_context(path.open("a", encoding="utf-8"))
            if append and path.read_bytes()[-1:] not in (b"", b"\n"):  # the run was killed while writing its last line
                self._file.write("\n")

    def write(self, row: Row) -> None:
        """Appends a row and flushes it."""
        if self._file is not None:
            if self._begins_anew:
                self._file.truncate(0)
                self._begins_anew = False
            plain = json.loads(json.dumps(row), parse_constant=lambda _: None)  # null where JSON has no number
            self._file.write(json.dumps(plain) + "\n")
            self._file.flush()
