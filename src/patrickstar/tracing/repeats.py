"""Blocks of one kind, of which one is traced: the trace of each other one is that, with its own parameters.

Note [Repeated blocks]
    The blocks of a model do the same. So in a trial run one of each kind runs *alone*: a twin of its own with fresh inputs, in which each parameter
    is a unit. No block of the kind runs, but is *told*: the moments of the one alone, with its own parameters, come in its place, with as many
    bytes more as are alive there. Its outputs are fresh fake tensors with one node of autograd behind them, which holds what the block would: inputs,
    outputs, and as many bytes as it would save. The node's backward tells the backward of the one alone, which has had gradients of the same forms.
    Of one kind are blocks of one structure: classes, shapes, types, what is frozen or training, attributes, inputs of the same forms. A block's own
    number may differ, if its forward does not look at it.
    What cannot be told exactly is run: a block with hooks, in a recomputation, under autocast or hooks of saved tensors, one that is given objects or
    tensors that share memory, asks for values, changes its inputs, a parameter or itself, gives out views, or keeps what it has made. Where only the
    trial run shows it, all of it is made again, without: a block that is called twice, a parameter that is used elsewhere, an input of which others
    want a gradient too.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from patrickstar.core.trace import Moment, Phase, Touch
from patrickstar.parameters.blocks import Place
from patrickstar.torch_private import Plain, backward_id, top_saved_tensors_hooks
from patrickstar.tracing.alone import Alone, Bind, Node, anchor, fresh, is_arrival, likes_of, mapped, mark, put
from patrickstar.tracing.block_kinds import HOOKS, BoundTwin, Member, kinds_in
from patrickstar.tracing.missing import MissingOperations
from patrickstar.tracing.signature import can_be_traced, signature
from patrickstar.tracing.trial_values import KnownValues
from patrickstar.tracing.twin import Twin, Unlike


class Repeats:
    """The blocks of a twin that are told. See Note [Repeated blocks].

    Args:
        places: the outermost blocks. missing: shows the operations of the trial run.
    """

    def __init__(
        self, twin: BoundTwin, places: Iterable[Place], bind: Bind, values: KnownValues, missing: MissingOperations
    ) -> None:
        self._twin = twin
        self._values = values
        self._run_alone = partial(Alone, bind=bind, values=values, missing=missing)
        self._with_gradients = torch.is_grad_enabled()
        self._alone: dict[Any, Alone | None] = {}
        self._told: dict[Member, Alone] = {}
        with Plain():
            for kind in kinds_in(twin, places):
                for member in kind:
                    calls = vars(member.module)
                    calls["_call_impl"] = partial(self._call, kind, member, calls["_call_impl"])

    def _call(self, kind: Sequence[Member], member: Member, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if member in self._told:
            raise Unlike(f"{member.path} is called twice")
        tensors: list[Tensor] = []
        alone = None
        if not self._is_odd(member) and can_be_traced((args, kwargs)):
            with suppress(Unlike):
                given = mapped((args, kwargs), partial(mark, tensors))
                alone = self._one_of(kind, given, tensors)
        if alone is None:
            return run(*args, **kwargs)
        self._told[member] = alone
        telling = _Telling(self._twin.owner, member, alone)
        return self._twin.blocks.call(member.module, partial(telling.output, tensors))

    def _is_odd(self, member: Member) -> bool:
        """Tells whether a block that begins now may do what it does not do elsewhere."""
        return (
            backward_id() != -1
            or torch.is_grad_enabled() is not self._with_gradients
            or top_saved_tensors_hooks() is not None
            or torch.is_anomaly_enabled()
            or any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
            or any(vars(module).get(hooks) for module in member.module.modules() for hooks in HOOKS)
        )

    def _one_of(self, kind: Sequence[Member], given: Any, tensors: Sequence[Tensor]) -> Alone | None:
        """The block of a kind that has run alone for such arguments; None where it cannot be told."""
        likes = likes_of(tensors)
        key = kind[0], likes, repr(given), signature((), (), (), {})
        if key not in self._alone:
            self._alone[key] = None
            contents = [self._values.content(tensor) for tensor in tensors]
            with suppress(Exception):  # whatever it is, the block shows it when it runs
                self._alone[key] = self._run_alone(kind, given, likes, contents)
        return self._alone[key]

    def expect_apart(self, outputs: Iterable[Tensor]) -> None:
        """Raises Unlike where a block that was told has to do with others. `outputs`: those whose backward is about to begin."""
        uses = self._twin.owner.touches.counts.uses
        for member, alone in self._told.items():
            if any(uses.get(bound.name, 0) != n for bound, n in zip(member.records, alone.uses, strict=True)):
                raise Unlike(f"{member.path} has parameters that are used elsewhere")
        edges, nodes = Counter[Any](), dict[Any, None]()
        todo: list[Any] = [tensor.grad_fn for tensor in outputs]
        while todo:
            node = todo.pop()
            if node is not None and node not in nodes:
                nodes[node] = None
                edges.update(node.next_functions)
                todo += [other for other, _ in node.next_functions]
        for node in nodes:
            if hasattr(node, "take") and any(edges[edge] > 1 for edge in node.next_functions[1:]):
                raise Unlike("an input of a block has gradients from elsewhere")


@dataclass(slots=True, eq=False)
class _Telling:
    """A block that is told: it does what one alone has done."""

    owner: Twin
    member: Member
    alone: Alone
    _held: list[torch.UntypedStorage] = field(default_factory=list)
    _gradients: Sequence[Tensor | None] = ()

    def output(self, tensors: Sequence[Tensor]) -> Any:
        """Tells the forward for these inputs; its output."""
        alone, owner, counts = self.alone, self.owner, self.owner.touches.counts
        for count, own in ((counts.uses, alone.uses), (counts.apart, alone.apart)):
            for bound, times in zip(self.member.records, own, strict=True):
                if times and not self.member.is_bound:  # else it is counted where it begins
                    count[bound.name] = count.get(bound.name, 0) + times
        self._tell(alone.forward, owner.meter.live)
        made = fresh(alone.made)
        every = [*tensors, *made]
        if alone.has_backward:
            saved = torch.UntypedStorage(0, device="meta")
            owner.meter.add(saved, alone.saved_bytes)
            self._held = [*(every[number].untyped_storage() for number in alone.held), saved]
            wanting = [tensor for tensor in tensors if tensor.requires_grad]
            told = [at for at, like in enumerate(alone.made, len(tensors)) if like and like.requires_grad]
            with_history = Node.apply(
                partial(tuple, [every[at] for at in told]), self.backward, anchor(owner), *wanting
            )
            with_history[0].grad_fn.register_prehook(self.take)
            for at, tensor in zip(told, with_history, strict=True):
                every[at] = tensor
        return put(alone.output, every)

    def take(self, gradients: Sequence[Tensor | None]) -> Any:
        """Takes the gradients, which nobody else has from now on: others stand for them."""
        self._gradients = tuple(gradients)
        with self.owner.uncounted():
            return tuple(None if one is None else one.new_empty(()).expand(one.shape) for one in gradients)

    def backward(self, *_: Any) -> Sequence[Tensor | None]:
        """Tells the backward; the gradients of the inputs that want them, after that of a number that is none."""
        meter, likes = self.owner.meter, likes_of(self._gradients)
        live, held = meter.live, self._held[:-1]
        held += [one.untyped_storage() for one in self._gradients if one is not None]
        there = [*map(weakref.ref, held)]
        self._gradients, self._held, held = (), [], []
        moments, outgoing = self.alone.backward(likes, [storage() is not None for storage in there])
        left = self._tell(moments, live)
        gradients = fresh(outgoing)
        if meter.live != left:
            raise Unlike("others hold what the block holds")
        return None, *gradients

    def _tell(self, moments: Sequence[Moment], live: int) -> int:
        """Tells moments, as which begin so many bytes are alive; those that are when they are over."""
        meter, (start, *told, end) = self.owner.meter, moments
        before = live - start.live_bytes
        meter.pretend(live, before + start.nonmodel_bytes)
        for moment in told:
            meter.pretend(before + moment.live_bytes)
            self._tell_one(moment)
            meter.pretend(before + moment.live_bytes, before + moment.nonmodel_bytes)
        self.owner.held_beside = ()
        meter.pretend(None)
        return before + end.live_bytes

    def _tell_one(self, moment: Moment) -> None:
        owner, records = self.owner, self.member.records
        assert owner.binding is not None
        access, bound = owner.binding.access, records[self.alone.numbers[moment.label]]
        if not self.member.is_bound:  # else those are held that are
            owner.held_beside = [records[ref.chunk].ref for ref in moment.held]
        if is_arrival(moment):
            if bound in access.open:
                with Plain():
                    owner.binding.gradients.arrives(bound)
            if owner.adds_up(bound.name, bound.shape_only.dtype):
                raise Unlike("its gradients are added up")
            owner.arrives(bound.name)
        elif moment.phase is Phase.BACKWARD:
            for ref in bound.refs:
                owner.unpack(access.parameters_in(bound.key)[0].name, (Touch(ref),))
        else:
            used = {touch for one in moment.touches for touch in records[one.ref.chunk].touches}
            owner.use(bound.name, sorted(used))
