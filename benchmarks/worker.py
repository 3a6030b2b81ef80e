"""A process beside ours that answers when it is spoken to: what is measured in it has its size to itself.

Processes are forked from one that has imported torch and transformers and done nothing else: importing takes three seconds, as long as twenty steps
of a small model. No thread of torch's has started there, none of its random numbers been drawn.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final

__all__ = ["Worker", "WorkerError"]

# Modules that are installed: the first process does not see those beside this file.
_IMPORTED_ONCE: Final = (
    "torch.utils.flop_counter",
    "transformers.modeling_utils",
    "patrickstar.cli.predict",
    "patrickstar.session.forecast",
)


class WorkerError(Exception):
    """The process ended without an answer."""


class Worker:
    """Runs `target(pipe, *arguments)`, which sends one message when it is ready and one for each that it is sent, until that is None."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_IMPORTED_ONCE))
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(target, theirs, *arguments), daemon=True)
        self._process.start()
        # As long as we hold its end too, it cannot be heard to end.
        theirs.close()

    def ask(self, question: Any, *, within_s: float | None = None) -> Any:
        """Its answer.

        Raises:
            WorkerError: the process has ended, or gives none within that time, after which it is ended.
        """
        try:
            self._pipe.send(question)
        except OSError as error:
            raise self._ended() from error
        return self.hear(within_s=within_s)

    def hear(self, *, within_s: float | None = None) -> Any:
        """Its next message.

        Raises:
            WorkerError: the process has ended, or says nothing within that time, after which it is ended.
        """
        try:
            if within_s is not None and not self._pipe.poll(within_s):
                self.end()
                raise WorkerError(f"it said nothing within {within_s:.0f} s")
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def dismiss(self) -> None:
        """Lets it end, and returns at once; `join` waits for the end."""
        self._pipe.send(None)

    def join(self) -> None:
        """Waits for its end.

        Raises:
            WorkerError: it ended otherwise than it should.
        """
        self._process.join()
        if self._process.exitcode:
            raise WorkerError(f"its process ended with status {self._process.exitcode} after its last answer")

    def end(self) -> None:
        """Ends it, whatever it does."""
        self._process.kill()
        self._process.join()

    def _ended(self) -> WorkerError:
        self._process.join()
        return WorkerError(f"its process ended with status {self._process.exitcode} before it answered")


def _run(target: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    # Whoever asked may be gone, and has said why.
    with suppress(EOFError, BrokenPipeError):
        target(pipe, *arguments)
