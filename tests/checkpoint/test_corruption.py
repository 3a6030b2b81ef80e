"""Whatever happens to a checkpoint's files, by accident or by intent: a CheckpointError that names the file.

Before that error nothing is executed, written, or taken memory for; after it the checkpoint beside it still loads.
"""

from __future__ import annotations

import os
import random
import shutil
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from patrickstar.checkpoint.reader import open_step
from patrickstar.errors import CheckpointError
from tests.checkpoint.samples import LIES, adopt, forge, resize, write

STEP = "step-00000002"


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    """Steps 1 and 2; step 2 is the latest."""
    directory = tmp_path_factory.mktemp("clean")
    for step in (1, 2):
        write(directory, step)
    return directory


@pytest.fixture
def runs(clean, tmp_path) -> Path:
    """A copy to spoil, with the times of the original."""
    shutil.copytree(clean, tmp_path / "runs")
    return tmp_path / "runs"


def snapshot(directory: Path) -> dict[str, tuple[Any, ...]]:
    return {
        str(path.relative_to(directory)): (path.lstat().st_mode, path.lstat().st_mtime_ns, path.lstat().st_size)
        for path in [directory, *directory.rglob("*")]
    }


def refusal(runs: Path) -> str:
    """How step 2 is refused; nothing is changed by it, and step 1 is named and loads."""
    before = snapshot(runs.parent)
    with pytest.raises(CheckpointError) as refused, open_step(runs) as reader:
        reader.verify()
    assert snapshot(runs.parent) == before
    text = str(refused.value)
    assert text.endswith(f"; the newest intact checkpoint is {runs / 'step-00000001'}: load that path"), text
    return text


FILES = [
    *("index.json", "moments.safetensors", "values.pt"),
    *("weights-00001-of-00002.safetensors", "weights-00002-of-00002.safetensors"),
]


def test_the_sample_has_the_files_that_are_spoiled_here(clean):
    assert sorted(path.name for path in (clean / STEP).iterdir()) == FILES


def moved(make: Callable[[Path, Path], None]) -> Callable[[Path], None]:
    """The file goes elsewhere, and something that `make(file, elsewhere)` makes has its name."""

    def damage(file: Path) -> None:
        elsewhere = file.parents[1] / "moved"
        file.rename(elsewhere)
        make(file, elsewhere)

    return damage


DAMAGE: dict[str, Callable[[Path], Any]] = {
    **{f"resized to {to}": partial(resize, to=to) for to in (0.0, 0.01, 0.5, 0.999, 1.001, 2.0)},
    "missing": Path.unlink,
    "of another step": lambda file: shutil.copyfile(file.parents[1] / "step-00000001" / file.name, file),
    "a link to the right bytes": moved(lambda file, elsewhere: file.symlink_to(elsewhere)),
    "a pipe": moved(lambda file, _: os.mkfifo(file)),  # not waited for
    "a directory": moved(lambda file, _: file.mkdir()),
    "bytes of its neighbour": lambda file: shutil.copyfile(file.parent / FILES[FILES.index(file.name) - 1], file),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_by_name(runs, file, damage):
    DAMAGE[damage](runs / STEP / file)
    text = refusal(runs)
    assert text.startswith(f"{runs / STEP / file}: ")
    assert ("symbolic link" in text) is ("link" in damage)


def test_one_flipped_bit_anywhere_is_found_and_its_file_named(runs):
    draw = random.Random(7)
    places = [(file, at) for file in FILES for at in range((runs / STEP / file).stat().st_size)]
    for file, at in draw.sample(places, 100):
        path = runs / STEP / file
        data = bytearray(path.read_bytes())
        data[at] ^= 1 << draw.randrange(8)
        kept = path.read_bytes()
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=f"^{path}: "), open_step(runs / STEP) as reader:
            reader.verify()
        path.write_bytes(kept)
    with open_step(runs) as reader:
        reader.verify()


def stranger(name: str) -> Callable[[Path], object]:
    def add(step: Path) -> None:
        (step / name).parent.mkdir(exist_ok=True)
        (step / name).write_bytes(b"x")

    return add


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a file larger than it is": (
        lambda index: index["files"]["values.pt"].update(nbytes=2**50),
        f"written with {2**50}",
    ),
    "another checksum": (lambda index: index["files"]["values.pt"].update(sha256="0" * 64), "damaged"),
    "another step": (lambda index: index.update(step=3), "step: 3, in a directory named step-00000002"),
}


def another_step(step: Path) -> None:
    shutil.rmtree(step)
    shutil.copytree(step.with_name("step-00000001"), step)


def another_model(step: Path) -> None:
    other = write(step.parents[1] / "other", 2, {"wte.weight": torch.zeros(40, 64), "ln.bias": torch.zeros(8)})
    shutil.copyfile(other / "index.json", step / "index.json")


# What is done to a step, and what is said of it.
DAMAGED_STEPS: dict[str, tuple[Callable[[Path], object], str]] = {
    **{
        f"a stranger, {name}": (stranger(name), f"{name.split('/')[0]}: no part of this checkpoint")
        for name in ("more.safetensors", "notes.txt", ".hidden", "deep/file")
    },
    "another step under its name": (another_step, "step: 1, in a directory named step-00000002"),
    "the index of another model": (another_model, "the file is missing"),
    "an index larger than any": (lambda step: os.truncate(step / "index.json", 1 << 40), "such a file has at most"),
    **{name: (partial(forge, change=change), says) for name, (change, says) in FORGERIES.items()},
    **{name: (partial(adopt, file="moments.safetensors", data=data), says) for name, (data, says) in LIES.items()},
}


@pytest.mark.parametrize("damage", DAMAGED_STEPS)
def test_a_damaged_step_is_refused_with_what_is_wrong_and_takes_no_memory(runs, damage):
    act, says = DAMAGED_STEPS[damage]
    act(runs / STEP)
    tracemalloc.start()
    text = refusal(runs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert says in text
    assert str(runs / STEP) in text
    assert peak < 2 << 20
