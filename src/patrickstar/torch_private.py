"""Private names of torch that the library relies on, in one place; `tests/test_torch_private.py` tests what each must do (torch 2.11 to 2.13)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.optim.optimizer as _optimizers
from torch import nn
from torch._guards import CompileContext
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _get_current_function_mode_stack as _function_modes
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:  # a build of torch may have none
    from torch._C._distributed_c10d import Backend, ProcessGroup, Work

Plain = torch._C.DisableTorchFunctionSubclass
"""Context in which tensor subclasses behave as plain tensors."""

NotInference = partial(torch._C._InferenceMode, False)
"""Context in which tensors that are made are no inference tensors. Gradients are on in it, as in torch's own, which is five calls."""

no_gradients: Callable[[], None] = partial(torch._C._set_grad_enabled, False)
"""Switches gradients off, inside of `NotInference` until its end."""

Unseen = torch._C.DisableTorchFunction
"""Context in which neither tensor subclasses nor modes see what is called."""

Seen = torch._C._EnableTorchFunction
"""Context in which tensor subclasses and modes see what is called, whatever is switched off around it."""

Undispatched = torch._C._DisableTorchDispatch
"""Context in which dispatch modes do not see what is called: under a mode that makes tensors fake, real ones are computed with."""


def fake_over(meta: torch.Tensor, like: FakeTensor) -> FakeTensor:
    """A fake tensor over a meta tensor, of the device and mode of another: what the constructor makes, in a fifth of its time."""
    made: FakeTensor = torch.Tensor._make_subclass(
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=like.device
    )
    torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(vars(like))
    return made


SavedTensorsHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

top_saved_tensors_hooks: Callable[[], SavedTensorsHooks | None] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks, True
)
"""Gives the (pack, unpack) pair that autograd would call now, or None. Only the topmost pair is ever called. Asked at every use."""

are_saved_tensors_hooks_allowed: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
"""Tells whether hooks may be pushed; not within `torch.autograd.graph.disable_saved_tensors_hooks`."""


def is_checkpoints(hooks: SavedTensorsHooks) -> bool:
    """Tells whether a pair of hooks is gradient checkpointing's: what it packs is made again by running the forward again."""
    return hooks[0].__module__ == "torch.utils.checkpoint"


def saves_on_cpu(hooks: SavedTensorsHooks) -> bool:
    """Tells whether a pair of hooks is torch's own that keeps saved tensors on the CPU."""
    return hooks[0].__module__ == "torch.autograd.graph"


backward_id = torch._C._current_graph_task_id
"""Gives a number of the innermost backward call that runs on this thread; -1 outside of any. A function of torch's own: asked at every use."""

is_profiled = torch._C._autograd._profiler_enabled
"""Tells whether a profiler is on."""

overrides_are_on: Callable[[], bool] = torch._C._is_torch_function_enabled
"""Tells whether the classes of tensors are asked (`__torch_function__`)."""

transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
"""Gives the number of the innermost transform of `torch.func` that runs on this thread; None outside of any. Asked at every use."""

next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Gives the number of the next node of autograd's graph that this thread makes: nodes that are made later have no smaller one."""


def is_compiling() -> bool:
    """Tells whether torch.compile traces what runs, or has run it because it could not."""
    return torch.compiler.is_dynamo_compiling() or torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


@contextmanager
def uncompiled() -> Iterator[None]:
    """A context of which torch.compile takes no frame. Only where it is at work: that module of torch's is there then."""
    previous = torch._C._dynamo.eval_frame.set_eval_frame(None)
    try:
        yield
    finally:
        torch._C._dynamo.eval_frame.set_eval_frame(previous)


OBSERVERS_KEY: Final = "Fake"
"""A key of dispatch, of a mode that torch has no kernels for so far; where it has, installing ours raises. See Note [No mode in a step]."""

unobserved: Callable[[], Any] = partial(
    torch._C._ExcludeDispatchKeyGuard, torch._C.DispatchKeySet(torch._C._dispatch_key_parse(OBSERVERS_KEY))
)
"""A context in which operations are shown to nobody."""


@cache
def never_compile(package: str) -> None:
    """Has torch.compile take no frame of a package's functions, here or inside of others: there it breaks its graph."""
    from torch._dynamo.trace_rules import add  # noqa: PLC0415  (a second of imports)

    add(package)


def is_being_compiled() -> bool:
    """Tells whether what runs on this thread is torch.compile itself, which compiles something."""
    return CompileContext.try_get() is not None


@contextmanager
def unprofiled() -> Iterator[None]:
    """A context of which a profile shows nothing."""
    if not is_profiled():
        yield
        return
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


