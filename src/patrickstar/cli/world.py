"""The ranks that one call of the command line runs on: they agree on what each finds out for itself, and tell each error once."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from contextlib import ExitStack, suppress
from typing import Any, Final, TypeVar

from patrickstar.comm.all_ranks import AllRanks
from patrickstar.errors import ConfigError

T = TypeVar("T")
_LAST_WORDS_S: Final = 3.0
# What torchrun gives each process that it starts.
_OF_TORCHRUN: Final = frozenset({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})


class World(ExitStack):
    """The ranks of the process group, or of torchrun before there is one; a single rank where there is neither.

    Until they `join`, a rank knows only which it is. What it agrees on with others is known to itself where there are none.

    Attributes:
        rank, size: this one's place among them, and how many there are. joined: those that have joined; until then, this one.
        together: how many work on one batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size, self.together = 0, 1, 1
        dist = sys.modules.get("torch.distributed")  # importing it takes seconds, which most calls need not pay
        if dist is not None and dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        elif os.environ.keys() >= _OF_TORCHRUN:
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.joined = AllRanks()

    def join(self) -> None:
        """Meets the other ranks, in a process group that is made where there is none. All ranks call it."""
        if self.size == 1:
            return
        from patrickstar.comm.collectives import Collectives
        from patrickstar.comm.ranks import Ranks, begin_process_group

        self.callback(begin_process_group())
        self.joined = AllRanks(collectives := Collectives(Ranks.of_group()))
        self.callback(collectives.close)

    def __exit__(self, *error: Any) -> bool | None:
        # torchrun ends all ranks once one has failed: by then the others should have said what they know, and have a status of their own.
        if self.joined.collectives is not None:
            store = self.joined.collectives.ranks.store
            with suppress(RuntimeError):  # the store is gone, with the process that held it
                patience, ended = time.monotonic() + _LAST_WORDS_S, store.add("ended", 1)
                while ended < self.size and time.monotonic() < patience:
                    time.sleep(0.02)
                    ended = store.add("ended", 0)
        return super().__exit__(*error)

    def leave(self, reason: str) -> None:
        """Takes part in nothing any more: the others end with an error that names this rank and its reason, unless they have ended too."""
        if self.joined.collectives is not None:
            self.joined.collectives.close(f"rank {self.rank} has ended: {reason}")

    @property
    def local_size(self) -> int:
        """Number of ranks on this machine."""
        return 1 if self.joined.collectives is None else self.joined.collectives.ranks.local_size

    def rows(self, batch_size: int, rank: int | None = None) -> slice:
        """The rows of a batch of all ranks that are one rank's and of those it works with, in rank order; `None`: this one's."""
        each = batch_size * self.together // self.size
        group = (self.rank if rank is None else rank) // self.together
        return slice(each * group, each * (group + 1))

    def agree(self, value: T, what: str) -> list[T]:
        """The values of all ranks, in their order."""
        return self.joined.tell(what, lambda: value)

    def mean(self, value: float, what: str) -> float:
        """The mean of all ranks' values, added in their order."""
        return sum(self.agree(value, what)) / self.size

    def expect_alike(self, facts: dict[str, Any], advice: str) -> None:
        """Raises ConfigError on all ranks where one has other facts than the first: which, and what to do about it."""
        for rank, theirs in enumerate(of_all := self.agree(facts, "what must be alike")):
            if odd := [name for name in facts if theirs[name] != of_all[0][name]]:
                raise ConfigError(f"{', '.join(odd)} of rank {rank} and of rank 0 differ: {advice}")

    def tells(self, error: str) -> bool:
        """Tells whether this rank is to say an error: the first that has it; until ranks have joined, the first of each machine."""
        if self.joined.collectives is None:
            return self.size == 1 or os.environ.get("LOCAL_RANK", str(self.rank)) == "0"
        said = re.sub(r"\brank \d+: ", "", error, count=1)  # which the rank itself does not say
        with suppress(RuntimeError):  # the store is gone, with the process that held it
            return self.joined.collectives.ranks.store.add(f"told/{hashlib.sha256(said.encode()).hexdigest()}", 1) == 1
        return True
