"""A model in q x q blocks under management: as one process trains it, whatever the budget; whole tensors, checkpoints, faults."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import patrickstar
from patrickstar.checkpoint.reader import open_step
from patrickstar.comm.ranks import ranks_of
from patrickstar.errors import CheckpointError, DeviceError, RankError
from patrickstar.parallel import Tensor2D, traffic
from patrickstar.parallel.grid import Cut, Grid
from patrickstar.parallel.group import MeshGroup
from patrickstar.step.mesh_ranks import MeshRanks
from tests.parallel.programs_of_2d import batch_of, gpt2, llama
from tests.ranks import Ended, Team, Teams, all_well, kill_me, team
from tests.session.test_rank_checkpoints import caught, spoil

STEPS = 3
ROOMY, TIGHT = "8MiB", {"gpt2": "136KiB", "llama": "104KiB"}
MODELS: dict[str, Callable[[int], nn.Module]] = {"gpt2": gpt2, "llama": llama}
NAMES = ("dp", "row", "col")


@pytest.fixture
def four(team_of: Teams) -> Team:
    return team_of(4)


@cache
def mesh_of(*shape: int) -> DeviceMesh:
    """The mesh, made once: a process that is kept would make groups again and again."""
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES)


def build(name: str, seed: int = 0) -> nn.Module:
    """A small model whose vectors differ element by element."""
    torch.manual_seed(seed)
    model = MODELS[name](2)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.3)
    return model


def batches(groups: int) -> list[list[dict[str, Tensor]]]:
    """Batches of an odd number of rows, step by step, of each group."""
    torch.manual_seed(5)
    return [[batch_of(5) for _ in range(groups)] for _ in range(2 * STEPS)]


@contextmanager
def managed(name: str, groups: int = 1, seed: int = 0, **arguments: Any) -> Any:
    mesh, model = mesh_of(groups, 2, 2), build(name, seed)
    tp = Tensor2D(mesh["row", "col"])
    optimizer = torch.optim.AdamW(tp.parallelize(model).parameters(), lr=1e-3)
    with patrickstar.manage(
        model, optimizer, mesh=mesh, **{"device": "cpu", "precision": "fp32"} | arguments
    ) as session:
        yield tp, model, session


def whole_states(session: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in session.state_dict().items()}


def steps(tp: Tensor2D, model: nn.Module, session: Any, taken: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Losses, norms and gradients of some steps."""
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": {}}
    for batch in taken:
        loss = model(**tp.shard(batch)).loss
        session.scaler.scale(loss).backward()
        if session.scaler.is_enabled():
            session.scaler.unscale_(session.optimizer)
        found["gradients"] = found["gradients"] or dict(session.gradients())
        found["norms"].append(session.clip_grad_norm_(0.5).item())
        session.scaler.step(session.optimizer)
        session.scaler.update()
        session.optimizer.zero_grad()
        found["losses"].append(loss.item())
    return found


