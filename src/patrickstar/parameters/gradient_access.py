"""Gradients as users know them: `.grad` of a managed parameter, taken off as it arrives, and bound by use when it is read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from patrickstar.core.cuda_blocks import block_bytes
from patrickstar.core.planes import GRAD, GradientUse
from patrickstar.errors import StateError
from patrickstar.memory.leases import AssembledKey
from patrickstar.parameters.assembled import AssembledTensors, title
from patrickstar.parameters.bound import BoundParameter
from patrickstar.parameters.weight_access import WeightAccess
from patrickstar.torch_private import Plain, overrides_are_on

USED = 'it was used and released (step="in_backward"; step="deferred" keeps gradients until zero_grad())'


@dataclass(eq=False)
class GradientAccess:
    """The gradients of bound parameters, as PyTorch's users know them.

    Read as `p.grad`, a gradient is a tensor bound by use (Note [Assembled tensors] in `assembled.py`). A tensor that is assigned as `p.grad` is
    the user's own from then on: an ordinary one, to which autograd adds as ever, until it is None again. Where parameters keep their bytes, all of
    them are the user's own, always; what stands for one that was used as it came lies in `p.grad` itself then.

    Attributes:
        assembled: what stands for gradients in chunks. use: where gradients go. bound: the records of parameters and tiles, by `id()`.
        arrives: is told of each gradient of a block that is open, before the owner is.
        are_kept: tells whether the session may have a gradient of any of them.
        comes: is told of one that autograd is about to add to `p.grad`, where parameters keep their bytes and somebody has to know.
        own: the parameters whose gradient is the user's own, by name. stay: True where gradients stay the tensors that autograd made.
        are_used: True where gradients are used as they come. used: what stands for them then, where parameters keep their bytes.
        are_shared: True where gradients are those of all ranks, averaged.
        widen: True where gradients that are more than 16 bits can hold (of several backwards, or multiplied) lie in chunks, wherever parameters do.
        shown: what `p.grad` has been made to be, of parameters that are ordinary ones.
    """

    access: WeightAccess
    assembled: AssembledTensors
    use: GradientUse
    bound: Mapping[int, BoundParameter]
    _: KW_ONLY
    widen: bool

    own: set[str] = field(default_factory=set, init=False)
    stay: bool = field(default=False, init=False)
    are_shared: bool = field(default=False, init=False)
    shown: dict[BoundParameter, Tensor | None] = field(default_factory=dict, init=False)
    _hooks: dict[BoundParameter, RemovableHandle] = field(default_factory=dict, init=False)
    # By the node that adds to `p.grad`, which lives as long as somebody has it.
    _early: dict[Node, RemovableHandle] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._by_name, self._owner = self.access.records, self.access.owner
        self.arrives: Callable[[BoundParameter], None] = lambda _: None
        self.are_kept: Callable[[], bool] = lambda: False
        self.comes: Callable[[str], None] = lambda _: None
        self.used = UsedGradients(self.assembled, self._by_name)
        self.are_used = self.use is GradientUse.UPDATE

    def stay_put(self) -> None:
        """Leaves all gradients where autograd makes them from now on."""
        self._unhook()
        self.stay = self.use is not GradientUse.NONE
        self.own = set(self._by_name) if self.stay else set()

    def lie_apart(self) -> None:
        """Has gradients go where the session keeps them from now on, but for those that there are."""
        self.hide(list(self.shown))
        self.own = {name for name, _ in self.owned()}
        self._unhook()
        self.stay = False

    def watch(self, bound: BoundParameter) -> None:
        """Takes the parameter's gradients off from now on, if it has any."""
        if self.use is GradientUse.NONE or not bound.parameter.requires_grad or bound in self._hooks:
            return
        # torch's own reference to a hook is none that the garbage collector sees: through it, a parameter would hold itself.
        take = partial(GradientAccess._take, weakref.proxy(self))
        handle = bound.parameter.register_post_accumulate_grad_hook(take)
        self._hooks[bound] = handle
        if self.stay and (self.are_used or self.widen):
            node = get_gradient_edge(bound.parameter).node
            self._early[node] = node.register_prehook(partial(GradientAccess._expect, weakref.proxy(self), bound))
        # Ours comes first, so that the user's hooks see the accumulated gradient, as in PyTorch. torch walks the plain dict underneath the
        # ordered one: only the order of insertion counts.
        hooks = bound.parameter._post_accumulate_grad_hooks
        others = [(key, hook) for key, hook in hooks.items() if key != handle.id]
        for key, _ in others:
            del hooks[key]
        hooks.update(others)

    def release(self) -> None:
        """Takes nothing off any more: gradients are ordinary parameters'."""
        self._unhook()
        self.used.forget()
        for bound in list(self.shown):
            bound.parameter.grad = None
        self.shown.clear()
        self.own.clear()

    def _unhook(self) -> None:
        for hook in (*self._hooks.values(), *self._early.values()):
            hook.remove()
        self._hooks.clear()
        self._early.clear()

    def _expect(self, bound: BoundParameter, _: object) -> None:
        with self.access.lock, Plain():
            self.comes(bound.name)
            if not self.are_used:
                return
            # Whoever else has a hook is to see the gradient that there is, before it is used: ours is the last.
            hooks, ours = bound.parameter._post_accumulate_grad_hooks, self._hooks[bound].id
            if next(reversed(hooks)) != ours:
                hooks[ours] = hooks.pop(ours)

    def _take(self, parameter: Tensor) -> None:
        if not (self.stay or overrides_are_on()) and len(parameter._post_accumulate_grad_hooks) > 1:
            raise StateError(
                f"a hook on {self.bound[id(parameter)].name} is called in the backward of a loss whose class switches __torch_function__ off: "
                "its p.grad lies in chunks, and would be None. Call backward() of loss.as_subclass(torch.Tensor)"
            )
        with self.access.lock, Plain():
            bound = self.bound[id(parameter)]
            gradient = parameter.grad
            if bound in self.access.open:
                self.arrives(bound)
            if gradient is not None and self.stay:
                self._owner.gradient(bound.name, gradient)
            elif gradient is not None and bound.owner not in self.own:
                parameter.grad = None
                self._owner.gradient(bound.name, gradient)
            elif gradient is not None and bound.owner != bound.name:
                parameter.grad = None
                own = self._by_name[bound.owner].parameter.grad
                assert own is not None, f"{bound.owner} has no gradient of the user's own"
                bound.of(own.detach()).add_(gradient)
            elif gradient is not None:
                self._owner.gradient(bound.name, None)

    def get(self, bound: BoundParameter) -> Tensor | None:
        """The value of `p.grad`."""
        gradient = bound.tensor().grad
        if gradient is None and not bound.is_detached:  # an alias has a gradient of its own, as in PyTorch
            key = AssembledKey(bound.name, GRAD)
            if self._owner.has_gradient(bound.name):
                return self.assembled.tensor(key, bound.shape_only)
            if self._owner.is_spent(bound.name):
                return self.assembled.gone(key, bound.shape_only, USED)
        return gradient

    def set(self, bound: BoundParameter, value: Tensor | None) -> None:
        """Does `p.grad = value`, with torch's own checks of shape, type and device."""
        if bound.is_detached:
            bound.tensor().grad = value
            return
        if self.assembled.is_of(value, AssembledKey(bound.name, GRAD)):
            return  # `p.grad *= x` multiplies in place, and assigns the very same
        other = self.assembled.of(value)
        if other is not None:
            what = title(other.source.key)
            raise StateError(
                f"{bound.name}.grad was assigned {what}, which lies in chunks and cannot be another's: assign a copy, {what}.clone()"
            )
        if value is not None and self.are_shared:
            raise StateError(
                f"{bound.name}.grad was assigned a tensor: over ranks gradients are averaged as backwards end, and this one would not be. Change "
                "the one that is there, in place and on all ranks alike (p.grad.mul_(x), p.grad.copy_(t))"
            )
        if value is not None and self._owner.is_spent(bound.name):
            raise StateError(f"{bound.name}.grad was assigned a tensor after {USED}")
        bound.tensor().grad = value
        # What a view of the old gradient shows is ordinary memory once that is let go.
        self._owner.drop_gradient(bound.name)
        if value is not None:
            self.access.undress(value)
            self.own.add(bound.name)
        elif not self.stay:  # the next one goes to the owner again, if that keeps gradients
            self.own.discard(bound.name)

    def show(self, records: Sequence[BoundParameter]) -> None:
        """Has `p.grad` of parameters that are ordinary ones for a while be what it is otherwise."""
        if self.are_kept():
            for bound in records:
                gradient = self.get(bound)
                if gradient is not bound.parameter.grad:
                    self.shown[bound] = bound.parameter.grad = gradient

    def hide(self, records: Sequence[BoundParameter]) -> None:
        """Ends that. What was assigned meanwhile is the user's own."""
        for bound in records:
            gradient = bound.tensor().grad
            if self.shown or gradient is not None:
                shown = self.shown.pop(bound, None)
                own = gradient if shown is None and bound.name in self.own else None
                if gradient is not (own if shown is None else shown):
                    bound.parameter.grad = None
                    self.set(bound, gradient)
                elif shown is not None:
                    bound.parameter.grad = None

    def take_back(self) -> None:
        """Takes over what has become of gradients that lie in chunks, where nobody tells: they were zeroed, or others were assigned."""
        with Plain():
            shown = list(self.shown)
            self.hide(shown)
            self.show(shown)

    def own_of(self, name: str) -> Tensor | None:
        """The gradient of a parameter that is the user's own, if there is one."""
        with Plain():
            own = self._by_name[name].parameter.grad if name in self.own else None
            return own if self.assembled.of(own) is None else None

    def owned(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients that are the user's own, each after the name of its parameter."""
        for name in self.own:
            own = self.own_of(name)
            if own is not None:
                yield name, own

    def taken_bytes(self) -> int:
        """Bytes that they take of where they lie."""
        return sum(block_bytes(gradient.nbytes, gradient.device.type) for _, gradient in self.owned())

    def forget_own(self, names: Collection[str]) -> None:
        """Sets the gradients of these parameters to None that are the user's own."""
        with Plain():
            for name in self.own.intersection(names):
                self._by_name[name].tensor().grad = None
        if not self.stay:
            self.own.difference_update(names)


@dataclass(eq=False, slots=True)
class UsedGradients:
    """Tensors that refuse every use, one for each parameter, in the place of gradients that were used as they came where parameters keep their bytes.

    A gradient is zeroed where its tensor is in `p.grad` no more: `model.zero_grad()` and `p.grad = None` tell nobody.
    """

    assembled: AssembledTensors
    by_name: Mapping[str, BoundParameter]
    _tensors: dict[str, Tensor] = field(default_factory=dict, init=False)

    def put(self, names: Iterable[str]) -> None:
        """Lets gradients go, which have been used."""
        for name in names:
            bound = self.by_name[name]
            if name not in self._tensors:
                self._tensors[name] = self.assembled.gone(AssembledKey(name, GRAD), bound.shape_only, USED)
            bound.parameter.grad = self._tensors[name]

    def there(self, names: Iterable[str]) -> list[str]:
        """Names of those of these parameters whose gradients were used, and have not been zeroed since."""
        with Plain():
            return [name for name in names if self.by_name[name].parameter.grad is self._tensors.get(name, self)]

    def forget(self, names: Container[str] | None = None) -> None:
        """Zeroes these gradients: `p.grad` is None. `names`: of which parameters; None: of all."""
        with Plain():
            for name in self.there(self._tensors):
                if names is None or name in names:
                    self.by_name[name].parameter.grad = None