@contextmanager
def without_modes() -> Iterator[None]:
    """A context in which no mode is on but torch's default device."""
    modes = [_pop_function_mode() for _ in range(len(_function_modes()))]
    kept = [mode for mode in reversed(modes) if isinstance(mode, DeviceContext)]
    for mode in kept:
        _push_function_mode(mode)
    try:
        with _disable_current_modes():
            yield
    finally:
        for _ in kept:
            _pop_function_mode()
        for mode in reversed(modes):
            _push_function_mode(mode)


call_without_hooks_of_all_modules = FunctionType(
    nn.Module._call_impl.__code__,
    vars(nn.modules.module) | {name: {} for name in vars(nn.modules.module) if name.startswith("_global_")},
)
"""The call of a module as torch has it, with the module's hooks, but without those that are registered for all modules."""


def checks_for_nan() -> bool:
    """Tells whether a backward looks for NaN in each gradient (`torch.autograd.detect_anomaly`)."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def allocated_bytes(device: torch.device) -> tuple[int, int]:
    """The bytes that torch's allocator of a device has given out, now and at most. `torch.accelerator.memory_stats` sorts a hundred other numbers."""
    if not torch._C._accelerator_isAllocatorInitialized():
        return 0, 0
    counts = torch._C._accelerator_getDeviceStats(device.index or 0)["allocated_bytes"]["all"]
    return counts["current"], counts["peak"]


def attach_out_of_memory_observer(observer: Callable[[int, int, int, int], None]) -> None:
    """Has something called, from now on for ever, before torch's allocator of a CUDA device raises that there is no memory.

    It is given the number of the device, the bytes asked for, those of the device, and those that are free. What it raises is raised instead.
    """
    attach: Any = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]  # of a build with CUDA
    attach(observer)


def storage_at(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A fresh storage over memory of a device that somebody else owns, and keeps for as long as the storage lives."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return storage


def refuse_reads(tensor: torch.Tensor) -> None:
    """Has torch raise a RuntimeError from now on wherever an operation reads or writes the memory of this tensor's storage.

    This is torch's own check, which its CUDA graphs use for memory that is gone. Builds without CUDA have it too, but no function that switches it
    on: there the flag is set where it lies, and only after it has shown on a scratch tensor that it does what it should.
    """
    storage: int = tensor.untyped_storage()._cdata
    switch_on = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
    if switch_on is not None:
        switch_on(storage, READ_REFUSED)
        return
    for flag in _flags_that_refuse_reads():
        ctypes.memset(storage + flag, 1, 1)


READ_REFUSED = (
    "the placeholder of a managed parameter was read: code that patrickstar cannot see (a torch.func transform of the parameter itself, a tensor "
    "class that switches overrides off) has used a parameter, gradient or optimizer state. docs/troubleshooting.md says what to do instead"
)
"""The message of torch's error, on builds with CUDA; others say "Cannot access data pointer of Storage that is invalid"."""


@cache
def _flags_that_refuse_reads() -> tuple[int, ...]:
    """Offsets, in bytes, of the two flags in torch's storage object that have every access raise; none where they are not found."""

    def changed_by(switch_on: Callable[[torch.Tensor], None]) -> set[int]:
        scratch = torch.zeros(1)
        address = scratch.untyped_storage()._cdata
        before = ctypes.string_at(address, _OF_A_STORAGE)
        switch_on(scratch)
        after = ctypes.string_at(address, _OF_A_STORAGE)
        return {offset for offset in range(_OF_A_STORAGE) if after[offset] != before[offset]}

    # Two other switches have a flag of their own, and share the one that says that there is something to check. Ours lies beside theirs.
    one = changed_by(torch._C._set_throw_on_mutable_data_ptr)
    other = changed_by(torch._C._set_warn_deprecated_on_mutable_data_ptr)
    shared, own = one & other, one ^ other
    if len(shared) != 1 or len(own) != 2:
        return ()
    for flag in sorted(set(range(min(own) - 1, max(own) + 2)) - shared - own):
        scratch = torch.zeros(1)
        for offset in (*shared, flag):
            ctypes.memset(scratch.untyped_storage()._cdata + offset, 1, 1)
        try:
            scratch.sum()
        except RuntimeError:
            return (*shared, flag)
    return ()


_OF_A_STORAGE = 96
"""Bytes at the head of torch's storage object in which its flags are looked for."""


def backward_makes_graph() -> bool:
    """Tells whether the innermost backward call running on this thread was asked for a graph of the gradients (`create_graph=True`)."""
    # Gradients are on in other backwards too, where something is recomputed; only these keep their graph as well.
    return torch.is_grad_enabled() and torch._C._autograd._get_current_graph_task_keep_graph() and backward_id() != -1


def inside_backward_node() -> bool:
    """Tells whether a backward node is being evaluated on this thread."""
    return torch._C._current_autograd_node() is not None


def inside_node_of_torch() -> bool:
    """Tells whether a backward node is being evaluated on this thread that is not the backward of a `torch.autograd.Function`."""
    node = torch._C._current_autograd_node()
    return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)