def train(rank: int, name: str, groups: int, budget: str) -> dict[str, Any]:
    """Steps under a budget, what was moved, and whole weights at the end."""
    memory = {"device": "emulated", "device_memory": budget, "host_memory": "64MiB"}
    with managed(name, groups, **memory) as (tp, model, session):
        first, *others, last = [of_all[rank // 4] for of_all in batches(groups)[:STEPS]]
        found = steps(tp, model, session, [first, *others])
        with traffic(mesh_of(groups, 2, 2)) as seen:
            of_last = steps(tp, model, session, [last])
        found["losses"] += of_last["losses"]
        found["norms"] += of_last["norms"]
        found["weights"], stats = whole_states(session), session.stats()
        assert {name: stats.sent[name] for name in ("row", "col")} == {name: seen.sent[name] for name in ("row", "col")}
    left = dict(tp.state_dict(model))
    assert all(torch.equal(found["weights"][name], value) for name, value in left.items())
    return found | {"planned": stats.planned_steps, "moved": stats.moved["H>D"]}


def plain(name: str, groups: int) -> dict[str, Any]:
    """The same by one process with the batches of all groups: losses by step and group."""
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": {}}
    for of_all in batches(groups)[:STEPS]:
        each = [model(**batch).loss for batch in of_all]
        (sum(each) / groups).backward()
        found["gradients"] = found["gradients"] or {n: p.grad.clone() for n, p in model.named_parameters()}
        found["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append([loss.item() for loss in each])
    return found | {"weights": model.state_dict()}


def expect_trained_as_one(ranks: Team, name: str, groups: int, tight: str) -> None:
    want = plain(name, groups)
    roomy, again = (all_well(ranks.run(train, name, groups, budget)) for budget in (ROOMY, tight))
    assert any(found["moved"] for found in again)
    for rank, (found, moving) in enumerate(zip(roomy, again, strict=True)):
        assert found["losses"] == pytest.approx([of_all[rank // 4] for of_all in want["losses"]], abs=2e-5)
        assert found["norms"] == pytest.approx(want["norms"], rel=1e-6)
        assert found["norms"] == moving["norms"] == roomy[0]["norms"]
        assert found["losses"] == moving["losses"]
        assert found["planned"] == moving["planned"] == STEPS
        assert found["moved"] == 0
        for what, most in (("gradients", 1e-6), ("weights", 1e-4)):
            assert found[what].keys() == want[what].keys()
            for key, value in want[what].items():
                assert torch.equal(found[what][key], moving[what][key]), key
                assert (found[what][key] - value).abs().max() < most, key


@pytest.mark.parametrize("name", MODELS)
def test_blocks_train_as_one_process_with_the_same_bits_under_any_budget(four: Team, name: str) -> None:
    """Losses, the norm for clipping, whole gradients and whole weights."""
    expect_trained_as_one(four, name, 1, TIGHT[name])


@pytest.mark.campaign
@pytest.mark.parametrize("name", MODELS)
def test_grids_of_blocks_that_have_batches_of_their_own_train_as_one_process(name: str) -> None:
    with team(8) as ranks:
        expect_trained_as_one(ranks, name, 2, "180KiB")


def half(rank: int) -> dict[str, Any]:
    """Steps in fp16 of which one overflows on one rank alone, and what its blocks and those of others are then."""
    with managed(
        "gpt2",
        precision="fp16",
        options=patrickstar.Options(loss_scale=patrickstar.LossScale(initial=256, hysteresis=1)),
    ) as (tp, model, session):
        first, second, *_ = [of_all[0] for of_all in batches(1)]
        steps(tp, model, session, [first])
        before, scale = whole_states(session), session.scaler.get_scale()
        if rank == 3:
            hook = model.transformer.h[1].mlp.c_fc.weight.register_hook(lambda gradient: gradient.fill_(torch.inf))
        steps(tp, model, session, [second])
        after = whole_states(session)
        if rank == 3:
            hook.remove()
        found = steps(tp, model, session, [second])
        same = all(torch.equal(before[name], value) for name, value in after.items())
        return found | {"same": same, "scales": (scale, session.scaler.get_scale()), "weights": whole_states(session)}


@pytest.mark.campaign
def test_an_overflow_in_one_block_skips_the_step_on_all_ranks(four: Team) -> None:
    first, *others = all_well(four.run(half))
    assert first["same"]
    assert first["scales"][1] < first["scales"][0]
    for answer in others:
        assert (answer["same"], answer["scales"], answer["losses"]) == (True, first["scales"], first["losses"])
        assert all(torch.equal(answer["weights"][name], value) for name, value in first["weights"].items())


CUTS = [Cut((7, 10), 0, 1), Cut((10, 7), 1, 0), Cut((5, 36), 0, 1, 3), Cut((36, 4), 1, 0, 3), Cut((7,), None, 0)]
CUTS += [Cut((36,), None, 0, 3), Cut((6, 7), None, 1), Cut((4, 4), 0, 1)]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("q", [1, 2, 3])
def test_strips_have_all_elements_of_a_whole_in_order(q: int, cut: Cut) -> None:
    """Of sizes that do not divide, blocks that are empty, and of few rows at a time."""
    whole = torch.arange(math.prod(cut.shape)).view(cut.shape)
    lines = [MeshGroup(members=tuple(range(q)), rank=index) for index in range(q)]
    grids = {(i, j): Grid(q, lines[i], lines[j]) for i in range(q) for j in range(q)}
    blocks = {place: cut.block(whole, grid) for place, grid in grids.items()}
    for numel in (1, 12, 1000):
        strips = list(cut.strips(q, numel))
        found = [torch.cat([tile.of(blocks[tile.place]) for tile in tiles], 1).view(-1) for tiles in strips]
        assert torch.equal(torch.cat(found), whole.view(-1))
        assert max(map(len, found)) <= max(numel, math.prod(cut.shape[1:]))
    assert all(torch.equal(blocks[cut.first(place)], block) for place, block in blocks.items())


# checkpoints and exports, whole tensors on any mesh or none


def tensors_in(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    with open_step(path) as reader:
        return {name: reader.read(name) for name in reader.spans}


def later(rank: int, name: str) -> list[dict[str, Tensor]]:
    return [of_all[0] for of_all in batches(1)[2:4]]


def save(rank: int, name: str, groups: int, path: Path) -> dict[str, Any]:
    """Steps, a checkpoint and an export where chunks move; then more steps."""
    memory = {"device": "emulated", "device_memory": TIGHT[name] if groups == 1 else "180KiB", "host_memory": "64MiB"}
    with managed(name, groups, **memory) as (tp, model, session):
        steps(tp, model, session, [of_all[0] for of_all in batches(1)[:2]])
        assert session.save_checkpoint(path / "grid", extra={"of": rank}) == path / "grid" / "step-00000002"
        session.export(path / "export", max_shard_size=20_000)
        weights = whole_states(session)
        return steps(tp, model, session, later(rank, name)) | {"weights": weights}


def load(rank: int, name: str, groups: int, path: Path) -> dict[str, Any]:
    """The checkpoint of one process in blocks, and once more from there; whole weights that are written come in, too."""
    with managed(name, groups, seed=3) as (tp, model, session):
        assert session.load_checkpoint(path / "one") == {"of": 0}
        weights = whole_states(session)
        session.load_state_dict({name: value + 1 for name, value in weights.items()})
        changed = whole_states(session)
        session.load_state_dict(weights)
        session.save_checkpoint(path / "again", extra={"of": 0})
        found = steps(tp, model, session, later(rank, name))
        return found | {"weights": weights, "changed": all(torch.equal(changed[n], v + 1) for n, v in weights.items())}


SAVED = [("gpt2", 1), *(pytest.param(*case, marks=pytest.mark.campaign) for case in (("llama", 1), ("gpt2", 2)))]


@pytest.mark.parametrize(("name", "groups"), SAVED)
def test_checkpoints_go_from_blocks_to_one_process_and_back(
    team_of: Teams, name: str, groups: int, tmp_path: Path
) -> None:
    """Of several grids, all with the same batches."""
    ranks = team_of(4 * groups)
    saved = all_well(ranks.run(save, name, groups, tmp_path))
    weights, tensors, model = saved[0]["weights"], tensors_in(tmp_path / "grid"), build(name, 7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with patrickstar.manage(model, optimizer, device="cpu", precision="fp32") as session:
        assert session.load_checkpoint(tmp_path / "grid") == {"of": 0}
        assert all(torch.equal(weights[name], value) for name, value in session.state_dict().items())
        session.save_checkpoint(tmp_path / "one", extra={"of": 0})
        for batch, wanted in zip(later(0, name), saved[0]["losses"], strict=True):
            loss = model(**batch).loss
            loss.backward()
            session.clip_grad_norm_(0.5)
            session.optimizer.step()
            session.optimizer.zero_grad()
            assert loss.item() == pytest.approx(wanted, abs=2e-5)
    loaded = all_well(ranks.run(load, name, groups, tmp_path))
    assert len(tensors) == 3 * len(list(model.parameters()))
    for other in map(tensors_in, (tmp_path / "one", tmp_path / "again")):
        assert tensors.keys() == other.keys()
        assert all(torch.equal(other[name], value) for name, value in tensors.items())
    for first, second in zip(saved, loaded, strict=True):
        assert (first["losses"], first["norms"]) == (second["losses"], second["norms"])
        assert second["changed"]
        assert all(torch.equal(weights[name], value) for name, value in second["weights"].items())
    exported, plainly = type(model).from_pretrained(tmp_path / "export"), build(name, 8)
    plainly.load_state_dict(weights)
    batch = {"input_ids": later(0, name)[0]["input_ids"]}
    with torch.no_grad():
        assert torch.equal(exported.eval()(**batch).logits, plainly.eval()(**batch).logits)


# bad input and faults


def save_with_faults(rank: int, path: Path) -> tuple[list[Exception], dict[str, Tensor]]:
    """The errors of saving and loading where one rank fails, and weights of a step after that; a checkpoint with them."""
    with managed("gpt2") as (tp, model, session):
        steps(tp, model, session, [batches(1)[0][0]])
        session.save_checkpoint(path)
        errors = []
        for fault, guilty in FAULTS:
            with pytest.MonkeyPatch.context() as patch:
                spoil(patch, fault if rank == guilty else "")
                errors.append(caught(lambda: session.save_checkpoint(path)))
        errors.append(caught(lambda: session.load_checkpoint(path / ("none" if rank == 2 else "step-00000001"))))
        assert sorted(one.name for one in path.iterdir()) == ["latest", "step-00000001"]
        steps(tp, model, session, [batches(1)[1][0]])
        session.save_checkpoint(path)
        return errors, whole_states(session)


FAULTS = [("a full disk", 0), ("no room", 3), ("chunks", 1)]


@pytest.mark.campaign
def test_what_fails_on_one_rank_in_saving_and_loading_is_an_error_on_all_and_they_go_on(
    four: Team, tmp_path: Path
) -> None:
    answers = all_well(four.run(save_with_faults, tmp_path))
    for rank, (errors, weights) in enumerate(answers):
        guilty = [*(each for _, each in FAULTS), 2]
        kinds = [type(error) for error in errors]
        assert kinds == [DeviceError, DeviceError, DeviceError, CheckpointError]
        for error, one, words in zip(
            errors, guilty, ("No space", "No space", "gone", "no such directory"), strict=True
        ):
            assert words in str(error)
            assert (f"rank {one}: " in str(error)) == (rank != one)
        found = tensors_in(tmp_path)
        assert all(torch.equal(found[f"weight/{n}"], v) for n, v in weights.items() if n != "lm_head.weight")


class Mine(Exception):
    """What one rank raises."""


def raises(*_: object) -> None:
    raise Mine


def fails(rank: int, how: str) -> None:
    """A second step in which rank 1 ends in a layer."""
    with pytest.MonkeyPatch.context() as patch, managed("gpt2") as (tp, model, session):
        patch.setattr("patrickstar.session.session._OTHERS_COME_S", 1.0)
        steps(tp, model, session, [batches(1)[0][0]])
        if rank == 1 and how != "leaves":
            model.transformer.h[1].register_forward_hook(raises if how == "raises" else lambda *_: kill_me())
        steps(tp, model, session, [batches(1)[1][0]])


@pytest.mark.parametrize(
    ("how", "raised", "said"),
    [
        pytest.param("raises", Mine, "close after Mine", marks=pytest.mark.campaign),
        ("is killed", Ended, "rank 1 has ended"),
    ],
)
def test_what_ends_one_rank_in_a_layer_is_an_error_on_all(how: str, raised: type, said: str, team_of: Teams) -> None:
    started = time.monotonic()
    first, one, *others = (ranks := team_of(4)).run(fails, how)
    ranks.has_all = False  # groups of torch are out of step: another test has others
    assert isinstance(one, raised), one
    for error in (first, *others):
        assert isinstance(error, RankError), error
        assert said in str(error)
    assert time.monotonic() - started < 30


def refusals(rank: int) -> list[str]:
    """What `manage` says to models in blocks and meshes that do not go together."""
    torch.manual_seed(0)
    mesh, said = mesh_of(1, 2, 2), []
    cut, whole = (lambda: Tensor2D(mesh["row", "col"]).parallelize(gpt2(2))), (lambda: gpt2(2))
    for build_one, given, more in (
        (cut, None, {}),
        (cut, mesh["dp"], {}),
        (whole, mesh, {}),
        (cut, init_device_mesh("cpu", (1, 1, 4), mesh_dim_names=NAMES), {}),
        (cut, mesh, {"step": "in_backward"}),
        (cut, mesh, {"weights": Path.cwd()}),
    ):
        model = build_one()
        optimizer = torch.optim.AdamW(model.parameters())
        said.append(str(caught(lambda: patrickstar.manage(model, optimizer, mesh=given, device="cpu", **more))))
    both: Any = SimpleNamespace(mesh=torch.arange(8).view(1, 2, 2, 2), mesh_dim_names=("dp", "cp", "row", "col"))
    both.get_coordinate = lambda: (0, 0, 0, 0)
    two: Any = SimpleNamespace(agree=lambda *_: [(0, 0), (0, 1)] * 2)  # ranks of two grids
    said.append(str(caught(lambda: ranks_of(both, {"row": 2, "col": 2}))))
    return [*said, str(caught(lambda: MeshRanks.meet(two, (0, 0), 2, ())))]


def test_meshes_that_are_not_those_of_the_blocks_are_refused(four: Team) -> None:
    for without, part, whole, other, in_backward, weights, both, two in all_well(four.run(refusals)):
        for text in (without, part):
            assert 'works together over "row", 2 ranks' in text
            assert 'works together over "col", 2 ranks' in text
        assert 'the model is not cut over "row": call Tensor2D(...).parallelize(model) first' in whole
        assert 'works together over "row", 2 ranks' in other
        assert 'step="in_backward" over 4 ranks comes later' in in_backward
        assert "weights= of blocks over 4 ranks comes later" in weights
        assert '"cp" comes later' in both
        assert "give manage() the mesh of Tensor2D" in two
