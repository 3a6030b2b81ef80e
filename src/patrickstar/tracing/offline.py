"""The trace of a step that has not been run: on a twin of the model whose tensors are fake.

Fake tensors of the device that computes behave as real ones do, saved tensors and recomputation included, without memory or arithmetic. Nothing
of the user's is touched: not the model, its gradients or buffers, and what runs here shows to nobody (Note [Side effects]). For a device that is not
here they are of the CPU: torch differentiates no fake tensors of a device that it does not have.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from patrickstar.core.layout import Layout
from patrickstar.core.planes import GradientUse
from patrickstar.core.strides import dense_strides
from patrickstar.core.trace import Trace
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.blocks import Blocks, NotInBlocksError
from patrickstar.parameters.changes import UnseenChangeError
from patrickstar.parameters.exchange import Travel
from patrickstar.parameters.saved import WeightChangedError
from patrickstar.parameters.transforms import tensors_in
from patrickstar.plan.fit import minimum_bytes
from patrickstar.plan.make import garbage_waits
from patrickstar.plan.touches import Touches
from patrickstar.torch_private import Plain, Undispatched, saves_on_cpu, top_saved_tensors_hooks
from patrickstar.tracing.inputs import CacheAt, cache_tensors, cast_inputs
from patrickstar.tracing.side_effects import CopiedFunctions, HooklessTensors, drop_hooks, no_side_effects
from patrickstar.tracing.trial_operations import TrialOperations
from patrickstar.tracing.trial_values import Endless
from patrickstar.tracing.twin import CannotTrace, Twin

_log = logging.getLogger("patrickstar")
_LIKELY = 0.5
_EXTREMES = (0.0, 1.0)
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A forward with its backward, as it is expected to run.

    `by_chance`: whether it branches on numbers that it draws. Then the trace is that of the branches which need the largest budget, and a step
    that takes others departs from it. `by_use`: why its bits would be others if nobody saw each use of a parameter; empty where they would not.
    `sent_bytes`: weights and gradients handed to other ranks.
    """

    trace: Trace
    by_chance: bool = False
    by_use: str = ""
    sent_bytes: int = 0


