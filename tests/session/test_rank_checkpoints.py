"""Checkpoints and exports by all ranks: files as one process writes them, which any number of ranks takes up."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import patrickstar
from patrickstar.errors import CheckpointError, DeviceError, RankError
from patrickstar.memory.fileio import FileIO
from tests.ranks import Ended, Team, Teams, all_well, kill_me
from tests.sampling import only
from tests.session.builders import tiny_gpt2
from tests.session.rank_programs import ROOMY, Bits, bits_of, build, expect_same, managed, train


def save_and_go_on(rank: int, path: Path, arguments: Mapping[str, Any]) -> tuple[Bits, Bits]:
    with managed(**arguments) as (model, session):
        torch.manual_seed(rank)
        train(model, session, 2)
        session.optimizer.param_groups[0]["lr"] = 5e-3
        saved = bits_of(model, session)
        extra = {"of": rank, "large": torch.zeros(50_000 >> 10 * rank)}
        assert session.save_checkpoint(path, extra=extra) == path / "step-00000002"
        train(model, session, 2)
        return saved, bits_of(model, session)


def load(rank: int, path: Path, steps: int, arguments: Mapping[str, Any]) -> tuple[Bits, Bits]:
    with managed(5, **arguments) as (model, session):
        torch.manual_seed(rank + 70)
        train(model, session, 1)
        assert session.load_checkpoint(path)["of"] == 0
        loaded = bits_of(model, session)
        train(model, session, steps)
        assert session.save_checkpoint(path.with_name("more"), extra={"of": 0}).name == f"step-{2 + steps:08d}"
        return loaded, bits_of(model, session)


@pytest.mark.parametrize("has_disk", [False, True], ids=["host", "disk"])
def test_ranks_that_stop_and_resume_have_the_bits_of_not_stopping(ranks: Team, has_disk: bool, tmp_path: Path) -> None:
    each = 400 if ranks.size == 2 else 320  # of two ranks each has more, and a larger piece on its way
    arguments = {"host_memory": ranks.size * (each << 10), "disk": tmp_path} if has_disk else {}
    want = all_well(ranks.run(save_and_go_on, tmp_path / "run", arguments))
    got = all_well(ranks.run(load, tmp_path / "run", 2, arguments))
    for (saved, end), (loaded, resumed) in zip(want, got, strict=True):
        expect_same(saved, loaded, but="4.running")
        expect_same(end, resumed, but="4.running")  # each rank's own until a checkpoint has rank 0's
    assert not torch.equal(want[0][0]["tensors"]["4.running_mean"], want[1][0]["tensors"]["4.running_mean"])
    for loaded, _ in got:
        expect_same(want[0][0], loaded)


@pytest.mark.parametrize("count", only([2], [2, 3]))
def test_a_checkpoint_knows_no_number_of_ranks_and_is_read_by_torch_s_own_reader(
    team_of: Teams, count: int, tmp_path: Path
) -> None:
    (saved, _), _ = all_well(team_of(2).run(save_and_go_on, tmp_path / "2", {"chunk_size": 6144}))
    want = {f"weight/{name}": saved["tensors"][name] for name, _ in build().named_parameters()}
    read = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(tmp_path / "2/step-00000002")), no_dist=True)
    assert not [name for name, tensor in want.items() if not torch.equal(tensor, read[name])]

    others: list[tuple[int, dict[str, Any]]] = [
        (3, {"host_memory": 3 * (320 << 10), "disk": tmp_path}),
        (1, {"chunk_size": 1024, "device": "emulated", "device_memory": "96KiB"}),
        (2, {"chunk_size": 2048}),
    ]
    path = tmp_path / "2"
    for size, arguments in others[:count]:
        for loaded, same in all_well(team_of(size).run(load, path, 0, arguments)):
            expect_same(saved, loaded)
            expect_same(saved, same)
        (tmp_path / "more").rename(path := tmp_path / f"again {size}")


class Counted(FileIO):
    """Files that count the bytes that are written."""

    written_bytes = 0

    def pwritev(self, fd: int, buffer: memoryview, offset: int) -> int:
        Counted.written_bytes += len(buffer)
        return super().pwritev(fd, buffer, offset)


def count_bytes(rank: int, path: Path) -> tuple[int, int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(96, 96) for _ in range(24)])
    optimizer = torch.optim.AdamW(model.parameters())
    with patrickstar.manage(model, optimizer, options=patrickstar.Options(chunk_size=12288), **ROOMY) as session:
        model(torch.randn(4, 96)).sum().backward()
        session.optimizer.step()
        session.stats()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("patrickstar.checkpoint.storage.FileIO", Counted)
            Counted.written_bytes = 0
            before = session._parts.collectives.sent_bytes
            session.save_checkpoint(path)
        return Counted.written_bytes, session._parts.collectives.sent_bytes - before, session.layout.n_chunks


def test_each_rank_writes_its_share_of_the_bytes_and_sends_each_byte_once(three: Team, tmp_path: Path) -> None:
    answers = all_well(three.run(count_bytes, tmp_path / "run"))
    size, chunk_bytes, tensor_bytes = three.size, 4 * 12288, 4 * 96 * 96
    total = sum(file.stat().st_size for file in (tmp_path / "run").glob("step-*/*.safetensors"))
    for written_bytes, sent_bytes, n_chunks in answers:
        assert abs(written_bytes - total / size) < 3 * tensor_bytes
        # All planes once, and a chunk again where a rank's files begin or end in it, or one has no more to write.
        least = 3 * n_chunks * chunk_bytes * (size - 1) // size**2
        assert least <= sent_bytes <= least + 4 * chunk_bytes


def train_and_export(rank: int, path: Path) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    model = tiny_gpt2()
    model.register_buffer("seen", torch.zeros(1))
    with patrickstar.manage(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **ROOMY) as session:
        tokens = torch.arange(24).view(2, 12) + rank
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
            model.seen += rank + 1
        for shard in ("5GB", "20KB"):
            session.export(path / shard, max_shard_size=shard)
        with torch.no_grad():
            return tokens, model.eval()(input_ids=tokens).logits.clone(), model.seen.clone()


def test_an_export_by_all_ranks_loads_with_equal_logits_and_has_the_buffers_of_rank_0(
    three: Team, tmp_path: Path
) -> None:
    answers = all_well(three.run(train_and_export, tmp_path))
    for shard in ("5GB", "20KB"):
        model = type(tiny_gpt2()).from_pretrained(tmp_path / shard, local_files_only=True).eval()
        for tokens, logits, _ in answers:
            with torch.no_grad():
                assert torch.equal(model(input_ids=tokens).logits, logits)
        files = [load_file(file) for file in (tmp_path / shard).glob("*.safetensors")]
        assert (len(files) > 1) == (shard == "20KB")
        assert [tensors["seen"] for tensors in files if "seen" in tensors] == [answers[0][2]] == [torch.tensor([2.0])]


def begin_from(rank: int, paths: list[Path]) -> Mapping[str, Tensor]:
    torch.manual_seed(0)
    model = tiny_gpt2()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(paths[rank])
            session = patrickstar.manage(model, torch.optim.AdamW(model.parameters()), weights=".", **ROOMY)
        with session:
            return {name: value.clone() for name, value in session.state_dict().items()}
    except Exception:
        assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
        raise


def test_ranks_begin_from_the_weights_of_files_that_all_have(two: Team, tmp_path: Path) -> None:
    torch.manual_seed(7)
    start = tiny_gpt2()
    for name in ("shared", "copy", "other"):
        start.save_pretrained(tmp_path / name)
    other = tmp_path / "other/model.safetensors"
    other.write_bytes(other.read_bytes()[:-1] + b"?")

    def begin(last: str) -> list[Any]:
        return two.run(begin_from, [tmp_path / "shared", tmp_path / last])

    for found in (*all_well(begin("shared")), *all_well(begin("copy"))):
        assert not [name for name, value in start.state_dict().items() if not torch.equal(value, found[name])]
    for error in begin("other"):
        assert isinstance(error, CheckpointError), error
        assert "other values" in str(error)


# what goes wrong


class FullDisk(FileIO):
    """Files on a disk that has no room for another one."""

    left = 2

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        self.left -= bool(flags & os.O_CREAT)
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().open(path, flags, mode)


class NoRoomAtAll(FullDisk):
    left = 0


def caught(act: Callable[[], object]) -> Exception:
    """What is raised. (What pytest raises where nothing is does not go through a pipe.)"""
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


class Refusing:
    def state_dict(self) -> None:
        raise ValueError("no state")


FAULTS: list[tuple[str, int, type[Exception], type[Exception], str]] = [
    ("a full disk", 0, DeviceError, DeviceError, "No space left"),
    ("no room", 1, DeviceError, DeviceError, "No space left"),
    ("chunks", 1, DeviceError, DeviceError, "the disk is gone"),
    ("extra", 1, ValueError, RankError, "no state"),
    ("another directory", 1, DeviceError, DeviceError, "a directory that all ranks see"),
]


def spoil(patch: pytest.MonkeyPatch, fault: str) -> None:
    def gone(*_: object, writes: bool) -> None:
        raise DeviceError("the disk is gone")

    if fault in ("no room", "a full disk"):
        patch.setattr("patrickstar.checkpoint.storage.FileIO", NoRoomAtAll if fault == "no room" else FullDisk)
    elif fault == "chunks":
        patch.setattr("patrickstar.step.values.Weights._kept", gone)


def save_with_each(rank: int, path: Path) -> tuple[list[Exception], Bits]:
    """The error of each fault, and the bits of a checkpoint after all of them."""
    with managed() as (model, session):
        torch.manual_seed(rank)
        train(model, session, 1)
        session.save_checkpoint(path)
        train(model, session, 1)
        errors = []
        for fault, guilty, *_ in FAULTS:
            mine = fault if rank == guilty else ""
            where = path / mine if mine == "another directory" else path
            extra = {"object": Refusing()} if mine == "extra" else None
            with pytest.MonkeyPatch.context() as patch:
                spoil(patch, mine)
                errors.append(caught(lambda: session.save_checkpoint(where, extra)))
            if rank == 0:
                assert sorted(one.name for one in path.iterdir()) == ["latest", "step-00000001"]
        train(model, session, 1)
        session.save_checkpoint(path)
        return errors, bits_of(model, session)


def test_what_fails_on_one_rank_is_an_error_on_all_and_they_go_on(two: Team, tmp_path: Path) -> None:
    (first, want), (second, same) = all_well(two.run(save_with_each, tmp_path))
    for (fault, guilty, own, theirs, words), *errors in zip(FAULTS, first, second, strict=True):
        for rank, error in enumerate(errors):
            assert type(error) is (own if rank == guilty else theirs), fault
            assert words in str(error)
            assert (f"rank {guilty}" in str(error)) == (rank != guilty) or fault == "another directory"
    expect_same(want, same, but="running")
    expect_same(want, load_alone(tmp_path))


def load_alone(path: Path) -> Bits:
    with managed(5) as (model, session):
        session.load_checkpoint(path)
        return bits_of(model, session)


ODD = [
    (("run", "none"), "none: no such directory"),
    (("run", "other"), "rank 1 another one, of step 2"),
    (("run", "another model"), "of another model"),
    (("damaged", "damaged"), "checksum"),
    (("run", "damaged"), "checksum"),
]


def load_what_is_not_for_all(rank: int, path: Path) -> list[Exception]:
    with managed() as (model, session):
        train(model, session, 1)
        before, errors = bits_of(model, session), []
        for names, _ in ODD:
            errors.append(caught(lambda: session.load_checkpoint(path / names[rank])))
            expect_same(before, bits_of(model, session))
        return errors


def test_what_not_all_ranks_can_load_changes_nothing_on_any(two: Team, tmp_path: Path) -> None:
    with managed() as (model, session):
        session.save_checkpoint(tmp_path / "run")
        session.save_checkpoint(tmp_path / "damaged")
        train(model, session, 2)
        session.save_checkpoint(tmp_path / "other")
    plain = nn.Linear(2, 2)
    with patrickstar.manage(plain, torch.optim.AdamW(plain.parameters()), **ROOMY) as session:
        session.save_checkpoint(tmp_path / "another model")
    damaged = tmp_path / "damaged/step-00000000/weights.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    for errors in all_well(two.run(load_what_is_not_for_all, tmp_path)):
        for (names, words), error in zip(ODD, errors, strict=True):
            assert isinstance(error, CheckpointError), names
            assert words in str(error)


def save_on_one(rank: int, path: Path) -> Exception:
    with managed() as (model, session):
        error = caught(lambda: session.save_checkpoint(path) if rank == 0 else train(model, session, 1))
        assert isinstance(caught(lambda: session.save_checkpoint(path)), RankError)
        return error


def test_a_checkpoint_that_one_rank_saves_is_an_error_on_all_that_says_so(two: Team, tmp_path: Path) -> None:
    for error in two.run(save_on_one, tmp_path / "run"):
        assert isinstance(error, RankError)
        assert "rank 0: agree save_checkpoint()" in str(error)
        assert "rank 1: gather" in str(error)
    assert not (tmp_path / "run").exists()


def load_and_die(rank: int, path: Path) -> None:
    with managed() as (_, session), pytest.MonkeyPatch.context() as patch:
        session.save_checkpoint(path)
        if rank == 1:
            patch.setattr("patrickstar.step.values.Weights.read_into", lambda *_: kill_me())
        session.load_checkpoint(path)


def test_a_rank_that_is_killed_while_all_load_ends_the_others_with_an_error_that_names_it(
    two: Team, tmp_path: Path
) -> None:
    error, killed = two.run(load_and_die, tmp_path / "run")
    assert isinstance(killed, Ended)
    assert isinstance(error, RankError)
    assert error.ranks == (1,)


class Interrupted(FileIO):
    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        raise KeyboardInterrupt

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        if path.suffix == ".safetensors":
            raise KeyboardInterrupt
        return super().open(path, flags, mode)


def interrupt(rank: int, path: Path, guilty: int) -> type[BaseException] | None:
    try:
        with managed() as (_, session), pytest.MonkeyPatch.context() as patch:
            session.save_checkpoint(path)
            if rank == guilty:
                patch.setattr("patrickstar.checkpoint.storage.FileIO", Interrupted)
            session.save_checkpoint(path)
    except BaseException as error:
        return type(error)
    return None


@pytest.mark.parametrize("guilty", only([1], [0, 1]))
def test_ctrl_c_on_one_rank_ends_all_and_leaves_the_checkpoint_before(two: Team, guilty: int, tmp_path: Path) -> None:
    want = [KeyboardInterrupt if rank == guilty else RankError for rank in range(2)]
    assert all_well(two.run(interrupt, tmp_path / "run", guilty)) == want
    with managed(5) as (_, session):
        session.load_checkpoint(tmp_path / "run")
        session.save_checkpoint(tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["latest", "step-00000000"]
