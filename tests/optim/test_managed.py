import copy
import gc
import inspect
import pickle
import warnings
import weakref

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from patrickstar.errors import CheckpointError, ConfigError, StateError
from patrickstar.optim.adamw import Adam, AdamW
from patrickstar.optim.choose import choose_kernel
from patrickstar.optim.managed import ManagedOptimizer
from patrickstar.optim.user_optimizer import State
from tests.optim.test_state import assert_same

KINDS = [torch.optim.AdamW, torch.optim.Adam, AdamW, Adam]


class Watched(torch.nn.Parameter):
    """A parameter whose gradient only the target may touch, as in a session."""

    touched = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in {torch.Tensor.grad.__get__, torch.Tensor.grad.__set__}:
            cls.touched += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Target:
    """A session in small: gradients and moments lie in its own tables, by name."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.gradients = {}
        self.states = {}
        self.calls = []
        self.kernel = choose_kernel()

    def step_groups(self):
        self.calls.append(("step", torch.is_grad_enabled()))
        for name, hyper in self.optimizer.hypers().items():
            if name not in self.gradients:
                continue
            weight = self.parameters[name].detach().as_subclass(torch.Tensor).view(-1)
            state = self.states.get(name) or State(0, torch.zeros(weight.numel()), torch.zeros(weight.numel()))
            step = state.step + 1
            moments = state.exp_avg.view(-1), state.exp_avg_sq.view(-1)
            self.kernel(weight, self.gradients[name].view(-1), *moments, step=step, hyper=hyper)
            shape = self.parameters[name].shape
            self.states[name] = State(step, state.exp_avg.view(shape), state.exp_avg_sq.view(shape))

    @property
    def optimizer_state(self):
        return self.mapping

    def zero_grad(self, set_to_none):
        self.calls.append(("zero_grad", set_to_none))
        self.gradients.clear()

    def optimizer_states(self):
        return self.states

    def load_optimizer_states(self, states):
        self.states = copy.deepcopy(states)


def managed(kind=torch.optim.AdamW, *, groups=None, prepare=None, **options):
    """(ours, original, target): three parameters under management, the third in no group."""
    torch.manual_seed(0)
    parameters = {name: Watched(torch.randn(shape)) for name, shape in (("a", (2, 3)), ("b", (16,)), ("c", (4,)))}
    wanted = groups(parameters) if groups else [parameters["a"], parameters["b"]]
    original = kind(wanted, **options)
    if prepare:
        prepare(original)
    target = Target(parameters)
    target.optimizer = ManagedOptimizer(original, target=target, names=target.names)
    give_gradients(target)
    Watched.touched = 0
    return target.optimizer, original, target


def give_gradients(target, seed=1):
    generator = torch.Generator().manual_seed(seed)
    target.gradients = {
        name: torch.randn(parameter.shape, generator=generator) for name, parameter in target.parameters.items()
    }


def plain_twin(kind, target, **options):
    """An ordinary optimizer over copies of the parameters; `step(gradients)` gives them and steps."""
    parameters = {
        name: torch.nn.Parameter(p.detach().as_subclass(torch.Tensor).clone()) for name, p in target.parameters.items()
    }
    optimizer = kind([parameters["a"], parameters["b"]], **options)

    def step(gradients):
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].clone()
        optimizer.step()

    return parameters, optimizer, step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"lr": torch.tensor(0.01)}])
def test_a_step_is_the_targets_and_no_gradient_of_a_parameter_is_touched(kind, options):
    ours, original, target = managed(kind, **options)
    ours_kind = AdamW if issubclass(kind, torch.optim.AdamW) else Adam
    parameters, _, plain_step = plain_twin(ours_kind, target, **options)
    for seed in range(3):
        give_gradients(target, seed)
        ours.step()
        plain_step(target.gradients)
    assert target.calls == [("step", False)] * 3
    assert Watched.touched == 0
    assert not original.state, "the original updates nothing and remembers nothing"
    for name, parameter in parameters.items():
        assert torch.equal(parameter, target.parameters[name].detach().as_subclass(torch.Tensor))


def test_groups_are_one_list_of_the_same_dicts():
    ours, original, _ = managed()
    assert isinstance(ours, torch.optim.Optimizer)
    assert ours.param_groups is original.param_groups
    assert ours.param_groups[0] is original.param_groups[0]
    assert ours.defaults is original.defaults
    original.param_groups[0]["lr"] = 0.5
    assert ours.hypers()["a"].lr == 0.5
    ours.param_groups[0]["weight_decay"] = 0.25
    assert original.param_groups[0]["weight_decay"] == 0.25
    assert "lr: 0.5" in repr(ours)


@pytest.mark.parametrize("kind", KINDS)
def test_the_originals_own_step_is_refused_until_detached(kind):
    ours, original, target = managed(kind)
    for call in (original.step, lambda: original.step(lambda: 1.0)):
        with pytest.raises(StateError, match=r"session\.optimizer\.step\(\)"):
            call()
    assert target.calls == []
    ours.step()
    with pytest.raises(StateError):
        original.step()  # ours has not opened it for good
    ours.detach()
    original.step()  # no gradients on the parameters: nothing happens, and nothing raises
    assert target.calls == [("step", False)]


@pytest.mark.parametrize("where", ["the update", "a user's hook"])
def test_after_an_error_the_original_is_still_closed_and_ours_works(where, monkeypatch):
    ours, original, target = managed()
    with monkeypatch.context() as patch:
        patch.setattr(target, "step_groups", lambda: 1 / 0)
        handle = original.register_step_pre_hook(lambda *_: 1 / 0 if where == "a user's hook" else None)
        with pytest.raises(ZeroDivisionError):
            ours.step()
        handle.remove()
    with pytest.raises(StateError):
        original.step()
    assert target.calls == []
    ours.step()
    assert target.states["a"].step == 1


def test_a_closure_runs_once_with_gradients_enabled_and_cannot_step_the_original():
    ours, original, target = managed()
    seen = []

    def closure():
        seen.append((torch.is_grad_enabled(), list(target.calls)))
        with pytest.raises(StateError):
            original.step()
        return 3.5

    assert ours.step(closure) == 3.5
    assert seen == [(True, [])]
    assert target.calls == [("step", False)]
    assert ours.step() is None


def test_hooks_of_both_optimizers_and_global_ones_run_once_around_the_update():
    ours, original, target = managed()
    seen = []

    def hook(name):
        def run(optimizer, args, kwargs):
            groups = [len(group["params"]) for group in optimizer.param_groups]
            seen.append((name, type(optimizer).__name__, groups, len(target.calls)))

        return run

    handles = [register_optimizer_step_pre_hook(hook("global")), register_optimizer_step_post_hook(hook("global"))]
    original.register_step_pre_hook(hook("original"))
    original.register_step_post_hook(hook("original"))
    ours.register_step_pre_hook(hook("ours"))
    ours.register_step_post_hook(hook("ours"))
    try:
        ours.step(lambda: seen.append("closure"))
    finally:
        for handle in handles:
            handle.remove()
    before = [("ours", "ManagedOptimizer", [2], 0), ("global", "AdamW", [2], 0), ("original", "AdamW", [2], 0)]
    after = [("original", "AdamW", [2], 1), ("global", "AdamW", [2], 1), ("ours", "ManagedOptimizer", [2], 1)]
    assert seen == [*before, "closure", *after]


@pytest.mark.parametrize("on", ["ours", "original"])
def test_a_hook_that_replaces_the_arguments_is_refused_not_ignored(on):
    ours, original, target = managed()
    optimizer = ours if on == "ours" else original
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: ((optimizer, lambda: 1.0), kwargs))
    with pytest.raises(StateError, match="replace the arguments"):
        ours.step()
    assert target.calls == []


def test_what_a_gradient_scaler_passes_is_ignored_and_anything_else_is_not():
    ours, _, target = managed()
    ours.step(grad_scaler=object(), found_inf=None)
    assert target.calls == [("step", False)]
    with pytest.raises(TypeError, match="closurre"):
        ours.step(closurre=None)
    assert "grad_scaler" not in inspect.signature(ours.step).parameters, "torch would pass one, with a warning"
    assert not getattr(ours, "_step_supports_amp_scaling", False)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_is_the_targets(set_to_none):
    ours, _, target = managed()
    ours.zero_grad(set_to_none=set_to_none)
    ours.zero_grad(set_to_none)
    ours.zero_grad()
    assert target.calls == [("zero_grad", set_to_none), ("zero_grad", set_to_none), ("zero_grad", True)]
    assert Watched.touched == 0


SCHEDULERS = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


@pytest.mark.parametrize("where", ["original, before", "original, after", "ours"])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, AdamW])
def test_schedulers_on_either_optimizer_do_as_in_plain_torch_and_warn_of_nothing(kind, name, where):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = []
        before = (lambda original: built.append(SCHEDULERS[name](original))) if where == "original, before" else None
        ours, original, target = managed(kind, prepare=before, lr=0.01)
        scheduler = built[0] if built else SCHEDULERS[name](ours if where == "ours" else original)
        parameters, plain, plain_step = plain_twin(AdamW, target, lr=0.01)
        plain_scheduler = SCHEDULERS[name](plain)
        for seed in range(5):
            give_gradients(target, seed)
            ours.step()
            plain_step(target.gradients)
            for one in (scheduler, plain_scheduler):
                one.step(1.0) if name == "ReduceLROnPlateau" else one.step()
            want = plain.param_groups[0]
            assert [original.param_groups[0][key] for key in ("lr", "betas")] == [want["lr"], want["betas"]]
            assert [ours.param_groups[0][key] for key in ("lr", "betas")] == [want["lr"], want["betas"]]
    assert want["lr"] != 0.01
    for key, parameter in parameters.items():
        assert torch.equal(parameter, target.parameters[key].detach().as_subclass(torch.Tensor))


@pytest.mark.parametrize("where", ["original", "ours"])
def test_a_scheduler_that_steps_too_early_still_warns(where):
    ours, original, _ = managed()
    scheduler = SCHEDULERS["LambdaLR"](ours if where == "ours" else original)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
            scheduler.step()


@pytest.mark.parametrize("through", ["ours", "original"])
def test_a_group_added_through_either_is_in_both_and_updated(through):
    ours, original, target = managed()
    target.parameters["c"].requires_grad_(False)
    optimizer = ours if through == "ours" else original
    before = target.parameters["c"].detach().clone()
    ours.step()
    assert torch.equal(target.parameters["c"].detach(), before), "a parameter in no group gets no update"
    optimizer.add_param_group({"params": (p for p in [target.parameters["c"]]), "lr": 0.5})
    assert len(ours.param_groups) == len(original.param_groups) == 2
    assert ours.hypers()["c"].lr == 0.5
    assert ours.param_groups[1]["eps"] == 1e-8, "the rest is the original's default"
    ours.step()
    assert not torch.equal(target.parameters["c"].detach(), before)


@pytest.mark.parametrize(
    ("group", "error", "message"),
    [
        (lambda t: {"params": torch.nn.Parameter(torch.zeros(5))}, ConfigError, r"1 of .* not the model's.*\(5,\)"),
        (lambda t: {"params": [("x", torch.nn.Parameter(torch.zeros(5)))]}, ConfigError, "not the model's"),
        (lambda t: {"params": [t.parameters["c"]], "amsgrad": True}, ConfigError, "amsgrad"),
        (lambda t: {"params": [t.parameters["c"]], "lr": -1.0}, ConfigError, "Invalid learning rate: -1.0"),
        (lambda t: {"params": [t.parameters["a"]]}, ValueError, "more than one parameter group"),
        (lambda t: {"params": {t.parameters["c"]}}, TypeError, "sets"),
        (lambda t: {"params": [3]}, TypeError, "can only optimize Tensors"),
        (lambda t: [t.parameters["c"]], TypeError, "must be a dict"),
    ],
)
def test_a_wrong_group_is_refused_and_nothing_has_changed(group, error, message):
    ours, original, target = managed()
    with pytest.raises(error, match=message):
        ours.add_param_group(group(target))
    assert len(original.param_groups) == 1
    ours.step()


def test_a_strangers_group_added_through_the_original_is_found_at_the_next_step():
    ours, original, target = managed()
    original.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3, 7))]})
    with pytest.raises(ConfigError, match=r"not the model's.*\(3, 7\)"):
        ours.step()
    assert target.calls == []


def test_adamw_stays_adamw_whatever_it_loads_and_adam_follows_as_in_torch():
    for kind in (torch.optim.AdamW, torch.optim.Adam):
        for saved_kind in (torch.optim.AdamW, torch.optim.Adam):
            ours, _, target = managed(kind)
            _, plain, _ = plain_twin(kind, target)
            saved = plain_twin(saved_kind, target)[1].state_dict()
            plain.load_state_dict(copy.deepcopy(saved))
            ours.load_state_dict(copy.deepcopy(saved))
            assert_same(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda saved: saved["param_groups"][0]["params"].pop(), CheckpointError),
        (lambda saved: saved["state"][0].update(exp_avg=torch.zeros(3)), CheckpointError),
        (lambda saved: saved["param_groups"][0].update(maximize=True), ConfigError),
        (lambda saved: saved["param_groups"][0].update(lr=-1.0), ConfigError),
    ],
)
def test_a_wrong_state_is_refused_before_anything_has_changed(spoil, error):
    ours, _, target = managed(lr=0.5)
    ours.step()
    before = copy.deepcopy(ours.state_dict())
    wrong = copy.deepcopy(before)
    wrong["param_groups"][0]["lr"] = 0.25
    spoil(wrong)
    target.load_optimizer_states = target.states.update  # a target that trusts what it is given is given nothing wrong
    with pytest.raises(error):
        ours.load_state_dict(wrong)
    assert_same(ours.state_dict(), before)


def test_a_target_that_cannot_load_leaves_the_hyper_parameters():
    ours, _, target = managed(lr=0.5)
    saved = copy.deepcopy(ours.state_dict())
    saved["param_groups"][0]["lr"] = 0.25
    target.load_optimizer_states = lambda state_dict: 1 / 0
    with pytest.raises(ZeroDivisionError):
        ours.load_state_dict(saved)
    assert ours.param_groups[0]["lr"] == 0.5


def test_loading_into_the_original_is_refused_before_it_changes_its_groups():
    ours, original, _ = managed()
    ours.step()
    saved, groups = copy.deepcopy(ours.state_dict()), original.param_groups
    with pytest.raises(StateError, match=r"session\.optimizer\.load_state_dict\(\)"):
        original.load_state_dict(saved)
    assert original.param_groups is groups
    assert not original.state
    ours.load_state_dict(saved)
    with pytest.raises(StateError):
        original.load_state_dict(saved)
    ours.detach()
    original.load_state_dict(saved)
    assert original.state[original.param_groups[0]["params"][0]]["step"] == 1


def test_hooks_around_state_dicts_run_once_on_both():
    ours, original, _ = managed()
    ours.step()
    seen = []
    for name, optimizer in (("original", original), ("ours", ours)):
        optimizer.register_state_dict_pre_hook(lambda _, name=name: seen.append(f"{name} saves"))
        optimizer.register_state_dict_post_hook(
            lambda _, saved, name=name: seen.append(f"{name} saved {len(saved['state'])}")
        )
        optimizer.register_load_state_dict_pre_hook(lambda _, saved, name=name: seen.append(f"{name} loads"))
        optimizer.register_load_state_dict_post_hook(lambda _, name=name: seen.append(f"{name} loaded"))
    original.register_state_dict_post_hook(lambda _, saved: {**saved, "epoch": 3})
    ours.register_load_state_dict_pre_hook(lambda _, saved: {key: saved[key] for key in ("state", "param_groups")})
    saved = ours.state_dict()
    assert seen == ["ours saves", "original saves", "original saved 2", "ours saved 2"]
    assert saved["epoch"] == 3
    seen.clear()
    ours.load_state_dict(saved)
    assert seen == ["original loads", "ours loads", "original loaded", "ours loaded"]


def test_the_state_is_the_targets():
    ours, _, target = managed()
    target.mapping = {}
    assert ours.state is target.mapping
    parameter = ours.param_groups[0]["params"][0]
    ours.state = {parameter: {"step": 3}}
    assert target.mapping == {parameter: {"step": 3}}
    ours.state = target.mapping
    assert target.mapping == {parameter: {"step": 3}}
    ours.state = {}
    assert target.mapping == {}
    ours.detach()
    with pytest.raises(StateError, match="closed"):
        _ = ours.state


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_managed_optimizer_is_not_copied(copying):
    ours, _, _ = managed()
    with pytest.raises(StateError, match=r"use state_dict\(\)"):
        copying(ours)


def test_after_detaching_the_original_is_as_before_and_ours_says_where_to_go():
    ours, original, _ = managed()
    SCHEDULERS["LambdaLR"](original)
    ours.step()
    ours.detach()
    ours.detach()
    loads, adds = (lambda: ours.load_state_dict({})), (lambda: ours.add_param_group({}))
    for call in (ours.step, ours.zero_grad, ours.state_dict, loads, adds):
        with pytest.raises(StateError, match=r"use the optimizer that was passed to manage\(\)"):
            call()
    hooks = [
        f"_optimizer_{of}_{when}_hooks" for of in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
    ]
    assert [len(getattr(original, hook)) for hook in hooks] == [0] * 6
    plain = torch.nn.Parameter(torch.ones(3))
    original.add_param_group({"params": [plain]})
    plain.grad = torch.ones(3)
    original.step()
    assert original.state[plain]["step"] == 1
    assert original.state_dict()["state"][2]["step"] == 1


def test_many_steps_leave_one_hook():
    ours, original, _ = managed()
    for _ in range(5):
        ours.step()
    assert len(original._optimizer_step_pre_hooks) == 1
    assert len(original._optimizer_step_post_hooks) == 0


def test_a_detached_optimizer_holds_nothing_alive():
    ours, original, target = managed()
    ours.step()
    ours.detach()
    gone = weakref.ref(ours)
    del ours, target
    gc.collect()
    assert gone() is None
    original.step()


def test_two_optimizers_of_one_type_are_managed_apart():
    first, first_original, first_target = managed()
    _second, second_original, second_target = managed()
    first.step()
    assert (first_target.calls, second_target.calls) == ([("step", False)], [])
    with pytest.raises(StateError):
        second_original.step()
    first.detach()
    first_original.step()
    with pytest.raises(StateError):
        second_original.step()
    unmanaged = torch.nn.Parameter(torch.ones(2))
    unmanaged.grad = torch.ones(2)
    torch.optim.AdamW([unmanaged]).step()  # the class itself is as it was
