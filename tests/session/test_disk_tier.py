"""The disk below a session: directories that cannot be used, and disks that stop doing their work."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import patrickstar
from patrickstar import DeviceError, StateError
from tests.faults import Fails, FaultyIO, Short
from tests.parity.compare import same_bits
from tests.session.builders import (
    MACHINES,
    SLOT,
    TIGHT,
    MakePair,
    Pair,
    adamw,
    batch,
    everything,
    expect_bits,
    is_ordinary,
    managed,
    mlp,
    options,
    train,
    train_step,
    values,
)

HOST = TIGHT + SLOT


def ours(directory: Path) -> list[Path]:
    return sorted(directory.rglob("patrickstar-*"))


# directories


def refused(directory: Any, match: str) -> None:
    model = mlp()
    optimizer = adamw(model)
    before = values(model)
    with pytest.raises(DeviceError, match=match):
        patrickstar.manage(model, optimizer, options=options(), device="cpu", host_memory=HOST, disk=directory)
    assert is_ordinary(model)
    expect_bits(before, values(model))
    train_step(model, optimizer)


FULL = type("Full", (), {"f_bavail": 0, "f_frsize": 4096})


@pytest.mark.parametrize(
    ("directory", "fault", "says"),
    [
        ("no/disk", None, "tmp_path/no"),
        ("disk", Fails("fallocate", errno.ENOSPC, nth=3), os.strerror(errno.ENOSPC)),
        ("disk", "full", "nothing is free"),
    ],
    ids=["no parent", "no space for files", "full"],
)
def test_a_directory_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str, fault: Any, says: str
) -> None:
    """`tests/memory` has more that cannot be one."""
    if fault == "full":
        monkeypatch.setattr("patrickstar.memory.disk.os.statvfs", lambda _: FULL)
    elif fault is not None:
        monkeypatch.setattr("patrickstar.memory.disk.FileIO", lambda: FaultyIO(fault))
    refused(tmp_path / directory, re.escape(says.replace("tmp_path", str(tmp_path))))
    assert not (tmp_path / "no").exists()
    assert not ours(tmp_path)
    assert fault != "full" or not (tmp_path / "disk").exists()


@pytest.mark.parametrize(
    "number", [errno.EROFS, errno.EACCES, errno.ENOSPC], ids=lambda number: errno.errorcode[number]
)
@pytest.mark.parametrize("there", [True, False], ids=["is there", "is yet to be made"])
def test_a_directory_that_cannot_be_written_is_no_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, there: bool
) -> None:
    """Where nothing can be written nothing is free, as a rule: which is not what is said."""
    disk = tmp_path / "disk"
    if there:
        disk.mkdir()
    monkeypatch.setattr("patrickstar.memory.disk.FileIO", lambda: FaultyIO(Fails("open", number, times=99)))
    monkeypatch.setattr("patrickstar.memory.disk.os.statvfs", lambda _: FULL)
    refused(disk, f"disk='{re.escape(str(disk))}': files cannot be made in .*{re.escape(os.strerror(number))}; ")
    assert disk.exists() is there
    assert not ours(tmp_path)


@pytest.mark.parametrize("raises", [False, True])
def test_a_directory_is_made_and_left_empty(tmp_path: Path, raises: bool) -> None:
    model = mlp()
    with pytest.raises(ZeroDivisionError) if raises else nullcontext():
        with managed(model, device="cpu", host_memory=HOST, disk=str(tmp_path / "disk")) as session:
            train(model, session.optimizer, 1)
            assert ours(tmp_path / "disk")
            assert session.stats().moved["K>H"] > 0
            if raises:
                raise ZeroDivisionError
    assert (tmp_path / "disk").is_dir()
    assert not ours(tmp_path)


def test_sessions_take_turns_and_share_a_directory(make_pair: MakePair, machine: dict[str, Any]) -> None:
    pairs = [make_pair(lambda seed=seed: mlp(seed), **machine) for seed in (0, 1)]
    for number in range(3):
        for pair in pairs:
            pair.each(train_step, number)
    for pair in pairs:
        pair.expect_same()
        assert pair.session.stats().planned_steps == 3


def test_with_room_for_everything_nothing_goes_to_disk_and_back(tmp_path: Path) -> None:
    model = mlp()
    with managed(model, device="cpu", host_memory="512MiB", disk=tmp_path / "disk") as session:
        train(model, session.optimizer, 3)
        assert session.stats().moved["K>H"] == 0


@pytest.mark.parametrize("step", ["deferred", "in_backward"])
@pytest.mark.parametrize("eviction", ["next-use", "lru"])
def test_no_bit_depends_on_the_machine(make_pair: MakePair, machine: dict[str, Any], step: str, eviction: str) -> None:
    pair = make_pair(with_options={"eviction": eviction}, step=step, **machine)
    pair.train_same(4)
    assert pair.session.stats().planned_steps == 4, pair.session.stats().reason


# faults while running


def arm(io: FaultyIO, call: str, number: int | None, *, after: int = 0, times: int = 1, nbytes: int = 0) -> None:
    """From the use after the next `after` of a call on, `times` of them fail or are short."""
    nth = io.counts[call] + 1 + after
    io.hit.clear()
    io.faults[:] = [
        Short(call, nbytes, nth=nth, times=times) if number is None else Fails(call, number, nth=nth, times=times)
    ]


FAULTS = [("pwritev", errno.ENOSPC), ("pwritev", errno.EIO), ("pwritev", None), ("preadv", errno.EIO), ("preadv", None)]


@pytest.mark.parametrize(("call", "number"), FAULTS, ids=lambda value: errno.errorcode.get(value, value) or "short")
@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize("tiers", ["cpu+disk", "emulated+disk"])
def test_a_transfer_that_fails_in_a_step_names_its_place_and_nothing_is_lost(
    make_pair: MakePair, faulty: FaultyIO, tmp_path: Path, call: str, number: int | None, after: int, tiers: str
) -> None:
    pair = make_pair(**MACHINES[tiers](tmp_path / "disk"))
    pair.train(2)
    pair.session.save_checkpoint(tmp_path / "checkpoint")
    arm(faulty, call, number, after=after)
    with pytest.raises(DeviceError) as failure:
        for step in range(2, 6):
            train_step(pair.model, pair.optimizer, step)
    faulty.faults.clear()
    message = str(failure.value)
    assert str(tmp_path / "disk") in message
    assert re.search(r"\d+ bytes at offset \d+", message), message
    assert faulty.hit, "the fault has not come"
    # The weights are of a whole step, or the session says that they are not; a checkpoint is intact.
    try:
        held = everything(pair.session)
        assert not any(tensor.isnan().any() for tensor in held.values())
        pair.model(batch())
    except StateError as refusal:
        assert "load_checkpoint" in str(refusal)
    del failure
    pair.session.load_checkpoint(tmp_path / "checkpoint")
    pair.train_same(2, first=2)


def test_a_state_that_cannot_be_read_can_be_read_again(faulty: FaultyIO, disk_pair: Pair) -> None:
    disk_pair.train(2)
    arm(faulty, "preadv", errno.EIO)
    with pytest.raises(DeviceError):
        dict(disk_pair.session.state_dict())
    faulty.faults.clear()
    disk_pair.expect_same()
    disk_pair.train_same(1, first=2)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_short_and_interrupted_transfers_are_continued(faulty: FaultyIO, disk_pair: Pair, call: str) -> None:
    disk_pair.train(1)
    arm(faulty, call, None, times=3, nbytes=4096)
    disk_pair.train(1, first=1)
    assert faulty.hit
    arm(faulty, call, errno.EINTR, times=3)
    disk_pair.train(1, first=2)
    assert faulty.hit
    disk_pair.expect_same()


def test_a_disk_that_is_broken_for_good_lets_the_session_be_closed(
    make_pair: MakePair, faulty: FaultyIO, on_disk: dict[str, Any], tmp_path: Path
) -> None:
    """Weights that are on the broken disk only cannot be given back; that is said, and the files are gone."""
    pair = make_pair(**on_disk | {"host_memory": "1MiB"})
    model = mlp(layers=2)
    session = managed(model, **on_disk | {"host_memory": 4 * SLOT + 4096})
    train(model, session.optimizer, 1)
    arm(faulty, "preadv", errno.EIO, times=10_000)
    try:
        session.close()
    except DeviceError as failure:
        assert "offset" in str(failure)
        faulty.faults.clear()
        session.close()
        assert is_ordinary(model)
    faulty.faults.clear()
    pair.session.close()
    assert not ours(tmp_path)


def test_a_checkpoint_that_cannot_be_written_leaves_the_session_and_the_last_one(
    trained: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained.session.save_checkpoint(tmp_path / "checkpoint", extra={"step": 1})
    held = everything(trained.session)
    trained.train(1, first=1)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises((DeviceError, patrickstar.CheckpointError), match=os.strerror(errno.ENOSPC)):
            trained.session.save_checkpoint(tmp_path / "checkpoint", extra={"step": 2})
    trained.train_same(1, first=2)
    assert trained.session.load_checkpoint(tmp_path / "checkpoint") == {"step": 1}
    expect_bits(held, everything(trained.session))


# sessions that nobody closes

UNCLOSED = """
import logging, sys
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
import torch, patrickstar
torch.set_num_threads(1)
from tests.session.builders import TIGHT, SLOT, managed, mlp, train
model = mlp()
session = managed(model, precision="fp32", device="cpu", host_memory=TIGHT + SLOT, disk=sys.argv[1])
train(model, session.optimizer, 1)
print(len(list(__import__("pathlib").Path(sys.argv[1]).iterdir())))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "status"),
    [("raise SystemExit(3)", 3), ("del session, model; import gc; gc.collect(); print('collected')", 0)],
    ids=["end of the program", "its owner goes"],
)
def test_a_session_that_nobody_closes_ends_cleanly_with_one_warning(ending: str, status: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNCLOSED + ending, str(tmp_path / "disk")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert done.stdout.split()[0] == "4"
    assert not ours(tmp_path)
    assert "Traceback" not in done.stderr
    warnings = [line for line in done.stderr.splitlines() if "WARNING patrickstar" in line and "tmpfs" not in line]
    assert len(warnings) == 1, done.stderr
    assert "close" in warnings[0]


def test_a_session_that_was_closed_ends_without_a_warning(
    make_pair: MakePair, on_disk: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    import gc

    pair = make_pair(**on_disk | {"host_memory": "1MiB"})
    pair.train(1)
    caplog.clear()
    pair.session.close()
    gc.collect()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_session_keeps_its_model_trainable_while_only_the_optimizer_is_held(on_disk: dict[str, Any]) -> None:
    """The loop of the README holds `model` and `optimizer`, and may let `session` go."""
    import gc

    plain, model = mlp(), mlp()
    optimizer = managed(model, **on_disk).optimizer
    gc.collect()
    oracle = adamw(plain)
    assert same_bits(train(plain, oracle, 2), train(model, optimizer, 2))
    with torch.no_grad():
        assert same_bits(plain(batch()), model(batch()))
