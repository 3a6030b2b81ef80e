"""Ranks that have parts of the same sequences, and share model states: as one rank with more memory, whatever the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import patrickstar
from patrickstar.parallel import ContextParallel, traffic
from tests.ranks import Teams, all_well

STEPS, ROWS, LENGTH = 3, 2, 30
ROOMY, TIGHT = "8MiB", "400KiB"
LLAMA = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA, num_attention_heads=4, num_key_value_heads=2))


def batch(step: int, group: int) -> dict[str, Tensor]:
    """A batch of one group; a third of its labels are masked, most of them at one end."""
    ids = torch.randint(64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(10 * step + group))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(LENGTH) < LENGTH // 3 + group, -100)}


def train(rank: int, shape: tuple[int, int], method: Any, budget: str) -> dict[str, Any]:
    """Steps under a budget: losses and norms, what was moved, and weights at the end."""
    mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp")), llama()
    cp = ContextParallel(mesh["cp"], method)
    optimizer, losses = torch.optim.AdamW(cp.parallelize(model).parameters(), lr=1e-2), []
    budgets = {"device": "emulated", "device_memory": budget, "host_memory": "64MiB"}
    with patrickstar.manage(model, optimizer, mesh=mesh, precision="fp32", **budgets) as session:
        for step in range(STEPS):
            with traffic(mesh) as seen:
                loss = model(**cp.shard(batch(step, rank // shape[1]))).loss
                loss.backward()
            losses += [loss.item(), float(session.clip_grad_norm_(0.5))]
            session.optimizer.step()
            session.optimizer.zero_grad()
        stats = session.stats()
        assert stats.sent["cp"] == seen.sent["cp"] > 0
        assert sum(stats.sent.values()) > stats.sent["cp"]
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"losses": losses, "weights": weights, "planned": stats.planned_steps, "moved": stats.moved["H>D"]}


def plain(groups: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """The same by one process with the batches of all groups: losses and norms by group, and weights."""
    model = llama()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), []
    for step in range(STEPS):
        each = [model(**batch(step, group)).loss for group in range(groups)]
        (sum(each) / groups).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        losses += [[loss.item() for loss in each], [norm] * groups]
    return losses, dict(model.named_parameters())


WAYS = [("2-2", "ring"), *(pytest.param("1-2", way, marks=pytest.mark.campaign) for way in ("ring", "rsa", "ulysses"))]


@pytest.mark.parametrize(("shape", "method"), WAYS)
def test_ranks_with_parts_of_a_batch_train_as_one(shape: str, method: Any, team_of: Teams) -> None:
    """One budget in which chunks move has the bits of one in which nothing does."""
    dp, cp = map(int, shape.split("-"))
    ranks, (losses, weights) = team_of(dp * cp), plain(dp)
    roomy, tight = (all_well(ranks.run(train, (dp, cp), method, budget)) for budget in (ROOMY, TIGHT))
    for rank, (found, again) in enumerate(zip(roomy, tight, strict=True)):
        want = [of_all[rank // cp] for of_all in losses]
        assert found["losses"] == pytest.approx(want, abs=2e-5)
        assert found["losses"] == again["losses"]
        assert found["planned"] == again["planned"] == STEPS
        assert found["moved"] == 0 < again["moved"]
        for name, value in weights.items():
            assert torch.equal(found["weights"][name], again["weights"][name]), name
            assert (found["weights"][name] - value).abs().max() < 2e-4, name


def refusals(rank: int) -> list[str]:
    """What `manage` says to a model that works together with other ranks than it is given."""
    mesh, said = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp")), []
    for gradients, given in (("sum", None), ("sum", mesh["dp"]), ("mean", mesh)):
        model = ContextParallel(mesh["cp"], gradients=gradients).parallelize(llama())
        with pytest.raises(patrickstar.ConfigError) as refused:
            patrickstar.manage(model, torch.optim.AdamW(model.parameters()), mesh=given)
        said.append(str(refused.value))
    return said


def test_a_model_is_managed_over_the_ranks_that_it_works_with(team_of: Teams) -> None:
    for without, part, mean in all_well(team_of(2).run(refusals)):
        assert 'works together over "cp", 2 ranks' in without
        assert 'works together over "cp", 2 ranks' in part
        assert 'gradients="mean" is for DDP' in mean
