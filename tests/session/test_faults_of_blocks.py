"""What goes wrong inside of a block: it ends as in PyTorch, or with an error that says where, and the session stays usable."""

import threading
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from patrickstar import StateError
from patrickstar.core.planes import WEIGHT
from tests.session.blocks import MOVING, Block, build
from tests.session.builders import WIDTH, adamw, batch, managed, step_with_loss, store_of

pytestmark = pytest.mark.blocks


class Failing(Block):
    """Raises where it is told to, when it is told to."""

    armed: ClassVar[type[BaseException] | None] = None
    where = ""

    @staticmethod
    def fail(*_):
        if Failing.armed is not None:
            raise Failing.armed

    def forward(self, x):
        x = super().forward(x)
        if self.where == "forward":
            self.fail()
        if self.where == "backward" and x.requires_grad:
            x.register_hook(self.fail)
        return x


HOOKS = {
    "a hook before its forward": lambda block: block.register_forward_pre_hook(block.fail),
    "a hook of its forward": lambda block: block.register_forward_hook(block.fail),
    "a hook before its backward": lambda block: block.register_full_backward_pre_hook(block.fail),
    "a hook of its backward": lambda block: block.register_full_backward_hook(block.fail),
    "a hook of a gradient": lambda block: block.up.weight.register_hook(block.fail),
    "a hook after a gradient": lambda block: block.scale.register_post_accumulate_grad_hook(block.fail),
}


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("where", ["forward", "backward", *HOOKS])
def test_an_exception_in_a_block_leaves_the_session_usable_and_its_slots_free(where, raised, make_pair):
    def hook(model, _):
        model.blocks[3].where = where
        HOOKS.get(where, lambda _: None)(model.blocks[3])

    pair = make_pair(lambda: build(Failing), before=hook, **MOVING)
    pair.same(step_with_loss)
    Failing.armed = raised
    try:
        with pytest.raises(raised):
            step_with_loss(pair.model, pair.optimizer)
    finally:
        Failing.armed = None
    pair.optimizer.zero_grad()
    assert not any(type(parameter) is nn.Parameter for parameter in pair.model.parameters())
    assert not any(ref.plane == WEIGHT for ref in store_of(pair.session).leases.held())
    pair.train(3, by=step_with_loss)
    stats = pair.session.stats()
    # Gradients that have come before it in the backward are dropped in the middle of that.
    assert (stats.steps, stats.reactive_steps) == (4, "forward" not in where)
    pair.close()


KEPT = {
    "a view": lambda block: block.up.weight.detach()[1],
    "its memory": lambda block: block.up.weight.data,
    "a view in the graph": lambda block: block.up.weight.t()[:4],
    "a gradient": lambda block: block.scale.grad,
}


@pytest.mark.parametrize("step_mode", ["deferred", "in_backward"])
@pytest.mark.parametrize("kind", KEPT)
def test_what_outlives_its_block_shows_what_its_weight_becomes_or_refuses(kind, step_mode, make_pair):
    class Showing(Block):
        shown: ClassVar = []

        def forward(self, x):
            kept = KEPT[kind](self)
            if kept is not None and not isinstance(kept, FakeTensor):
                self.shown.append(kept)
            return super().forward(x)

    def read(kept):
        try:
            return [tensor.detach().clone() for tensor in kept]
        except StateError:
            return None

    def run(model, optimizer):
        """What is kept, as it reads at each point."""
        Showing.shown, found = [], []
        for number in range(2):
            for _ in range(2 if step_mode == "deferred" else 1):
                loss = model(batch(number))
                found.append(read(Showing.shown))
                loss.backward()
                if step_mode == "deferred":  # else weights are new by now
                    found.append(read(Showing.shown))
            optimizer.step()
            found.append(read(Showing.shown))
            optimizer.zero_grad()
        return found

    theirs, ours = make_pair(lambda: build(Showing, layers=2), step=step_mode, **MOVING).each(run)
    assert any(theirs) == (kind != "a gradient" or step_mode == "deferred")
    for want, got in zip(theirs, ours, strict=True):
        assert got is None or (len(want) == len(got) and all(map(torch.equal, want, got)))


