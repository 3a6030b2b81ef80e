"""`Options(embedding_rows=True)`: tables stay on the host, and only rows that are looked up cross the link, with the bits of plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import patrickstar
from patrickstar.errors import LayoutError
from patrickstar.plan.check import check
from tests.session.test_simulation import expect_executed_as_simulated, watched
from tests.session.test_tiles import expect_same, gradients_of, same

VOCABULARY, WIDTH = 300, 16


class Words(nn.Module):
    """Two tables, of which one is looked up in twice, and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, padding_idx=5)
        self.places = nn.Embedding(40, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 30)

    def forward(self, ids: Tensor, other: Tensor) -> Tensor:
        hidden = self.words(ids) + self.places(torch.arange(ids.shape[-1])) + self.words(other)
        return self.head(torch.tanh(self.mix(hidden))).square().mean()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randint(0, VOCABULARY, (3, 8), generator=generator) for _ in range(2))
    first[0, :3] = 5
    return first, second


def built(seed: int = 0) -> Words:
    torch.manual_seed(seed)
    return Words()


def managed(model: nn.Module, *, lr: float = 1e-2, rows: bool = True, **memory: Any) -> Any:
    options = {"embedding_rows": rows, "poison": True, "chunk_size": 1024, **memory.pop("options", {})}
    given = {"device": "emulated", "precision": "fp32", **memory}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    return patrickstar.manage(model, optimizer, options=patrickstar.Options(**options), **given)


def step(session: Any, loss: Tensor) -> None:
    session.scaler.scale(loss).backward()
    session.scaler.step(session.optimizer)
    session.scaler.update()
    session.optimizer.zero_grad()


MACHINES = {
    "emulated": {"device_memory": 40_000},
    "cpu": {"device": "cpu"},
    "emulated+disk": {"device_memory": 60_000, "disk": True},
}