# What a loss outside of the model is taken to hold at once: a cross entropy has its log-softmax and two gradients of that size.
_LOSS_COPIES = 3
_LOSS_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class OfflineTracer:
    """Makes traces of forwards, with the backward where gradients are on.

    Attributes:
        make_touches: fresh ones for each trace.
        dtypes: of parameters, by name; fp32 where it says nothing. copied: whose uses see copies.
        scales: whether the loss is multiplied with a scale.
        device: of the tensors that the forward sees: the one that computes, or the CPU in the place of one that is not here.
        on_device: whether the step is to run on a device whose memory torch gives out. compute: the type that inputs are cast to.
        next_blocks: over ranks, which block comes after which, as far as calls have shown (`CallOrder`). travel: the types of what is exchanged.
    """

    layout: Layout
    make_touches: Callable[[], Touches]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    copied: Collection[str] = ()
    scales: bool = False
    device: torch.device = _CPU
    on_device: bool = False
    compute: torch.dtype = torch.float32
    next_blocks: Mapping[tuple[bool, str], str] = field(default_factory=dict)
    travel: Travel = Travel()  # noqa: RUF009  (frozen)

    def foresee(
        self,
        model: nn.Module,
        named: Mapping[str, nn.Parameter],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        blocks: Collection[str] = (),
    ) -> Foreseen:
        """The trace of `model(*args, **kwargs)`, and of a backward of its loss where gradients are on.

        The loss is the output's `loss`, or the output itself where it is a scalar. A loss outside the model cannot be seen: for it
        three times the bytes of the outputs, and 4 KiB, are reserved through the backward.

        `blocks`: paths of those that are bound, each at once.

        A forward that branches on numbers that it draws is tried with small, likely and large ones; see Note [Values in a trial run].

        Raises:
            CannotTrace: the step depends on data, or does something that fake tensors cannot.
            UnseenChangeError: it changes a weight in a way that cannot be carried into its master.
        """
        attempt = partial(self._run, model, named, args, kwargs, blocks=blocks)
        likely = attempt(quantile=_LIKELY)
        if not likely.by_chance:
            return likely
        tried = [self._try_extreme(attempt, quantile) for quantile in _EXTREMES]
        traces = [likely.trace, *(trace for trace in tried if trace is not None)]
        formats = self.make_touches().formats.now
        largest = max(traces, key=lambda trace: minimum_bytes(trace, layout=self.layout, formats=formats))
        return replace(likely, trace=largest)

    @staticmethod
    def _try_extreme(attempt: Callable[..., Foreseen], quantile: float) -> Trace | None:
        """The trace with draws that are as small, or as large, as they can be; None where the model does not work with such draws."""
        try:
            return attempt(quantile=quantile).trace
        except CannotTrace as problem:
            if isinstance(problem.__cause__, Endless):
                raise  # nothing bounds what it needs
            _log.info("the forecast leaves out draws at quantile %g: %s", quantile, problem)
            return None

    @garbage_waits(collects=True)  # Note [Side effects]
    def _run(
        self,
        model: nn.Module,
        named: Mapping[str, nn.Parameter],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        blocks: Collection[str],
        quantile: float,
    ) -> Foreseen:
        operations = TrialOperations(quantile)
        with ExitStack() as stack:
            stack.enter_context(no_side_effects(self.device))
            with_backward = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            hooks = top_saved_tensors_hooks()
            if with_backward and hooks is not None and not saves_on_cpu(hooks):
                raise CannotTrace("hooks of saved tensors are on, which would be called")
            if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
                raise CannotTrace("a part of the model is a ScriptModule, which cannot be copied onto fake tensors")
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(with_backward))
            touches = self.make_touches()
            owner = Twin(touches, self.dtypes, device=self.device, on_device=self.on_device)  # type: ignore[abstract]  # see `Owner`
            fakes = _Fakes(operations, self.device)
            try:
                twin, twins = _twin_of(model, named, self.dtypes, fakes)
                stack.enter_context(operations)
                owner.binding = Binding(
                    twins,
                    owner,
                    leases=owner.leases,
                    touches=touches,
                    dtypes=self.dtypes,
                    copied=self.copied,
                    to_master=lambda bound, _: owner.carry(bound.name),
                )
                owner.binding.let_go()
                order = owner.order_over_ranks(self.next_blocks, self.travel)
                bound = Blocks(twin, owner.binding, order)
                bound.bind(blocks)
                owner.in_blocks = bool(bound.bound)
                inputs, keywords = fakes.of((args, dict(kwargs)))
                owner.meter.note(cache_tensors(keywords))
                stack.enter_context(HooklessTensors())
                operations.seer = owner.meter
                inputs, keywords = cast_inputs((inputs, keywords), self.compute)
                if order is not None:
                    bound.watch()
                    order.begin_forward()
                output = twin(*inputs, **keywords)
                del inputs, keywords
                if with_backward:
                    _backward(output, scales=self.scales)
                    del output
            except (CannotTrace, UnseenChangeError, NotInBlocksError, WeightChangedError):
                raise
            except Endless as problem:
                raise CannotTrace(str(problem)) from problem
            except DataDependentOutputException as error:
                raise CannotTrace(
                    f"it asks for a value (item(), tolist(), if tensor:) that depends on weights or on data that a fake-tensor trace lacks: {error}"
                ) from error
            except Exception as error:
                reason = str(error).strip().split("\n")[0]
                raise CannotTrace(f"{type(error).__name__}: {reason}") from error
            return Foreseen(
                owner.recorder.trace(),
                operations.values.branches,
                self._why_by_use(owner, with_backward=with_backward),
                0 if owner.over_ranks is None else owner.over_ranks.others.sent_bytes,
            )

    def _why_by_use(self, owner: Twin, *, with_backward: bool) -> str:
        """The reason why uses are to be seen."""
        if owner.changes_copies:
            return "a forward changes weights in place that compute in another type than they are kept in"
        is_narrow = bool(self.copied) or any(dtype is not torch.float32 for dtype in self.dtypes.values())
        touches = owner.touches
        in_parts = with_backward and not all(map(touches.comes_whole, touches.uses))
        adds_up = touches.gradients is GradientUse.CHUNK and is_narrow and in_parts
        return "gradients of 16 bits come in parts (re-entrant checkpointing)" if adds_up else ""


