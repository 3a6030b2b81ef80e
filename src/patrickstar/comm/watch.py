"""A watch over the ranks: notices which of them is gone, has failed or has left, and tells it to all.

A rank of the same host is gone when its process is. One of another host is gone when its heart stands still: a number in the store that its watch
counts up. Each rank looks at the heart of the next one only. Whoever notices writes it into the store, where all ranks read the news. A thread of
each rank does that, a few times a second, whatever its others do.

Nothing of other ranks is ever waited for here, and nothing of the store longer than its timeout, seconds.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from patrickstar.comm.ranks import Ranks
from patrickstar.errors import RankError, some

POLL_S: Final = 0.25  # from one look at the ranks to the next
_BEAT_S: Final = 1.0
_SILENT_S: Final = 20.0  # a heart that stands still for that long
_STORE_GONE_S: Final = 10.0
_TIMES_GONE: Final = 4  # what a rank wrote before its end, and what it sent, comes first
_LONGEST_LOOK_S: Final = 1.0


class Patience:
    """A time that runs while somebody looks at it: not while this process, or the machine, is stopped."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._seen = time.monotonic()

    @property
    def is_over(self) -> bool:
        """True once that time has passed."""
        now = time.monotonic()
        self._left -= min(now - self._seen, _LONGEST_LOOK_S)
        self._seen = now
        return self._left < 0


