"""The plain side of `--compare-plain`: a session does the very same, and whatever the plain side did in another way would show."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import patrickstar
from patrickstar.checkpoint import rng
from patrickstar.cli import plain
from patrickstar.cli.batches import Batches
from patrickstar.cli.loop import backward
from patrickstar.cli.plain import (
    ManagedRun,
    PlainPrecision,
    PlainRun,
    Scaling,
    _padded,
    compare_plain,
    digest,
    digests,
    narrow,
    unscale_,
)
from patrickstar.cli.request import BETAS, EPS, WEIGHT_DECAY, WarmupSchedule
from patrickstar.config.settings import OptimizerSettings
from patrickstar.optim.scale_rule import ScaleRule
from patrickstar.optim.schedules import Rates

TOKENS = np.arange(600, dtype=np.int32) % 11
LR = 1e-2
FP32 = PlainPrecision()
SETTINGS = OptimizerSettings(lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, decoupled=True)
STEPS = 8
SCHEDULE = WarmupSchedule("cosine", 2, STEPS)
KINDS = ("fp32", "bf16", "bf16-fp32", "fp16", "fp16-fp32")
"""What weights are kept in, and what they compute in where that is another type."""
A_TIE = 1 + 2**-8
"""Half-way between two numbers of bf16; the even one is the smaller."""


class Toy(nn.Module):
    """A causal model with everything that 16 bits treat in a way of its own."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.dropout = nn.Dropout(0.25)
        self.across = nn.Parameter(torch.randn(8, 8).t())  # not row-major
        self.frozen = nn.Parameter(torch.rand(8), requires_grad=False)
        self.batch_norm = nn.BatchNorm1d(8)
        self.layer_norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)
        self.register_buffer("gain", torch.rand(8))
        nn.init.constant_(self.head.bias, A_TIE)

    def forward(self, input_ids, labels):
        x = self.dropout(self.embedding(input_ids)) @ self.across + self.frozen
        x = self.layer_norm(self.batch_norm(x.transpose(1, 2)).transpose(1, 2) * self.gain)
        logits = self.head(x).float()
        return SimpleNamespace(
            loss=nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1))
        )


def build():
    torch.manual_seed(0)
    return Toy()


def batches():
    return Batches(TOKENS, batch_size=2, seq_len=8, seed=0)


def scale_of(kind, accumulate):
    """Overflows at first, by itself, and grows soon. Gradients that add up in fp32 have the range of fp32."""
    return patrickstar.LossScale(initial=2.0**127 if (kind, accumulate) == ("fp16-fp32", 2) else 2.0**19, window=2)


def precision_of(kind, accumulate):
    if kind == "fp32":
        return FP32
    kept, _, wide = kind.partition("-")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kept]
    return PlainPrecision(
        kept=dtype,
        compute=torch.float32 if wide else dtype,
        gradient=dtype if accumulate == 1 else torch.float32,
        whole=("layer_norm", "batch_norm"),
        loss_scale=scale_of(kind, accumulate) if kept == "fp16" else None,
    )


def managed_run(kind, *, clip=None, accumulate=1):
    """The steps on a session; what they are compared by."""
    kept, _, wide = kind.partition("-")
    given = {"compute": wide or kept, "keep_fp32": ("layer_norm",), "accumulate": accumulate}
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    options = patrickstar.Options(**given, loss_scale=scale_of(kind, accumulate))
    given = {"device": "cpu", "precision": kept, "max_grad_norm": clip, "options": options}
    with patrickstar.manage(model, optimizer, **given) as session:
        scheduler = torch.optim.lr_scheduler.LambdaLR(session.optimizer, SCHEDULE.factor)
        source, state, losses = batches(), rng.capture(), []
        for _ in range(STEPS):
            updates = session.stats().steps
            of_step = [backward(model, source, accumulate, scale=session.scaler.scale) for _ in range(accumulate)]
            losses.append(sum(of_step) / accumulate)
            session.scaler.step(session.optimizer)
            session.scaler.update()
            session.optimizer.zero_grad()
            if session.stats().steps > updates:
                scheduler.step()
        scaling = None
        if session.scaler.is_enabled():
            scaling = Scaling(session.scaler.get_scale(), STEPS - session.stats().steps)
        return ManagedRun(losses, digests(session.state_dict()), state, scaling)


def plain_run(precision=FP32, *, clip=None, accumulate=1, optimizer=SETTINGS):
    given = {
        "optimizer": optimizer,
        "schedule": Rates(lambda done, base: base * SCHEDULE.factor(done)),
        "clip": clip,
        "accumulate": accumulate,
    }
    return PlainRun(build(), [batches()], precision=precision, **given)


def verdict(managed, run):
    return compare_plain(run, managed, advance=lambda _: None)