@pytest.mark.parametrize("kind", ["deferred", "in_backward"])
@pytest.mark.parametrize("machine", MACHINES)
def test_training_has_the_bits_of_plain_pytorch(machine: str, kind: str, tmp_path: Path) -> None:
    memory = {**MACHINES[machine]}
    if memory.get("disk"):
        memory["disk"] = tmp_path
    model, plain = built(), built()
    theirs = patrickstar.AdamW(plain.parameters(), lr=1e-2)
    with managed(model, step=kind, **memory) as session:
        for number in range(4):
            loss = model(*batch(number))
            loss.backward()
            if kind == "deferred":
                ours = gradients_of(session)
            session.optimizer.step()
            session.optimizer.zero_grad()
            expected = plain(*batch(number))
            expected.backward()
            assert loss.item().hex() == expected.item().hex()
            if kind == "deferred":
                expect_same(ours, {name: p.grad for name, p in plain.named_parameters()})
            theirs.step()
            theirs.zero_grad()
        expect_same({**session.state_dict()}, {**plain.state_dict()})
    expect_same({**model.state_dict()}, {**plain.state_dict()})


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["bf16", "bf16-fp32", "fp16", "fp16-fp32"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_16_bits_have_the_bits_of_tables_that_are_fetched(precision: str, accumulate: int) -> None:
    kept, _, compute = precision.partition("-")
    options = {"compute": compute or kept, "accumulate": accumulate}
    ends = []
    for rows in (True, False):
        model = built()
        with managed(model, precision=kept, rows=rows, options=options) as session:
            losses = []
            for number in range(3):
                for micro in range(accumulate):
                    loss = model(*batch(2 * number + micro)).float()
                    losses.append(loss.item().hex())
                    session.scaler.scale(loss).backward()
                session.scaler.step(session.optimizer)
                session.scaler.update()
                session.optimizer.zero_grad()
            ends.append((losses, {**session.state_dict()}))
    assert ends[0][0] == ends[1][0]
    expect_same(ends[0][1], ends[1][1])


def test_only_rows_cross_the_link_until_the_step() -> None:
    model = built()
    with managed(model, device_memory="16MiB") as session:
        step(session, model(*batch(0)))
        before = session.stats().moved
        session.state_dict()["head.weight"]  # what is pending is done
        at_rest = session.stats().moved
        loss = model(*batch(1))
        looked_up = 4 * WIDTH * (24 + 24)  # the table of places is smaller than a chunk, and still there
        forward = session.stats().moved["H>D"] - at_rest["H>D"]
        assert forward == looked_up, (before, forward)
        down = session.stats().moved["D>H"]
        loss.backward()
        assert session.stats().moved["D>H"] - down == looked_up
        assert session.stats().reactive_steps == 0, session.stats().reason


def test_the_smallest_budget_has_no_room_for_the_table() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20_000, 64), nn.Linear(64, 4))
    table = 4 * 20_000 * 64
    ids = torch.randint(0, 20_000, (2, 8))
    options = {"chunk_size": 8192}
    with managed(model, device_memory=table // 8, options=options) as session:
        for _ in range(2):
            step(session, model(ids).square().mean())
        assert session.stats().peak["device"] <= table // 8
        assert session.stats().reactive_steps == 0, session.stats().reason


def test_plans_with_rows_keep_all_invariants_and_parse_back() -> None:
    model = built()
    with managed(model, device_memory=40_000) as session:
        for number in range(3):
            step(session, model(*batch(number)))
        plan, trace = session.plan, session.trace
        assert type(trace).parse(str(trace)) == trace
        assert any(touch.tier and touch.writes for moment in trace.moments for touch in moment.touches)
        assert check(plan, trace, session.layout, plan.machine) == []


@pytest.mark.parametrize("kind", ["deferred", "in_backward"])
def test_steps_with_rows_are_executed_as_simulated(kind: str) -> None:
    model = built()
    with managed(model, step=kind, device_memory=40_000) as session, watched(session) as stretches:
        for number in range(3):
            step(session, model(*batch(number)))
        assert session.stats().planned_steps == 3, session.stats().reason
        expect_executed_as_simulated(session, stretches, bytes_are_foreseen=False)


def test_gradients_of_several_backwards_add_up_and_those_read_are_the_users() -> None:
    model, plain = built(), built()
    with managed(model) as session:
        for number in range(3):
            model(*batch(number)).backward()
            plain(*batch(number)).backward()
        expect_same(gradients_of(session), {name: p.grad for name, p in plain.named_parameters()})
        assert same(model.words.weight.grad, plain.words.weight.grad)
        model(*batch(3)).backward()
        plain(*batch(3)).backward()
        assert same(model.words.weight.grad, plain.words.weight.grad)
        norms = session.clip_grad_norm_(0.01)
        whole = built()
        with managed(whole, rows=False) as other:
            for number in range(4):
                whole(*batch(number)).backward()
            assert same(norms, other.clip_grad_norm_(0.01))


@pytest.mark.parametrize("kind", ["deferred", "in_backward"])
def test_lookups_of_several_forwards_add_up_in_one_backward(kind: str) -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words = nn.Embedding(VOCABULARY, WIDTH)
            self.mix = nn.Linear(WIDTH, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.mix(self.words(ids)).square().mean()

    model, plain = Once(), Once()
    theirs = patrickstar.AdamW(plain.parameters(), lr=1e-2)
    with managed(model, step=kind) as session:
        for number in range(2):
            for backward in range(1 if kind == "in_backward" else 2):  # what is added to comes from the one before
                seeds = (4 * number + 2 * backward, 4 * number + 2 * backward + 1)
                for each in (model, plain):
                    sum(each(batch(seed)[0] % 7) for seed in seeds).backward()
            if kind == "deferred":
                expect_same(gradients_of(session), {name: p.grad for name, p in plain.named_parameters()})
            session.optimizer.step()
            session.optimizer.zero_grad()
            theirs.step()
            theirs.zero_grad()
        expect_same({**session.state_dict()}, {**plain.state_dict()})


def test_rows_of_the_last_step_are_not_in_the_next_ones_gradient() -> None:
    model, plain = built(), built()
    with managed(model, lr=0.0) as session:
        for number in range(3):
            session.optimizer.zero_grad()
            model(*batch(number)).backward()
        plain(*batch(2)).backward()
        expect_same(gradients_of(session), {name: p.grad for name, p in plain.named_parameters()})


def test_a_gradient_takes_the_place_of_what_its_chunk_held_before() -> None:
    torch.manual_seed(0)
    # The last row of the first table, and the first 21 rows of the second, fill a chunk.
    model = nn.ModuleList([nn.Embedding(65, 16), nn.Embedding(42, 48)])
    plain = copy.deepcopy(model)
    ids = torch.tensor([0, 64]), torch.tensor([0, 41])
    with managed(model) as session:
        assert session.layout.tiles("0.weight")[-1].chunk == session.layout.tiles("1.weight")[0].chunk
        (model[0](ids[0]).square().sum() + model[1](ids[1]).square().sum()).backward()
        model[0].weight.grad = None
        model[0](ids[0][:1]).square().sum().backward()
        plain[0](ids[0][:1]).square().sum().backward()
        plain[1](ids[1]).square().sum().backward()
        expect_same(gradients_of(session), {name: p.grad for name, p in plain.named_parameters()})


def test_padding_in_a_later_tile_gets_no_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Embedding(VOCABULARY, WIDTH, padding_idx=VOCABULARY - 1)
    plain = copy.deepcopy(model)
    ids = torch.tensor([VOCABULARY - 1, 7, 290, VOCABULARY - 1])
    with managed(model) as session:
        for each in (model, plain):
            (each(ids) * torch.arange(1.0, 1 + 4 * WIDTH).view(4, WIDTH)).sum().backward()
        expect_same(gradients_of(session), {"weight": plain.weight.grad})
        assert not plain.weight.grad[-1].any()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["deferred", "in_backward"])
def test_lookups_are_done_again_where_a_block_is_checkpointed(reentrant: bool, kind: str) -> None:
    model, plain = built(), built()
    theirs = patrickstar.AdamW(plain.parameters(), lr=1e-2)

    def loss(model: Words, number: int) -> Tensor:
        ids, other = batch(number)
        start = model.mix(torch.ones(WIDTH))

        def block(start: Tensor, ids: Tensor) -> Tensor:
            return start + model.words(ids)

        hidden = checkpoint(block, start, ids, use_reentrant=reentrant)
        return model.head(hidden + model.words(other)).square().mean()

    with managed(model, step=kind) as session:
        for number in range(3):
            ours = loss(model, number)
            ours.backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
            expected = loss(plain, number)
            expected.backward()
            theirs.step()
            theirs.zero_grad()
            assert ours.item().hex() == expected.item().hex()
        expect_same({**session.state_dict()}, {**plain.state_dict()})


def test_other_uses_of_a_table_see_the_whole() -> None:
    model, plain = built(), built()
    with managed(model) as session:
        for each in (model, plain):
            hidden = each.mix(each.words(batch(0)[0])).square().mean()
            (hidden + each.words.weight.norm() + F.linear(torch.ones(WIDTH), each.places.weight).sum()).backward()
        expect_same(gradients_of(session), {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
        with torch.no_grad():
            model.words.weight.mul_(3.0)
            plain.words.weight.mul_(3.0)
        assert model(*batch(1)).item().hex() == plain(*batch(1)).item().hex()


def test_frozen_tables_evaluation_and_wrong_ids() -> None:
    model, plain = built(), built()
    for each in (model, plain):
        each.words.weight.requires_grad_(False)
    with managed(model) as session:
        model(*batch(0)).backward()
        plain(*batch(0)).backward()
        expect_same(gradients_of(session), {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
        with torch.inference_mode():
            assert same(model.words(batch(1)[0]).clone(), plain.words(batch(1)[0]))
        with pytest.raises(IndexError, match="a table of 300 rows"):
            model.words(torch.tensor([300]))


def test_a_table_that_a_linear_shares_is_fetched_as_ever() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(60, 16), nn.Linear(16, 60, bias=False))
    model[1].weight = model[0].weight
    plain = copy.deepcopy(model)
    ids = torch.tensor([1, 2, 59])
    with managed(model) as session:
        assert not session.layout.slices["0.weight"].tiles
        model(ids).square().mean().backward()
        plain(ids).square().mean().backward()
        expect_same(gradients_of(session), {name: p.grad for name, p in plain.named_parameters()})


def test_hooks_on_a_table_are_refused() -> None:
    model = built()
    model.words.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(LayoutError, match=r"words\.weight has hooks"):
        managed(model)


def test_checkpoints_go_from_rows_to_whole_tables(tmp_path: Path) -> None:
    model = built()
    with managed(model) as session:
        step(session, model(*batch(0)))
        session.save_checkpoint(tmp_path)
        expected = {name: tensor.clone() for name, tensor in session.state_dict().items()}
    other = built(1)
    with managed(other, rows=False) as session:
        session.load_checkpoint(tmp_path)
        expect_same({**session.state_dict()}, expected)
