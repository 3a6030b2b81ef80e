import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.optim.fused import LARGEST_STEP, VECTOR_NUMEL, Fused
from patrickstar.optim.hyper import Hyper
from tests.optim.definition import Definition
from tests.optim.oracle import different, random_planes, special_planes

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch's kernels are not fused on this machine"
)

ADAMW = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True)
ADAM = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=False)


def differences(kernel, planes, *, step=3, hyper=ADAMW):
    """Elements of weight, grad, exp_avg, exp_avg_sq in which a kernel differs from the definition. Updates planes."""
    want = [plane.clone() for plane in planes]
    Definition().update(*want, step=step, hyper=hyper)
    kernel.update(*planes, step=step, hyper=hyper)
    return [different(*pair) for pair in zip(planes, want, strict=True)]


class TorchAlone(Fused):
    """Leaves the last elements to torch as well."""

    def update(self, weight, grad, exp_avg, exp_avg_sq, *, step, hyper):
        update = torch._fused_adamw_ if hyper.decoupled else torch._fused_adam_
        update(
            [weight], [grad], [exp_avg], [exp_avg_sq], [], [torch.tensor(float(step))], lr=hyper.lr, beta1=hyper.beta1,
            beta2=hyper.beta2, weight_decay=hyper.weight_decay, eps=hyper.eps, amsgrad=False, maximize=False,
        )  # fmt: skip


@pytest.mark.parametrize("hyper", [ADAMW, ADAM], ids=["adamw", "adam"])
@pytest.mark.parametrize("numel", [*range(50), 1000, 4096, 65_537, 200_003])
def test_every_length_has_the_bits_of_the_definition(numel, hyper):
    assert differences(Fused(), random_planes(numel, seed=numel), hyper=hyper) == [0, 0, 0, 0]


@pytest.mark.parametrize("offset", range(1, VECTOR_NUMEL))
def test_every_address_has_the_bits_of_the_definition(offset):
    for numel in (16, 35, 2048):
        assert differences(Fused(), random_planes(numel, seed=offset, offset=offset)) == [0, 0, 0, 0]


def test_planes_at_different_addresses_have_the_bits_of_the_definition():
    planes = [random_planes(1000, offset=offset)[index] for index, offset in enumerate((0, 1, 7, 15))]
    assert differences(Fused(), planes) == [0, 0, 0, 0]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(threads):
    torch.set_num_threads(threads)  # put back by the fixture of conftest.py
    for numel in (48, 80, 16 * 1001, 100_003):
        assert differences(Fused(), random_planes(numel, seed=threads)) == [0, 0, 0, 0]


@pytest.mark.parametrize("hyper", [ADAMW, ADAM], ids=["adamw", "adam"])
def test_special_numbers_have_the_bits_of_the_definition(hyper):
    planes = special_planes()
    assert planes[0].numel() > 10 * VECTOR_NUMEL
    assert differences(Fused(), planes, hyper=hyper) == [0, 0, 0, 0]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    hyper=st.builds(
        Hyper,
        lr=st.floats(0, 10),
        beta1=st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.95]) | st.floats(0, 0.9999),
        beta2=st.sampled_from([0.0, 0.5, 0.95, 0.999, 0.99999]) | st.floats(0, 0.9999),
        eps=st.sampled_from([0.0, 1e-15, 1e-8, 1e-3]),
        weight_decay=st.sampled_from([0.0, 1e-2]) | st.floats(0, 2),
        decoupled=st.booleans(),
    ),
    step=st.integers(1, 100) | st.integers(1, 2**25),
    seed=st.integers(0, 2**30),
)
def test_all_hyper_parameters_have_the_bits_of_the_definition(hyper, step, seed):
    assert differences(Fused(), random_planes(67, seed=seed), step=step, hyper=hyper) == [0, 0, 0, 0]


def test_a_step_beyond_what_fp32_counts_has_the_bits_of_the_definition():
    slow = Hyper(lr=1e-3, beta1=0.9999999, beta2=0.99999999, eps=1e-8, weight_decay=0.0, decoupled=True)
    assert differences(Fused(), random_planes(64), step=LARGEST_STEP + 1, hyper=slow) == [0, 0, 0, 0]
    assert differences(Fused(), random_planes(64), step=LARGEST_STEP, hyper=slow) == [0, 0, 0, 0]


def test_the_comparison_fails_where_torch_updates_the_last_elements_too():
    assert differences(TorchAlone(), random_planes(67 * VECTOR_NUMEL)) == [0, 0, 0, 0]  # in whole vectors it is right
    assert sum(sum(differences(TorchAlone(), random_planes(15, seed=seed))) for seed in range(40)) > 0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_one_step_has_the_moments_of_torch_and_weights_within_two_ulp(kind, fused):
    numel = 200_000
    weight = torch.randn(numel, generator=torch.Generator().manual_seed(11))
    exp_avg, exp_avg_sq = torch.zeros(2, numel)
    for step in range(1, 5):
        grad = torch.randn(numel, generator=torch.Generator().manual_seed(step))
        Fused().update(weight, grad, exp_avg, exp_avg_sq, step=step, hyper=ADAMW)
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = kind([parameter], lr=1e-2, weight_decay=0.1, fused=fused)
    parameter.grad = grad.clone()
    optimizer.state[parameter] = {
        "step": torch.tensor(4.0),
        "exp_avg": exp_avg.clone(),
        "exp_avg_sq": exp_avg_sq.clone(),
    }
    optimizer.step()
    hyper = Hyper.from_group(optimizer.param_groups[0])
    Fused().update(weight, grad, exp_avg, exp_avg_sq, step=5, hyper=hyper)
    assert different(exp_avg, optimizer.state[parameter]["exp_avg"]) == 0
    assert different(exp_avg_sq, optimizer.state[parameter]["exp_avg_sq"]) == 0
    # torch's root is MKL's: off by an ulp in 0.65 % of all cases on one CPU, in 20 % on another. That is one ulp of
    # max(|p|, lr) at most, but for about one of those weights in a thousand, where the weight is no larger than its update.
    rounded = exp_avg_sq.double().sqrt().float()
    roots_off = different(exp_avg_sq.sqrt(), rounded)
    size = weight.abs().clamp(min=hyper.lr)
    ulp = torch.nextafter(size, torch.tensor(torch.inf)) - size
    off = (weight - parameter.detach()).abs() / ulp
    assert off.max() <= 2
    assert (off > 1).sum() <= roots_off / 500
    assert fused == (different(weight, parameter.detach()) == 0), "torch's fused one is the same, its others are not"
