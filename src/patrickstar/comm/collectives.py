"""Collectives over ranks, one after another, in the order of their issue: a thread does them, and callers wait on tickets.

(1) All ranks do the same, or none does: before each collective the ranks compare what each is about to do. No byte of data moves before.
(2) Nothing hangs: a collective is asked whether it has ended, and the watch whether all ranks are there. Whoever waits on a ticket waits for neither.
(3) An error is for ever: what comes after one that failed fails with it. What torch has under way then is given up, and may still write.
(4) A sum has the bits of the formula: in the order of ranks, in fp32, whatever the backend and the number of hosts.
"""

from __future__ import annotations

import atexit
import hashlib
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from patrickstar.comm.ranks import Ranks
from patrickstar.comm.transport import Transport, as_bytes
from patrickstar.comm.watch import POLL_S, News, Patience, Watch
from patrickstar.errors import RankError, StateError, some
from patrickstar.memory.lanes import Task, ThreadTicket, Ticket
from patrickstar.torch_private import all_gather, one_thread_here

_T = TypeVar("_T")

ANNOUNCEMENT_BYTES: Final = 256
_DIGEST_BYTES: Final = 16
_SUMMED_AT_ONCE: Final = 1 << 18  # elements
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 5e-5, 1e-3
_GRACE_S: Final = 5.0  # for the watch to find out who it was
_MORE_THAN_OURS_S: Final = 15.0
_WAITS_ON_S: Final = 5.0  # who looks at others is at it that long: hearts are heard meanwhile, and then it looks again


@dataclass(frozen=True, slots=True, eq=False)
class _Collective:
    """One collective. `text`: kind and name; `detail`: what else must be alike; `act`: what it does, once."""

    number: int
    text: str
    detail: str
    act: list[Task]
    end: Future[None]


