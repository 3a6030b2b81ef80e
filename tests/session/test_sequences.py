"""Programs that nobody has thought of: Hypothesis says the words of `script.py` in any order that plain PyTorch allows.

What fails is printed as a line, which belongs into `test_scripts.py` then.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.session.builders import LAYERS, MACHINES, ROOMY
from tests.session.script import Script, Word

NUMBERS = st.integers(0, 2 * LAYERS - 1)
CHANGES = st.sampled_from(["*=.5", "+=.1", "=.1"])
WORDS = st.one_of(
    st.builds("forward(layers={},rows={})".format, st.sampled_from([LAYERS, LAYERS, 2]), st.sampled_from([4, 4, 2])),
    st.sampled_from(["backward", "backward", "backward(keep)"]),
    st.builds("differentiate({})".format, NUMBERS),
    st.sampled_from(["zero", "zero", "zero(zeros)"]),
    st.builds("grad({}){}".format, NUMBERS, st.sampled_from(["", "*=.5", "+=.1", "=.1", "=None"])),
    st.sampled_from(["clip(.01)", "clamp(.001)", "norm", "limit(.01)", "evaluate", "lr*=.5", "read"]),
    st.builds("{}({}){}".format, st.sampled_from(["weight", "data"]), NUMBERS, CHANGES),
    st.builds("average({}){}".format, NUMBERS, CHANGES),
    st.builds("freeze({})".format, NUMBERS),
    *map(st.just, ("step", "keep", "back", "save", "load")),
)
WRITE_WEIGHTS = ("step", "weight", "data", "freeze", "thaw", "load", "back")
"""A backward does not take weights that have changed since its forward."""


def taken(words: Sequence[str], *, in_tiles: bool) -> Iterator[str]:
    """Those that plain PyTorch takes."""
    waiting, frozen, said = list[int](), set[int](), set[str]()  # layers of each loss
    for text in words:
        word = Word.of(text)
        match word.verb:
            case "forward":
                layers = word.given("layers", LAYERS)
                if len(waiting) == 2 or not set(range(2 * layers)) - frozen:  # otherwise the loss has no graph
                    continue
                waiting.append(layers)
            case "backward" | "differentiate" if not waiting:
                continue
            case "differentiate" if in_tiles or word.number in frozen or word.number >= 2 * waiting[0]:
                continue
            case "back" | "load" if {"back": "keep", "load": "save"}[word.verb] not in said:
                continue
            case "freeze":
                text = f"thaw({word.number})" if word.number in frozen else text  # noqa: PLW2901
                frozen ^= {word.number}
        if word.verb in ("backward", "differentiate") and text != "backward(keep)":
            waiting.pop(0)
        if word.verb in WRITE_WEIGHTS and waiting:
            waiting.clear()
            yield "drop"
        said.add(word.verb)
        yield text


def run(examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(
        machine=st.sampled_from(["roomy", "unbounded", *MACHINES]),
        kind=st.sampled_from(["fp32", "bf16", "bf16-fp32"]),
        arithmetic=st.sampled_from([{}, {}, {"accumulate": 2}, {"tile_rows": 8}]),
        words=st.lists(WORDS, min_size=15, max_size=40),
    )
    def program_has_no_other_bits(machine: str, kind: str, arithmetic: dict[str, Any], words: list[str]) -> None:
        places = {"roomy": lambda disk: ROOMY, "unbounded": lambda disk: {"device": "cpu"}, **MACHINES}
        with tempfile.TemporaryDirectory() as folder:
            script = Script(kind, given=arithmetic, **places[machine](Path(folder) / "disk"))
            try:
                for word in taken(words, in_tiles="tile_rows" in arithmetic):
                    script.say(word)
            finally:
                script.close()

    program_has_no_other_bits()


def test_no_program_has_other_bits_under_a_session() -> None:
    run(examples=20)


@pytest.mark.campaign
def test_no_program_of_many_has_other_bits_under_a_session() -> None:
    run(examples=1500)
