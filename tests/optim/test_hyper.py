import math

import numpy as np
import pytest
import torch

from patrickstar.errors import ConfigError
from patrickstar.optim.hyper import Hyper


def group(**changes):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.1, betas=(0.8, 0.99), eps=1e-6)
    return {**optimizer.param_groups[0], **changes}


def test_a_group_of_torch_is_read_as_it_stands():
    assert Hyper.from_group(group()) == Hyper(0.1, 0.8, 0.99, 1e-6, 1e-2, decoupled=True)
    assert not Hyper.from_group(group(decoupled_weight_decay=False)).decoupled


def test_tensors_of_one_element_are_numbers():
    hyper = Hyper.from_group(group(lr=torch.tensor([0.25]), betas=(torch.tensor(0.5), torch.tensor(0.75))))
    assert (hyper.lr, hyper.beta1, hyper.beta2) == (0.25, 0.5, 0.75)
    assert Hyper.from_group(group(lr=np.float64(0.5))).lr == 0.5


@pytest.mark.parametrize("value", [torch.zeros(2), "fast", None])
def test_what_is_no_number_is_refused_by_name(value):
    with pytest.raises(ConfigError, match=r"^lr\b"):
        Hyper.from_group(group(lr=value))


def test_flags_that_choose_an_implementation_are_taken():
    assert Hyper.from_group(group(fused=True)) == Hyper.from_group(group(foreach=True)) == Hyper.from_group(group())


@pytest.mark.parametrize(
    "values",
    [
        {"lr": -1e-3},
        {"lr": math.nan},
        {"eps": -1e-8},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"betas": (0.9, math.nan)},
        {"weight_decay": -1.0},
    ],
)
def test_what_the_constructor_of_torch_refuses_is_refused(values):
    with pytest.raises(ValueError, match="Invalid"):
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], **values)
    hyper = Hyper.from_group(group(**values))  # torch takes them from a group, and a scheduler may put them there
    with pytest.raises(ConfigError, match="Invalid"):
        hyper.check()


def test_what_the_constructor_of_torch_takes_passes():
    Hyper(lr=0.0, beta1=0.0, beta2=0.0, eps=0.0, weight_decay=0.0, decoupled=True).check()
    Hyper(lr=math.inf, beta1=0.9, beta2=0.999, eps=1.0, weight_decay=1.0, decoupled=False).check()
