"""Jobs for tests: a small model with everything in it, trained in steps of numbered parts by ranks that come and go."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import patrickstar
from patrickstar.session.sample_order import SampleOrder, keyed_seed

MOST = 4


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that are drawn in part when they are asked for, as augmentation is."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        fixed = torch.randn(48, generator=torch.Generator().manual_seed(index))
        return index, fixed + 0.1 * torch.rand(48)


def build(*, with_statistics: bool = False) -> nn.Module:
    """Blocks and a root group, a tied, a frozen and a transposed weight, random numbers, and a tensor of several chunks."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(48, 120), nn.Dropout(0.2), nn.Linear(120, 48)) for _ in range(3)]
    norm = nn.BatchNorm1d(48) if with_statistics else nn.LayerNorm(48)
    model = nn.Sequential(nn.Linear(48, 48), *blocks, norm, nn.Linear(48, 48))
    model[5].weight = model[0].weight
    model[1][0].weight.requires_grad_(False)
    model[2][2].weight = nn.Parameter(model[2][2].weight.detach().t().contiguous().t())
    return model


@dataclass(frozen=True)
class Plan:
    """A run: sizes and batches by step in which they are asked for, and what does not depend on them. `growth`: arguments of `steps`."""

    sizes: Mapping[int, int] = field(default_factory=dict)
    begins: int = 1
    least: int = 1
    most: int = MOST
    parts: int = 4
    total: int = 5
    samples: int = 29
    batches: Mapping[int, int] = field(default_factory=dict)
    growth: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=lambda: {"host_memory": "1GiB"})


@dataclass
class Run:
    """What a rank has to show: (step, part, loss, samples) of what it has computed, and weights and moments where it was there at the end."""

    parts: list[tuple[int, int, str, tuple[int, ...]]] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    process: int = 0
    moved: list[tuple[int, int]] = field(default_factory=list)


@contextmanager
def in_job(rank: int, plan: Plan) -> Iterator[None]:
    """The environment of a process of a job that begins with so many ranks."""
    given = {
        "RANK": str(rank),
        "PATRICKSTAR_ELASTIC": f"{plan.least}:{plan.most}",
        "PATRICKSTAR_SIZE": str(plan.begins),
    }
    before = {name: os.environ.get(name) for name in given}
    os.environ |= given
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def train(rank: int, plan: Plan) -> Run:
    """The run of one process of a job."""
    with in_job(rank, plan), tempfile.TemporaryDirectory() as disk:
        memory = dict(plan.memory)
        if "disk_memory" in memory:
            memory["disk"] = disk
        return train_here(plan, memory)


def train_here(plan: Plan, memory: Mapping[str, Any]) -> Run:
    """The run of this process, whatever it is of."""
    torch.set_num_threads(1)
    model, run, asked = build(), Run(process=os.getpid()), plan.begins
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = patrickstar.manage(model, optimizer, options=patrickstar.Options(poison=True), **memory)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
    steps = session.steps(
        Samples(plan.samples),
        batch_size=2 * plan.parts,
        parts=plan.parts,
        total=plan.total,
        seed=3,
        extra={"schedule": schedule},
        **plan.growth,
    )
    for parts in steps:
        with parts:
            run.sizes.append(session.world_size)
            for indices, batch in parts:
                loss = model(batch).square().mean()
                loss.backward()
                run.parts.append((parts.step, parts.index, loss.item().hex(), tuple(indices.tolist())))
            session.optimizer.step()
            session.optimizer.zero_grad()
            schedule.step()
            if session.rank == 0 and parts.step in {*plan.sizes, *plan.batches}:
                asked = plan.sizes.get(parts.step, asked)
                session.resize(asked, plan.batches.get(parts.step))
    if session.is_member:
        run.tensors = {name: value.clone() for name, value in session.state_dict().items()}
        for name, parameter in model.named_parameters():
            state = session.optimizer.state.get(parameter, {})
            run.tensors |= {f"{name}/{plane}": state[plane].clone() for plane in state}
    session.close()
    return run


def plain(plan: Plan, parts: Sequence[int], lr_factor: Callable[[int], float] = lambda _: 1.0) -> Run:
    """What plain PyTorch computes in steps of so many parts, with learning rates times a factor by step."""
    torch.set_num_threads(1)
    model, run = build(), Run()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
    samples, order, first = Samples(plan.samples), SampleOrder(plan.samples, 3), 0
    for step, count in enumerate(parts):
        for part in range(count):
            torch.manual_seed(keyed_seed(3, step, part))
            indices = order.indices(first, 2)
            batch = torch.stack([samples[index][1] for index in indices])
            torch.manual_seed(keyed_seed(3, step, part))
            loss = model(batch).square().mean()
            loss.backward()
            run.parts.append((step, part, loss.item().hex(), tuple(indices)))
            first += 2
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(torch.tensor(1 / count))
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = rate * lr_factor(step)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = rate
        schedule.step()
    run.tensors = {name: value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        run.tensors |= {f"{name}/{plane}": state[plane].clone() for plane in state}
    return run


def refusal(act: Callable[[], object]) -> str:
    """The error that something ends with; "nothing" where it does not."""
    try:
        act()
    except patrickstar.Error as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def digest(values: Iterable[torch.Tensor]) -> str:
    """A digest of all bits."""
    return hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in values)).hexdigest()


def expect_run(want: Run, runs: Sequence[Run]) -> None:
    """Fails unless these processes have computed, all together, what one has."""
    assert sorted(part for run in runs for part in run.parts) == sorted(want.parts)
    ended = [run for run in runs if run.tensors]
    assert ended, "nobody was there at the end"
    for run in ended:
        assert run.tensors.keys() == want.tensors.keys()
        odd = [name for name, value in want.tensors.items() if not torch.equal(value, run.tensors[name])]
        assert not odd, f"{odd} differ"