class Meeting(Block):
    """Waits for the other thread in the middle of its forward."""

    barrier: ClassVar = None

    def forward(self, x):
        x = self.up(x)
        if self.barrier is not None:
            self.barrier.wait(30)
        return self.scale * self.down(nn.functional.gelu(x))


@pytest.mark.parametrize("trains", [False, True])
def test_blocks_of_two_threads_run_at_the_same_time(trains):
    plain, model, results = build(Meeting), build(Meeting), {}
    optimizer = adamw(plain)

    def run(blocks, number):
        try:
            with torch.set_grad_enabled(trains):
                result = blocks[number](batch(number))
            if trains:
                result.square().mean().backward()
            results[number] = result.detach()
        except StateError as refused:
            results[number] = refused

    with managed(model, **MOVING) as session:
        assert torch.equal(step_with_loss(plain, optimizer), step_with_loss(model, session.optimizer))
        for number in (1, 2):
            run(plain.blocks, number)
        want = results.copy()
        Meeting.barrier = threading.Barrier(2)
        threads = [threading.Thread(target=run, args=(model.blocks, number)) for number in (1, 2)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert not any(thread.is_alive() for thread in threads)
        finally:
            Meeting.barrier = None
        if not any(isinstance(result, StateError) for result in results.values()):
            assert all(torch.equal(want[number], results[number]) for number in (1, 2))
            for each in (optimizer, session.optimizer):
                each.step()
                each.zero_grad()
        assert torch.equal(step_with_loss(plain, optimizer), step_with_loss(model, session.optimizer))


def test_a_forward_inside_of_one_is_part_of_it(make_pair):
    def inside(block, *_):
        if not block.results:
            block.results.append(None)
            with torch.no_grad():
                block.results.append(block.model[0](batch(3)))

    def prepare(model, _):
        model.blocks[2].model, model.blocks[2].results = [model], []
        model.blocks[2].register_forward_hook(inside)

    pair = make_pair(build, before=prepare, **MOVING)
    pair.same(lambda model, _: [model(batch()).detach(), model.blocks[2].results[1]])


def test_a_forward_beside_one_of_another_thread_is_refused(make_pair):
    pair, refused = make_pair(build, **MOVING), []

    def call():
        with pytest.raises(StateError, match="another thread") as error:
            pair.model(batch())
        refused.append(error)

    def beside(*_):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(60)

    hook = pair.model.blocks[2].register_forward_hook(beside)
    for number in range(2):
        pair.same(step_with_loss, number)
        assert len(refused) == 1
        hook.remove()


def assigns(block):
    block.scale = nn.Parameter(block.scale.detach() * 0.99)


def deletes(block):
    del block.scale
    block.scale = torch.ones(WIDTH)


def replaces(block):
    child = nn.Linear(WIDTH, 2 * WIDTH)
    child.load_state_dict(block.up.state_dict())
    block.up = child


OWN = {
    "assigns a parameter": (assigns, r"blocks\.3\.scale"),
    "deletes a parameter": (deletes, r"blocks\.3\.scale"),
    "replaces a child": (replaces, r"blocks\.3\.up\.weight, blocks\.3\.up\.bias"),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_block_that_changes_what_it_has_is_as_in_pytorch_or_named(kind, make_pair):
    change, named = OWN[kind]

    class Changing(Block):
        changes: ClassVar = False

        def forward(self, x):
            if self.changes and self.number == 3:
                change(self)
            return super().forward(x)

    def number_them(model, _):
        for number, block in enumerate(model.blocks):
            block.number = number

    pair = make_pair(lambda: build(Changing), before=number_them, **MOVING)
    pair.same(step_with_loss)
    Changing.changes = True
    pair.same(step_with_loss, 1)
    Changing.changes = False
    with pytest.raises(StateError, match=f"parameters of the model were replaced.*{named}"):
        pair.model(batch(2))
    pair.session.close()
    assert torch.equal(pair.plain(batch(2)), pair.model(batch(2)))