@dataclass(frozen=True, slots=True)
class _Fakes:
    """Makes fake tensors of a device in the place of real ones, whose small values stay known."""

    operations: TrialOperations
    device: torch.device

    def of(self, value: Any) -> Any:
        """A value whose tensors are fake, also those in containers."""
        if isinstance(value, Tensor):
            # Where the input came from is none of the model's business; whether it wants a gradient is.
            alike = self.like(value)
            return alike.requires_grad_() if value.requires_grad else alike
        if isinstance(value, CacheAt):
            # Nobody asks for the values of keys, which may be many.
            fake = self.operations.fakes.from_tensor
            return value.copied(lambda tensor: fake(tensor.detach()) if tensor.ndim else self.like(tensor))
        if isinstance(value, Mapping):
            faked = {name: self.of(item) for name, item in value.items()}
            if type(value) is dict:
                return faked
            rebuilt: Any = copy.copy(value)
            for name, item in faked.items():
                rebuilt[name] = item
            return rebuilt
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.of(item) for item in value))
        if isinstance(value, list | tuple):
            return type(value)(self.of(item) for item in value)
        return value

    def like(self, tensor: Tensor) -> Tensor:
        """A fake tensor without history: on the device, or on the CPU where the real one is there."""
        on_cpu = tensor if tensor.is_meta else _on_cpu(tensor)
        alike = self.operations.fakes.from_tensor(tensor.detach() if self.device.type == tensor.device.type else on_cpu)
        self.operations.values.know(alike, on_cpu)
        return alike


def _twin_of(
    model: nn.Module, named: Mapping[str, nn.Parameter], dtypes: Mapping[str, torch.dtype], fakes: _Fakes
) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """A copy of the model whose parameters are fake, and buffers that are not on the CPU.

    Other tensors are copied as they are, being small and of values that may matter.
    """
    with fakes.operations:
        twins = dict[str, nn.Parameter]()
        for name, parameter in named.items():
            form = parameter.shape, dense_strides(parameter.shape, parameter.stride())
            fake = torch.empty_strided(*form, dtype=dtypes.get(name, torch.float32), device=fakes.device)
            twins[name] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        memo: dict[int, Any] = {id(named[name]): twin for name, twin in twins.items()}
        without = (buffer for buffer in model.buffers() if buffer.is_meta)
        memo.update((id(buffer), torch.empty_like(buffer, device=fakes.device)) for buffer in without)
        # What a module keeps of an earlier forward (the old weight norm its product, a recurrence its state) cannot be copied with its history.
        kept = (tensor for module in model.modules() for tensor in tensors_in(vars(module)))
        with Plain():
            memo.update((id(tensor), torch.empty_like(tensor)) for tensor in kept if tensor.grad_fn is not None)
    # Outside of the mode: a real tensor cannot be copied under it.
    elsewhere = [buffer for buffer in model.buffers() if buffer.device.type not in ("cpu", "meta")]
    as_real = _on_cpu if fakes.device.type == "cpu" else fakes.like
    memo.update((id(buffer), as_real(buffer)) for buffer in elsewhere)
    functions = CopiedFunctions(model, memo)
    twin = copy.deepcopy(model, memo)
    functions.fill()
    drop_hooks(memo.values())
    return twin, twins


def _on_cpu(tensor: Tensor) -> Tensor:
    """A tensor of the same values on the CPU, without history."""
    with Undispatched():  # a mode of fake tensors would give a fake one, which has no values
        return tensor.detach().cpu()


def _backward(output: Any, *, scales: bool) -> None:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, Tensor):
        loss = output
    if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
        (loss * torch.ones((), device=loss.device) if scales else loss).backward()
        return
    wanted = [tensor for tensor in tensors_in(output) if tensor.requires_grad and tensor.is_floating_point()]
    if wanted:
        scratch = [torch.empty_like(tensor) for tensor in wanted for _ in range(_LOSS_COPIES - 1)]
        scratch.append(torch.empty(_LOSS_BYTES, dtype=torch.uint8, device=wanted[0].device))
        torch.autograd.backward(wanted, [torch.empty_like(tensor) for tensor in wanted])
        del scratch