def has_step_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Tells whether anything of the user's is called before `optimizer.step()` does its work (`register_step_pre_hook`)."""
    return bool(optimizer._optimizer_step_pre_hooks or _optimizers._global_optimizer_pre_hooks)


def has_views(tensor: torch.Tensor) -> bool:
    """Tells whether there are other tensors over the storage of this one, held by whomever: code, or a graph."""
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses > 2  # the tensor itself, and the object that Python has of the storage


def computes_bf16() -> bool:
    """Tells whether the processor has instructions for products of bf16."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def computes_fp16() -> bool:
    """Tells whether the processor has instructions for products of fp16."""
    return bool(torch.cpu._is_amx_fp16_supported())


@contextmanager
def one_thread_here() -> Iterator[None]:
    """A context in which torch's operations that this thread calls run on it alone; those of other threads run on as many as before.

    `torch.set_num_threads` would say so to every thread that is started from then on. Where torch has no OpenMP of its own, nothing changes.
    """
    set_threads = _openmp_set_num_threads()
    if set_threads is None:
        yield
        return
    before = torch.get_num_threads()  # the first such call of a thread sets the number, which comes before ours
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before)


@cache
def _openmp_set_num_threads() -> Callable[[int], Any] | None:
    """OpenMP's `omp_set_num_threads`, of the very library that torch computes with; None where that has none."""
    try:
        return cast(Any, ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).omp_set_num_threads)
    except (OSError, AttributeError):
        return None


def all_gather(group: Backend, out: torch.Tensor, shard: torch.Tensor) -> Work:
    """Begins to gather, in `out`, the shards of all ranks of a group that torch keeps no list of; the public call takes groups of its list only."""
    return group._allgather_base(out, shard)  # type: ignore[attr-defined]


def broadcast(group: Backend, tensor: torch.Tensor, root: int) -> Work:
    """Begins to give what one rank of such a group has to all."""
    return group.broadcast(tensor, root)  # type: ignore[attr-defined]


def reduce_scatter(group: Backend, out: torch.Tensor, pieces: torch.Tensor) -> Work:
    """Begins to add up pieces over the ranks of such a group: each gets, in `out`, the sum of its own, which are as many as ranks."""
    return group._reduce_scatter_base(out, pieces)  # type: ignore[attr-defined]


def all_to_all(
    group: Backend, out: torch.Tensor, pieces: torch.Tensor, received: Sequence[int] = (), sent: Sequence[int] = ()
) -> Work:
    """Begins to send each rank of such a group its piece, and to receive, in `out`, a piece of each: so many elements, or as many of each."""
    return group.alltoall_base(out, pieces, list(received), list(sent))  # type: ignore[attr-defined]


def process_group_of(given: Any) -> ProcessGroup:
    """The process group that an operation of torch's is given, as it is or by name."""
    from torch.distributed.distributed_c10d import ProcessGroup, _resolve_process_group  # noqa: PLC0415  (a build may have none)

    if isinstance(given, str):
        return _resolve_process_group(given)  # type: ignore[arg-type]  # a name is a string
    return given if isinstance(given, ProcessGroup) else ProcessGroup.unbox(given)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs a callback when the innermost backward call running now ends. Only inside a backward call."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def writes_by_schema(func: Callable[..., Any]) -> bool:
    """Tells whether a function is a registered operation of whose arguments some are written, as its schema says."""
    if isinstance(func, OpOverloadPacket):
        return any(getattr(func, name)._schema.is_mutable for name in func.overloads())
    return isinstance(func, OpOverload) and bool(func._schema.is_mutable)


@contextmanager
def imagined_ranks(size: int) -> Iterator[None]:
    """A context with a default process group of so many ranks, of which this is the first and the others are not there: nothing is sent."""
    import torch.distributed as dist  # noqa: PLC0415  (takes seconds)
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def is_imagined(group: ProcessGroup) -> bool:
    """Tells whether the other ranks of a group are not there."""
    import torch.distributed as dist  # noqa: PLC0415

    return bool(dist.get_backend(group) == "fake")
