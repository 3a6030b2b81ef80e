"""What ranks send, to the byte, and how much of a model is whole at once."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import patrickstar
from patrickstar.core.shard_layout import ShardLayout
from tests.comm.programs import counting
from tests.ranks import Team, all_well
from tests.sampling import only

DEFAULTS: dict[str, Any] = {"host_memory": "1GiB"}


def decoder(checkpointed: bool) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3, n_embd=48, n_head=2, n_positions=16, vocab_size=96, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = GPT2LMHeadModel(config).train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    return model


def bytes_of(rank: int, what: str) -> tuple[list[int], dict[str, int], int, int]:
    """What is given to process groups in each of some steps, the bytes of groups, the largest step besides, and what the session counts."""
    model = decoder(what == "checkpointed")
    model.transformer.h[1].requires_grad_(what != "frozen")
    words = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(rank))
    parts = 2 if what in ("twice", "no_sync") else 1
    options = patrickstar.Options(accumulate=parts)
    with (
        patrickstar.manage(model, torch.optim.AdamW(model.parameters()), **DEFAULTS, options=options) as session,
        counting() as given,
    ):
        steps, besides = list[int](), 0
        for _ in range(2):
            before = dict(given)
            with torch.set_grad_enabled(what != "evaluation"):
                for part in range(parts):
                    loss = model(input_ids=words, labels=words).loss
                    if what != "evaluation":
                        with session.no_sync() if what == "no_sync" and part == 0 else nullcontext():
                            loss.backward()
            if what != "evaluation":
                session.optimizer.step()
                session.optimizer.zero_grad()
            steps.append(given["data"] - before["data"])
            besides = max(besides, given["besides"] - before["besides"])
        layout = session._parts.layout
        assert isinstance(layout, ShardLayout)
        return steps, {g: 4 * layout.group_numel(g) for g in layout.chunks_of}, besides, session.stats().moved["ranks"]


@pytest.mark.parametrize(
    "what",
    only(("checkpointed", "no_sync"), ["plain", "frozen", "checkpointed", "twice", "no_sync", "evaluation"]),
)
def test_a_rank_sends_each_weight_once_in_a_forward_and_once_in_a_backward_and_each_gradient_once(
    ranks: Team, what: str
) -> None:
    for steps, nbytes, besides, counted in all_well(ranks.run(bytes_of, what)):
        blocks = {group: size for group, size in nbytes.items() if group}
        assert len(blocks) == 3
        weights, root = sum(blocks.values()), nbytes[""]
        last = blocks["transformer.h.2"]  # which stays for its backward
        once, gradients = 2 * weights - last + root, weights + root
        wanted = {
            "plain": [once + gradients] * 2,
            "frozen": [once + gradients - blocks["transformer.h.1"]] * 2,
            "checkpointed": [once + gradients] * 2,
            "twice": [2 * (once + gradients)] * 2,
            "no_sync": [2 * once + gradients] * 2,
            "evaluation": [weights + root] * 2,
        }[what]
        assert steps == [n * (ranks.size - 1) // ranks.size for n in wanted]
        assert counted == sum(steps)
        assert besides < 64 << 10


def read_alone(rank: int) -> tuple[int, int]:
    """The bytes that a rank sends while all parameters are read, one after the other, and the bytes of these."""
    model = decoder(checkpointed=False)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    with patrickstar.manage(model, torch.optim.AdamW(model.parameters()), **DEFAULTS) as session, counting() as given:
        state = session.state_dict()
        for name, _ in model.named_parameters():
            assert state[name].shape
        return given["data"], nbytes


def test_a_parameter_that_is_read_sends_none_of_the_others_in_its_chunk(two: Team) -> None:
    for sent, nbytes in all_well(two.run(read_alone)):
        assert 0 < sent <= (two.size - 1) * nbytes


def peak_of(rank: int, blocks: int) -> tuple[int, int, int]:
    """Peak of the host, what rests there, and the bytes of a block's weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64)) for _ in range(blocks)])
    with patrickstar.manage(model, torch.optim.AdamW(model.parameters()), **DEFAULTS) as session:
        for _ in range(3):
            model(torch.randn(2, 64)).square().mean().backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
        layout = session._parts.layout
        assert isinstance(layout, ShardLayout)
        assert session.stats().planned_steps == 3
        return session.stats().peak["host"], 16 * layout.chunk_numel * layout.n_chunks, 4 * layout.group_numel("0")


def test_two_blocks_are_whole_at_once_however_many_there_are(two: Team) -> None:
    for peak, resting, block in all_well(two.run(peak_of, 8)):
        activations = 8 * 2 * (512 + 64 + 64) * 4
        received, shares = block, block // two.size
        assert peak <= resting + 4 * block + received + 2 * shares + 2 * activations


def torn(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights before and after a backward that an exception ends in the middle of a block."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(3)])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    device = {"device": "emulated", "device_memory": "1MiB"}
    session = patrickstar.manage(model, torch.optim.AdamW(model.parameters()), **DEFAULTS, **device)
    output = model(torch.randn(2, 32))
    model[1][0].weight.register_hook(lambda gradient: gradient.view(7))
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        output.square().mean().backward()
    session.close()
    return list(zip(before, [parameter.detach() for parameter in model.parameters()], strict=True))


def test_a_backward_that_an_exception_ends_on_all_ranks_leaves_the_weights(ranks: Team) -> None:
    for weights in all_well(ranks.run(torn)):
        for before, after in weights:
            assert torch.equal(before, after)
