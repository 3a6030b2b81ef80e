"""Weights of 16 bits that keep their bytes: what scripts (`test_scripts.py`) do not say of them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import patrickstar
from patrickstar import StateError
from tests.composed import Composed
from tests.session.builders import MakePair, adamw, alike, batch, finish, mlp, options, seeded
from tests.session.script import Script

pytestmark = pytest.mark.whole

BF16: dict[str, Any] = {"precision": "bf16", "options": options(compute="bf16")}
ROOMY = {"device": "emulated", "device_memory": "1MiB", "host_memory": "8MiB"}


def narrow() -> nn.Module:
    """In bf16 without us, too, where `patrickstar.AdamW` splits masters as a session does."""
    return mlp().bfloat16()


def loss_of(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    return lambda values, x: functional_call(model, values, (x,)).float().square().sum()


def hooked(model: nn.Module) -> list[Tensor]:
    seen: list[Tensor] = []
    handles = [p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())) for p in model.parameters()]
    model(batch().bfloat16()).float().sum().backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return seen


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "gradients of each sample": lambda m: list(
        vmap(grad(loss_of(m)), (None, 0))({n: p.detach() for n, p in m.named_parameters()}, batch().bfloat16()).values()
    ),
    "jvp": lambda m: jvp(m, (batch().bfloat16(),), (torch.ones(4, 32).bfloat16(),))[1],
    "functional_call": lambda m: functional_call(m, {"0.weight": torch.eye(32).bfloat16()}, (batch().bfloat16(),)),
    "compiled": lambda m: torch.compile(m, backend="eager", fullgraph=True)(batch().bfloat16()),
    "deepcopy": lambda m: copy.deepcopy(m)(batch().bfloat16()),
    "pickle": lambda m: pickle.loads(pickle.dumps(m))(batch().bfloat16()),
    "hooks": hooked,
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_torch_does_with_the_model_in_the_middle_of_a_training_has_the_same_bits(kind: str) -> None:
    plain, model = narrow(), narrow()
    optimizer = patrickstar.AdamW(plain.parameters(), lr=1e-2)
    given = patrickstar.AdamW(model.parameters(), lr=1e-2)
    with patrickstar.manage(model, given, **BF16) as session:
        for do in (None, KINDS[kind], None):
            found = []
            for each, stepped in ((plain, optimizer), (model, session.optimizer)):
                if do is not None:
                    found.append(do(each))
                    continue
                loss = each(batch().bfloat16()).float().square().sum()
                loss.backward()
                found.append([loss.detach(), *(p.grad for p in each.parameters())])
                assert all(type(p) is nn.Parameter and type(p.grad) is Tensor for p in each.parameters())
                stepped.step()
                stepped.zero_grad()
            assert alike(*found)
        assert alike(list(plain.parameters()), list(model.parameters()))
        assert session.stats().binding == "whole"


@pytest.mark.parametrize(("times", "binding"), [(1, "whole"), (2, "gradients of 16 bits come in parts")])
def test_gradients_that_come_in_parts_add_up_in_16_bits_first(times: int, binding: str) -> None:
    """Of the parameters of a layer that is called so many times, each time in a re-entrant checkpoint."""

    def run(model: Any, x: Tensor) -> Any:
        x = model.layers[0](x)
        for _ in range(times):
            x = checkpoint(model.layers[1], x, use_reentrant=True).tanh()
        return model.layers[2](x)

    build = seeded(lambda: Composed(run, layers=nn.ModuleList(nn.Linear(32, 32) for _ in range(3))))
    with closing(Script("bf16", build, device="emulated", device_memory="64MiB")) as script:
        script.run("2[forward backward] grad(2) step zero train read")
        assert binding in script.session.stats().binding


class Scaled(torch.autograd.Function):
    """x * weight + bias, whose gradients are two halves of one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight + bias

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad_out * weight, *torch.cat([(grad_out * x).sum(0), grad_out.sum(0)]).split(len(weight))


class TwoHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(32)), nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(x, self.weight.view(-1), self.bias.view(-1))  # type: ignore[no-any-return]


def test_gradients_that_are_parts_of_one_tensor_are_rounded_each_by_itself() -> None:
    given: dict[str, Any] = {"precision": "bf16", "options": options(compute="fp32")}
    with patrickstar.manage(model := seeded(TwoHalves)(), adamw(model), **given) as session:
        for _ in range(2):
            model(batch()).square().sum().backward()
            assert all(torch.equal(gradient, gradient.bfloat16().float()) for _, gradient in session.gradients())
            session.optimizer.step()
            session.optimizer.zero_grad()
        assert session.stats().binding == "whole"


