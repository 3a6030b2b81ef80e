"""Whatever operation fails, and however: a complete checkpoint is loaded afterwards, and the next one can be written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from patrickstar.checkpoint.reader import open_step
from patrickstar.errors import DeviceError
from tests.checkpoint.faults import KINDS, FaultyFiles, Killed
from tests.checkpoint.samples import contents, same_bits, sample, write

REPLACING = ("EIO", "gone", "kill", "power cut", "torn cut")  # where the others would only repeat those of step 3
ANOTHER = 77  # the seed of contents that differ from all before


@cache
def small(seed: int) -> dict[str, torch.Tensor]:
    """One file of two blocks."""
    return {"wte.weight": sample(seed)["wte.weight"][:18].clone()}


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory in memory where there is one: these tests make thousands of files and sync none."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        yield Path(directory)


@pytest.fixture
def before(scratch) -> Path:
    """A directory with steps 1 and 2."""
    for step in (1, 2):
        write(scratch / "before", step, small(step), io=FaultyFiles())
    return scratch / "before"


def rewritten(directory: Path, step: int, io: FaultyFiles) -> None:
    write(directory, step, small(ANOTHER), keep=2, io=io)


def operations(before: Path, scratch: Path, step: int) -> int:
    shutil.copytree(before, scratch / "count")
    files = FaultyFiles()
    rewritten(scratch / "count", step, files)
    assert {"pwritev", "fsync", "rename", "remove_directory"} <= {entry.split()[0] for entry in files.log}
    return len(files.log)


# Step 3 is a new one and step 1 goes by retention; step 2 replaces what `latest` names; step 1 replaces an earlier one.
@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "step"), [*product(KINDS, [3]), *product(REPLACING, [2]), ("power cut", 1)])
def test_a_fault_at_any_operation_leaves_a_whole_checkpoint_and_the_next_can_be_written(before, scratch, kind, step):
    total = operations(before, scratch, step)
    outcomes = set()
    for at in range(total):
        directory = scratch / str(at)
        shutil.copytree(before, directory)
        files = FaultyFiles(at=at, kind=kind)
        try:
            rewritten(directory, step, files)
            outcome = "written"
        except DeviceError:
            outcome = "refused"
        except Killed:
            outcome = "killed"
        outcomes.add(outcome)

        with open_step(directory) as reader:
            reader.verify()
            old = reader.step == 2 and same_bits(contents(reader), small(2))
            new = reader.step == step and same_bits(contents(reader), small(ANOTHER))
        what = f"operation {at} of {total}, {files.log[at]}: {outcome}"
        assert new or (old and outcome != "written"), what

        write(directory, 4, small(4), keep=2, io=FaultyFiles())
        with open_step(directory) as reader:
            reader.verify()
            assert reader.step == 4, what
        left = {path.name for path in directory.iterdir()}
        assert all(name == "latest" or name.startswith("step-") for name in left), what
        assert len(left) == 3, what
        shutil.rmtree(directory)
    if kind == "short":
        assert outcomes == {"written"}
    else:
        assert outcomes == ({"killed"} if kind.endswith("cut") or kind.startswith("kill") else {"written", "refused"})


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_in_the_first_checkpoint_of_all_leaves_none_or_a_whole_one(scratch, kind):
    files = FaultyFiles()
    write(scratch / "count", 5, small(5), io=files)
    for at in range(len(files.log)):
        directory = scratch / str(at) / "deep"
        with suppress(DeviceError, Killed):
            write(directory, 5, small(5), io=FaultyFiles(at=at, kind=kind))
        if any(directory.glob("step-*")):
            with open_step(directory) as reader:
                reader.verify()
        write(directory, 6, small(6), io=FaultyFiles())
        with open_step(directory) as reader:
            assert reader.step == 6


class NoSync(FaultyFiles):
    """A writer that forgets to sync one kind of thing."""

    def __init__(self, forgotten: str, **options) -> None:
        super().__init__(**options)
        setattr(self, forgotten, lambda *_: None)


@pytest.mark.parametrize("forgotten", ["fsync", "sync_directory"])
def test_the_power_cut_finds_a_writer_that_does_not_sync(before, scratch, forgotten):
    lost = 0
    for at in range(operations(before, scratch, 2)):
        directory = scratch / str(at)
        shutil.copytree(before, directory)
        with suppress(Killed):
            rewritten(directory, 2, NoSync(forgotten, at=at, kind="power cut"))
        try:
            with open_step(directory) as reader:
                reader.verify()
                lost += not any(same_bits(contents(reader), small(seed)) for seed in (2, ANOTHER))
        except Exception:
            lost += 1
    assert lost > 0


def test_an_error_names_file_offset_and_bytes(scratch):
    files = FaultyFiles()
    write(scratch / "one", 1, io=files)
    at = [number for number, entry in enumerate(files.log) if entry.startswith("pwritev")][2]
    with pytest.raises(DeviceError, match=r"weights.*cannot write 4096 bytes at offset 4096: No space left on device"):
        write(scratch / "two", 1, io=FaultyFiles(at=at, kind="ENOSPC"))
