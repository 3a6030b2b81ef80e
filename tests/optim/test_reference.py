import math

import pytest
import torch

from patrickstar.optim import hyper as hyper_module
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.reference import BLOCK_NUMEL, Reference
from tests.optim.definition import Definition, exact_fma
from tests.optim.live_bytes import LiveBytes
from tests.optim.oracle import different, random_planes, special_planes, update

ADAMW = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}
HYPERS = {
    "adamw": ADAMW,
    "adam with l2": {**ADAMW, "decoupled": False},
    "no decay": {**ADAMW, "weight_decay": 0.0},
    "gradient weighs more": {**ADAMW, "beta1": 0.25},
    "both weigh half": {**ADAMW, "beta1": 0.5},
    "no momentum": {**ADAMW, "beta1": 0.0, "beta2": 0.0},
    "eps 0": {**ADAMW, "eps": 0.0},
    "lr 0": {**ADAMW, "lr": 0.0},
    "huge lr": {**ADAMW, "lr": 1e38, "weight_decay": 1e-3},
}
KERNELS = {"torch's operations": Reference, "emulated": Definition}


def updated(kernel, planes, *, step, hyper):
    weight, grad, exp_avg, exp_avg_sq = [plane.clone() for plane in planes]
    kernel.update(weight, grad, exp_avg, exp_avg_sq, step=step, hyper=Hyper(**hyper))
    assert different(grad, planes[1]) == 0, "the gradient was changed"
    return weight, exp_avg, exp_avg_sq


def assert_is_the_definition(kernel, planes, *, step, hyper):
    got, want = updated(kernel, planes, step=step, hyper=hyper), update(planes, step=step, **hyper)
    assert [different(*pair) for pair in zip(got, want, strict=True)] == [0, 0, 0]


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)
def test_random_numbers_are_updated_by_the_definition(hyper, kernel):
    for step in (1, 3, 10_000):
        assert_is_the_definition(kernel(), random_planes(200, seed=step), step=step, hyper=hyper)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)
def test_special_numbers_are_updated_by_the_definition(hyper, kernel):
    assert_is_the_definition(kernel(), special_planes(), step=2, hyper=hyper)


@pytest.mark.parametrize("numel", [0, 1, 15, 17, BLOCK_NUMEL - 1, BLOCK_NUMEL, BLOCK_NUMEL + 1, 3 * BLOCK_NUMEL + 7])
def test_every_element_is_updated_once_at_any_length(numel):
    planes = random_planes(numel, seed=6)
    in_blocks = updated(Reference(), planes, step=2, hyper=ADAMW)
    weight, exp_avg, exp_avg_sq = (torch.full((numel,), math.nan) for _ in range(3))
    for start in range(0, numel, 1000):  # blocks of another length: an update knows nothing of its neighbours
        part = slice(start, start + 1000)
        pieces = updated(Reference(), [plane[part] for plane in planes], step=2, hyper=ADAMW)
        weight[part], exp_avg[part], exp_avg_sq[part] = pieces
    assert [different(*pair) for pair in zip(in_blocks, (weight, exp_avg, exp_avg_sq), strict=True)] == [0, 0, 0]


def test_moments_after_many_steps_are_the_definition():
    planes = random_planes(50, seed=7)
    want = [plane.clone() for plane in planes]
    kernel = Reference()
    for step in range(1, 21):
        planes[1] = want[1] = random_planes(50, seed=100 + step)[1]
        kernel.update(*planes, step=step, hyper=Hyper(**ADAMW))
        want[0], want[2], want[3] = update(want, step=step, **ADAMW)
        assert [different(*pair) for pair in zip(planes, want, strict=True)] == [0, 0, 0, 0]


@pytest.mark.parametrize("numel", [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 1001])
def test_torch_fuses_to_the_last_element(numel):
    for beta1 in (0.75, 0.5, 0.25, 0.0, 0.9):
        hyper = {**ADAMW, "beta1": beta1, "decoupled": False}
        for seed in range(20):
            planes = random_planes(numel, seed=seed)
            got, want = (updated(kernel(), planes, step=3, hyper=hyper) for kernel in (Reference, Definition))
            assert [different(*pair) for pair in zip(got, want, strict=True)] == [0, 0, 0]