class Collectives:
    """Collectives of one rank. Every rank issues the same ones, in one order; waiting is for whoever needs a result.

    After a `RankError` all tickets fail with it, those of later calls, too. Tensors belong to a collective until its ticket is done.

    Args:
        timeout_s: the longest time to wait for other ranks. kind: of errors about other ranks.

    Attributes:
        ranks: which they are. me: this one, in messages. past: words for what all have done alike so far, which is compared with every collective.
        sent_bytes: data that this rank has sent.
    """

    def __init__(self, ranks: Ranks, *, timeout_s: float = 600.0, kind: type[RankError] = RankError) -> None:
        self.sent_bytes = 0
        self.past = ""
        self.ranks = ranks
        self._timeout_s = timeout_s
        self._process = os.getpid()
        self.me = ranks.names([ranks.rank])

        self._issued = -1
        self._under_way: dict[int, Future[None]] = {}
        self._given_up: list[Any] = []
        self._transport = Transport(ranks, self._finish)
        self._closed = False
        self._lock = threading.Lock()
        self._queue: SimpleQueue[_Collective | None] = SimpleQueue()
        self._watch = Watch(ranks, self._fail_what_cannot_be, kind=kind)
        # A daemon: where torch does not come back, it keeps no program from its end.
        self._thread = threading.Thread(target=self._run, name="patrickstar collectives", daemon=True)
        self._thread.start()
        atexit.register(self._leave_at_exit)
        self._issue("open", "groups", "", self._open)

    @property
    def failure(self) -> RankError | None:
        """The error with which every call fails from now on, if there is one."""
        return self._watch.failure_of(self._issued + 1)

    def gather(self, out: torch.Tensor, shard: torch.Tensor, what: str) -> Ticket:
        """Has `out` [p * n] get the shards [n] of all ranks, in their order. `shard`: perhaps its place in `out`."""
        assert (out.numel(), out.dtype) == (self.ranks.size * shard.numel(), shard.dtype)
        return _carry(self, "gather", what, shard, lambda: self._transport.gather(out, shard))

    def exchange(
        self,
        out: torch.Tensor,
        parts: torch.Tensor,
        what: str,
        *,
        flags: bytearray | None = None,
        kind: str = "exchange",
        then: Task | None = None,
    ) -> Ticket:
        """Has `out` [p * n] get the pieces of all ranks' `parts` [p * n] that are for this one, in their order.

        `flags`: each byte becomes the bitwise or of those of all ranks. `kind`, `then`: see `reduce`, which does `then` with what has come.
        """
        size = self.ranks.size
        assert (out.numel(), out.dtype) == (parts.numel(), parts.dtype)
        own = parts.view(-1)[: parts.numel() // size]

        def act() -> None:
            works = []
            if flags is not None:
                mine = torch.frombuffer(flags, dtype=torch.uint8)
                of_all = mine.new_empty(size, len(flags))
                works.append(all_gather(self.ranks.group, as_bytes(of_all), mine))
            self._transport.exchange(out, parts, works)
            if then is not None:
                then()
            if flags is not None:
                for theirs in of_all:
                    mine.bitwise_or_(theirs)

        return _carry(self, kind, what, own, act, also=f", {len(flags or ())} flags")

    def reduce(
        self, out: torch.Tensor, partial: torch.Tensor, into: torch.Tensor, what: str, *, flags: bytearray | None = None
    ) -> Ticket:
        """Has `out` [n], in fp32, be f(1/n) * (((g0 + g1) + g2) + ...), of the pieces of all ranks' `partial` [p * n] that are this rank's.

        `into`: to receive into, as `partial`, whose type travels. `flags`: as in `exchange`.
        """
        assert out.dtype is torch.float32
        assert partial.numel() == self.ranks.size * out.numel()
        rows = into.view(self.ranks.size, -1)

        def add() -> None:
            sum_in_rank_order(out, rows, averaged=self.ranks.averaged)

        return self.exchange(into, partial, what, flags=flags, kind="reduce", then=add)

    def agree(self, value: _T, what: str, *, within_s: float = math.inf) -> list[_T]:
        """The values of all ranks, in their order, by pickle; waits for them, and no longer than so: all calls of all ranks fail then."""
        mine, values = pickle.dumps(value), list[bytes]()

        def act() -> None:
            lengths = self._gather_bytes(len(mine).to_bytes(8, "little"))
            longest = max(int.from_bytes(length, "little") for length in lengths)
            values.extend(self._gather_bytes(mine.ljust(longest, b"\0")))

        ticket, patience = self._issue("agree", what, "", act), Patience(within_s)
        while within_s < math.inf and not ticket.done:
            if patience.is_over:
                reason = f"{self.me} was about to agree {what}, and the others were not within {within_s:g} s"
                raise self._failed(News((self.ranks.rank,), what, reason))
            time.sleep(_LONGEST_PAUSE_S)
        ticket.wait()
        return [pickle.loads(theirs) for theirs in values]  # noqa: S301  (of ranks of this program)

    def look(self, waited_s: float, error: RuntimeError | None = None) -> None:
        """Raises RankError where whoever has waited so long for these ranks, by other means, waits in vain: for one that has failed, or for too long.

        `error`: of torch's, with which waiting has ended: of that in any case.
        """
        number, self._watch.position.waits_until = self._issued + 1, time.monotonic() + _WAITS_ON_S
        if error is not None:
            raise self._broken(number, error) from error
        self._check(number)
        if waited_s > self._timeout_s:
            ranks, found = self._watch.late_for(None)
            reason = f"{self.me} has waited for other ranks for {self._timeout_s:g} s: {found}"
            raise self._failed(News(ranks, "a wait", reason))

    def close(self, reason: str = "") -> None:
        """Takes part in nothing any more, and tells the others. Waits for nobody; what is under way fails."""
        with self._lock:
            if self._closed or os.getpid() != self._process:  # a forked child speaks for nobody
                return
            self._closed = True
            ends = list(self._under_way.values())
        for end in ends:
            _set(end, StateError("communication between ranks is closed"))
        self._queue.put(None)
        self._watch.leave("close()" if not reason else "exit", reason or f"{self.me} has closed its session")
        self._thread.join(1)
        self.ranks.close(abandons=bool(ends or self._given_up) or self._thread.is_alive())
        if self.ranks.rank > 0:
            atexit.unregister(self._leave_at_exit)

    def _leave_at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        how = f" after {type(error).__name__}: {error}" if error is not None else ""
        self.close(f"{self.me} has ended{how}")
        if self.ranks.rank == 0 and os.getpid() == self._process:
            time.sleep(2 * POLL_S)  # the others read the news: the store ends with the process that holds it

    def _issue(self, kind: str, what: str, detail: str, act: Task) -> Ticket:
        end: Future[None] = Future()
        with self._lock:
            self._issued += 1
            number = self._issued
            if self._closed:
                _set(end, StateError("communication between ranks is closed"))
            self._under_way[number] = end
            alike = ", ".join(filter(None, (detail, self.past)))
            self._queue.put(_Collective(number, f"{kind} {what}", alike, [act], end))
        end.add_done_callback(lambda _: self._under_way.pop(number, None))
        self._fail_what_cannot_be()
        return ThreadTicket(end)

    def _open(self) -> None:
        try:
            self.ranks.open(timeout_s=self._timeout_s + _MORE_THAN_OURS_S)
        except RuntimeError as error:  # another rank may have gone, which says why
            raise self._broken(0, error) from error
        self._watch.meet()

    def _fail_what_cannot_be(self) -> None:
        for number, end in list(self._under_way.items()):
            if (error := self._watch.failure_of(number)) is not None:
                _set(end, error)

    def _run(self) -> None:
        with torch.no_grad(), one_thread_here():
            while (collective := self._queue.get()) is not None:
                if not collective.end.done():
                    self._do(collective)

    def _do(self, collective: _Collective) -> None:
        at = self._watch.position
        try:
            at.number, at.doing = collective.number, collective.text
            if collective.number > 0:
                self._announce(collective)
            collective.act.pop()()  # what it read and wrote is let go of before whoever waits goes on
        except BaseException as error:
            _set(collective.end, error)
            # Where it is of this rank alone, the others have to know.
            if not self._closed and self._watch.failure_of(collective.number) is None:
                reason = f"{self.me} failed: {type(error).__name__}: {error}"
                self._watch.note(News((self.ranks.rank,), collective.text, reason))
        else:
            at.done, at.doing = collective.number, ""
            _set(collective.end, None)

    def _announce(self, collective: _Collective) -> None:
        text = f"{collective.text} (collective {collective.number}: {collective.detail})".encode()
        row = hashlib.sha256(text).digest()[:_DIGEST_BYTES] + text[: ANNOUNCEMENT_BYTES - _DIGEST_BYTES]
        rows = self._gather_bytes(row.ljust(ANNOUNCEMENT_BYTES, b"\0"))
        if len(set(rows)) == 1:
            return
        ranks_of = {row: [rank for rank, theirs in enumerate(rows) if theirs == row] for row in dict.fromkeys(rows)}
        texts = {row: row[_DIGEST_BYTES:].rstrip(b"\0").decode(errors="replace") for row in ranks_of}
        said = [f"{self.ranks.names(ranks_of[row])}: {text}" for row, text in texts.items()]
        most = max(ranks_of, key=lambda row: len(ranks_of[row]))  # the first of those
        reason = (
            f"ranks were about to do different things, and nothing was exchanged: {some(said, most=8, separator='; ')}. All ranks call"
            " the same modules, in the same order, for as many batches"
        )
        odd = [rank for row, ranks in ranks_of.items() if row != most for rank in ranks]
        raise self._failed(News(odd, collective.text, reason))

    def _gather_bytes(self, row: bytes) -> list[bytes]:
        """The bytes of all ranks, as many of each, and not none."""
        mine = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        rows = mine.new_empty(self.ranks.size, len(row))
        self._finish(all_gather(self.ranks.group, as_bytes(rows), mine))
        return [theirs.numpy().tobytes() for theirs in rows]

    def _finish(self, *works: dist.Work) -> None:
        """Returns when works of torch have ended. RankError: they will not, or have not ended well; or it takes too long."""
        number = self._watch.position.number
        patience, pause = Patience(self._timeout_s), _SHORTEST_PAUSE_S
        try:
            for work in works:
                while not work.is_completed():
                    self._check(number)
                    if patience.is_over:
                        ranks, found = self._watch.late_for(number)
                        reason = f"{self._watch.position.doing} has not ended within {self._timeout_s:g} s: {found}"
                        raise self._failed(News(ranks, self._watch.position.doing, reason))
                    time.sleep(pause)
                    pause = min(1.5 * pause, _LONGEST_PAUSE_S)
                work.wait()  # for what it raises
        except (RankError, StateError, RuntimeError) as error:
            self._given_up.append(works)
            self.ranks.abort()
            if isinstance(error, RankError | StateError):
                raise
            raise self._broken(number, error) from error

    def _check(self, number: int) -> None:
        if self._closed:
            raise StateError("communication between ranks is closed")
        if (error := self._watch.failure_of(number)) is not None:
            raise error

    def _broken(self, number: int, error: RuntimeError) -> RankError:
        """The error for a connection that is broken: the watch's, if it finds out why."""
        patience = Patience(_GRACE_S)
        while not patience.is_over:
            self._check(number)
            time.sleep(_LONGEST_PAUSE_S)
        reason = f"a connection to another rank broke: {error}"
        return self._failed(News(sorted(self._watch.absent), self._watch.position.doing, reason))

    def _failed(self, news: News) -> RankError:
        """The error that news make, told to the others."""
        self._watch.note(news)
        error = self._watch.failure_of(sys.maxsize)
        assert error is not None
        return error


def _carry(by: Collectives, kind: str, what: str, sent: torch.Tensor, move: Task, *, also: str = "") -> Ticket:
    """Issues a collective of data. `sent`: as much as each rank gets of each other. `also`: what else must be alike."""

    def act() -> None:
        move()
        by.sent_bytes += (by.ranks.size - 1) * sent.nbytes

    act_there = by._transport.after_now(sent.device, act)
    return by._issue(kind, what, f"{sent.numel()} {sent.dtype}{also}", act_there)


def redistribute(
    by: Collectives, out: torch.Tensor, given: torch.Tensor, *, received: Sequence[int], sent: Sequence[int], what: str
) -> Ticket:
    """Has each rank get its part of `given` [n], and `out` [m] what is for this one, in rank order.

    `received`, `sent`: how many elements come from each rank, and go to each, this one included.
    """

    def act() -> None:
        by._transport.redistribute(out, given, received, sent)
        by.sent_bytes += (sum(sent) - sent[by.ranks.rank]) * given.element_size()

    return by._issue("redistribute", what, str(given.dtype), by._transport.after_now(given.device, act))


def sum_in_rank_order(out: torch.Tensor, pieces: torch.Tensor, *, averaged: int) -> None:
    """Has `out` [n] be f(1/averaged) * (((g0 + g1) + g2) + ...), of the rows of `pieces` [p, n]: in fp32, element for element."""
    for start in range(0, out.numel(), _SUMMED_AT_ONCE):
        total = out[start : start + _SUMMED_AT_ONCE]
        total.copy_(pieces[0, start : start + len(total)])
        for piece in pieces[1:]:
            total.add_(piece[start : start + len(total)])
        total.mul_(1 / averaged)


def _set(end: Future[None], error: BaseException | None) -> None:
    with suppress(InvalidStateError):  # it is over
        if error is None:
            end.set_result(None)
        else:
            end.set_exception(error)
