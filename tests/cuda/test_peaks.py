"""What a device holds: as foreseen from the first step on, within the budget, and told where it is more."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import patrickstar
from patrickstar.core.cuda_blocks import cuda_block_bytes
from patrickstar.core.machine import Tier
from patrickstar.errors import BudgetError
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.norm import norm_of
from patrickstar.optim.passes import Passes
from patrickstar.session.manage import assemble
from patrickstar.tracing.live_bytes import LiveBytes
from tests.composed import Composed
from tests.cuda.schedules import Accelerator
from tests.cuda.twins import CHUNK, TIGHT, WIDTH, Hungry, batch, hungry_mlp, mlp, step, twins

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """What earlier tests have left on the device goes before, and not in the middle of a step that is measured."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_forecast_knows_the_values_of_inputs_on_the_device(accelerator: Accelerator) -> None:
    """Which models with masks look at."""

    def masked(model: Any, x: Tensor) -> Any:
        mask = (x > -100).to(torch.bool)
        return model.layers(x if mask.all() else x * mask)

    with twins(lambda: Composed(masked, layers=mlp())) as pair:
        pair.train(2)
        assert pair.session.stats().planned_steps == 2
        pair.expect_same()


def test_bytes_are_counted_in_whole_grains_as_the_allocator_gives_them() -> None:
    before = torch.accelerator.memory_allocated()
    meter = LiveBytes(lambda _: False, on_device=True)
    meter.switch_on()
    try:
        kept = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for nbytes in (1, 512, 513, 5 * WIDTH)]
        assert meter.live == 512 * 5 == torch.accelerator.memory_allocated() - before
        kept += [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for nbytes in (MIB, MIB + 1)]
        assert meter.live == 512 * 6 + 3 * MIB == torch.accelerator.memory_allocated() - before
        del kept
    finally:
        meter.retire()
    assert torch.accelerator.memory_allocated() == before


@pytest.mark.parametrize("rows", [1, 4, 5_000])
def test_a_forecast_is_what_the_allocator_then_gives_out(rows: int, accelerator: Accelerator) -> None:
    """Also where each activation is smaller than what the allocator gives out, or so large that it leaves them more."""

    def deep() -> nn.Module:
        return nn.Sequential(*[part for _ in range(40) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])

    with twins(deep, device_memory=128 * MIB if rows > 4 else TIGHT) as pair:
        inputs = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0)).cuda()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        pair.model(inputs).square().mean().backward()
        took = torch.accelerator.max_memory_allocated() - before
        foreseen = pair.session.trace.peak
        assert took <= foreseen <= 2 * took  # more is reserved for a loss outside of the model than this one takes


def loss_of_many(model: nn.Module, inputs: Tensor) -> Tensor:
    """A loss whose activations are larger than 1 MiB each."""
    loss: Tensor = model(inputs.repeat(600, 1)).square().mean()
    return loss


