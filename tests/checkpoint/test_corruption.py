"""Whatever happens to a checkpoint's files, by accident or by intent: a CheckpointError that names the file.

Before that error nothing is executed, written, or taken memory for; after it the checkpoint beside it still loads.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from patrickstar.checkpoint import open_step
from patrickstar.errors import CheckpointError
from tests.checkpoint.samples import adopt, contents, forge, same_bits, sample, write

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


def resized(factor: float) -> Callable[[Path], None]:
    return lambda file: os.truncate(file, int(file.stat().st_size * factor) + (factor > 1))


def moved(make: Callable[[Path, Path], None]) -> Callable[[Path], None]:
    """The file goes elsewhere, and something that `make(file, elsewhere)` makes has its name."""

    def damage(file: Path) -> None:
        elsewhere = file.parents[1] / "moved"
        file.rename(elsewhere)
        make(file, elsewhere)

    return damage


DAMAGE: dict[str, Callable[[Path], Any]] = {
    **{f"resized to {factor}": resized(factor) for factor in (0.0, 0.01, 0.5, 0.999, 1.001, 2.0)},
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


def in_place_of(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda index: index["files"].update({name: index["files"].pop("moments.safetensors")})


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a path that climbs out": (in_place_of("../outside.safetensors"), "not a plain file name"),
    "an absolute path": (in_place_of("/etc/passwd"), "not a plain file name"),
    "the same file by another name": (in_place_of("./moments.safetensors"), "not a plain file name"),
    "a file larger than it is": (
        lambda index: index["files"]["values.pt"].update(nbytes=2**50),
        f"written with {2**50}",
    ),
    "another checksum": (lambda index: index["files"]["values.pt"].update(sha256="0" * 64), "damaged"),
    "another step": (lambda index: index.update(step=3), "step: 3, in a directory named step-00000002"),
    "an earlier release": (
        lambda index: index.update(version=1),
        "version 1 of the format; this library reads 2: load",
    ),
}


def header(text: bytes, length: int | None = None, data: int = 0) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


def entry(dtype: str, shape: list[int], *offsets: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def headed(tensors: dict[str, Any], data: int) -> bytes:
    return header(json.dumps(tensors).encode(), data=data)


# Files whose headers lie, under a right checksum in the index: none is read into memory on its word.
LIES: dict[str, tuple[bytes, str]] = {
    "a pickle": (pickle.dumps({"a": [1.0] * 300}), "begins like a pickle"),
    "a file of torch.save": (b"PK\x03\x04" + bytes(200), "begins like a pickle"),
    "a length without end": (header(b"{}" * 100, 99_000_000), "invalid header length"),
    "no header": (b"", "header too small"),
    "no JSON": (header(b"[]" * 20), "invalid JSON"),
    "tensors without end": (headed({"a": entry("F32", [2**40], 0, 2**42)}, 64), "not a safetensors file"),
    "dims that multiply beyond counting": (headed({"a": entry("F32", [2**62, 2**62], 0, 64)}, 64), "overflow"),
    "empty dims beside huge ones": (
        headed({"a": entry("F32", [0, 2**62, 2**62], 0, 0)}, 0),
        "more elements than any memory",
    ),
    "tensors that overlap": (headed({"a": entry("U8", [9], 0, 9), "b": entry("U8", [9], 0, 9)}, 9), "invalid offset"),
    "a hole": (headed({"a": entry("U8", [8], 4, 12)}, 12), "invalid offset"),
    "more bytes than the shape takes": (headed({"a": entry("F32", [3], 0, 16)}, 16), "not a safetensors file"),
    "bytes that belong to none": (headed({"a": entry("F32", [3], 0, 12)}, 16), "not a safetensors file"),
    "an unknown type": (headed({"a": entry("F33", [3], 0, 12)}, 12), "unknown variant"),
    "a type that is not read": (headed({"a": entry("F8_E8M0", [12], 0, 12)}, 12), "F8_E8M0, which is not read"),
    "a tensor of another file": (
        headed({"wte.weight": entry("U8", [4], 0, 4)}, 4),
        "as well",
    ),
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
    (runs / "outside.safetensors").write_bytes((runs / STEP / "moments.safetensors").read_bytes())
    act(runs / STEP)
    tracemalloc.start()
    text = refusal(runs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert says in text
    assert str(runs / STEP) in text
    assert peak < 2 << 20


def test_random_mutations_are_refused_or_change_nothing(runs, clean):
    """A campaign in small: bytes overwritten, files cut, swapped, renamed, removed, linked."""
    draw = random.Random(11)
    unchanged = refused = 0
    for _ in range(40):
        shutil.rmtree(runs)
        shutil.copytree(clean, runs)
        path = runs / STEP / draw.choice(FILES)
        match draw.randrange(5):
            case 0:
                data = bytearray(path.read_bytes())
                at = draw.randrange(len(data))
                data[at : at + draw.randrange(1, 40)] = draw.randbytes(draw.randrange(40))
                path.write_bytes(data)
            case 1:
                os.truncate(path, draw.randrange(path.stat().st_size + 100))
            case 2:
                shutil.copyfile(runs / STEP / draw.choice(FILES), path.with_name(draw.choice(FILES)))
            case 3:
                path.rename(path.with_name(draw.choice([*FILES, "renamed.safetensors", "..x"])))
            case 4:
                path.unlink()
                path.symlink_to(draw.choice(["/dev/zero", "/etc/passwd", str(clean / STEP / path.name), "missing"]))
        try:
            with open_step(runs) as reader:
                reader.verify()
                found = contents(reader)
        except CheckpointError as problem:
            refused += str(runs / STEP) in str(problem)
        else:
            unchanged += same_bits(found, sample(2))
    assert unchanged + refused == 40
    assert refused > 25


def test_what_is_read_by_others_is_json(clean):
    assert json.loads((clean / STEP / "index.json").read_text())["step"] == 2
