"""The optimizer that a session hands out: the user's groups and hooks, the session's update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NoReturn

import torch

from patrickstar.errors import StateError
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.user_optimizer import check_parameters, read_groups, restore_groups, unpack

GRAD_SCALER_ARGUMENTS = frozenset({"grad_scaler", "grad_scale", "found_inf"})


class ManagedOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` over the very `param_groups` of the optimizer that was passed to `manage`.

    Both see each other's changes to a group, so a scheduler may be built on either, before or after. One `step()` here
    counts as one of the original: it calls the original's own `step()`, inside which the session updates.

    Note [The original's step]
    --------------------------
    The original runs its hooks, counts the step for its schedulers, and must neither update nor so much as look at a
    parameter: reading `.grad` of a managed parameter is work for the session. A pre-hook of ours, moved behind all
    others before each step, does three things. Called by the user it raises. Called by us it runs closure and update,
    which thus stand where torch has them: after all pre-hooks, before all post-hooks. And it hands the original's code
    another optimizer of its type, without parameters, as `self`: torch lets a pre-hook replace the arguments. Nothing
    of the original is changed at any time, so nothing must be put back if something raises.
    """

    def __init__(self, original: torch.optim.Optimizer, *, target: Any, names: Mapping[int, str]) -> None:
        """Takes the place of an optimizer that `check_optimizer` accepts, until `detach()`.

        `target`: who updates, an `OptimizerTarget`; None: nobody yet. `names`: `id(parameter)` -> name, of all parameters of the model.
        """
        # Not Optimizer.__init__, which makes groups of its own: what unpickling calls sets up hooks and nothing else.
        self.__setstate__({"defaults": original.defaults})
        self._original = original
        self.target = target
        self._names = names
        kind: Any = type(original)
        self._idle = kind([{"params": []}])

        self._running: Callable[[], None] | None = None
        self._loading = False
        self._attached = True
        self._guard = original.register_step_pre_hook(self._on_original_step)
        self._handles = (
            original.register_state_dict_post_hook(self._add_state, prepend=True),
            original.register_load_state_dict_pre_hook(self._on_original_load),
        )

    @property
    def original(self) -> torch.optim.Optimizer:
        """The optimizer that was passed to `manage`."""
        return self._original

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The original optimizer's list of groups, not a copy."""
        return self._original.param_groups

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[Any, Any]:
        """A mapping from parameters to their `step`, `exp_avg` and `exp_avg_sq`, which have bytes only while an operation uses them.

        Empty before the first step, as in torch. Assigning a tensor writes it; assigning what was read from here does nothing.
        """
        self._require_attached("state")
        return self.target.optimizer_state

    @state.setter
    def state(self, values: Mapping[Any, Any]) -> None:
        if values is not self.state:
            self.state.update(values)
            for parameter in [parameter for parameter in self.state if parameter not in values]:
                del self.state[parameter]

    def hypers(self) -> dict[str, Hyper]:
        """The hyper-parameters by parameter name, read from the groups now.

        Raises:
            ConfigError: a group that came in through the original has parameters that are not the model's, or a group
                asks for an update that is not supported.
        """
        return read_groups(self.param_groups, self._names)

    def step(self, closure: Callable[[], float] | None = None, **scaling: object) -> float | None:  # type: ignore[override]
        """Runs one step: closure and update, between the step hooks of both optimizers.

        What a gradient scaler passes along is ignored, as by an optimizer that does not scale by itself.

        Raises:
            ConfigError: see `hypers()`. StateError: after the session was closed.
        """
        unknown = sorted(set(scaling) - GRAD_SCALER_ARGUMENTS)
        if unknown:
            raise TypeError(f"step() got an unexpected keyword argument {unknown[0]!r}")
        self._require_attached("step()")
        loss: float | None = None

        def closure_and_update() -> None:
            nonlocal loss
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            # A group may have come in through the original, which knows nothing of the model.
            check_parameters([parameter for group in self.param_groups for parameter in group["params"]], self._names)
            self.target.step_groups()

        arguments: tuple[Any, ...] = (self,) if closure is None else (self, closure)
        for pre_hook in list(self._optimizer_step_pre_hooks.values()):
            if pre_hook(self, arguments, {}) is not None:
                raise StateError("a step pre-hook of a managed optimizer cannot replace the arguments of step()")
        # See Note [The original's step].
        self._guard.remove()
        self._guard = self._original.register_step_pre_hook(self._on_original_step)
        self._running = closure_and_update
        try:
            self._original.step()
        finally:
            self._running = None
        for post_hook in list(self._optimizer_step_post_hooks.values()):
            post_hook(self, arguments, {})
        return loss

    # torch wraps the step of every new class to run its hooks and the global ones. Ours are run above, the global ones
    # by the original: wrapped, they would run twice.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of the parameters in the groups, as in torch."""
        self._require_attached("zero_grad()")
        self.target.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters of the model; the original and its schedulers see it too.

        Raises:
            ConfigError: parameters that are not the model's, or unsupported values. Nothing has changed then.
        """
        self._require_attached("add_param_group()")
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        given = param_group["params"]
        if not isinstance(given, (torch.Tensor, set)):
            param_group["params"] = given = list(given)  # it may be a generator, and torch reads it once more
        entries = [given] if isinstance(given, torch.Tensor) else given
        parameters = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
        check_parameters((entry for entry in parameters if isinstance(entry, torch.Tensor)), self._names)
        Hyper.from_group({**self.defaults, **param_group}).check()
        self._original.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state in the format of torch's class; the optimizer states are read from the chunks."""
        self._require_attached("state_dict()")
        for pre_hook in list(self._optimizer_state_dict_pre_hooks.values()):
            pre_hook(self)
        state_dict = self._original.state_dict()  # our post-hook there asks the target, before the user's post-hooks
        for post_hook in list(self._optimizer_state_dict_post_hooks.values()):
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what this class or torch's saved: states into the chunks, hyper-parameters into the same group dicts.

        Raises:
            CheckpointError, ConfigError: a state of other parameters, or unsupported flags. Nothing has changed then.
        """
        self._require_attached("load_state_dict()")
        state_dict = dict(state_dict)
        hooks = [(self._original, hook) for hook in self._original._optimizer_load_state_dict_pre_hooks.values()]
        hooks += [(self, hook) for hook in self._optimizer_load_state_dict_pre_hooks.values()]
        self._loading = True
        try:
            for optimizer, pre_hook in hooks:
                replaced = pre_hook(optimizer, state_dict)
                state_dict = state_dict if replaced is None else replaced
        finally:
            self._loading = False
        self.target.load_optimizer_states(unpack(state_dict, self.param_groups, self._names))
        # As in torch, AdamW stays AdamW whatever it loads; Adam takes over how the weight decays.
        decoupled = isinstance(self._original, torch.optim.AdamW)
        restore_groups(self.param_groups, state_dict, keep={"decoupled_weight_decay"} if decoupled else ())
        for optimizer in (self._original, self):
            for post_hook in list(optimizer._optimizer_load_state_dict_post_hooks.values()):
                post_hook(optimizer)

    def detach(self) -> None:
        """Gives the original its step back; this object can do nothing more."""
        self._attached = False
        self._guard.remove()
        for handle in self._handles:
            handle.remove()

    def __getstate__(self) -> NoReturn:
        raise StateError("a managed optimizer cannot be copied or pickled: use state_dict() and load_state_dict()")

    def _require_attached(self, call: str) -> None:
        if not self._attached:
            raise StateError(f"{call} after the session was closed: use the optimizer that was passed to manage()")
        if self.target is None:
            raise StateError(f"{call} in a process that is no rank of its job now, and waits in session.steps()")

    def _on_original_step(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._running is None:
            raise StateError(
                "step() of the optimizer that was passed to manage(): call session.optimizer.step() instead"
            )
        if len(args) > 1 or kwargs:
            raise StateError("a step pre-hook of a managed optimizer cannot replace the arguments of step()")
        run, self._running = self._running, None
        with torch.no_grad():
            run()
        return (self._idle,), {}

    def _add_state(self, _: object, state_dict: dict[str, Any]) -> None:
        """Gives what torch writes, which are the groups, the state that the target has."""
        states = self.target.optimizer_states()
        groups = zip(self.param_groups, state_dict["param_groups"], strict=True)
        numbers = {n: id(p) for group, packed in groups for p, n in zip(group["params"], packed["params"], strict=True)}
        names = {number: self._names[parameter] for number, parameter in numbers.items()}
        state_dict["state"] = {number: states[name].to_torch() for number, name in names.items() if name in states}

    def _on_original_load(self, *_: object) -> None:
        if not self._loading:
            raise StateError(
                "load_state_dict() of the optimizer that was passed to manage(): "
                "call session.optimizer.load_state_dict() instead"
            )
