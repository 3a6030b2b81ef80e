"""Safetensors files of a directory: which tensor goes to which, which rank writes it, and the writing of one, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from patrickstar.checkpoint.format import FileRecord
from patrickstar.checkpoint.staged_files import StagedFiles
from patrickstar.checkpoint.tensors import DTYPE_CODES, TensorEntry, bytes_of, encode_header
from patrickstar.comm.all_ranks import AllRanks, share_out
from patrickstar.errors import ConfigError

_MOST_TENSORS = 50_000  # so that no header comes near the 100 MB that readers accept


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file and the tensors it will hold, in order."""

    file: str
    entries: tuple[TensorEntry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(entry.nbytes for entry in self.entries)


def plan_shards(entries: Sequence[TensorEntry], *, shard_bytes: int) -> tuple[Shard, ...]:
    """Files of at most `shard_bytes` of tensors each (a larger tensor has one to itself), stem by stem.

    Within a stem the order is kept, but wider types come first: the format has no padding between tensors, and a reader
    that maps the file could not view one whose bytes begin off its type's alignment. ConfigError: safetensors has no such name or type.
    """
    assert len({entry.name for entry in entries}) == len(entries), "a tensor is given twice"
    stems: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        if entry.name == "__metadata__":
            raise ConfigError("checkpoint: no tensor can be named __metadata__, safetensors keeps that name for itself")
        if entry.dtype not in DTYPE_CODES:
            raise ConfigError(f"checkpoint: tensor {entry.name!r}: safetensors has no {entry.dtype}")
        stems.setdefault(entry.stem, []).append(entry)

    shards: list[Shard] = []
    for stem, members in stems.items():
        ordered = sorted(members, key=lambda entry: -entry.dtype.itemsize)
        groups: list[list[TensorEntry]] = []
        room = 0
        for entry in ordered:
            if not groups or entry.nbytes > room or len(groups[-1]) == _MOST_TENSORS:
                groups.append([])
                room = shard_bytes
            groups[-1].append(entry)
            room -= entry.nbytes
        for number, group in enumerate(groups, 1):
            part = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
            shards.append(Shard(f"{stem}{part}.safetensors", tuple(group)))
    return tuple(shards)


@dataclass(frozen=True, slots=True)
class Writers:
    """Ranks that write together, or one process by itself.

    Attributes:
        all_ranks: those. rounds: for the names of the tensors that each rank writes, in order, gives the context in which this rank reads its own.
        of_first: names of tensors of which rank 0's values are written.
    """

    all_ranks: AllRanks = AllRanks()  # noqa: RUF009  (frozen)
    rounds: Callable[[Sequence[Sequence[str]]], AbstractContextManager[None]] = lambda _: nullcontext()
    of_first: Collection[str] = ()

    def write(
        self,
        staging: StagedFiles,
        directory: Path,
        shards: Sequence[Shard],
        *,
        read: Callable[[str], Iterable[torch.Tensor]],
        what: str,
        first_has: int = 0,
    ) -> None:
        """Writes and syncs all files. `read`: see `write_shard`. `first_has`: bytes that rank 0 has written besides."""
        size, rank = self.all_ranks.size, self.all_ranks.rank
        firsts = [shard for shard in shards if any(entry.name in self.of_first for entry in shard.entries)]
        others = [shard for shard in shards if shard not in firsts]
        owners = share_out(
            [shard.nbytes for shard in others], size, first_has=first_has + sum(shard.nbytes for shard in firsts)
        )
        shares = [[shard for shard, owner in zip(others, owners, strict=True) if owner == each] for each in range(size)]
        shares[0] = [*firsts, *shares[0]]

        def write_own() -> dict[str, FileRecord]:
            with self.rounds([[entry.name for shard in share for entry in shard.entries] for share in shares]):
                for shard in shares[rank]:
                    write_shard(staging, directory, shard, read=read)
            return staging.records

        for records in self.all_ranks.tell(f"{what}: its files", write_own):
            staging.records.update(records)


def write_shard(
    staging: StagedFiles, directory: Path, shard: Shard, *, read: Callable[[str], Iterable[torch.Tensor]]
) -> None:
    """Write and sync one file.

    `read(name)` gives a tensor's elements in order, in contiguous 1-D pieces; one piece is asked for at a time, and the
    one before is not looked at again, so its memory may be used for the next.
    """
    with staging.new_file(directory / shard.file) as writer:
        writer.append(memoryview(encode_header(shard.entries)))
        for entry in shard.entries:
            pieces, nbytes = read(entry.name), 0
            with ExitStack() as end:
                # A generator may hold a chunk pinned; do not leave it to the garbage collector to let go.
                end.callback(getattr(pieces, "close", lambda: None))
                for piece in pieces:
                    assert piece.dtype == entry.dtype, f"{entry.name}: pieces of {piece.dtype}, not {entry.dtype}"
                    assert piece.dim() == 1, f"{entry.name}: a piece of shape {tuple(piece.shape)}, expected one dim"
                    data = bytes_of(piece)
                    nbytes += len(data)
                    assert nbytes <= entry.nbytes, f"{entry.name}: more pieces than {entry.shape} has elements"
                    writer.append(data)
            assert nbytes == entry.nbytes, f"{entry.name}: pieces of {nbytes} bytes, declared as {entry.nbytes}"
