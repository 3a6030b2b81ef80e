"""Ctrl-C at any line of what moves bytes and notes where they are: nothing is lost, and what was interrupted can be done again."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from patrickstar.memory import arena, readiness, store
from patrickstar.plan import residency
from tests.session.builders import MACHINES, MakePair, backward

FILES = {module.__file__ for module in (arena, readiness, residency, store)}


class Lines:
    """Counts lines of what moves bytes, and interrupts at one of them."""

    def __init__(self, interrupted: int | None = None) -> None:
        self.count = 0
        self._interrupted = interrupted

    @contextmanager
    def counting(self) -> Any:
        before, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)
            signal.signal(signal.SIGINT, handler)

    def _call(self, frame: Any, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename in FILES else None

    def _line(self, frame: Any, event: str, argument: object) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self._interrupted:
                signal.raise_signal(signal.SIGINT)
        return self._line


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(2, 12))])
@pytest.mark.parametrize("step", ["deferred", "in_backward"])
@pytest.mark.parametrize("machine", ["cpu+disk", "emulated"])
def test_an_interruption_at_any_line_loses_nothing(
    machine: str, step: str, seed: int, make_pair: MakePair, tmp_path: Path
) -> None:
    random, interrupted = Random(seed), 0
    memory = {"precision": "fp32", "step": step, **MACHINES[machine](tmp_path / "disk")}
    for trial in range(6):
        pair = make_pair(**memory)
        pair.train(2)
        pair.session.save_checkpoint(tmp_path / f"{trial}")
        lines = Lines()
        with lines.counting():
            backward(pair.model, number=2)
        begun = make_pair(**memory)
        begun.train(2)
        begun.session.save_checkpoint(tmp_path / f"{trial}-again")
        try:
            with Lines(random.randrange(lines.count) + 1).counting():
                backward(begun.model, number=2)
        except KeyboardInterrupt:
            interrupted += 1
            if step == "in_backward":  # some parameters may have been updated
                begun.session.load_checkpoint(tmp_path / f"{trial}-again")
            begun.optimizer.zero_grad()
        else:
            begun.session.load_checkpoint(tmp_path / f"{trial}-again")
            begun.optimizer.zero_grad()
        begun.train_same(2, first=2)
        for one in (pair, begun):
            one.session.close()
    assert interrupted, "nothing was interrupted"