def test_parts_that_no_trace_shows_are_refused_in_a_second_backward() -> None:
    with patrickstar.manage(model := mlp(), adamw(model), **BF16):
        x = batch().bfloat16().requires_grad_()
        twice = checkpoint(model[0], checkpoint(model[0], x, use_reentrant=True), use_reentrant=True)
        with pytest.raises(StateError, match=r"0.(weight|bias) has two gradients in one backward"):
            twice.float().sum().backward()


def test_an_exception_in_a_second_backward_leaves_gradients_that_are_to_be_zeroed() -> None:
    with closing(Script("bf16", device="emulated", device_memory="64MiB")) as script:
        script.run("train forward backward")
        handle = get_gradient_edge(script.model[4].weight).node.register_prehook(lambda _: 1 / 0)  # after ours
        with pytest.raises(ZeroDivisionError):
            script.model(batch(1)).float().sum().backward()
        handle.remove()
        with pytest.raises(StateError, match=r"Call optimizer.zero_grad\(\)"):
            script.session.optimizer.step()
        script.run("zero read train read")


def test_a_gradient_of_another_parameter_is_no_gradient_to_assign() -> None:
    with patrickstar.manage(model := mlp(), adamw(model), **BF16) as session:
        model(batch()).float().sum().backward()
        session.clip_grad_norm_(1.0)
        model[2].weight.grad = model[0].weight.grad
        with pytest.raises(StateError, match="cannot be another's"):
            session.optimizer.step()


def test_the_smallest_budget_has_room_for_all_that_is_kept_beside_weights() -> None:
    def trained(**machine: Any) -> Any:
        with patrickstar.manage(model := mlp(), adamw(model), **BF16, **machine) as session:
            for _ in range(2):
                finish(model(batch()).float().square().sum(), session.optimizer)
            return session.stats(), session.trace, session.layout

    stats, trace, layout = trained(**ROOMY)
    # 2 bytes of the gradients that may come to 4, and 2 with which changes are found
    needed = sum(stats.model_data.values()) + (4 + 2) * layout.model_numel + trace.peak
    for budget, is_whole in ((needed, True), (needed - 1, False)):
        stats, _, _ = trained(**{**ROOMY, "device_memory": budget})
        assert (stats.binding == "whole") is is_whole
        assert stats.peak["device"] <= budget


def test_a_weight_that_is_widened_shows_what_was_written_until_the_next_forward() -> None:
    with closing(Script("bf16-fp32", device="emulated", device_memory="64MiB")) as script:
        script.run("train")
        weight = script.model[2].weight
        for model in (script.model, script.plain.model):
            model[2].weight.data += 0.1
        assert not alike(weight, weight.bfloat16().float())
        script.plain.twin.carry()
        script.run("evaluate")
        assert alike(weight, weight.bfloat16().float())
        script.run("read train read")


def test_an_update_that_fails_half_way_leaves_parameters_of_no_one_step(
    make_pair: MakePair, failing_update: Callable[[Any, int], AbstractContextManager[None]], tmp_path: Path
) -> None:
    pair = make_pair(device="emulated", device_memory="64MiB", precision="bf16")
    pair.session.save_checkpoint(tmp_path)
    model, optimizer = pair.model, pair.session.optimizer
    model(batch()).float().sum().backward()
    with failing_update(pair, 3), pytest.raises(MemoryError):
        optimizer.step()
    with pytest.raises(StateError, match="no one step"):
        model(batch())
    pair.session.load_checkpoint(tmp_path)
    model(batch()).float().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("before", ["", "forward backward "])
def test_from_the_first_forward_on_that_does_not_fit_nothing_of_it_is_lost(before: str) -> None:
    """Gradients, kept by autograd or in chunks, and a change by hand that nobody has looked at."""
    with closing(Script("bf16", device="emulated", device_memory="220KiB", host_memory="8MiB")) as script:
        script.run(f"train {before}forward backward")
        assert script.session.stats().binding == "whole"
        script.weights(lambda model: [p.data[3:].mul_(0.3) for p in model.parameters()])
        script.run("forward(rows=60) backward limit(.01) step zero train read")
        assert "by use" in script.session.stats().binding