def test_temporaries_stay_below_one_mebibyte():
    planes = random_planes(10 * BLOCK_NUMEL)
    with LiveBytes(known=planes) as meter:
        Reference().update(*planes, step=1, hyper=Hyper(**{**ADAMW, "decoupled": False}))
    assert 8 * BLOCK_NUMEL < meter.peak <= 2**20


class Unfused(Definition):
    """Rounds each product."""

    def average(self, exp_avg, grad, blend):
        return exp_avg + (grad - exp_avg) * blend

    def square(self, exp_avg_sq, grad, keep, add):
        return exp_avg_sq * keep + grad * add * grad


class FarEnd(Definition):
    """Goes from exp_avg to the gradient also where the gradient is nearer."""

    def average(self, exp_avg, grad, blend):
        return exact_fma(grad - exp_avg, blend, exp_avg)


class SquareFirst(Definition):
    """Squares the gradient before it is scaled."""

    def square(self, exp_avg_sq, grad, keep, add):
        return exact_fma(grad * grad, add, exp_avg_sq * keep)


@pytest.mark.parametrize(
    ("spoiled", "hyper"),
    [(Unfused, "adamw"), (FarEnd, "no momentum"), (SquareFirst, "adamw")],
)
def test_the_comparison_fails_for_other_operations(spoiled, hyper):
    with pytest.raises(AssertionError):
        assert_is_the_definition(spoiled(), random_planes(1000, seed=8), step=2, hyper=HYPERS[hyper])


def test_the_comparison_fails_for_scalars_computed_in_fp32(monkeypatch):
    exact = hyper_module.Coefficients.at

    def in_fp32(hyper, step):
        rounded = [torch.tensor(value, dtype=torch.float32) for value in (hyper.lr, hyper.beta1, hyper.beta2)]
        lr, beta1, beta2 = (float(value) for value in rounded)
        return exact(Hyper(lr, beta1, beta2, hyper.eps, hyper.weight_decay, hyper.decoupled), step)

    monkeypatch.setattr(hyper_module.Coefficients, "at", in_fp32)
    with pytest.raises(AssertionError):
        assert_is_the_definition(Reference(), random_planes(200, seed=9), step=2, hyper=ADAMW)


@pytest.mark.parametrize("off_by", [-1, 1])
def test_the_comparison_fails_for_another_step(off_by, monkeypatch):
    exact = hyper_module.Coefficients.at
    monkeypatch.setattr(hyper_module.Coefficients, "at", lambda hyper, step: exact(hyper, step + off_by))
    with pytest.raises(AssertionError):
        assert_is_the_definition(Reference(), random_planes(200, seed=9), step=2, hyper=ADAMW)


def test_the_comparison_fails_for_a_root_that_is_not_ieee(monkeypatch):
    planes = random_planes(2000, seed=10)
    root = torch.Tensor.sqrt_
    # one unit of the last fp32 place beside it, as MKL's fp32 root is in some cases
    monkeypatch.setattr(torch.Tensor, "sqrt_", lambda tensor: root(tensor).mul_(1 + 2.0**-23))
    with pytest.raises(AssertionError):
        assert_is_the_definition(Reference(), planes, step=2, hyper=ADAMW)


@pytest.mark.parametrize("spoil", [lambda p: p.view(-1, 2), lambda p: p[::2], lambda p: p.double(), lambda p: p[:4]])
def test_planes_that_do_not_fit_are_caught_before_anything_is_written(spoil):
    planes = random_planes(10)
    before = [plane.clone() for plane in planes]
    with pytest.raises(AssertionError):
        Reference().update(planes[0], planes[1], planes[2], spoil(planes[3]), step=1, hyper=Hyper(**ADAMW))
    with pytest.raises(AssertionError):
        Reference().update(*planes, step=0, hyper=Hyper(**ADAMW))
    assert [different(*pair) for pair in zip(planes, before, strict=True)] == [0, 0, 0, 0]
