"""Formulas of bytes and memory are those of the papers, with their crossings; published figures stand beside what the formulas give."""

from __future__ import annotations

import math
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Callable
from fractions import Fraction

import pytest

from patrickstar.errors import ConfigError
from patrickstar.parallel import costs

B, Z, KV, L, A = 2, 8, 2, 64, 4
H = Z * A


def u(ranks: int) -> int:
    return B * Z * (L // ranks) * A


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("kv", [1, 2, 8])
def test_an_attention_sends_what_the_table_says(n: int, kv: int) -> None:
    own, hops = Fraction(u(n) * kv, Z), n - 1
    for method in ("ring", "rsa"):
        found = costs.attention(method, n, B, Z, kv, L, A, element=4)
        assert (found.forward, found.backward) == (2 * hops * own * 4, 4 * hops * own * 4)
        narrow = costs.attention(method, n, B, Z, kv, L, A)  # sums of gradients in fp32
        assert (narrow.forward, narrow.backward) == (2 * hops * own * 2, 2 * hops * own * 2 + 2 * hops * own * 4)
    published = costs.attention("rsa-published", n, B, Z, kv, L, A, element=4)
    assert published.forward + published.backward == 8 * hops * own * 4
    swapped = costs.attention("ulysses", n, B, Z, kv, L, A, element=4)
    expected = (2 + Fraction(2 * max(kv, n), Z)) * Fraction(hops, n) * u(n) * 4
    assert (swapped.forward, swapped.backward) == (expected, expected)


def test_alone_nothing_is_sent() -> None:
    nothing = costs.PhaseBytes(0, 0)
    assert [costs.attention(method, 1, B, Z, KV, L, A) for method in costs.METHODS] == [nothing] * 4
    assert costs.summa(1, B, L, H) == nothing


def stem(system: str, ranks: int, tokens: float, hidden: int, *, broadcast: str = "ring") -> tuple[float, float]:
    """Elements that a rank sends for one layer, forward and backward with recomputing: table 1 of Optimus, whose panels go down a "tree"."""
    if system == "tensor":
        return 4 * (ranks - 1) / ranks * tokens * hidden, 8 * (ranks - 1) / ranks * tokens * hidden
    q = math.isqrt(ranks)
    factor = (q - 1) / ranks if broadcast == "ring" else math.log2(ranks) / (2 * q)
    forward = factor * (7 * tokens * hidden + 12 * hidden**2)
    return forward, 3 * forward


@pytest.mark.parametrize(("q", "batch", "layers"), [(2, 4, 1), (3, 6, 5), (4, 8, 2)])
def test_matrices_of_gpt2_send_what_the_paper_says(q: int, batch: int, layers: int) -> None:
    tokens, h = 10, 12 * q
    found = costs.summa(q, batch, tokens, h, layers, element=8)
    one, backward = stem("optimus", q * q, batch * tokens, h)
    assert found.forward == Fraction((q - 1) * layers * 8 * (7 * batch * tokens * h + 12 * h * h), q * q)
    assert found.forward == pytest.approx(8 * layers * one)
    assert found.backward == 2 * found.forward
    again = costs.summa(q, batch, tokens, h, layers, recompute=True, element=8)
    assert (again.forward, again.backward) == (found.forward, 3 * found.forward)
    assert again.backward == pytest.approx(8 * layers * backward)


def test_a_tree_sends_more_than_a_ring_from_16_ranks_on() -> None:
    for ranks, times in [(4, 2.0), (16, 8 / 3), (64, 24 / 7)]:
        tree, ring = (stem("optimus", ranks, B * L, H, broadcast=kind)[0] for kind in ("tree", "ring"))
        assert tree / ring == pytest.approx(times)


@pytest.mark.parametrize(("ranks", "times"), [(4, 2.4), (16, 0.92), (64, 0.41)])
def test_2d_sends_less_than_1d_above_as_many_tokens_as_published(ranks: int, times: float) -> None:
    hidden, q = 4096, math.isqrt(ranks)
    crossing, step = 12 * hidden / (4 * q - 3), 12 * hidden / (3 * q - 4)
    assert crossing / hidden == pytest.approx(times, abs=0.006)
    for tokens, is_less in [(0.99, False), (1.01, True)]:
        both = [stem(system, ranks, tokens * crossing, hidden)[0] for system in ("optimus", "tensor")]
        assert (both[0] < both[1]) is is_less
        both = [sum(stem(system, ranks, tokens * step, hidden)) for system in ("optimus", "tensor")]
        assert (both[0] < both[1]) is is_less


TABLES = {
    # block, system: states, activations and scores in elements, as RSA's tables 1 and 2 print them
    ("mlp", "tensor"): lambda n: (32 * H**2 / n, 4 * B * L * H / n + B * L * H, 0),
    ("mlp", "rsa"): lambda n: (32 * H**2, 5 * B * L * H / n, 0),
    ("attention", "tensor"): lambda n: (16 * A * Z * H / n, 4 * B * L * Z * A / n + B * L * H, B * Z * L**2 / n),
    ("attention", "rsa"): lambda n: (16 * A * Z * H, 4 * B * Z * L * A / n + B * L * H / n, B * Z * L**2 / n),
}


def test_a_model_is_the_blocks_of_the_tables() -> None:
    for n in (2, 4, 8):
        for system in ("tensor", "rsa"):
            blocks = [sum(TABLES[block, system](n)) for block in ("mlp", "attention")]
            assert sum(costs.memory(system, n, B, L, H, Z, 3).values()) == 3 * sum(blocks)


def test_a_sequence_cut_is_smaller_above_the_printed_crossings() -> None:
    """They are 32 H and 16 AZ tokens of a batch: 24 H over the model's two kinds of block, of which it has as many."""
    for tokens, is_less in [(24 * H - 1, False), (24 * H + 1, True)]:
        cut, whole = (sum(costs.memory(system, 4, 1, tokens, H, Z, 3).values()) for system in ("rsa", "tensor"))
        assert (cut < whole) is is_less


BERT_BASE = {"hidden": 768, "heads": 12, "layers": 12, "vocabulary": 30522}
BERT_LARGE = {"hidden": 1024, "heads": 16, "layers": 24, "vocabulary": 30522}
OPTIMUS = {"hidden": 8192, "heads": 128, "layers": 24}


def largest(elements: float, fits: Callable[[int], dict[str, float]]) -> int:
    """The largest number, of rows or of tokens, with which the parts that `fits` gives take no more than so many elements."""
    return bisect_right(range(1 << 20), elements, key=lambda number: sum(fits(number).values())) - 1


def rows(system: str, ranks: int, model: dict[str, int], card: float = 16e9, **more: bool) -> int:
    return largest(card / 4, lambda batch: costs.memory(system, ranks, batch, 512, **model, **more))


def length(system: str, ranks: int, model: dict[str, int], batch: int) -> int:
    return largest(16e9 / 4, lambda tokens: costs.memory(system, ranks, batch, tokens, **model))


def test_published_figures_beside_those_of_the_formulas() -> None:
    """States of embeddings are counted, no head. Published: 13.7, 3.0, 2.7, 10.2 and 2.0; 1D held more than its table says: masks, norms."""
    base, large = rows("tensor", 12, BERT_BASE), rows("tensor", 16, BERT_LARGE)
    long = length("tensor", 12, BERT_BASE, 64)
    found = [
        rows("rsa", 64, BERT_BASE) / base,
        length("rsa", 64, BERT_BASE, 64) / long,
        rows("rsa", 16, BERT_LARGE) / large,
        rows("rsa", 64, BERT_LARGE) / large,
        length("rsa", 64, BERT_LARGE, 16) / length("tensor", 16, BERT_LARGE, 16),
    ]
    assert found == [pytest.approx(figure, rel=0.02) for figure in (10.7, 3.2, 1.8, 7.3, 2.3)]
    assert rows("ring", 64, BERT_BASE) / base == pytest.approx(20, rel=0.02)
    assert length("ring", 64, BERT_BASE, 64) / long == pytest.approx(27, rel=0.02)


@pytest.mark.parametrize("card", [15e9, 16e9, 2**34])
def test_the_batch_of_optimus_is_8_to_10_times_that_of_1d(card: float) -> None:
    """Published: 480 rows of 512 tokens, and 60."""
    assert costs.LIVE * 4 == 34  # bytes a token and feature
    assert 8 <= rows("optimus", 64, OPTIMUS, card) / rows("tensor", 64, OPTIMUS, card, recompute=True) <= 10


def test_a_head_and_cut_states_change_what_they_are_about() -> None:
    shape = (4, B, L, H, Z, 3)
    for system in ("tensor", "rsa", "ring"):
        with_head = costs.memory(system, *shape, vocabulary=100, head=True)
        without = costs.memory(system, *shape, vocabulary=100)
        assert with_head == without | {"logits": 2 * B * L * 100 / 4}
    whole, cut = (costs.memory("rsa", *shape, sharded=is_cut) for is_cut in (False, True))
    assert cut["states"] == whole["states"] / 4
    assert costs.memory("optimus", *shape, vocabulary=10_000, head=True)["workspace"] == (B * L + H) * 10_000 / 4


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: costs.attention("rings", 2, B, Z, KV, L, A), ["'rings'", 'did you mean "ring"?']),
        (lambda: costs.attention("ring", 3, B, Z, KV, L, A), ["tokens 64 does not divide by 3"]),
        (lambda: costs.attention("ulysses", 16, B, Z, KV, L, A), ["heads 8 does not divide by 16"]),
        (lambda: costs.attention("ring", 2, B, Z, 3, L, A), ["heads 8 does not divide by 3"]),
        (lambda: costs.summa(3, B, L, 32), ["hidden 32", "divide by 3"]),
        (lambda: costs.memory("optimus", 8, B, L, H, Z, 1), ["8 is no square"]),
        (lambda: costs.memory("2d", 4, B, L, H, Z, 1), ["'2d'", "optimus"]),
    ],
)
def test_numbers_that_cannot_be_are_refused(act, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        act()
    assert [word for word in words if word not in str(refusal.value)] == []


def test_it_needs_no_torch() -> None:
    code = "import sys, patrickstar.parallel.costs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
