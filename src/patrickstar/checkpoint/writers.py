"""Writing of the files of one directory by all ranks: each has files of its own, about as many bytes as the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from patrickstar.checkpoint.format import FileRecord
from patrickstar.checkpoint.shards import Shard, write_shard
from patrickstar.checkpoint.staged_files import StagedFiles
from patrickstar.comm.all_ranks import AllRanks, share_out

Rounds = Callable[[Sequence[Sequence[str]]], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Writers:
    """Ranks that write together, or one process by itself.

    Attributes:
        all_ranks: those. rounds: for the names of the tensors that each rank writes, in order, gives the context in which this rank reads its own.
        of_first: names of tensors of which rank 0's values are written.
    """

    all_ranks: AllRanks = AllRanks()  # noqa: RUF009  (frozen)
    rounds: Rounds = lambda _: nullcontext()
    of_first: Collection[str] = ()

    def write(
        self,
        staging: StagedFiles,
        directory: Path,
        shards: Sequence[Shard],
        *,
        read: Callable[[str], Iterable[Tensor]],
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
