"""Programs of a line each, on every machine and in every precision: what plain PyTorch makes of them. The words are in `script.py`."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.session.builders import EMULATED, LAYERS, MACHINES, ROOMY, SLOT, TIGHT, Adapted
from tests.session.masters import KINDS
from tests.session.script import Script, Word

LINES = (
    "train(4) planned(4)",
    "forward backward step zero forward backward step zero",
    "step zero forward backward step",
    # gradients
    "forward backward grad(0)*=.5 grad(3)+=.1 step zero forward backward step",
    "forward backward grad(4)=.3 grad(7)=None read step zero forward backward step zero",
    "grad(0) forward backward grad(0) step grad(0) zero grad(0)",
    "forward backward(of=4) grad(0) grad(4) step zero forward backward step",
    "2[forward backward] grad(0) grad(0)+=0 grad(7)+=0 read step zero train",
    "forward backward clip(.01) step zero forward backward clip(.01) clip(.001) step",
    "3[forward backward norm grad(3) clip(.01) step zero] planned(3)",
    "forward backward clamp(.001) step norm zero norm",
    "forward backward limit(.01) step zero forward backward grad(3)*=.5 limit(.001) limit(.0001) norm step",
    "forward backward limit(9) step zero forward backward limit(.001) read step planned(2)",
    # zeros, or nothing, at every place of the loop
    "forward backward step zero(zeros) forward backward step zero(zeros) step",
    "forward zero backward step forward zero backward step forward zero(zeros) backward step",
    "forward backward zero step forward backward step",
    "forward backward step zero(model) read forward backward step zero(model) planned(2) step",
    "forward backward step zero(original) read forward backward step zero(original) planned(2) step",
    "forward backward step zero(each) read forward backward step zero(each) planned(2) step",
    "forward backward step zero(model,zeros) forward backward step zero(model,zeros) step zero step",
    # several backwards
    "forward backward forward backward train forward backward step",
    "forward forward backward backward step zero",
    "forward backward forward backward forward backward limit(.01) step zero forward backward step",
    "forward backward(keep) backward step zero forward backward step",
    "forward differentiate(3) read forward backward step zero",
    # weights and moments by hand
    "forward backward norm step weight(3)*=.5 zero forward backward weight(0)+=.1 step weight(1)=.1 zero forward backward step",
    "forward backward step data(3)*=.5 zero forward backward step data(2)+=.1 forward drop zero forward backward step",
    "forward backward step average(3)*=.5 zero forward backward average(1)+=.1 step average(0)=0 average(11)",
    "keep train back forward backward back step evaluate",
    "forward backward step save weight(0)*=.5 zero forward backward load evaluate train",
    "forward backward lr*=.5 step lr*=.5 zero forward backward step",
    "train save resume train(2) resume evaluate",
    "resume train copy planned(1)",
    "train write(4)=.3 evaluate forward backward step write(5)=.1 zero forward backward step",
    "train forget forward backward step count(0)+=3 square(1)*=2 count(0) zero forward backward step",
    "forward backward step copy weight(3)*=.5 copy zero forward backward step",
    # views and memory that are kept
    "hold(2) forward backward step held(2)*=.5 zero train held(2) free train",
    "train hold(4) train held(4) held(4)*=2 evaluate free evaluate",
    "train hold(2) train(3) held(2) evaluate free train",
    "train unseen(2) read train unseen(2) forward backward step",
    "memory(2) forward backward unseen(2) step zero free read train",
    "memory(2) forward backward step unseen(2) zero free read train",
    "memory(2) train(2) write(4)=1 read free train",
    # what is trained, and how much of it
    "freeze(2) train thaw(2) train",
    "freeze(4) freeze(8) train thaw(4) thaw(8) train freeze(4) train",
    "forward backward freeze(2) step zero forward backward step thaw(2) zero forward backward step",
    "forward(layers=2) backward step zero train forward(layers=2) backward forward backward step",
    "forward(rows=9) backward step zero forward backward forward(rows=2) backward step zero",
    "forward(rows=1) backward step zero forward(rows=0) backward step zero train",
    # forwards that no backward follows
    "forward backward step evaluate zero evaluate forward backward evaluate step evaluate",
    "forward backward forward drop step zero forward drop forward backward step",
    "forward forward evaluate backward evaluate backward read step",
    "train(2) forward backward zero train(2)",
    # outside of the trace, and the next ordinary step goes by its plan again
    *(
        f"train(2) planned(2) {departs} since train(2) planned(2)"
        for departs in (
            "evaluate",
            "infer",
            "forward drop",
            "forward drop forward drop",
            "forward(rows=7) backward step zero",
            "forward drop step zero",
            "forward backward forward backward forward backward step zero",
            "forward(layers=3) backward step zero",
            "step",
            "freeze(4) freeze(5) forward backward step zero thaw(4) thaw(5)",
        )
    ),
    "evaluate forward drop train(2) planned(2)",
)

ADDING = (
    "5[forward zero(model) backward step] planned(4,1) train(2) forward zero(model) backward step",
    "5[forward zero backward step] planned(4,1) train(2) forward zero backward step",
    "forward backward limit(.01) limit(.001) read forward backward read step",
    "forward backward step step zero step forward backward step step",
    "forward backward step forward backward step read step",
    "forward backward grad(0) forward backward grad(0) step",
    "step grad(7)=.1 forward backward step read",
    "forward backward grad(4)=.1 grad(7)=.1 train(2)",
)
"""In fp16 these would add gradients that are scaled to some that no longer are, as with torch's own scaler."""

