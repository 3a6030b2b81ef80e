"""Writing a checkpoint: what lies there afterwards, what stays, and what is refused before anything is touched."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from patrickstar.checkpoint.reader import newest_intact, open_step
from patrickstar.checkpoint.storage import write_step
from patrickstar.checkpoint.tensors import TensorEntry
from patrickstar.errors import CheckpointError, ConfigError, DeviceError
from tests.checkpoint.faults import FaultyFiles
from tests.checkpoint.samples import contents, in_pieces, same_bits, same_tensor, sample, write
from tests.faults import Fails, FaultyIO


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*"))


def test_what_is_written_is_what_is_read(tmp_path):
    path = write(tmp_path / "deep" / "runs", 12)
    assert path == tmp_path / "deep" / "runs" / "step-00000012"
    assert (path.parent / "latest").read_text() == "step-00000012\n"
    assert sorted(found.name for found in path.parent.iterdir()) == ["latest", "step-00000012"]
    with open_step(path.parent) as reader:
        reader.verify()
        assert reader.step == 12
        assert same_bits(contents(reader), sample(12))
        assert reader.values["state"] == {"lr": 1e-3}
        extra = reader.values["extra"]
        assert (extra["epoch"], extra["betas"], extra["order"].tolist()) == (12, (0.9, 0.999), [12, 13, 14, 15, 16])


def test_anybody_reads_the_files_with_safetensors_and_torch(tmp_path):
    path = write(tmp_path, 3)
    found: dict[str, torch.Tensor] = {}
    files = sorted(path.glob("*.safetensors"))
    assert len(files) == 3  # several for a stem
    for file in files:
        found |= safetensors.torch.load_file(file)
        with safetensors.safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert found.keys() == sample(3).keys()
    assert all(same_tensor(found[name], tensor) for name, tensor in sample(3).items())
    values = torch.load(path / "values.pt", weights_only=True)
    assert (values["state"], values["extra"]["epoch"]) == ({"lr": 1e-3}, 3)
    index = json.loads((path / "index.json").read_text())
    assert {path.name for path in path.iterdir()} == {"index.json", *index["files"]}
    for name, row in index["files"].items():
        assert hashlib.sha256((path / name).read_bytes()).hexdigest() == row["sha256"]


def test_equal_contents_give_equal_files(tmp_path):
    one, other = write(tmp_path / "one", 5), write(tmp_path / "other", 5)
    assert {path.name: path.read_bytes() for path in one.iterdir()} == {
        path.name: path.read_bytes() for path in other.iterdir()
    }


def test_a_step_that_is_there_is_replaced(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2)
    write(tmp_path, 2, sample(9))
    with open_step(tmp_path) as reader:
        assert same_bits(contents(reader), sample(9))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000002"]


def test_a_step_that_could_not_be_replaced_is_back_in_its_place(tmp_path):
    write(tmp_path, 2)
    with pytest.raises(
        DeviceError, match=r"step-00000002: cannot rename .*\.tmp-\w+/step-00000002 to it: Input/output error"
    ):
        write(tmp_path, 2, sample(9), io=FaultyIO(Fails("rename", errno.EIO, nth=2)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002"]
    with open_step(tmp_path) as reader:
        assert same_bits(contents(reader), sample(2))


def test_a_link_or_file_with_the_name_of_the_step_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("here")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "step-00000001").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "runs" / "step-00000002").write_text("a file")
    for step in (1, 2):
        write(tmp_path / "runs", step)
    assert (tmp_path / "elsewhere" / "precious").read_text() == "here"
    assert newest_intact(tmp_path / "runs") == tmp_path / "runs" / "step-00000002"
    assert not (tmp_path / "runs" / "step-00000001").is_symlink()


def test_the_newest_of_them_stay(tmp_path):
    for step in range(1, 6):
        write(tmp_path, step, keep=3)
    assert steps(tmp_path) == [3, 4, 5]
    write(tmp_path, 6)
    assert steps(tmp_path) == [3, 4, 5, 6]
    write(tmp_path, 7, keep=1)
    assert steps(tmp_path) == [7]


def test_after_going_back_the_steps_of_the_abandoned_run_are_the_older_ones(tmp_path):
    for step in (10, 20, 30):
        write(tmp_path, step)
    write(tmp_path, 11, keep=2)
    assert steps(tmp_path) == [11, 30]
    write(tmp_path, 12, keep=2)
    assert steps(tmp_path) == [11, 12]


def test_what_is_no_complete_checkpoint_is_neither_counted_nor_deleted(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / "step-00000002" / "index.json").unlink()
    (tmp_path / "step-9").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    write(tmp_path, 3, keep=2)
    assert steps(tmp_path) == [1, 2, 3, 9]
    assert (tmp_path / "notes.txt").exists()


def test_an_older_one_that_cannot_be_deleted_is_a_warning(tmp_path, caplog):
    write(tmp_path, 1)
    with caplog.at_level(logging.WARNING, "patrickstar"):
        write(tmp_path, 2, keep=1, io=FaultyIO(Fails("unlink", errno.EPERM, times=99)))
    assert "older checkpoint could not be deleted" in caplog.text
    assert open_step(tmp_path).step == 2


def test_leftovers_of_a_crash_are_swept_and_what_was_set_aside_comes_back(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / ".tmp-abc" / "deep").mkdir(parents=True)
    (tmp_path / ".tmp-abc" / "deep" / "file").write_text("half")
    (tmp_path / ".tmp-link").symlink_to(tmp_path / "step-00000001")
    (tmp_path / "step-00000002").rename(tmp_path / ".old-step-00000002")
    assert open_step(tmp_path).step == 2  # already before the sweep
    write(tmp_path, 3)
    assert steps(tmp_path) == [1, 2, 3]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert newest_intact(tmp_path) == tmp_path / "step-00000003"


def test_two_writers_of_one_directory_are_kept_apart(tmp_path):
    write(tmp_path, 1)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(DeviceError, match="another process or session is writing"):
        write(tmp_path, 2)
    os.close(descriptor)
    write(tmp_path, 2)
    assert steps(tmp_path) == [1, 2]


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path):
    write(tmp_path, 1)
    files = FaultyFiles()
    files.free_bytes = lambda directory: 1_000_000
    with pytest.raises(DeviceError, match=r"a checkpoint of \d+ bytes .*, 1000000 bytes .* are free: make room for"):
        write(tmp_path, 2, io=files)
    assert not any(entry.startswith(("create", "rename")) for entry in files.log)
    assert open_step(tmp_path).step == 1


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_place_that_is_no_directory_is_a_device_error(tmp_path, where):
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(DeviceError, match="cannot"):
        write(tmp_path / where, 1)
    assert (tmp_path / "file").read_text() == "no directory"


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        ({"extra": {"loader": {"rng": object()}}}, CheckpointError, r'extra\["loader"\]\["rng"\] is a builtins.object'),
        ({"state": [lambda: 0]}, CheckpointError, r"state\[0\] is a builtins.function"),
        ({"keep": 0}, ConfigError, "keep=0"),
        ({"keep": True}, ConfigError, "keep=True"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_touched(tmp_path, options, error, problem):
    with pytest.raises(error, match=problem):
        write(tmp_path / "new", 1, **options)
    assert not (tmp_path / "new").exists()


def test_pieces_are_asked_for_one_at_a_time_and_let_go_when_it_fails(tmp_path):
    tensor, held = torch.randn(10_000), []

    def read(name: str):
        try:
            for number, piece in enumerate(in_pieces(tensor, 1000)):
                assert held == []
                held.append(name)
                if number == 7:
                    raise DeviceError("the disk tier broke")
                yield piece
                held.remove(name)
        finally:
            held.append("closed")

    write(tmp_path, 1)
    entries = [TensorEntry("w", torch.float32, (10_000,))]
    with pytest.raises(DeviceError, match="the disk tier broke"):
        write_step(tmp_path, 2, entries=entries, read=read, parameters={})
    assert held == ["w", "closed"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


@pytest.mark.parametrize(
    "pieces",
    [
        [torch.zeros(9)],
        [torch.zeros(11)],
        [torch.zeros(5), torch.zeros(5).double()],
        [torch.zeros(2, 5)],
        [torch.zeros(20)[::2]],
        [torch.zeros(10, device="meta")],
    ],
)
def test_pieces_that_are_not_the_tensor_are_our_mistake_and_nothing_stays(tmp_path, pieces):
    with pytest.raises(AssertionError):
        write_step(
            tmp_path, 1, entries=[TensorEntry("w", torch.float32, (10,))], read=lambda name: iter(pieces), parameters={}
        )
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_save_but_a_step_is_a_checkpoint_too(tmp_path):
    write_step(tmp_path, 0, entries=[], read=list, parameters={})
    with open_step(tmp_path) as reader:
        reader.verify()
        assert (reader.step, reader.spans, dict(reader.values)) == (0, {}, {"state": None, "extra": None})


def test_no_generator_draws_when_a_checkpoint_is_written(tmp_path):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    write(tmp_path, 1, sample(1))
    assert torch.equal(before, torch.get_rng_state())
