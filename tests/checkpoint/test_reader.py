"""Reading: whole tensors, parts, pieces; of the right model; of files that stay what they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from patrickstar.checkpoint.reader import open_step
from patrickstar.errors import CheckpointError
from tests.checkpoint.samples import contents, flip, same_bits, same_tensor, sample, write
from tests.faults import FaultyIO, Short


@pytest.fixture
def step(tmp_path):
    return write(tmp_path, 3)


@pytest.mark.parametrize("numel", [3, 700, 10_000])
def test_pieces_are_the_tensor_in_order(step, numel):
    with open_step(step) as reader:
        for name, tensor in sample(3).items():
            pieces = list(reader.pieces(name, numel))
            assert all(piece.dim() == 1 and piece.numel() <= numel for piece in pieces)
            joined = torch.cat(pieces) if pieces else torch.empty(0, dtype=tensor.dtype)
            assert same_tensor(joined, tensor.reshape(-1))


def test_a_part_is_read_into_memory_that_is_there(step):
    slot = torch.full((300,), 7.0)
    with open_step(step) as reader:
        reader.read_into("wte.weight", slot[100:200], start=1000)
    assert torch.equal(slot[100:200], sample(3)["wte.weight"].reshape(-1)[1000:1100])
    assert (slot[:100] == 7).all()
    assert (slot[200:] == 7).all()


@pytest.mark.parametrize(("start", "numel"), [(2560, 1), (-1, 4), (2500, 61)])
def test_a_part_outside_the_tensor_is_our_mistake(step, start, numel):
    with open_step(step) as reader, pytest.raises(AssertionError, match=r"wte\.weight"):
        reader.read_into("wte.weight", torch.empty(numel), start=start)


def test_tensors_are_ordinary_wherever_they_are_read(step):
    with open_step(step) as reader, torch.inference_mode(), torch.device("meta"):
        tensor = reader.read("wte.weight")
    assert not tensor.is_inference()
    assert same_tensor(tensor, sample(3)["wte.weight"])


def test_short_reads_are_continued(step):
    with open_step(step, io=FaultyIO(Short("preadv", 300, times=10**6))) as reader:
        reader.verify()
        assert same_bits(contents(reader), sample(3))


def test_the_model_is_known_again_and_another_is_refused_by_its_differences(step):
    right = {"wte.weight": (40, 64), "ln.bias": (7,)}
    with open_step(step) as reader:
        reader.require_model(dict(reversed(right.items())))
        with pytest.raises(CheckpointError) as refused:
            reader.require_model({"wte.weight": (40, 65), "h.0.w": (1,), "h.1.w": (1,)})
    assert str(refused.value) == (
        f"{step}: a checkpoint of another model: h.0.w is not there in the checkpoint, (1,) in the model; "
        "h.1.w is not there in the checkpoint, (1,) in the model; "
        "ln.bias is (7,) in the checkpoint, not there in the model and 1 more"
    )


def test_a_tensor_that_is_not_there_is_named(step):
    with open_step(step) as reader, pytest.raises(CheckpointError, match="holds no tensor 'lm_head'"):
        reader.read("lm_head")


def test_without_verify_a_damaged_file_is_found_when_something_is_read_of_it(step):
    with open_step(step) as reader:
        file = next(path for path in step.glob("moments*"))
        status = file.stat()
        flip(file)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a disk that rots does
        assert same_tensor(reader.read("wte.weight"), sample(3)["wte.weight"])
        for use in (reader.read, lambda name: next(reader.pieces(name, 1000))):
            with pytest.raises(CheckpointError, match=rf"{file.name}: damaged: its bytes have checksum"):
                use("exp_avg/wte.weight")


def test_a_file_that_becomes_another_one_is_refused(step):
    with open_step(step) as reader:
        reader.verify()
        reader.close()
        for path in step.glob("*.safetensors"):
            path.write_bytes(path.read_bytes())
        with pytest.raises(CheckpointError, match="changed while the checkpoint was open"):
            reader.read("wte.weight")


def test_a_file_deleted_while_open_is_refused(step):
    reader = open_step(step)
    for path in step.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"weights.*cannot open the file: No such file"):
        reader.read("wte.weight")


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_reader_that_is_let_go_closes_its_file(step):
    before = open_descriptors()
    reader = open_step(step)
    reader.read("wte.weight")
    assert open_descriptors() == before + 1
    del reader
    assert open_descriptors() == before