def test_large_activations_stay_within_the_smallest_budget_from_the_first_step_on(
    accelerator: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a large block torch leaves them the end, which nothing else shows."""
    with twins(device_memory=4 * MIB) as pair, pytest.raises(BudgetError) as refusal:
        loss_of_many(pair.model, batch())
    enough = refusal.value.smallest_bytes
    with twins(device_memory=enough - 1) as pair, pytest.raises(BudgetError):
        loss_of_many(pair.model, batch())
    with twins(device_memory=enough) as pair, caplog.at_level(logging.INFO, logger="patrickstar"):
        for number in range(3):
            torch.accelerator.reset_peak_memory_stats()  # so that what a moment holds for an instant shows
            pair.train(1, first=number, loss_of=loss_of_many)
            assert 0.8 * enough < pair.session.stats().peak["device"] <= enough
        assert not [record for record in caplog.records if "than its plan left them" in record.message]
        assert pair.session.stats().planned_steps == 3
        pair.expect_same()


LARGE = 600  # a weight of 600 x 600 in fp32 is above 1 MiB
LARGE_BYTES = 4 * LARGE * LARGE


def large_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(LARGE, LARGE), nn.Linear(LARGE, LARGE))


def loss_of_large(model: nn.Module, inputs: Tensor) -> Tensor:
    loss: Tensor = model(inputs[:, :1].expand(-1, LARGE)).square().mean()
    return loss


def test_what_the_user_takes_of_a_device_counts_as_its_blocks(accelerator: Accelerator) -> None:
    with twins(large_layers, device_memory=40 * MIB) as pair:
        binding, first = pair.session._parts.binding, pair.model[0].weight
        first.grad = torch.ones(LARGE, LARGE, device="cuda")
        assert binding.taken_bytes() == cuda_block_bytes(LARGE_BYTES) > LARGE_BYTES + MIB
        loss_of_large(pair.model, batch()).backward()
        held = pair.model[1].weight.grad.view(-1)
        assert binding.taken_bytes() == 2 * cuda_block_bytes(LARGE_BYTES)
        del held
        assert binding.taken_bytes() == cuda_block_bytes(LARGE_BYTES)


def test_a_tensor_that_is_put_together_needs_its_block(accelerator: Accelerator) -> None:
    """In a budget that has room for all bytes of two, but not for the ends of both blocks."""
    chunk = 4 * CHUNK
    enough = 2 * cuda_block_bytes(LARGE_BYTES) + chunk
    assert enough - MIB > 2 * LARGE_BYTES + chunk
    for budget in (enough, enough - 1):
        with twins(large_layers, device_memory=budget) as pair:
            loss_of_large(pair.model, batch()).backward()
            first, _, second, _ = pair.model.parameters()
            shown = first.grad, second.grad
            before = torch.accelerator.memory_allocated()
            held = [shown[0].view(-1)]
            if budget < enough:
                with pytest.raises(BudgetError, match=r"short to put 1\.weight\.grad together") as refusal:
                    shown[1].view(-1)
                assert refusal.value.needed_bytes == enough
            else:
                held.append(shown[1].view(-1))
                assert torch.accelerator.memory_allocated() - before + chunk == budget
            held.clear()


def test_an_allocator_that_is_told_to_give_more_is_told_of(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:4")
    with twins():
        (said,) = (record.message for record in caplog.records if "PYTORCH_ALLOC_CONF" in record.message)
    assert said.startswith(
        "PYTORCH_ALLOC_CONF has roundup_power2_divisions: with that torch gives out larger blocks than plans count"
    )


def test_gradients_that_nobody_reads_take_nothing_of_a_device(accelerator: Accelerator) -> None:
    """Programs ask each parameter for its gradient."""
    with twins() as pair:
        pair.model(batch()).square().mean().backward()
        first, *others = pair.model.parameters()
        shown = [first.grad]
        before = torch.accelerator.memory_allocated()
        shown += [parameter.grad for parameter in others]
        assert len({id(gradient) for gradient in shown}) == 10
        assert torch.accelerator.memory_allocated() == before
        assert [gradient.shape for gradient in shown] == [parameter.shape for parameter in pair.plain.parameters()]


def test_a_gradient_of_the_users_is_left_to_the_parameter_when_the_session_is_closed(accelerator: Accelerator) -> None:
    """Where the weights come back, as gradients that lie in chunks are."""
    with twins() as pair:
        first, _, third, *_ = pair.model.parameters()
        first.grad = torch.full((WIDTH, WIDTH), 2.0, device="cuda")
        third.square().sum().backward()
        wanted = third.grad.clone().cpu()
    assert (first.grad.device.type, third.grad.device.type) == ("cpu", "cpu")
    assert torch.equal(first.grad, torch.full((WIDTH, WIDTH), 2.0))
    assert torch.equal(third.grad, wanted)


def wide() -> nn.Module:
    """Sums up wide inputs, which it does not keep."""
    torch.manual_seed(0)
    return Composed(lambda model, x: model.layer(x.sum(0)), layer=nn.Linear(WIDTH, WIDTH))


def test_copies_of_inputs_in_the_type_that_computes_are_foreseen(
    accelerator: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    """They are the session's, and gone with the forward."""
    with (
        twins(wide, device_memory=8 * MIB, precision="bf16") as pair,
        caplog.at_level(logging.INFO, logger="patrickstar"),
    ):
        inputs = torch.randn(16, 1000, WIDTH, generator=torch.Generator().manual_seed(0)).cuda()
        copy_bytes = cuda_block_bytes(inputs.nbytes // 2)
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        loss = pair.model(inputs).float().square().mean()
        took = torch.accelerator.max_memory_allocated() - before
        assert copy_bytes < took <= pair.session.trace.peak <= 1.2 * took
        assert torch.accelerator.memory_allocated() - before < copy_bytes
        loss.backward()
        assert copy_bytes < pair.session.stats().peak["device"] <= 8 * MIB
        assert not [record for record in caplog.records if "than its plan left them" in record.message]
    with (
        twins(wide, device_memory=copy_bytes, precision="bf16") as pair,
        pytest.raises(BudgetError, match="forward layer.weight"),
    ):
        pair.model(inputs)


def most_of(work: Callable[[], object]) -> int:
    """The most bytes that torch gives out meanwhile."""
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    work()
    return torch.accelerator.max_memory_allocated() - before


@pytest.mark.parametrize("numel", [512, 4_096, 70_000])
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_an_update_takes_no_more_than_plans_have_for_it(is_split: bool, numel: int, accelerator: Accelerator) -> None:
    accelerator.configure(1.0)
    passes = Passes()
    weight, exp_avg, exp_avg_sq = (torch.ones(numel, device="cuda") for _ in range(3))
    rest = torch.ones(numel, dtype=torch.int16, device="cuda") if is_split else None
    kept = weight.bfloat16() if is_split else weight
    grad, factor = weight.half(), torch.ones((), device="cuda")
    planned = passes.scratch_bytes(numel, is_split=is_split, largest=1, tensors=1).update
    for decoupled in (True, False):
        hyper = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=decoupled)
        update = partial(passes.update, kept, rest, grad, exp_avg, exp_avg_sq)
        took = most_of(partial(update, step=1, hyper=hyper, factors=(factor,)))
        assert took <= planned <= 3 * took


@pytest.mark.parametrize("numel", [1, 100, 4_096, 70_000, 400_000])
def test_a_norm_takes_no_more_than_plans_have_for_it(numel: int, accelerator: Accelerator) -> None:
    accelerator.configure(1.0)
    tensors = [torch.ones(size, device="cuda").half() for size in (numel, 1, numel // 2 + 1)]
    factor = torch.full((), 0.5, device="cuda")
    passes = Passes()

    def take() -> None:
        norm = passes.norm(tensors[0].device, largest=numel)
        for tensor in tensors:
            norm.add(tensor, [factor])
            norm.end_tensor()
        norm_of(norm.numbers().tolist())

    planned = passes.scratch_bytes(1, is_split=False, largest=numel, tensors=len(tensors)).norm
    took = most_of(take)
    assert took <= planned <= 2 * took + 8_192


def loss_after_restart(model: nn.Module, inputs: Tensor) -> Tensor:
    """A loss of a forward whose peak shows, whatever has been before."""
    torch.accelerator.reset_peak_memory_stats()
    loss: Tensor = model(inputs).square().mean()
    return loss


def test_a_budget_that_a_step_has_shown_to_be_too_small_is_refused_for_the_next(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the step that has taught it is above the budget; the refusal's budget is enough, and a byte less is not."""
    monkeypatch.setattr(Hungry, "nbytes", 1 << 20)
    with twins(hungry_mlp, device_memory=TIGHT) as pair, caplog.at_level(logging.WARNING, logger="patrickstar"):
        pair.train(1, loss_of=loss_after_restart)
        (said,) = (record.message for record in caplog.records if "than its plan left them" in record.message)
        assert "chunks and they took more than the device_memory of 192.00 KiB" in said
        with pytest.raises(BudgetError, match="are in no trace: an earlier step took them") as raised:
            pair.model(batch(1))
        refusal = raised.value
        assert refusal.tier == "device"
        assert refusal.moment
        assert refusal.needed_bytes == refusal.smallest_bytes > refusal.available_bytes == TIGHT
        with torch.no_grad():
            monkeypatch.setattr(Hungry, "nbytes", 0)
            assert torch.equal(pair.model(batch(1)[:4]), pair.plain(batch(1)[:4]))  # another kind of forward
        pair.expect_same()
    monkeypatch.setattr(Hungry, "nbytes", 1 << 20)
    for memory in (refusal.smallest_bytes, refusal.smallest_bytes - 1):
        with twins(hungry_mlp, device_memory=memory) as pair:
            pair.train(1, loss_of=loss_after_restart)
            if memory < refusal.smallest_bytes:
                with pytest.raises(BudgetError):
                    pair.model(batch(1))
            else:
                pair.train(2, first=1)
                pair.expect_same()


SHARE = 50  # per cent
TAKEN = 1 << 16  # by a kernel: less than that share of what these steps need


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device leaves a share of a budget for workspaces of kernels, as a GPU does."""
    monkeypatch.setattr("patrickstar.step.resources._workspace_percent", lambda: SHARE)
    monkeypatch.setattr("patrickstar.core.fixed_costs.WORKSPACE_BYTES", 1024)


def smallest(build: Callable[[], nn.Module], **arguments: Any) -> int:
    """The budget that a first refusal of the forward names."""
    limit = 1024
    for _ in range(3):
        try:
            with twins(build, device_memory=limit, **arguments) as pair:
                pair.model(batch())
        except BudgetError as refusal:
            assert "+ fixed costs" in str(refusal)
            limit = refusal.smallest_bytes
    return limit


@pytest.mark.usefixtures("share")
@pytest.mark.parametrize("step", ["deferred", "in_backward"])
def test_steps_stay_within_the_budget_that_a_refusal_names_whatever_kernels_take_of_the_share(
    step: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = smallest(hungry_mlp, step=step)
    monkeypatch.setattr(Hungry, "nbytes", TAKEN)
    with (
        caplog.at_level(logging.INFO, logger="patrickstar"),
        twins(hungry_mlp, device_memory=memory, step=step) as pair,
    ):
        for number in range(4):
            pair.train(1, first=number, loss_of=loss_after_restart)
            room = pair.session.plan.machine.budget[Tier.DEVICE]
            # The first step has shown what kernels take, and nothing is left beside that.
            assert room == (memory if number else memory - memory * SHARE // 100)
        assert TAKEN < pair.session.stats().peak["device"] <= memory
        assert not [record for record in caplog.records if "than its plan left them" in record.message]
        pair.expect_same()


@pytest.mark.usefixtures("share")
@pytest.mark.parametrize("way", ["deferred", "in_backward"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_what_libraries_keep_is_left_to_them(
    when: str, way: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As cuBLAS keeps a workspace for each thread and stream: later steps find it there, in the budget of their session."""
    memory = smallest(hungry_mlp, step=way)
    for name, value in {"nbytes": TAKEN // 2, "when": when, "keeps": []}.items():
        monkeypatch.setattr(Hungry, name, value)
    with twins(hungry_mlp, device_memory=memory, step=way) as pair:
        inputs = [batch(number) for number in range(4)]
        base = torch.accelerator.memory_allocated()
        for number in range(4):
            torch.accelerator.reset_peak_memory_stats()
            step(pair.model, pair.session, inputs[number])
            took = torch.accelerator.max_memory_allocated() - base
            room = pair.session.plan.machine.budget[Tier.DEVICE] - pair.session.trace.peak
            assert number == 0 or TAKEN // 2 < took <= memory - room <= memory
        assert pair.session.stats().planned_steps == 4


@pytest.mark.usefixtures("share")
def test_a_step_without_a_trace_names_the_share(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patrickstar.step.forwards.can_be_traced", lambda _: False)
    monkeypatch.setattr(Hungry, "nbytes", 2 * TAKEN)
    memory, said = 1024, list[str]()
    for _ in range(12):
        try:
            with twins(hungry_mlp, device_memory=memory) as pair:
                pair.train(1)
            break
        except BudgetError as refusal:
            assert refusal.smallest_bytes > memory
            memory = refusal.smallest_bytes
            said.append(str(refusal))
    assert any("of the training step" in text and "+ fixed costs" in text for text in said), said


@pytest.mark.usefixtures("share")
def test_the_share_stays_free_where_no_step_has_shown_what_kernels_take(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator's peak of before hides what a kernel takes and gives back; and a forward without its backward is no step."""
    memory = smallest(hungry_mlp)
    monkeypatch.setattr(Hungry, "nbytes", TAKEN)
    with twins(hungry_mlp, device_memory=memory) as pair:
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        for number in range(3):
            pair.train(1, first=number)
            assert pair.session.plan.machine.budget[Tier.DEVICE] == memory - memory * SHARE // 100
        pair.expect_same()
    with twins(hungry_mlp, device_memory=memory) as pair:
        for number in range(3):
            loss_after_restart(pair.model, batch(number))
            assert pair.session.plan.machine.budget[Tier.DEVICE] == memory - memory * SHARE // 100


@pytest.mark.usefixtures("share")
def test_kernels_that_take_more_than_the_share_are_said_and_refused_where_they_do_not_fit(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = smallest(hungry_mlp)
    monkeypatch.setattr(Hungry, "nbytes", memory)
    with twins(hungry_mlp, device_memory=memory) as pair, caplog.at_level(logging.WARNING, logger="patrickstar"):
        pair.train(1, loss_of=loss_after_restart)
        assert "chunks and they took more than the device_memory" in caplog.text
        with pytest.raises(BudgetError, match="are in no trace: an earlier step took them"):
            pair.model(batch(1))
        pair.expect_same()


def test_what_a_budget_has_room_for_is_planned_anew_and_trains_within_it(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hungry, "nbytes", 3 * TIGHT)
    with twins(hungry_mlp, device_memory=5 * TIGHT) as pair:
        pair.train(4, loss_of=loss_after_restart)
        assert min(moment.nonmodel_bytes for moment in pair.session.trace.moments) > 3 * TIGHT
        assert 3 * TIGHT < pair.session.stats().peak["device"] <= 5 * TIGHT
        pair.expect_same()


def test_a_session_does_not_count_its_neighbours_activations(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither in turns nor in the middle of each other's steps."""
    with twins() as small, twins(hungry_mlp, device_memory=32 << 20) as large:
        for number in range(3):
            small.train(1, first=number)
            monkeypatch.setattr(Hungry, "nbytes", 1 << 20)
            large.train(1, first=number)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="patrickstar"):
            torch.accelerator.reset_peak_memory_stats()
            monkeypatch.setattr(Hungry, "nbytes", 8 << 20)
            loss = small.model(batch(3)).square().mean()
            held = large.model(batch(3))
            loss.backward()
            del held, loss
            small.session.optimizer.zero_grad()
            small.train(1, first=3)
            said = [record.message for record in caplog.records if "than its plan left them" in record.message]
            assert not said
        assert small.session.stats().peak["device"] <= TIGHT
        small.expect_same()


def test_a_session_does_not_count_what_its_user_keeps(
    accelerator: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    with twins() as pair, caplog.at_level(logging.INFO, logger="patrickstar"):
        kept = []
        for number in range(3):
            pair.train(1, first=number)
            kept.append(torch.empty(8 << 20, dtype=torch.uint8, device="cuda"))
        assert not [record for record in caplog.records if "than its plan left them" in record.message]
        assert pair.session.stats().peak["device"] <= TIGHT
        pair.expect_same()


def test_slots_and_activations_stay_within_a_budget_of_whole_granules(accelerator: Accelerator) -> None:
    """As the driver and torch count, at the end of every module and gradient: with chunks that are whole granules, nothing is shared."""
    granule = 2 << 20
    wide = 724  # a weight is a granule, and a little

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(wide, wide) for _ in range(5)])

    def most_bytes() -> int:
        return accelerator.driver_bytes() + torch.accelerator.memory_stats()["allocated_bytes.all.current"]

    inputs = [torch.randn(8, wide, generator=torch.Generator().manual_seed(n)).cuda() for n in range(4)]
    model = build()
    budget = 8 * granule
    gc.collect()
    before = most_bytes()
    with assemble(
        model,
        torch.optim.AdamW(model.parameters()),
        device="cuda",
        device_memory=budget,
        precision="fp32",
        options=patrickstar.Options(chunk_size=granule // 4, poison=True),
    ) as session:
        seen = list[int]()

        def look(*_: object) -> None:
            seen.append(most_bytes() - before)

        def look_now_and_backward(_: nn.Module, __: object, output: Tensor) -> None:
            if not isinstance(output, FakeTensor):  # not while the forward is traced
                look()
                output.register_hook(look)

        for layer in model:
            layer.register_forward_hook(look_now_and_backward)
        for x in inputs:
            step(model, session, x)
        assert budget // 2 < max(seen) <= budget
        assert max(seen) <= session.stats().peak["device"] + granule
        assert session.stats().peak["device"] <= budget
        assert session.stats().moved["D>H"] > 0


def test_a_norm_has_its_scratch_when_there_is_room_for_it(accelerator: Accelerator) -> None:
    """At a budget that the norm has just room in."""
    wide = 256
    memory = 1 << 20

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(wide, wide) for _ in range(5)])

    arguments = {"max_grad_norm": 0.01, "options": patrickstar.Options(chunk_size=wide * wide // 8, poison=True)}
    with pytest.raises(BudgetError) as refusal, twins(build, device_memory=memory, **arguments):
        pass
    with twins(build, device_memory=refusal.value.smallest_bytes, **arguments) as pair:
        model, session = pair.model, pair.session
        for number in range(3):
            model(
                torch.randn(8, wide, generator=torch.Generator().manual_seed(number)).cuda()
            ).square().mean().backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
        assert session.stats().peak["device"] <= refusal.value.smallest_bytes
