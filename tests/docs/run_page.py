"""Runs the snippets of one page in order, in one namespace: `python -m tests.docs.run_page PAGE`.

In a process of its own, because a session may change what is the process's: allocator thresholds, random states. What
snippets print is compared with what the page says; line numbers in tracebacks are those of the page. A page is for a processor that is slow in
bf16, so that it says the same on every machine.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from unittest import mock

from tests.docs.pages import matches, snippets


def main(page: Path) -> int:
    namespace: dict[str, object] = {"__name__": "__main__"}
    for snippet in snippets(page.read_text()):
        code = compile("\n" * (snippet.line - 1) + snippet.code, str(page), "exec")
        printed = io.StringIO()
        with (
            contextlib.redirect_stdout(printed),
            mock.patch("patrickstar.step.resources.computes_bf16", return_value=False),
        ):
            exec(code, namespace)
        if snippet.output is not None and not matches(snippet.output, printed.getvalue()):
            sys.stderr.write(
                f"{page}, line {snippet.line}: the page says that this prints\n{snippet.output}\nbut it prints\n{printed.getvalue()}\n"
            )
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
