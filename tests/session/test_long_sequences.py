"""Ranks that have parts of the same sequences, and share model states: as one rank with more memory, whatever the budget."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import patrickstar
from patrickstar.errors import RankError
from patrickstar.parallel import ContextParallel, Tensor2D, traffic
from tests.ranks import Ended, Team, Teams, all_well, kill_me
from tests.session.test_blocks_2d import tensors_in

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


def take_up(rank: int, names: tuple[str, ...], path: Path | None, to: Path) -> dict[str, Tensor]:
    """Whole weights of a model over `cp` or in blocks, which has loaded a checkpoint, or else has taken steps; it saves one, and an export."""
    mesh = init_device_mesh("cpu", (2, 2) if "cp" in names else (1, 2, 2), mesh_dim_names=names)
    over = ContextParallel(mesh["cp"]) if "cp" in names else Tensor2D(mesh["row", "col"])
    optimizer = torch.optim.AdamW(over.parallelize(model := llama()).parameters(), lr=1e-2)
    with patrickstar.manage(model, optimizer, mesh=mesh, device="cpu", precision="fp32") as session:
        if path is not None:
            session.load_checkpoint(path)
        for step in range(0 if path else 2):
            model(**over.shard(batch(step, rank // 2))).loss.backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
        session.save_checkpoint(to / "steps")
        session.export(to / "export")
        return {name: value.clone() for name, value in session.state_dict().items()}


def take_up_alone(path: Path, to: Path) -> None:
    """A checkpoint that one process loads and saves."""
    model = llama()
    with patrickstar.manage(model, torch.optim.AdamW(model.parameters()), device="cpu", precision="fp32") as session:
        session.load_checkpoint(path)
        session.save_checkpoint(to / "steps")


def test_checkpoints_go_from_parts_of_sequences_to_one_process_and_to_blocks_and_back(
    team_of: Teams, tmp_path: Path
) -> None:
    """And once more from the blocks' to parts of sequences: the same tensors each time, and an export with the same logits."""
    ranks, parts, blocks = team_of(4), ("dp", "cp"), ("dp", "row", "col")
    way = [("first", parts), ("one", None), ("blocks", blocks), ("again", parts), ("blocks of those", blocks)]
    before, want = None, {}
    for name, dimensions in way:
        path = None if before is None else tmp_path / before / "steps"
        if dimensions is None:
            take_up_alone(path or tmp_path, tmp_path / name)
        else:
            found = all_well(ranks.run(take_up, dimensions, path, tmp_path / name))
            want = want or found[0]
            assert all(torch.equal(want[key], value) for each in found for key, value in each.items())
        tensors = tensors_in(tmp_path / name / "steps")
        first = tensors_in(tmp_path / "first" / "steps")
        assert tensors.keys() == first.keys()
        assert all(torch.equal(first[key], value) for key, value in tensors.items())
        before = name
    plainly, ids = llama(), batch(0, 0)["input_ids"]
    plainly.load_state_dict(want)
    for name in ("first", "blocks"):
        exported = type(plainly).from_pretrained(tmp_path / name / "export")
        with torch.no_grad():
            assert torch.equal(exported.eval()(ids).logits, plainly.eval()(ids).logits)


def ends(rank: int, how: str) -> tuple[RankError, float]:
    """A second step in which rank 1 is killed in forward, or stands still in backward, before the attention of a layer: what is said, and when."""
    mesh, model = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "cp")), llama()
    cp, attention = ContextParallel(mesh["cp"]), model.model.layers[1].self_attn
    optimizer = torch.optim.AdamW(cp.parallelize(model).parameters())
    options = patrickstar.Options(collective_timeout=2 if how == "stalls" else 600)
    with patrickstar.manage(model, optimizer, mesh=mesh, precision="fp32", device="cpu", options=options) as session:
        model(**cp.shard(batch(0, 0))).loss.backward()
        session.optimizer.step()
        session.optimizer.zero_grad()
        if rank == 1 and how == "is killed":
            attention.v_proj.register_forward_hook(lambda *_: kill_me())
        elif rank == 1:
            attention.o_proj.register_full_backward_hook(lambda *_: time.sleep(10))
        started = time.monotonic()
        with pytest.raises(RankError) as told:
            model(**cp.shard(batch(1, 0))).loss.backward()
        return told.value, time.monotonic() - started


@pytest.mark.parametrize(("how", "said"), [("is killed", "has ended"), ("stalls", "was at collective")])
def test_what_ends_a_rank_in_a_hop_is_an_error_on_all_that_names_it_and_the_layer(
    three: Team, how: str, said: str
) -> None:
    first, own, last = three.run(ends, how)
    three.has_all = False  # groups of torch are out of step: another test has others
    assert own == Ended(-9) if how == "is killed" else isinstance(own[0], RankError)
    for error, seconds in (first, last):
        assert error.ranks == (1,)
        assert f"rank 1 {said}" in str(error)
        assert "waited for others in LlamaAttention of layer 1" in str(error)
        assert seconds < 30


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
