"""A job whose ranks come and go: who is in it, which its processes learn from a store at the boundary between two steps.

A *generation* is what the job is between two changes of its ranks. Rank 0 writes down the next one when a change has been asked for and those that
join wait for it: with the boundary from which it holds, the next one but where there is one rank. No rank is there before all have been in the step
before, so all that look have it. That is one question to the store a step, and no collective.

What stands in the store:

    want            size and batch that were asked for last, why     arrival/K     a process that waits, the K-th to do so
    news            counts all that rank 0 has to look at            call/K        the generation that it is called to
    generation/N    who is in it, from which step on, why            over          there is no next step
    batches         least, end and step of what batches may be
    survivor/K/M    that M has lost others, in its generation N      recovery/K    the generation that goes on after the K-th loss
    losses          counts those that have been decided upon
    here/N/M        that M is there where generation N begins
    gone/M          that M has ended                                 progress      the step that rank 0 has come to
    present         the generation that is there

What has become of lost ranks a supervisor decides, which sees processes end (`elastic/supervisor.py`): the survivors wait for it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import torch.distributed as dist

from patrickstar.comm.ranks import Ranks
from patrickstar.config.kinds import refuse
from patrickstar.core.resharding import Member, order_of_least_movement
from patrickstar.errors import ConfigError, RankError, RankLost, StateError

SIZES: Final = "PATRICKSTAR_ELASTIC"  # the fewest and the most ranks of a job, as `1:4`
PRESENT: Final = "PATRICKSTAR_SIZE"  # how many ranks a job begins with; the fewest by default
DIRECTORY: Final = "PATRICKSTAR_JOB_DIR"  # of a job that is supervised: of its log and its checkpoints
SAVE_EVERY: Final = "PATRICKSTAR_SAVE_EVERY"  # steps from checkpoint to checkpoint
PLANNED: Final = "PATRICKSTAR_AT"  # sizes that are planned, as `100:2,200:4`: two ranks from step 100 on
NOW: Final = "patrickstar/now"  # where a store has the prefix of the job that is there now
# A signal that comes later than that ends a process at once. Where its parent ends two come, for a thread and for the process.
AT_ONCE_S: Final = 1.0
_WAITS_S: Final = 0.01
_TELLS_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Generation:
    """A job between two changes.

    Attributes:
        members: in rank order. step: that it begins with. why: what has brought it about.
        batches: (step, samples of each step from there on), where batches are not what they were at first.
    """

    number: int
    members: Sequence[Member]
    step: int
    why: str = ""
    batches: Sequence[tuple[int, int]] = ()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)


class ElasticJob:
    """A job as one of its processes sees it.

    Args:
        store: that all of its processes have. name: prefix of what this one has there. member: the number of this process.
        least, most: how many ranks there may be. size: how many there are at first, which are the first ones.

    Attributes:
        now: the generation that is there, as far as this process knows.
        directory: of a job that is supervised, so that it survives the loss of a rank. save_every: steps from checkpoint to checkpoint; 0: none.
    """

    def __init__(self, store: dist.Store, name: str, member: Member, *, least: int, most: int, size: int) -> None:
        self._given, self._name = store, name
        self._store = dist.PrefixStore(name, cast(Any, store).clone())
        self.member, self.least, self.most = member, least, most
        self.now = Generation(0, tuple(range(size)), 0)
        self._next: Generation | None = None
        self._news = 0
        self._tells_s = 0.0
        self.directory = Path(os.environ[DIRECTORY]) if DIRECTORY in os.environ else None
        self.save_every = int(os.environ.get(SAVE_EVERY, "0"))
        self._planned = {
            int(at): int(to) for at, to in (one.split(":") for one in os.environ.get(PLANNED, "").split(",") if one)
        }
        if self.rank == 0:
            self.begins(self.now)
            store.set(NOW, name)

    @property
    def rank(self) -> int:
        """The place of this process among the ranks; -1 where it is none of them."""
        return self.now.members.index(self.member) if self.member in self.now.members else -1

    @property
    def loss(self) -> type[RankError]:
        """The error about ranks that are lost: one that the job survives, where it is supervised."""
        return RankError if self.directory is None else RankLost

    def ranks(self, generation: Generation) -> Ranks:
        """The ranks of a generation, on a prefix of the store that nobody has used."""
        return Ranks(
            range(generation.size),
            generation.members.index(self.member),
            (self._given, f"{self._name}/ranks/{generation.number}"),
            averaged=1,
            local_size=self.most,
        )

    def ask(self, size: int, why: str, batch: int | None = None) -> None:
        """Asks for another number of ranks, and samples of a step. ConfigError: the job has never so many."""
        if not self.least <= size <= self.most:
            raise ConfigError(f"resize({size}): this job has {self.least} to {self.most} ranks")
        ask(self._store, size, why, batch)

    def begins_loop(self) -> None:
        """Notes that a loop over steps begins. StateError: there was another, whose checkpoints there are."""
        of = self._name if self.directory is None else "patrickstar"
        if self._given.add(f"{of}/loops/{self.member}/{os.getpid()}", 1) > 1:
            raise StateError(
                "an elastic job has one loop over session.steps(): have a job for each, or one loop for both"
            )

    def offer(self, batches: range) -> None:
        """Has a step be of any of these numbers of samples, when it is asked for."""
        if self.rank == 0:
            self._store.set("batches", json.dumps([batches.start, batches.stop, batches.step]))

    def next(self, step: int, total: int) -> Generation | None:
        """The generation that begins with this step, of so many in all, if one does. Asked once before each step, by all ranks."""
        number = self.now.number + 1
        if self._next is None and self.rank == 0:
            self._next = self._decided(step, total)
            if time.monotonic() > self._tells_s:
                self._store.set("progress", str(step))
                self._tells_s = time.monotonic() + _TELLS_S
        elif self._next is None and self._store.check([f"generation/{number}"]):
            self._next = read_generation(self._store.get(f"generation/{number}"))
        if self._next is None or self._next.step > step:
            return None
        found, self._next = self._next, None
        return found

    def _decided(self, step: int, total: int) -> Generation | None:
        """The generation that rank 0 has come next, where one has been asked for and can be."""
        reaches = step + (self.now.size > 1)
        for at in sorted(at for at in self._planned if at <= reaches):
            ask(self._store, self._planned.pop(at), "planned")
        news = self._store.add("news", 0)
        if news == self._news or reaches >= total or not self._store.check(["want"]):
            return None
        want = json.loads(self._store.get("want"))
        missing = want["size"] - self.now.size
        there = waiting(self._store) if missing > 0 else {}
        self._news = news
        batches, batch = self.now.batches, want["batch"]
        if batch not in (None, *(last for _, last in batches[-1:])):
            batches = (*((begins, last) for begins, last in batches if begins < reaches), (reaches, batch))
        if missing > len(there) or (missing == 0 and batches is self.now.batches):
            return None  # another comes, which is news
        members = order_of_least_movement(self.now.members, want["size"], list(there))
        made = Generation(self.now.number + 1, members, reaches, want["why"], batches)
        write_generation(self._store, made)
        for member in set(members) & there.keys():
            self._store.set(f"call/{there[member]}", str(made.number))
        return made

    def survived(self, reason: str) -> Generation:
        """The generation that goes on without those that are lost, which this process waits for."""
        loss = self._store.add("losses", 0) + 1
        self._store.add(f"survivors/{loss}", 1)
        self._store.set(f"survivor/{loss}/{self.member}", json.dumps({"number": self.now.number, "reason": reason}))
        while not self._store.check([f"recovery/{loss}"]):
            time.sleep(_WAITS_S)
        self._next = None
        return read_generation(self._store.get(f"generation/{int(self._store.get(f'recovery/{loss}'))}"))

    def wait(self) -> Generation | None:
        """The next generation that this process is in, which it waits for; None where the job ends without it."""
        number = self._store.add("arrivals", 1)
        self._store.set(f"arrival/{number}", str(self.member))
        self._store.add("news", 1)
        while not self._store.check([f"call/{number}"]):
            if self._store.check(["over"]):
                return None
            time.sleep(_WAITS_S)
        return read_generation(self._store.get(f"generation/{int(self._store.get(f'call/{number}'))}"))

    def meets(self, generation: Generation) -> bool:
        """Returns when all members of the next generation have come to where it begins; False where one has ended, or others go on without it."""
        losses = self._store.add("losses", 0)
        self._store.set(f"here/{generation.number}/{self.member}", "1")
        for member in generation.members:
            while not self._store.check([f"here/{generation.number}/{member}"]):
                if self._store.check([f"gone/{member}"]) or self._store.add("losses", 0) != losses:
                    return False
                time.sleep(_WAITS_S)
        return True

    def stays(self, number: int) -> None:
        """Notes that the generation of that number could not be: it is the one that was there, and no other is asked for."""
        self.begins(replace(self.now, number=number))
        if self.rank == 0:
            ask(self._store, self.now.size, "another size could not be")

    def begins(self, generation: Generation) -> None:
        """Notes that a generation is there."""
        self.now = generation
        if self.rank == 0:
            write_generation(self._store, generation)
            self._store.set("present", str(generation.number))

    def over(self) -> None:
        """Tells whoever waits that no step comes any more."""
        self._store.set("over", "1")


def ask(store: dist.Store, size: int, why: str, batch: int | None = None) -> None:
    """Asks a job for another number of ranks, and of samples of a step. `store`: with the job's prefix. ConfigError: it has no such batches."""
    offered = range(*json.loads(store.get("batches"))) if store.check(["batches"]) else range(0)
    if batch is not None and batch not in offered:
        may_be = f"{offered[0]} to {offered[-1]} samples, in whole parts of {offered.step}" if offered else "one size"
        raise ConfigError(
            f'a batch of {batch} samples: those of this job have {may_be} (batch="grow", max_batch= of steps)'
        )
    before = json.loads(store.get("want")) if store.check(["want"]) else {"batch": None}
    store.set("want", json.dumps({"size": size, "why": why, "batch": batch or before["batch"]}))
    store.add("news", 1)


