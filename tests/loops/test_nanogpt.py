"""A loop like nanoGPT's `train.py`: two groups, fused, cosine rate, accumulation, clipping, a disabled scaler, evaluation, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import patrickstar
from tests.loops.runs import VOCABULARY, Run, budgets, expect_same, manage, rows
from tests.parity.compare import compare_mappings
from tests.sampling import only
from tests.session.masters import Twin

WIDTH, BLOCK, HEADS, LAYERS = 32, 8, 2, 4
STEPS, ACCUMULATE, CLIP = 4, 3, 0.5
FUSED = partial(torch.optim.AdamW, fused=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.c_fc, self.c_out = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (
            part.view(b, t, HEADS, c // HEADS).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(WIDTH, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        out: Tensor = x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))
        return out


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight  # tied, as there

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self, make: Callable[..., Any] = FUSED) -> Any:
        parameters = {name: p for name, p in self.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return make(groups, lr=6e-3, betas=(0.9, 0.95))


def get_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    data = torch.randint(VOCABULARY, (2, BLOCK + 1), generator=generator)
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def get_lr(it: int) -> float:
    if it < 1:
        return 6e-3 * (it + 1) / 2
    return 6e-4 + 0.5 * (1.0 + math.cos(math.pi * it / STEPS)) * (6e-3 - 6e-4)


@torch.no_grad()
def estimate_loss(model: nn.Module, generator: torch.Generator) -> list[Tensor]:
    model.eval()
    losses = [model(*get_batch(generator))[1] for _ in range(2)]
    model.train()
    return losses


def seeded_gpt() -> GPT:
    torch.manual_seed(1337)
    return GPT()


def train(
    memory: Mapping[str, Any] | None,
    *,
    make: Callable[..., Any] = FUSED,
    kind: str = "fp32",
    checkpoint: Path | None = None,
    compiled: Callable[[GPT], Any] = lambda model: model,
) -> Run:
    generator = torch.Generator().manual_seed(1337)
    raw_model, run = seeded_gpt(), Run()
    optimizer: Any = raw_model.configure_optimizers(make)
    session = None if memory is None else manage(raw_model, optimizer, memory, kind=kind)
    if session is not None:
        optimizer = session.optimizer
    model = compiled(raw_model)
    scaler = session.scaler if session is not None and kind == "fp16" else torch.amp.GradScaler("cpu", enabled=False)
    x, y = get_batch(generator)
    for iter_num in range(STEPS):
        for param_group in optimizer.param_groups:
            param_group["lr"] = get_lr(iter_num)
        if iter_num % 2 == 0:
            run.losses += estimate_loss(model, generator)
        if iter_num == STEPS - 1 and checkpoint is not None:
            torch.save(
                {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}, checkpoint
            )
        for _ in range(ACCUMULATE):
            with nullcontext():
                _, loss = model(x, y)
                loss = loss / ACCUMULATE
            x, y = get_batch(generator)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        run.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        run.losses.append(loss.detach())
    return run.finish(raw_model, optimizer, session)


@rows
def test_nanogpts_loop_has_the_bits_of_the_same_program_without_us(memory: str, tmp_path: Path) -> None:
    got = train(budgets(tmp_path / "disk")[memory])
    expect_same(train(None), got, memory)
    assert max(float(norm) for norm in got.norms) > CLIP, "nothing was clipped"


def compile_blocks(model: GPT, **given: Any) -> GPT:
    for block in model.h:
        block.compile(**given)
    return model


COMPILED = {"the model": torch.compile, "its blocks": compile_blocks}


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("backend", "what", "memory"),
    [
        pytest.param("aot_eager", "the model", "roomy", marks=pytest.mark.whole),
        pytest.param("aot_eager", "the model", "by block", marks=pytest.mark.blocks),
        pytest.param("inductor", "the model", "roomy", marks=pytest.mark.whole),
        pytest.param("inductor", "its blocks", "by block", marks=pytest.mark.blocks),
    ],
)
def test_compiled_it_has_the_bits_of_the_same_program_compiled_alike(
    backend: str, what: str, memory: str, tmp_path: Path
) -> None:
    compiled = partial(COMPILED[what], backend=backend)
    runs = []
    for given in (None, budgets(tmp_path)[memory]):
        torch.compiler.reset()
        runs.append(train(given, compiled=compiled))
    expect_same(*runs, memory)


@pytest.mark.parametrize(
    ("make", "oracle"),
    [
        pytest.param(torch.optim.AdamW, patrickstar.AdamW, marks=pytest.mark.campaign),
        pytest.param(partial(torch.optim.AdamW, foreach=True), patrickstar.AdamW, marks=pytest.mark.campaign),
        (partial(torch.optim.Adam, foreach=False), patrickstar.Adam),
    ],
    ids=["AdamW", "AdamW of foreach", "Adam"],
)
def test_so_it_has_with_other_optimizers_whose_update_is_ours(make: Any, oracle: Any, tmp_path: Path) -> None:
    got = train(budgets(tmp_path)["tight"], make=make)
    expect_same(train(None, make=oracle), got, "tight")


def train_masters(kind: str) -> Run:
    """The same program in 16 bits without us: masters in fp32 are kept by hand."""
    generator = torch.Generator().manual_seed(1337)
    run, twin = Run(), Twin(kind, seeded_gpt)
    optimizer = twin.optimizer = cast("GPT", twin.masters).configure_optimizers(patrickstar.AdamW)
    x, y = get_batch(generator)
    for iter_num in range(STEPS):
        for param_group in optimizer.param_groups:
            param_group["lr"] = get_lr(iter_num)
        if iter_num % 2 == 0:
            run.losses += estimate_loss(twin.model, generator)
        for _ in range(ACCUMULATE):
            loss = twin.model(x, y)[1] / ACCUMULATE
            x, y = get_batch(generator)
            twin.backward_of(loss)
        run.norms.append(twin.change_gradients(lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        twin.update()
        optimizer.zero_grad(set_to_none=True)
        run.losses.append(loss.detach())
    return run.finish(twin.masters, optimizer, None)


@rows
@pytest.mark.parametrize("kind", only(["bf16-fp32"], ["bf16", "bf16-fp32", "fp16"]))
def test_in_16_bits_it_has_the_bits_of_masters_kept_by_hand(kind: str, memory: str, tmp_path: Path) -> None:
    got = train(budgets(tmp_path / "disk")[memory], kind=kind)
    expect_same(train_masters(kind), got, memory)


def test_its_checkpoints_are_those_of_the_same_program_without_us(tmp_path: Path) -> None:
    train(None, checkpoint=tmp_path / "plain.pt")
    train(budgets(tmp_path)["tight"], checkpoint=tmp_path / "managed.pt")
    want, got = (torch.load(tmp_path / name) for name in ("plain.pt", "managed.pt"))
    assert not compare_mappings("weight", want["model"], got["model"])
    for number, entry in want["optimizer"]["state"].items():
        assert not compare_mappings(f"state {number}", entry, got["optimizer"]["state"][number])
    assert [group["params"] for group in want["optimizer"]["param_groups"]] == [
        group["params"] for group in got["optimizer"]["param_groups"]
    ]
