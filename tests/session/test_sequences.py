"""Programs that nobody has thought of: Hypothesis says the words of `script.py` in any order that plain PyTorch allows.

What fails is printed as steps; its words belong into `test_scripts.py` then.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.session.builders import LAYERS, MACHINES, ROOMY
from tests.session.script import Script

PARAMETERS = st.integers(0, 2 * LAYERS - 1)
CHANGES = st.sampled_from(["*=.5", "+=.1", "=.1"])


class Programs(RuleBasedStateMachine):
    """A script, and what has to be known so that its next word is one that plain PyTorch takes."""

    @initialize(
        machine=st.sampled_from(["roomy", "unbounded", *MACHINES]),
        kind=st.sampled_from(["fp32", "bf16", "bf16-fp32"]),
        given=st.sampled_from([{}, {}, {"accumulate": 2}, {"tile_rows": 8}]),
    )
    def manage(self, machine: str, kind: str, given: dict[str, Any]) -> None:
        self.disk = tempfile.TemporaryDirectory()
        memory = {"roomy": ROOMY, "unbounded": {"device": "cpu"}}
        place = memory[machine] if machine in memory else MACHINES[machine](Path(self.disk.name) / "disk")
        self.script = Script(kind, given=given, **place)
        self.in_tiles = "tile_rows" in given
        self.waiting: list[int] = []  # layers of each loss
        self.frozen: set[int] = set()
        self.has_kept = self.has_saved = False

    def say(self, word: str) -> None:
        self.script.say(word)

    def change_weights(self, word: str) -> None:
        """A backward does not take weights that have changed since its forward."""
        if self.waiting:
            self.waiting.clear()
            self.say("drop")
        self.say(word)

    @precondition(lambda self: len(self.waiting) < 2)
    @rule(layers=st.sampled_from([LAYERS, LAYERS, 2]), rows=st.sampled_from([4, 4, 2]))
    def forward(self, layers: int, rows: int) -> None:
        if set(range(2 * layers)) - self.frozen:  # otherwise the loss has no graph
            self.say(f"forward(layers={layers},rows={rows})")
            self.waiting.append(layers)

    @precondition(lambda self: self.waiting)
    @rule(keep=st.sampled_from([False, False, True]))
    def backward(self, keep: bool) -> None:
        self.say("backward(keep)" if keep else "backward")
        if not keep:
            self.waiting.pop(0)

    @precondition(lambda self: self.waiting)
    @rule(number=PARAMETERS)
    def differentiate(self, number: int) -> None:
        if number < 2 * self.waiting[0] and number not in self.frozen and not self.in_tiles:
            self.say(f"differentiate({number})")
            self.waiting.pop(0)

    @rule()
    def step(self) -> None:
        self.change_weights("step")

    @rule(how=st.sampled_from(["zero", "zero", "zero(zeros)"]))
    def zero(self, how: str) -> None:
        self.say(how)

    @rule(number=PARAMETERS, how=st.sampled_from(["", "*=.5", "+=.1", "=.1", "=None"]))
    def gradient(self, number: int, how: str) -> None:
        self.say(f"grad({number}){how}")

    @rule(word=st.sampled_from(["clip(.01)", "clamp(.001)", "norm", "limit(.01)", "evaluate", "lr*=.5", "read"]))
    def whole(self, word: str) -> None:
        self.say(word)

    @rule(verb=st.sampled_from(["weight", "data"]), number=PARAMETERS, how=CHANGES)
    def weight(self, verb: str, number: int, how: str) -> None:
        self.change_weights(f"{verb}({number}){how}")

    @rule(number=PARAMETERS, how=CHANGES)
    def average(self, number: int, how: str) -> None:
        self.say(f"average({number}){how}")

    @rule(number=PARAMETERS)
    def freeze_or_thaw(self, number: int) -> None:
        self.change_weights(f"{'thaw' if number in self.frozen else 'freeze'}({number})")
        self.frozen ^= {number}

    @rule()
    def keep(self) -> None:
        self.say("keep")
        self.has_kept = True

    @rule()
    def save(self) -> None:
        self.say("save")
        self.has_saved = True

    @precondition(lambda self: self.has_saved)
    @rule()
    def load(self) -> None:
        self.change_weights("load")

    @precondition(lambda self: self.has_kept)
    @rule()
    def back(self) -> None:
        self.change_weights("back")

    def teardown(self) -> None:
        if hasattr(self, "script"):
            try:
                self.script.close()
            finally:
                self.disk.cleanup()


def run(examples: int) -> None:
    run_state_machine_as_test(
        Programs,
        settings=settings(max_examples=examples, stateful_step_count=25, suppress_health_check=list(HealthCheck)),
    )


def test_no_program_has_other_bits_under_a_session() -> None:
    run(examples=20)


@pytest.mark.campaign
def test_no_program_of_many_has_other_bits_under_a_session() -> None:
    run(examples=1500)