def waiting(store: dist.Store) -> Mapping[Member, int]:
    """Processes that wait, each with the number of its arrival, in the order of these. `store`: with the job's prefix."""
    numbers = range(1, store.add("arrivals", 0) + 1)
    there = [number for number in numbers if store.check([f"arrival/{number}"])]
    known = {int(store.get(f"arrival/{number}")): number for number in there if not store.check([f"call/{number}"])}
    return {member: number for member, number in known.items() if not store.check([f"gone/{member}"])}


def write_generation(store: dist.Store, generation: Generation) -> None:
    """Writes a generation down. `store`: with the job's prefix."""
    store.set(f"generation/{generation.number}", json.dumps(asdict(generation)))


def read_generation(text: bytes) -> Generation:
    """A generation that was written down."""
    known = json.loads(text)
    return Generation(**{**known, "members": tuple(known["members"])})


def job_of_environment() -> ElasticJob | None:
    """The job that this process has been started for; None where it is of none. ConfigError: what the environment says of it makes no sense."""
    if SIZES not in os.environ:
        return None
    sizes = os.environ[SIZES].split(":")
    problems = []
    if len(sizes) != 2 or not all(size.isdigit() for size in sizes) or not 1 <= int(sizes[0]) <= int(sizes[1]):
        problems.append(
            f"{SIZES}={os.environ[SIZES]}: two numbers are expected, the fewest and the most ranks, such as 1:4"
        )
    refuse(problems, of="manage")
    least, most = map(int, sizes)
    member = int(os.environ["RANK"])
    store: dist.Store
    if dist.is_initialized():
        world = dist.group.WORLD
        assert world is not None
        store = world.get_group_store()
    else:
        hosts_it = member == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=hosts_it, wait_for_workers=False
        )
    # Each process counts for itself how many jobs it has been in: alike on all that do the same.
    process = f"patrickstar/jobs/{member}/{os.getpid()}"
    name = f"patrickstar/job/{store.add(process, 1)}"
    return ElasticJob(store, name, member, least=least, most=most, size=int(os.environ.get(PRESENT, least)))
