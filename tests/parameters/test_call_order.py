"""What ranks gather and reduce as calls begin: a function of these calls alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from patrickstar.core.layout import TensorSpec, build_layout
from patrickstar.core.shard_layout import shard_of
from patrickstar.parameters.call_order import BlockWeights, CallOrder, Coming

NAMES = ("table", "a.weight", "b.weight", "c.weight", "d.weight")


class Written:
    """An exchange that writes down what it is asked for: `+a` gathered, `a` waited for, `>a` sent, `<a` received."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.sent: list[str] = []
        specs = [TensorSpec(name, (32,), block=name.partition(".")[0] if "." in name else "") for name in NAMES]
        layout = shard_of(build_layout(specs, chunk_numel=32), 0, 2)
        self.order = CallOrder(layout, NAMES, gather=self.gather, send=self.send, receive=self.receive)

    def gather(self, block: str) -> BlockWeights:
        self.seen.append(f"+{block or 'root'}")
        return BlockWeights({}, [Coming(torch.empty(0), None, [])], lambda: self.waits(block), lambda *_: None)

    @contextmanager
    def waits(self, block: str) -> Iterator[None]:
        self.seen.append(block or "root")
        yield

    def send(self, block: str) -> None:
        self.seen.append(f">{block}")
        self.sent = [f"<{block}"]

    def receive(self) -> None:
        self.seen += self.sent
        self.sent = []

    def does(self, calls: str) -> str:
        """What is seen as calls begin: `a` of a block in a forward, `a'` its backward, `a*` its recomputation, `f` a forward; `e` ends a backward."""
        self.seen.clear()
        for call in calls.split():
            if call == "f":
                self.order.begin_forward()
            elif call == "e":
                self.order.end_backward()
            elif call == "step":
                self.order.forget()
            elif call[1:] == "'":
                self.order.begin_backward(call[0], 0)
            else:
                self.order.begin_call(call[0], in_backward=call[1:] == "*")
                if call[1:] != "*":
                    self.order.await_backward(call[0], 0)
        return " ".join(self.seen)


FORWARD = "+root root +a a +b b +c c +d d"


@pytest.fixture
def written() -> Written:
    return Written()


def test_a_step_gathers_one_block_ahead_and_sends_a_block_when_the_next_backward_begins(written: Written) -> None:
    for _ in range(3):
        assert written.does("f a b c d") == FORWARD
        assert written.does("d' c' b' a'") == "+c c >d +b b <d >c +a a <c >b"
        assert written.does("e step") == "<b"


def test_two_blocks_are_there_at_most_and_the_last_one_stays(written: Written) -> None:
    written.does("f a b")
    assert list(written.order.there) == ["", "b", "c"]
    written.does("c d")
    assert list(written.order.there) == ["", "d"]
    written.does("d' c'")
    assert list(written.order.there) == ["", "c", "b"]
    written.does("e")
    assert not written.order.there


def test_a_block_that_is_computed_again_is_gathered_once_in_its_backward(written: Written) -> None:
    written.does("f a b c d")
    assert written.does("d' d* c' c* b' b* a' a* e") == "+c c >d +b b <d >c +a a <c >b <b"


def test_blocks_that_are_computed_again_together_are_sent_one_by_one(written: Written) -> None:
    written.does("f a b c d")
    assert written.does("d' c* d* d' c' e") == "+c c >d +b <d"


def test_another_order_than_that_of_the_model_is_known_from_the_second_step_on(written: Written) -> None:
    assert written.does("f b a d c") == "+root root +b b +c +a a +b +d d +c c +d"
    written.does("c' d' a' b' e step")
    assert written.does("f b a d c") == "+root root +b b +a a +d d +c c"
    assert written.does("c' d' a' b' e") == "+d d >c +a a <c >d +b b <d >a <a"


def test_what_is_used_outside_of_its_call_is_gathered_there(written: Written) -> None:
    written.does("f a b c d")
    written.seen.clear()
    written.order.use([])
    written.order._use("a")
    written.order._use("a")
    assert " ".join(written.seen) == "+a a"
    assert written.does("d'") == "+d d +c"


def test_a_block_with_calls_that_are_still_to_come_back_waits_for_them(written: Written) -> None:
    written.does("f a b a b")
    written.order._calls.clear()
    for call in (1, 2):
        written.order.await_backward("a", call)
        written.order.await_backward("b", call)
    written.seen.clear()
    for block, call in (("b", 2), ("a", 2), ("b", 1), ("a", 1)):
        written.order.begin_backward(block, call)
    assert [what for what in written.seen if what[0] in "<>"] == [">b"]


def test_a_forward_without_a_backward_leaves_nothing_to_wait_for(written: Written) -> None:
    written.does("f a b")
    written.order.await_backward("b", 1)
    assert ">b" in written.does("f a b b' a'")


def test_a_block_that_has_no_backward_is_not_gathered_for_one(written: Written) -> None:
    written.does("f a b c d")
    written.order._calls["b"].clear()
    assert written.does("d' c' e") == "+c c >d <d"


def test_what_was_sent_in_a_backward_that_failed_is_received_before_the_next_forward(written: Written) -> None:
    written.does("f a b c d d' c'")
    assert written.does("f").startswith("<d")