IN_BACKWARD = (
    "train(3) planned(3)",
    "forward lr*=.5 backward step lr*=.5 zero forward backward step zero",
    "step forward backward step zero(model) step forward backward step zero(each) step",
    "train evaluate copy read train",
    "grad(3)=.1 step zero grad(4)=.1 train forward(layers=2) backward step zero",
    "train weight(3)*=.5 data(2)+=.1 average(3)*=.5 write(4)=.1 train",
    "train save train load train resume train",
    "freeze(2) train thaw(2) train evaluate forward(rows=7) backward step zero",
)
"""With `step="in_backward"`."""

IN_TILES = (
    "train(3) planned(3)",
    "weight(2)*=2 data(4)+=.5 weight(4) write(6)=1 weight(6) evaluate train read",
    "2[forward backward] grad(2) read step zero grad(2) train",
    "grad(2)=1 2[forward backward grad(2)] grad(4)=None step zero train",
    "forward backward limit(.01) read clip(.001) step zero copy train",
    "freeze(2) train thaw(2) train(2) resume train copy",
)
"""Of matrices that lie in tiles of eight rows."""

PLACES: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    **MACHINES,
    "roomy": lambda disk: ROOMY,
    "unbounded": lambda disk: {"device": "cpu"},
}
"""Also those on which nothing has to move, and where gradients stay the tensors that autograd makes."""

ALONE = "grad(0)=1 step zero"

WIDENED = ("bf16-fp32", "fp16-fp32")
SHOWS_MORE = re.compile(r"(weight|data)\(\d+\)\+=")
"""Changes by hand that a weight of 16 bits which keeps its bytes shows unrounded in fp32, until somebody looks (`test_whole_sixteen.py`)."""

ADAPTED = (
    "train(3) planned(3)",
    "train(2) thaw(2) thaw(3) read train(2) planned(4)",
    ALONE,
    "weight(0)=.5 forward backward step zero resume forward backward step",
)
"""Of a model whose base is frozen."""


def runs(lines: Sequence[str], *, fp16: bool = True) -> list[tuple[str, str, str]]:
    """Each in every precision on every machine."""
    return [
        (line, kind, machine)
        for line, kind, machine in product(lines, ("fp32", *KINDS), PLACES)
        if (fp16 and line not in (*ADDING, ALONE)) or not kind.startswith("fp16")
    ]


@pytest.mark.parametrize(("line", "kind", "machine"), runs(LINES + ADDING))
def test_a_line_means_what_it_means_in_plain_pytorch(line: str, kind: str, machine: str, tmp_path: Path) -> None:
    run(line, kind, **PLACES[machine](tmp_path / "disk"))