@dataclass(frozen=True, slots=True)
class Process:
    """A process. `host`: of which machine and which namespace; "" where processes cannot be looked at."""

    host: str
    pid: int
    started: str

    @classmethod
    def own(cls) -> Process:
        """The process that asks."""
        try:
            host = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(
                Path("/proc/self/ns/pid").readlink()
            )
            return cls(host, os.getpid(), _state(os.getpid())[1])
        except OSError:
            return cls("", os.getpid(), "")

    @property
    def is_gone(self) -> bool:
        """True where it has ended, whether or not somebody has asked for its status."""
        try:
            state, started = _state(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:  # no file can be opened, say
            return False
        return state in "ZX" or started != self.started


def _state(pid: int) -> tuple[str, str]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


@dataclass(frozen=True, slots=True)
class News:
    """Something that has become of ranks.

    Attributes:
        ranks: which, as numbers of the group. action, reason: see `RankError`.
        after: the number of the last collective that it does not concern: a rank that has left took part in those before.
        has_left: whether it is about a rank that said so itself.
    """

    ranks: Sequence[int]
    action: str
    reason: str
    after: int = 0
    has_left: bool = False


@dataclass(slots=True)
class Position:
    """The numbers of the last collective that ended on a rank and of the last that began there, and which that is.

    `waits_until`: a time on its clock until when it is known to wait for others by other means; of another rank, how long from then on.
    """

    done: int = 0
    number: int = 0
    doing: str = ""
    waits_until: float = 0.0


class Watch:
    """The watch of one rank.

    `on_failure`: called once there is an error for collectives that were none before, by whichever thread notices. `kind`: of the errors.

    Attributes:
        position: how far this rank has come; written by whoever does the collectives. absent: the ranks that have left, or are gone.
    """

    def __init__(self, ranks: Ranks, on_failure: Callable[[], None], *, kind: type[RankError]) -> None:
        self.position = Position()
        self._ranks = ranks
        self._store = ranks.store
        self._on_failure = on_failure
        self._kind = kind

        self._failures: list[tuple[int, RankError]] = []  # and the last collective that each does not concern
        self.absent: set[int] = set()
        self._read = 0
        self._own = Process.own()
        self._has_met = False
        self._beside: dict[int, Process] = {}  # of other ranks on this host
        self._looks: Counter[int] = Counter()  # at which each was found gone
        self._beats = 0
        self._beat_due = 0.0
        self._heard = b""
        self._silence = Patience(_SILENT_S)
        self._store_silence: Patience | None = None
        self._stopped = threading.Event()
        self._store.set(f"who/{ranks.rank}", json.dumps(asdict(self._own)))
        self._thread = threading.Thread(target=self._run, name="patrickstar watch", daemon=True)
        self._thread.start()

    def meet(self) -> None:
        """Has the watch look at the other ranks, all of which have one now."""
        me, here = self._ranks.rank, self._own.host
        known = {rank: Process(**json.loads(self._store.get(f"who/{rank}"))) for rank in range(self._ranks.size)}
        self._beside = {rank: one for rank, one in known.items() if rank != me and here and one.host == here}
        self._has_met = True

    def failure_of(self, number: int) -> RankError | None:
        """The reason why a collective of that number cannot be, if it cannot."""
        return next((error for after, error in self._failures if number > after), None)

    def note(self, news: News, *, tells: bool = True) -> None:
        """Takes note of news, and tells the others."""
        ranks, at = self._ranks, self.position
        here = f" ({ranks.names([ranks.rank])} was at {at.doing}, collective {at.number})" if at.doing else ""
        message = f"{news.reason}{here}; only close() works now: start again from the newest checkpoint"
        error = self._kind(message, ranks=ranks.numbers(news.ranks), action=news.action, reason=news.reason)
        if tells:  # first: who hears of it here may close, and say that
            self._tell(news)
        self._failures.append((news.after, error))
        self._on_failure()

    def leave(self, action: str, reason: str) -> None:
        """Tells the others that this rank takes part in nothing any more, and ends the watch. Takes two seconds at most."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        news = News((self._ranks.rank,), action, reason, self.position.done, has_left=True)
        telling = threading.Thread(target=self._tell, args=(news,), daemon=True)
        telling.start()
        # In the store's code at the end of the program, a thread would bring it down.
        telling.join(1)
        self._thread.join(1)

    def late_for(self, number: int | None) -> tuple[list[int], str]:
        """The ranks that are to blame where a collective does not end, and what is known of them. Takes seconds: hearts are heard twice.

        Without a number: where ranks wait by other means, those that do not.
        """
        first = self._hear(range(self._ranks.size))
        time.sleep(2.5 * _BEAT_S)
        now = self._hear(range(self._ranks.size))
        names = self._ranks.names
        others = [rank for rank in range(self._ranks.size) if rank != self._ranks.rank]
        if silent := [rank for rank in others if now.get(rank) == first.get(rank)]:
            return silent, f"{names(silent)} did not answer"
        at = {rank: Position(*json.loads(heard)[1:]) for rank, heard in now.items()}
        behind = [rank for rank in at if (at[rank].waits_until <= 0 if number is None else at[rank].number < number)]
        texts = [f"{names([r])} was at collective {at[r].number}, {at[r].doing or 'none'}" for r in behind]
        return behind, some(texts, most=8, separator="; ") or "all ranks are there"

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            self._look_at_processes()
            if self._store_silence is not None and not self._store_silence.is_over:
                continue  # each call would write to stderr
            try:
                self._read_news()
                if not self._has_met and self._store.check([f"who/{rank}" for rank in range(self._ranks.size)]):
                    self.meet()
                self._beat()
            except Exception as error:
                if self._store_silence is not None:
                    reason = "the store of the process group is gone: the process that holds it (rank 0, or torchrun)"
                    reason = f"{reason} has ended: {str(error).partition(chr(10))[0]}"
                    self.note(News((), self.position.doing, reason), tells=False)
                    return
                self._store_silence = Patience(_STORE_GONE_S)
            else:
                self._store_silence = None

    def _read_news(self) -> None:
        while self._store.check([f"news/{self._read + 1}"]):
            news = News(**json.loads(self._store.get(f"news/{self._read + 1}")))
            self._read += 1
            if news.has_left:
                self.absent.update(news.ranks)
            self.note(news, tells=False)

    def _tell(self, news: News) -> None:
        if self._store_silence is not None:
            return
        text, number = json.dumps(asdict(news)), self._read + 1
        with suppress(RuntimeError):  # nobody reads it any more
            while self._store.compare_set(f"news/{number}", "", text).decode() != text:
                number += 1

    def _beat(self) -> None:
        if time.monotonic() < self._beat_due:
            return
        self._beat_due = time.monotonic() + _BEAT_S
        self._beats += 1
        at = self.position
        waits = at.waits_until - time.monotonic()
        self._store.set(f"beat/{self._ranks.rank}", json.dumps([self._beats, at.done, at.number, at.doing, waits]))
        after_me = (self._ranks.rank + 1) % self._ranks.size
        if not self._has_met or after_me in self._beside or after_me in self.absent:
            return
        heard = self._hear([after_me]).get(after_me, b"")
        if heard != self._heard:
            self._heard, self._silence = heard, Patience(_SILENT_S)
        elif self._silence.is_over:
            self._gone(after_me, f"has not been heard for {_SILENT_S:.0f} s: it, its host or the network is down")

    def _hear(self, ranks: Collection[int]) -> dict[int, bytes]:
        return {rank: self._store.get(f"beat/{rank}") for rank in ranks if self._store.check([f"beat/{rank}"])}

    def _look_at_processes(self) -> None:
        for rank in sorted(self._beside.keys() - self.absent):
            self._looks[rank] += self._beside[rank].is_gone
            if self._looks[rank] == _TIMES_GONE:
                pid = self._beside[rank].pid
                self._gone(rank, f"has ended without a word: its process {pid} was killed, or crashed")

    def _gone(self, rank: int, how: str) -> None:
        self.absent.add(rank)
        self.note(News((rank,), self.position.doing, f"{self._ranks.names([rank])} {how}"))
