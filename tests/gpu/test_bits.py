"""No bit depends on where model data lies: a decoder with attention of torch's own, in every precision and way of stepping, against the oracle.

Larger than the models of the parity matrix, so that kernels of a GPU are those that real models get.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu.decoder import Decoder, Shape
from torch import Tensor, nn

import patrickstar
from patrickstar.optim.choose import choose_kernels
from patrickstar.optim.norm import GlobalNorm
from tests.cuda.schedules import Accelerator
from tests.parity import oracle
from tests.parity.compare import differences
from tests.parity.oracle import SCALE, WINDOW, Record
from tests.parity.zoo import Case, micro_seed, one_group, schedule

CUDA = torch.device("cuda", 0)
ON_GPU = "tests.gpu.plugin" in sys.modules
STEPS = 3
SEQUENCES, TOKENS = (2, 512) if ON_GPU else (2, 16)
SHAPE = (
    Shape(layers=3, width=512, heads=8, kv_heads=4, inner=1408, vocab=4096)
    if ON_GPU
    else Shape(layers=2, width=32, heads=4, kv_heads=2, inner=64, vocab=64)
)
CHUNK = 1 << 19 if ON_GPU else 2048
REFUSALS = 4


def draw() -> dict[str, Tensor]:
    tokens = torch.randint(SHAPE.vocab, (SEQUENCES, TOKENS))
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def plain_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch)
    return loss


def autocast_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return plain_loss(model, batch)


@dataclass(frozen=True)
class Way:
    """How the decoder is trained. `share`: of the smallest budget that trains; None: it all fits."""

    share: float | None = 1.0
    precision: str = "bf16"
    recompute: bool = True
    dropout: float = 0.0
    accumulation: int = 1
    clips: bool = False
    autocast: bool = False
    disk: bool = False
    arguments: tuple[tuple[str, Any], ...] = ()
    options: tuple[tuple[str, Any], ...] = field(default=())


IN_BACKWARD = (("step", "in_backward"),)
WAYS = {
    "bf16, all fits": Way(None),
    "bf16, smallest": Way(),
    "bf16, between": Way(1.5),
    "bf16, in backward, all fits": Way(None, arguments=IN_BACKWARD),
    "bf16, in backward, smallest": Way(arguments=IN_BACKWARD),
    "fp32, smallest": Way(precision="fp32"),
    "fp16, between": Way(1.5, precision="fp16"),
    "bf16, clipped": Way(1.2, clips=True),
    "bf16, accumulated": Way(1.2, accumulation=3),
    "bf16, nothing recomputed": Way(1.2, recompute=False),
    "bf16, dropout, recomputed": Way(1.2, dropout=0.1),
    "fp32 under autocast": Way(1.2, precision="fp32", autocast=True),
    "bf16, disk": Way(disk=True),
    "bf16, late transfers": Way(1.3, options=(("stress_seed", 7),)),
    "bf16, in backward, late transfers": Way(1.3, arguments=IN_BACKWARD, options=(("stress_seed", 8),)),
    "bf16, nothing early": Way(1.3, options=(("prefetch", 0),)),
    "fp32, in backward, disk": Way(precision="fp32", arguments=IN_BACKWARD, disk=True),
    "fp16, clipped, accumulated": Way(1.3, precision="fp16", clips=True, accumulation=2),
}


def case_of(way: Way) -> Case:
    shape = replace(SHAPE, recompute=way.recompute, dropout=way.dropout)
    loss = autocast_loss if way.autocast else plain_loss
    return Case("decoder", lambda _: Decoder(shape), draw, loss, groups=one_group, chunk_numel=CHUNK)


@lru_cache(maxsize=32)
def wanted(way: Way) -> Record:
    return oracle.train(
        case_of(way),
        accumulation=way.accumulation,
        clipping=way.clips,
        steps=STEPS,
        precision=way.precision,
        device="cuda",
    )


def train(way: Way, directory: Path, *, device_memory: int | str) -> tuple[Record, Any]:
    case, record = case_of(way), Record()
    model = case.build()
    (group,) = case.groups(model)
    batches = [oracle.on("cuda", batch) for batch in case.batches(seed=0, count=STEPS * way.accumulation)]
    scale = patrickstar.LossScale(initial=SCALE, window=WINDOW, hysteresis=oracle.HYSTERESIS)
    options = {"chunk_size": CHUNK, "poison": True, **dict(way.options)}
    if way.precision != "fp32":
        options |= {"loss_scale": scale, "accumulate": way.accumulation, "compute": way.precision}
    session = patrickstar.manage(
        model,
        torch.optim.AdamW([group], lr=1.0),
        device="cuda",
        precision=way.precision,
        device_memory=device_memory,
        max_grad_norm=case.max_norm if way.clips else None,
        options=patrickstar.Options(**options),
        **({"disk": directory, "disk_memory": "2GiB", "host_memory": "3GiB"} if way.disk else {}),
        **dict(way.arguments),
    )
    with session:
        optimizer: Any = session.optimizer
        base = dict(optimizer.param_groups[0])
        for step in range(1, STEPS + 1):
            optimizer.param_groups[0].update(schedule(base, step))
            for micro in range(way.accumulation):
                torch.manual_seed(micro_seed(step, micro))
                loss = case.loss_of(model, batches[(step - 1) * way.accumulation + micro])
                session.scaler.scale(loss / way.accumulation).backward()
                record.losses.append(loss.detach().cpu().clone())
                del loss
            session.scaler.step(optimizer)
            session.scaler.update()
            optimizer.zero_grad()
            oracle.evaluate(case, model, batches[0], step, record)
        weights = session.state_dict()
        record.weights = {name: weights[name].cpu().clone() for name in dict(model.named_parameters())}
        stats = session.stats()
    return record, stats


def seen_of(found: Record, expected: Record) -> Record:
    """Losses, evaluations and weights as found; of the rest these runs keep nothing."""
    return replace(expected, losses=found.losses, evaluations=found.evaluations, weights=found.weights)


def train_within(way: Way, directory: Path) -> tuple[Record, Any, int]:
    """In the smallest budget that trains, or this share of it."""
    if way.share is None:
        return *train(way, directory / "fits", device_memory="4GiB"), 4 << 30
    limit = 1024
    for attempt in range(REFUSALS):
        try:
            return *train(way, directory / str(attempt), device_memory=limit), limit
        except patrickstar.BudgetError as refusal:
            assert refusal.smallest_bytes is not None
            assert refusal.smallest_bytes > limit
            limit = int(refusal.smallest_bytes * (way.share if attempt == 0 else 1))
    return *train(way, directory / "last", device_memory=limit), limit


@pytest.mark.parametrize("name", WAYS)
def test_a_decoder_has_the_bits_of_plain_pytorch(
    name: str, tmp_path: Path, accelerator: Accelerator, record_property: Callable[..., None]
) -> None:
    way = WAYS[name]
    expected = wanted(replace(way, share=None, disk=False, arguments=(), options=()))
    accelerator.configure(0.3, 2)
    found, stats, limit = train_within(way, tmp_path)
    record_property("device_memory", limit)
    record_property("moved", dict(stats.moved))
    assert not differences(expected, seen_of(found, expected))
    assert way.share is None or stats.moved["H>D"] > 0  # a run in which nothing moves shows nothing


def test_a_norm_of_the_device_has_the_bits_of_the_hosts() -> None:
    pieces = [torch.randn(count, generator=torch.Generator().manual_seed(count)) for count in (7, 65_536, 200_001)]
    norms = GlobalNorm(), GlobalNorm(CUDA)
    for piece in pieces:
        for norm, there in zip(norms, (piece, piece.to(CUDA))):
            norm.add(there)
            norm.end_tensor()
    assert norms[0].numbers().tolist() == norms[1].numbers().tolist()


@pytest.mark.device_only
def test_kernels_of_tritons_are_used(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("patrickstar.optim.triton_passes", reason="the library has no Triton kernels yet")
    with caplog.at_level(logging.WARNING, logger="patrickstar"):
        kernel = choose_kernels(CUDA)["cuda"]
    assert not caplog.messages
    assert type(kernel).__name__ == "TritonPasses"


@pytest.mark.device_only
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
def test_every_attention_of_torchs_trains_managed(backend: str, tmp_path: Path) -> None:
    kind = getattr(torch.nn.attention.SDPBackend, backend)
    way = Way(1.3)
    with ExitStack() as stack:
        stack.enter_context(torch.nn.attention.sdpa_kernel(kind))
        wanted.cache_clear()
        repeat = partial(oracle.train, case_of(way), steps=STEPS, precision="bf16", device="cuda")
        try:
            expected, again = repeat(), repeat()
        except RuntimeError as refusal:
            pytest.skip(f"torch has no such attention here: {refusal}")
        if differences(expected, again):
            pytest.skip("plain PyTorch itself has other bits from run to run")
        found, _, _ = train_within(way, tmp_path)
    assert not differences(expected, seen_of(found, expected))
