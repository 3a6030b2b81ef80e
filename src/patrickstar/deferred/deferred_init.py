"""`patrickstar.deferred_init`: modules are built without memory for their parameters. See Note [Deferred] in `recording.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from patrickstar.deferred.recording import DeferredRecorder, unrecordable
from patrickstar.errors import StateError
from patrickstar.hooks import watch_parameters
from patrickstar.parameters.functions import ESCAPES, accessor
from patrickstar.torch_private import Plain

_SET_DATA = accessor("data", "__set__")
_HANDS_OUT = ESCAPES | {Tensor.tolist}


@contextmanager
def deferred_init() -> Iterator[None]:
    """A context in which modules are built without memory for their parameters: `with patrickstar.deferred_init(): model = build()`.

    `manage` gives each parameter the values that ordinary construction from the same random state gives, one at a time, straight into chunks.
    Random states are left as ordinary construction leaves them. Buffers are real. Until then using the model is a `StateError`.

    Raises:
        LayoutError: an initialisation that cannot be recorded, by module and operation: values that torch's operations have not made (NumPy,
            files; small literals are kept), memory handed out (`numpy()`), values of another parameter written into one.
        StateError: inside of another one.
    """
    if is_building():
        raise StateError("deferred_init() inside of deferred_init(): one is enough")
    recorder = DeferredRecorder()
    thread = threading.get_ident()

    def registered(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if threading.get_ident() == thread:
            recorder.register(parameter, f"{type(module).__name__}.{name}")

    try:
        with watch_parameters(registered), _Functions(recorder), recorder:
            yield
    finally:
        recorder.close()


def is_building() -> bool:
    """Tells whether this thread is inside of a `deferred_init()`."""
    return any(isinstance(mode, DeferredRecorder) for mode in _get_current_dispatch_mode_stack())


def deferred_by(parameter: Tensor) -> DeferredRecorder | None:
    """The record of the values of a parameter that was built under `deferred_init()`; None: it has them."""
    recorder: DeferredRecorder | None = getattr(type(parameter), "deferred_by", None)
    return recorder


def present_and_absent_bytes(parameters: Iterable[Tensor]) -> tuple[int, int]:
    """The bytes that parameters take in memory, and those that others will take once they are made, or read, or are elsewhere (on `meta`)."""
    present = absent = 0
    for parameter in parameters:
        if deferred_by(parameter) is None and not parameter.is_meta:
            present += parameter.nbytes
        else:
            absent += parameter.nbytes
    return present, absent


class _Functions(TorchFunctionMode):
    """Sees what is called in Python: also what hands out memory, and what no operation tells of."""

    def __init__(self, recorder: DeferredRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        keywords = kwargs or {}
        if func in _HANDS_OUT:
            for tensor in _pytree.tree_leaves(args):
                if isinstance(tensor, Tensor) and self._recorder.has_no_memory(tensor):
                    why = f"{func.__name__}() hands out its memory, and it has none"
                    raise unrecordable(self._recorder.label(tensor), why)
        # Equal, not the same: each look-up of an accessor makes another object.
        if func == _SET_DATA and isinstance(args[0], nn.Parameter) and self._recorder.has_no_memory(args[0]):
            label = self._recorder.label(args[0])
            with Plain():
                func(*args, **keywords)
            return self._recorder.register(args[0], label)
        with Plain():
            return self._recorder.dress(func(*args, **keywords))