@pytest.mark.sampled
@pytest.mark.parametrize(("clip", "accumulate"), [(None, 1), (0.1, 1), (None, 2), (0.1, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_steps_have_the_same_bits(kind, clip, accumulate):
    managed = managed_run(kind, clip=clip, accumulate=accumulate)
    run = plain_run(precision_of(kind, accumulate), clip=clip, accumulate=accumulate)
    found = verdict(managed, run)
    assert found.equal, str(found)
    assert str(found).startswith("plain PyTorch gives the same bits: every loss and all 13 tensors of the final state")
    assert len(set(managed.losses)) == STEPS
    if "fp16" in kind:
        assert 0 < run.scaling.skipped < STEPS, "an overflow, and steps after it"
        assert f"a loss scale of {run.scaling.scale:.10g} after {run.scaling.skipped} skipped steps" in str(found)


@pytest.mark.parametrize(
    ("kind", "accumulate", "changed"),
    [
        ("bf16", 1, {"kept": torch.float16, "compute": torch.float16}),
        ("bf16", 1, {"compute": torch.float32}),
        ("bf16-fp32", 1, {"compute": torch.bfloat16}),
        ("bf16-fp32", 1, {"gradient": torch.float32}),
        ("bf16-fp32", 2, {"gradient": torch.bfloat16}),
        ("fp16-fp32", 1, {"gradient": torch.float32}),
        ("fp16", 1, {"compute": torch.float32}),
        ("bf16", 1, {"whole": ("batch_norm",)}),
        ("fp16", 1, {"loss_scale": replace(scale_of("fp16", 1), hysteresis=1)}),
        ("fp16", 1, {"loss_scale": replace(scale_of("fp16", 1), window=1000)}),
        ("fp16", 1, {"loss_scale": None}),
    ],
    ids=str,
)
def test_another_arithmetic_is_told(kind, accumulate, changed):
    managed = managed_run(kind, accumulate=accumulate)
    spoiled = replace(precision_of(kind, accumulate), **changed)
    found = verdict(managed, plain_run(spoiled, accumulate=accumulate))
    assert not found.equal
    assert str(found).startswith("plain PyTorch gives other bits: ")


@pytest.mark.parametrize(
    ("kind", "name", "other"),
    [
        ("bf16", "narrow", lambda master, kept: master.to(kept)),  # ties to even
        ("fp16", "unscale_", lambda gradients, rule: unscale_(gradients, rule) and False),  # no step is skipped
        ("fp32", "_padded", lambda tensor: _padded(tensor).mul_(1 + 2**-20)),
    ],
)
def test_another_operation_is_told(monkeypatch, kind, name, other):
    managed = managed_run(kind)
    monkeypatch.setattr(plain, name, other)
    assert verdict(managed, plain_run(precision_of(kind, 1))).losses


def test_another_scale_alone_is_told():
    managed = managed_run("fp16")
    managed = replace(managed, scaling=replace(managed.scaling, scale=managed.scaling.scale / 2))
    found = verdict(managed, plain_run(precision_of("fp16", 1)))
    assert (found.losses, found.tensors) == ((), ())
    assert not found.equal
    assert ", where the run has a loss scale of " in str(found)


def test_bf16_ties_go_away_from_zero_and_fp16_ties_to_even():
    values = torch.tensor([A_TIE, -A_TIE, 1 + 2**-9, 1 + 2**-8 + 2**-20])
    assert narrow(values, torch.bfloat16).tolist() == [1 + 2**-7, -1 - 2**-7, 1.0, 1 + 2**-7]
    assert narrow(torch.tensor([1 + 2**-11, 1 + 3 * 2**-11]), torch.float16).tolist() == [1.0, 1 + 2**-9]


def test_what_is_kept_of_each_tensor():
    run = plain_run(precision_of("bf16", 1))
    model = run.model
    types = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name.partition(".")[0] for name, dtype in types.items() if dtype is torch.float32} == {
        "batch_norm",
        "layer_norm",
    }
    assert model.gain.dtype is torch.bfloat16
    assert model.batch_norm.running_mean.dtype is torch.float32
    assert model.across.stride() == (1, 8)
    state, first = run.state_dict(), build().state_dict()
    assert all(state[name].dtype is torch.float32 for name in types)
    lost = {name for name in types if not torch.equal(state[name], first[name])}
    assert lost == {"frozen"}


# any difference is told


def one_bit_in_a_loss(losses, _):
    losses[3] = float(np.nextafter(losses[3], 1))


def one_tensor(_, final):
    final["head.bias"] = final["head.bias"][::-1]


def a_tensor_that_is_gone(_, final):
    del final["head.weight"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (one_bit_in_a_loss, "1 losses, first at step 4"),
        (one_tensor, "1 of 13 final tensors, first head.bias"),
        (a_tensor_that_is_gone, "1 of 13 final tensors, first head.weight"),
    ],
)
def test_any_difference_is_found_and_named(spoil, says):
    managed = managed_run("fp32")
    spoil(managed.losses, managed.final)
    assert str(verdict(managed, plain_run())) == f"plain PyTorch gives other bits: {says}"


# the arithmetic


def test_a_loss_scale_divides_gradients_and_hears_of_any_element_that_overflows():
    rule = ScaleRule(patrickstar.LossScale(initial=65536.0, hysteresis=1))
    gradient = torch.tensor([65536.0, -32768.0])
    assert not unscale_([gradient], rule)
    assert gradient.tolist() == [1.0, -0.5]
    for number, bad in enumerate((float("inf"), float("-inf"), float("nan")), start=1):
        assert unscale_([torch.zeros(3), torch.tensor([0.0, bad, 0.0]), torch.zeros(3)], rule)
        assert rule.scale == 65536.0 / 2**number


def test_a_digest_is_of_bits_shape_and_type():
    zero = torch.zeros(2, 3)
    different = [-zero, torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.float64)]
    assert len({digest(tensor) for tensor in (zero, *different)}) == 5
    assert digest(zero) == digest(torch.zeros(3, 2).t())
