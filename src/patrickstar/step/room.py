"""Room on the tier that computes: how much there is, and what gives way where it is short.

A budget is shared by chunk slots and by what lies beside them: activations, workspaces, tensors of the user's. A plan leaves room for what its trace
has; what is really there shows in another way on each device, and that is all that the three kinds of `Room` differ in (`device_room.py` has one).

| | what lies beside chunks is known by | more than was foreseen |
|---|---|---|
| `HostRoom` | the trace; a meter where there is no trace; with a bound, the size of the process | chunks leave, which is said once |
| `EmulatedRoom` | a meter, in every step | chunks leave, and then it is an error |
| `DeviceRoom` | torch's allocator; a meter where there is no trace | as `EmulatedRoom`; and later plans leave more room |

A forecast for a device is low: kernels take what no trace shows. A share of the budget is left for that (`core/fixed_costs.py`) until a step of a
kind has shown what they take. Then its plans have that much more at every moment; where the budget has not, the next such step is refused.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Phase, Touch, Trace
from patrickstar.memory.allocator import allocator, release_free_memory, return_at_once
from patrickstar.memory.leases import Leases
from patrickstar.memory.process import resident_bytes
from patrickstar.memory.store import ChunkStore
from patrickstar.plan.actions import Action, Wait, Work, slots_taken
from patrickstar.plan.fit import Need, advise, refuse_moment
from patrickstar.plan.pilot import Pilot
from patrickstar.plan.plan import Plan
from patrickstar.plan.simulate import simulate
from patrickstar.plan.stretch import Stretch
from patrickstar.step.budgets import Budgets, leaves_room
from patrickstar.step.known_forwards import KnownForward
from patrickstar.step.pending_step import PendingStep
from patrickstar.torch_private import Plain
from patrickstar.tracing.live_bytes import LiveBytes
from patrickstar.units import MIB, format_bytes

_SLACK_BYTES = 40 * MIB  # of the 48 MiB of fixed costs
_SLACK_SHARE = 128  # of the 1 % of them
# Above what chunks and activations may take: from here on the allocator is asked for what it keeps.
EARLY_BYTES = 16 * MIB
_STEP_BYTES = 16 * MIB  # of growth, with what is to come, for which it is asked again
_Moment = tuple[Phase, str, Sequence[Touch], Collection[PlaneRef], Work | None]
"""A moment as the pilot decides about it: phase, label, touches, what is held, and the update that begins."""
_log = logging.getLogger("patrickstar")


class Room:
    """The room of one session. What is common: the trace, and a meter of live bytes, on from the beginning of a forward to the end of its backward.

    Attributes:
        lock: held by whoever changes what is in memory. meter: while one counts. always_meters: whether every forward is metered.
        level_bytes: the most bytes beside chunks at any moment so far, foreseen or taken. kept_bytes: what libraries keep from first steps on.
        is_short: whether more was taken than may be in the last stretch, in whose middle nothing could leave.
    """

    always_meters: ClassVar[bool] = False

    def __init__(self, pilot: Pilot, store: ChunkStore, budgets: Budgets) -> None:
        self._pilot = pilot
        self._store = store
        self._budgets = budgets
        self._compute = budgets.machine.compute
        self._room_bytes = budgets.machine.budget[self._compute]
        self._is_bounded = budgets.host_binds or self._compute is Tier.DEVICE
        # On the host an operation's result is there before it is counted: some room is left for that.
        self._metered_bytes = self._room_bytes - budgets.spare_bytes - budgets.fixed_bytes
        self.lock = threading.RLock()
        self.meter: LiveBytes | None = None
        self.level_bytes = budgets.passes.update
        self.kept_bytes = 0
        self.is_short = False
        self._started: LiveBytes | None = None  # the one that is on, counting or not
        self._acts = True
        self._abandoned: weakref.finalize[Any, Any] | None = None
        self._before_bytes = 0  # beside chunks, at the moment before
        self._making_bytes = 0

    def planned(self, plan: Plan, trace: Trace) -> None:
        """Takes note of a plan that a stretch is about to follow."""

    def begin(self, stretch: Stretch, there_bytes: int) -> None:
        """Begins to count for a stretch. `there_bytes`: of tensors of before that count among its activations."""

    def look(self) -> None:
        """Notes what has been taken since the last moment, where that shows afterwards only."""

    def end(self, stretch: Stretch, known: KnownForward | None, *, budget_bytes: int) -> None:
        """Ends the count for a stretch, and learns from it. `known`: of its forward; `budget_bytes`: what chunks and activations may take."""

    def rise(self, nbytes: int) -> None:
        """Notes that a moment takes so much beside chunks."""
        self.level_bytes = max(self.level_bytes, nbytes)

    def within(self, actions: Sequence[Action], moment: _Moment) -> Sequence[Action]:  # noqa: ARG002
        """Actions before a moment that leave what lies beside chunks its room: these, or others that are decided on the spot."""
        return actions

    def beside_bytes(self) -> int:
        """Bytes that lie beside chunks now: as a meter has them, else as the trace does, else what is reserved for them."""
        if self.meter is not None:
            return self.meter.live
        stretch = self._pilot.stretch
        followed = stretch.followed
        if followed is not None and followed.trace.moments:
            return followed.trace.moments[stretch.position - 1 if stretch.position else 0].nonmodel_bytes
        return stretch.reserve_bytes if stretch.trace is not None else 0

    @property
    def is_measured(self) -> bool:
        """True where what lies beside chunks is known by more than a trace."""
        return self.meter is not None

    def open(self, actions: Sequence[Action], pending: PendingStep | None) -> None:
        """Has done what may be done as soon as a stretch has begun."""
        if self.meter is None:
            # What the last stretch held is gone, as far as this one does not hold it.
            now = self.beside_bytes()
            self._store.hold_beside(now if self.is_measured else min(now, self._before_bytes))
        if actions:
            self.carry_out(actions, f"the start of the {self._pilot.stretch.kind}", pending)
        self._store.units.trim()

    def make(self, actions: Sequence[Action], phase: Phase, label: str, pending: PendingStep | None) -> None:
        """Has done what comes before a moment."""
        store, now = self._store, self.beside_bytes()
        if actions:
            # What is alive between two moments is part of both.
            store.hold_beside(now if self.is_measured else min(now, self._before_bytes))
            self.carry_out(actions, phase + " " + label, pending)
        if store.units.committed_slots > store.units.limit_slots:
            store.units.trim()
        store.hold_beside(now)
        self._before_bytes = now

    def carry_out(self, actions: Sequence[Action], during: str, pending: PendingStep | None = None) -> None:
        """Has actions done, updates as the step has them that is pending. What comes after one that fails begins elsewhere than in the plan."""
        try:
            with Plain() if self.meter is None else self.uncounted():
                work = None if pending is None else partial(pending.doer.work, pending)
                self._store.carry_out(actions, during=during, update_work=work)
        except BaseException:
            self._pilot.stretch.depart(f"a transfer at {during} was not done")
            raise

    @contextmanager
    def making(self, nbytes: int, *, is_budgeted: bool = False) -> Iterator[None]:
        """Leaves room for a tensor that is being filled, in the moments meanwhile. `is_budgeted`: what chunks may take has become less by it."""
        stretch, leases = self._pilot.stretch, self._store.leases
        reserved = 0 if is_budgeted else nbytes
        self._making_bytes += nbytes
        leases.making_bytes += nbytes - reserved
        stretch.reserve(reserved)
        try:
            yield
        finally:
            self._making_bytes -= nbytes
            leases.making_bytes -= nbytes - reserved
            stretch.reserve(-reserved)

    def start_meter(self, *, acts: bool) -> LiveBytes:
        """Switches the meter on, which it gives. `acts`: whether chunks may leave for what it counts."""
        # The thread holds a meter that is on: through it, it must not hold a session that everybody else has dropped.
        leases, room = weakref.proxy(self._store.leases), weakref.proxy(self)
        is_slot, at_change = partial(Leases.is_counted, leases), partial(Room.live_changed, room)
        meter = LiveBytes(is_slot, at_change, on_device=self._budgets.stream_device is not None)
        meter.switch_on()
        self._abandoned = weakref.finalize(self, meter.retire)
        self._abandoned.atexit = False
        self.meter = self._started = meter
        self._acts = acts
        return meter

    def pause_meter(self) -> None:
        """Stops counting: what is made from now on is no part of the step. (It is left when the next stretch begins.)"""
        if self._started is not None:
            self._started.counts, self.meter = False, None
            self._store.hold_beside(0)

    def stop_meter(self) -> None:
        """Switches the meter off."""
        self.pause_meter()
        self._started = None
        if self._abandoned is not None:
            self._abandoned.detach()
        LiveBytes.leave_retired()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """A context in which bytes are not counted: a lane may do its works in the thread that waits for them."""
        meter = self.meter
        if meter is None:
            yield
            return
        counted, meter.counts = meter.counts, False
        try:
            yield
        finally:
            meter.counts = counted

    def live_changed(self, live: int) -> None:
        """Makes room for the live bytes that the meter has just seen."""
        if self._acts and (over := self._over_bytes(self._store.state.slots_used[self._compute])):
            self._make_way(over)
        self._store.hold_beside(live)

    def _over_bytes(self, slots: int) -> int:
        """Bytes by which live bytes and so many slots would exceed what both may take; 0 where nobody gave a bound, or nobody knows."""
        if self.meter is None or not self._is_bounded or LiveBytes.is_shared():
            return 0
        bound = self._metered_bytes - self._store.leases.assembled_bytes()
        return max(0, slots * self._store.state.slot_bytes + self.meter.live - bound)

    def _make_way(self, over_bytes: int) -> None:
        """Has chunks leave that nothing uses, in the middle of a moment, for more live bytes than were foreseen, which is said."""
        state = self._store.state
        with self.lock:
            slot_bytes = state.slots_used[self._compute] * state.slot_bytes - over_bytes
            actions = self._pilot.clearing(slot_bytes, self._store.leases.held())
            self.carry_out(actions, "the middle of an op")
            self._store.units.trim()


class HostRoom(Room):
    """The room where the host computes. With a bound, the process itself is held against it.

    A plan counts live bytes and what the allocator is known to keep; the size of the process shows what neither has: a forward that cannot be
    traced, tensors of the user's, an allocator that keeps more.

    Blocks that are freed and kept save the page faults of the next ones. They have the room that chunks and activations leave, and are asked for
    before they would be too much; between two looks the allocator may take a little more than what is live, for which a plan must leave room.
    Making it return blocks is for the whole process and, under glibc, for good. So the first plan decides, and any later one that needs more.
    """

    def __init__(self, pilot: Pilot, store: ChunkStore, budgets: Budgets) -> None:
        super().__init__(pilot, store, budgets)
        limit = budgets.resident_limit_bytes
        self._limits = (limit + EARLY_BYTES, limit + _SLACK_BYTES + self._room_bytes // _SLACK_SHARE)
        self._keeps_blocks = self._is_bounded
        self._has_told = False
        self._least_bytes = 0  # resident, since the allocator was last asked

    def planned(self, plan: Plan, trace: Trace) -> None:
        """Has freed blocks returned from now on where the plan takes the room that they would be kept in."""
        if self._keeps_blocks and not leaves_room(simulate(plan, trace), trace, self._budgets, allocator()):
            self._return_at_once("a plan takes the room that they would be kept in")

    def begin(self, stretch: Stretch, there_bytes: int) -> None:  # noqa: ARG002
        """Has freed blocks returned where nobody knows what the stretch takes."""
        if stretch.reason:
            self._return_at_once(f"the {stretch.kind} runs unplanned")

    def end(self, stretch: Stretch, known: KnownForward | None, *, budget_bytes: int) -> None:  # noqa: ARG002
        """Has freed blocks returned after a stretch that was not foreseen, and looks at the process after one in which nobody could."""
        self.is_short = self._is_bounded and stretch.gradient_bytes is not None and self.is_exceeded_by(0)
        if stretch.reason:
            self._return_at_once(f"the {stretch.kind} was not as planned")

    def _return_at_once(self, why: str) -> None:
        """Makes the allocator keep no freed block from now on, for this reason. See decision 0002 for what that costs."""
        keeps, self._keeps_blocks = self._keeps_blocks, False
        if keeps and (done := return_at_once()):
            told = "%s at once, for the whole process and for good, since %s; steps take longer by the page faults"
            _log.info(told, done, why)

    def within(self, actions: Sequence[Action], moment: _Moment) -> Sequence[Action]:
        """Actions with which the process stays within the bound, if there is one."""
        if not self._is_bounded:
            return actions
        store, slot_bytes = self._store, self._store.state.slot_bytes
        # Those that will hold pages.
        slots = max(slots_after(actions, store), min(store.units.committed_slots, self._pilot.capacity_slots))
        growth = (slots - store.units.committed_slots) * slot_bytes + self._rise_bytes()
        # Pages of slots whose transfers are under way come with these. Those that have come count as resident already.
        arriving = store.works.arriving_slots * slot_bytes
        if arriving and self.is_exceeded_by(growth + arriving):
            arriving = store.works.arriving_bytes()
        excess = self.excess_bytes(growth + arriving)
        if not excess:
            return actions
        self._pilot.yield_bytes(excess, slots=slots)
        return self._pilot.decided(*moment)

    def look_again(self) -> None:
        """Has the allocator give back what it keeps, where the process would pass its bound in the rest of a moment."""
        if self._is_bounded:
            self.excess_bytes(self._rise_bytes())

    def _rise_bytes(self) -> int:
        """Bytes by which what is alive beside the slots grows until the next moment, as far as that is known."""
        stretch = self._pilot.stretch
        if stretch.followed is None or not stretch.position:
            return self._making_bytes
        # From what is alive now, not from the last moment's peak: what was made in between may be gone, and its memory returned.
        moment = stretch.followed.trace.moments[stretch.position - 1]
        return self._making_bytes + moment.nonmodel_bytes - moment.live_bytes

    def is_exceeded_by(self, growth_bytes: int) -> bool:
        """Tells whether the process would be too large once it has grown by so much, with nothing given back."""
        return resident_bytes() + growth_bytes > self._limits[1]

    def excess_bytes(self, growth_bytes: int) -> int:
        """Bytes that will be resident beyond what may be once the process has grown by so much, with what the allocator keeps given back."""
        early, limit = self._limits
        resident = resident_bytes()
        self._least_bytes = min(self._least_bytes, resident)
        if resident + growth_bytes <= early:
            return 0
        # A heap with holes from before, as building a model leaves them, keeps what is freed into them whatever its thresholds.
        if resident + growth_bytes > min(limit, self._least_bytes + _STEP_BYTES):
            release_free_memory()
            resident = self._least_bytes = resident_bytes()
        excess = max(0, resident + growth_bytes - limit)
        if excess and not self._has_told:
            self._has_told = True
            _log.warning(
                "the process holds %s more than host_memory allows and the plan has: chunks are evicted to make room. Tensors that "
                "the program keeps (outputs of a step, copies of weights) count as well",
                format_bytes(excess),
            )
        return excess


class EmulatedRoom(Room):
    """The room on an emulated device: chunks and live bytes together are never more than the budget, or it is an error."""

    always_meters = True

    def within(self, actions: Sequence[Action], moment: _Moment) -> Sequence[Action]:
        """Actions with which slots and live bytes stay within the budget. BudgetError where there are none."""
        if self.meter is None:
            return actions
        slots = slots_after(actions, self._store)
        excess = self._over_bytes(slots)
        if not excess:
            return actions
        self._pilot.yield_bytes(excess, slots=slots)
        actions = self._pilot.decided(*moment)
        self._expect_room(slots_after(actions, self._store))
        return actions

    def _make_way(self, over_bytes: int) -> None:
        super()._make_way(over_bytes)
        self._expect_room(self._store.state.slots_used[self._compute])

    def _expect_room(self, slots: int) -> None:
        over = self._over_bytes(slots)
        if not over or self.meter is None:
            return
        stretch, costs = self._pilot.stretch, self._budgets.machine.costs
        need = Need(f"{stretch.position} of the {stretch.kind}", slots, self._store.state.slot_bytes, self.meter.live)
        # An estimate: there is no forecast, or it has just been shown to be wrong.
        enough = need.nbytes + need.nbytes // 4
        self.pause_meter()  # this step is over
        refusal = refuse_moment(
            need,
            tier=self._compute,
            budget_bytes=need.nbytes - over + costs.set_aside_bytes,
            fixed_bytes=costs.beside(need.nbytes),
        )
        raise advise(refusal, {self._compute.label: enough + costs.beside(enough)})


def slots_after(actions: Sequence[Action], store: ChunkStore) -> int:
    """Number of slots of the compute tier that will be in use once these actions are done."""
    compute = store.state.compute
    in_use = store.state.slots_used[compute]
    for action in actions:
        in_use += 0 if isinstance(action, Wait) else slots_taken(action, compute)
    return in_use