@pytest.mark.parametrize(("line", "kind", "machine"), runs(IN_BACKWARD, fp16=False))
def test_so_it_does_where_updates_come_in_backward(line: str, kind: str, machine: str, tmp_path: Path) -> None:
    run(line, kind, step="in_backward", **PLACES[machine](tmp_path / "disk"))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("step", "line", "kind", "machine"),
    [
        (step, *case)
        for step, lines in (("deferred", LINES + ADDING), ("in_backward", IN_BACKWARD))
        for case in runs(lines, fp16=step == "deferred")
        if case[2] in ("roomy", "unbounded") and not (case[1] in WIDENED and SHOWS_MORE.search(case[0]))
    ],
)
def test_so_it_does_where_parameters_keep_their_bytes(step: str, line: str, kind: str, machine: str) -> None:
    with closing(Script(kind, step=step, **PLACES[machine](Path()))) as script:
        script.run(line.replace("planned(4,1)", "planned(5)"))  # where nothing has to move no step is out of plan
        assert script.session.stats().binding == "whole"


@pytest.mark.parametrize(("line", "kind", "machine"), runs(ADAPTED))
def test_so_it_does_for_adapters_beside_a_frozen_base(line: str, kind: str, machine: str, tmp_path: Path) -> None:
    run(line, kind, Adapted, **PLACES[machine](tmp_path / "disk"))


@pytest.mark.parametrize(
    ("step", "line", "kind", "machine"),
    [
        (step, *case)
        for step, lines in (("deferred", IN_TILES), ("in_backward", IN_BACKWARD))
        for case in runs(lines, fp16=False)
    ],
)
def test_so_it_does_in_tiles(step: str, line: str, kind: str, machine: str, tmp_path: Path) -> None:
    place = PLACES[machine](tmp_path / "disk")
    if (machine, step) == ("emulated+disk", "in_backward"):
        place["host_memory"] = 14 * SLOT  # gradients of tiles wait for each other
    run(line, kind, step=step, given={"tile_rows": 8}, **place)


@pytest.mark.parametrize("memory", ["64MiB", 25 * SLOT, TIGHT])
@pytest.mark.parametrize("kind", KINDS)
def test_masters_come_back_whole(kind: str, memory: str | int) -> None:
    """Whether what completes a weight to its master is on the device at the end, or at home."""
    run("forward backward step zero forward backward step zero", kind, device="emulated", device_memory=memory)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host_slots", [12, 18, 22, 23, 25, 26])
def test_a_host_that_holds_all_but_wider_gradients_has_the_disk_for_them(
    host_slots: int, kind: str, tmp_path: Path
) -> None:
    place = MACHINES["emulated+disk"](tmp_path / "disk") | {"host_memory": host_slots * SLOT}
    run("forward backward forward backward step zero train", kind, **place)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_are_said_to_add_up_do_so_in_fp32(kind: str) -> None:
    step = "forward backward forward backward forward backward step zero"
    run(" ".join([step] * 3), kind, given={"accumulate": 3}, **EMULATED)


def run(line: str, *args: Any, **keywords: Any) -> None:
    with closing(Script(*args, **keywords)) as script:
        script.run(line)


def test_other_bits_are_shown_with_what_was_said(tmp_path: Path) -> None:
    script = Script(**MACHINES["cpu+disk"](tmp_path / "disk"))
    script.run("evaluate")
    script.managed.batches += 1
    with pytest.raises(AssertionError, match=r"^evaluate evaluate: gives 0\.\d+, plain PyTorch 0\.\d+$"):
        script.run("evaluate")
    script.managed.session.write("0.bias", torch.ones(32))
    with pytest.raises(AssertionError, match=r"(?s)^evaluate evaluate\n.*weight 0\.bias: 32 of 32 elements"):
        script.close()


# programs that nobody has thought of: these words in any order that plain PyTorch allows; what fails is printed, and belongs into the lines above

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


def any_words(examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(
        machine=st.sampled_from(list(PLACES)),
        kind=st.sampled_from(["fp32", "bf16", "bf16-fp32"]),
        arithmetic=st.sampled_from([{}, {}, {"accumulate": 2}, {"tile_rows": 8}]),
        words=st.lists(WORDS, min_size=15, max_size=40),
    )
    def program_has_no_other_bits(machine: str, kind: str, arithmetic: dict[str, Any], words: list[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            with closing(Script(kind, given=arithmetic, **PLACES[machine](Path(folder) / "disk"))) as script:
                for word in taken(words, in_tiles="tile_rows" in arithmetic):
                    script.say(word)

    program_has_no_other_bits()


def test_no_program_has_other_bits_under_a_session() -> None:
    any_words(examples=8)


@pytest.mark.campaign
def test_no_program_of_many_has_other_bits_under_a_session() -> None:
    any_words(examples=1500)
