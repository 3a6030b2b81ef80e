import pytest
import torch

from patrickstar.errors import ConfigError
from patrickstar.optim.adamw import Adam, AdamW
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.user_optimizer import check_optimizer, check_parameters, read_groups, read_state, return_state

ACCEPTED = [torch.optim.AdamW, torch.optim.Adam, AdamW, Adam]
REFUSED = [torch.optim.SGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adagrad]


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def names_of(module):
    return {id(parameter): name for name, parameter in module.named_parameters()}


def train(module, optimizer, steps=2):
    for _ in range(steps):
        module(torch.ones(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ACCEPTED)
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"lr": torch.tensor(0.1)}])
def test_adam_and_adamw_are_taken_fresh_and_trained(kind, options):
    module = model()
    optimizer = kind(module.parameters(), **options)
    check_optimizer(optimizer, names_of(module))
    train(module, optimizer)
    check_optimizer(optimizer, names_of(module))


@pytest.mark.parametrize("kind", REFUSED)
def test_another_optimizer_is_refused_by_name_with_what_is_allowed(kind):
    module = model()
    with pytest.raises(ConfigError) as refusal:
        check_optimizer(kind(module.parameters(), lr=0.1), names_of(module))
    assert str(refusal.value).startswith(f"torch.optim.{kind.__name__} is no optimizer that can be managed")
    for allowed in ("torch.optim.AdamW", "torch.optim.Adam", "patrickstar.AdamW", "patrickstar.Adam"):
        assert allowed in str(refusal.value)


def test_a_subclass_is_refused_by_its_own_name():
    class Lookahead(torch.optim.AdamW):
        pass

    module = model()
    with pytest.raises(ConfigError, match=r"test_user_optimizer.*Lookahead is no optimizer"):
        check_optimizer(Lookahead(module.parameters()), names_of(module))


@pytest.mark.parametrize("thing", ["adamw", [], torch.optim.AdamW, None])
def test_what_is_no_optimizer_is_refused(thing):
    with pytest.raises(ConfigError, match="is no optimizer"):
        check_optimizer(thing, {})


@pytest.mark.parametrize("flag", ["amsgrad", "maximize", "capturable", "differentiable"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_another_update_is_refused_in_any_group(kind, flag):
    module = model()
    optimizer = kind([{"params": module[0].parameters()}, {"params": module[1].parameters()}])
    optimizer.param_groups[1][flag] = True
    with pytest.raises(ConfigError, match=f"{flag}=True"):
        check_optimizer(optimizer, names_of(module))


def test_hyper_parameters_that_torch_checks_only_outside_groups_are_checked():
    module = model()
    optimizer = torch.optim.AdamW([{"params": module.parameters(), "lr": -1.0}])
    with pytest.raises(ConfigError, match=r"Invalid learning rate: -1\.0"):
        check_optimizer(optimizer, names_of(module))


def test_parameters_of_another_model_are_refused_with_count_and_shapes():
    module, other = model(), torch.nn.Linear(7, 5)
    optimizer = torch.optim.AdamW([*module.parameters(), *other.parameters()])
    with pytest.raises(ConfigError, match=r"^2 of the optimizer's parameters .* shapes \(5, 7\), \(5,\):"):
        check_optimizer(optimizer, names_of(module))
    many = [torch.nn.Parameter(torch.zeros(size)) for size in range(1, 8)]
    with pytest.raises(ConfigError, match=r"^7 of .* \(1,\), \(2,\), \(3,\), \(4,\) and 3 more"):
        check_parameters(many, names_of(module))


def test_an_equal_parameter_is_not_the_same_parameter():
    with pytest.raises(ConfigError, match=r"^4 of"):
        check_optimizer(torch.optim.AdamW(model().parameters()), names_of(model()))


def test_groups_are_read_as_they_stand_by_name():
    module = model()
    optimizer = torch.optim.Adam(
        [{"params": module[0].parameters(), "lr": 0.5}, {"params": [module[1].weight], "decoupled_weight_decay": True}],
        weight_decay=0.25,
    )
    plain = Hyper(0.5, 0.9, 0.999, 1e-8, 0.25, decoupled=False)
    decoupled = Hyper(1e-3, 0.9, 0.999, 1e-8, 0.25, decoupled=True)
    hypers = read_groups(optimizer.param_groups, names_of(module))
    assert hypers == {"0.weight": plain, "0.bias": plain, "1.weight": decoupled}, "1.bias is in no group: no update"
    optimizer.param_groups[0]["lr"] = 0.125
    assert read_groups(optimizer.param_groups, names_of(module))["0.bias"].lr == 0.125


@pytest.mark.parametrize("kind", ACCEPTED)
@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_state_is_read_by_name_without_what_was_never_updated(kind, options):
    module = model()
    optimizer = kind([module[0].weight, module[1].weight], **options)
    assert read_state(optimizer, names_of(module)) == {}
    module[1].weight.requires_grad_(False)
    train(module, optimizer, steps=3)
    states = read_state(optimizer, names_of(module))
    assert list(states) == ["0.weight"]
    assert states["0.weight"].step == 3
    assert states["0.weight"].exp_avg is optimizer.state[module[0].weight]["exp_avg"]
    assert states["0.weight"].exp_avg_sq is optimizer.state[module[0].weight]["exp_avg_sq"]
    assert set(optimizer.state) <= {module[0].weight, module[1].weight}, "reading adds nothing"


def test_a_state_that_is_not_adams_is_refused():
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    train(module, optimizer)
    optimizer.state[module[0].weight].pop("exp_avg")
    with pytest.raises(ConfigError, match=r"0\.weight has no exp_avg"):
        check_optimizer(optimizer, names_of(module))


def test_nothing_is_changed_by_checking():
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    train(module, optimizer)
    before = {id(p): dict(state) for p, state in optimizer.state.items()}
    groups = [dict(group) for group in optimizer.param_groups]
    check_optimizer(optimizer, names_of(module))
    assert {id(p): dict(state) for p, state in optimizer.state.items()} == before
    assert [dict(group) for group in optimizer.param_groups] == groups


def test_state_that_was_taken_and_returned_goes_on_as_if_nothing_had_been():
    modules = [model(), model()]
    optimizers = [torch.optim.AdamW(module.parameters()) for module in modules]
    for module, optimizer in zip(modules, optimizers, strict=True):
        train(module, optimizer)
    names = names_of(modules[1])
    states = read_state(optimizers[1], names)
    optimizers[1].state.clear()
    optimizers[1].state[modules[1][1].bias] = {"step": torch.tensor(9.0)}
    states.pop("1.bias")  # what has no state any more loses it
    return_state(optimizers[1], names, states)
    assert modules[1][1].bias not in optimizers[1].state
    optimizers[0].state.pop(modules[0][1].bias)
    for module, optimizer in zip(modules, optimizers, strict=True):
        train(module, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(modules[0].parameters(), modules[1].parameters(), strict=True))
