"""Formulas of bytes and memory are those of the papers, with their crossings; published figures stand beside what the formulas give."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest

from benchmarks import papers
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


@pytest.mark.parametrize(("q", "batch", "layers"), [(2, 4, 1), (3, 6, 5), (4, 8, 2)])
def test_matrices_of_gpt2_send_what_the_paper_says(q: int, batch: int, layers: int) -> None:
    tokens, h = 10, 12 * q
    found = costs.summa(q, batch, tokens, h, layers, element=8)
    one, backward = papers.stem_elements("optimus", q * q, batch, tokens, h)
    assert found.forward == Fraction((q - 1) * layers * 8 * (7 * batch * tokens * h + 12 * h * h), q * q)
    assert found.forward == pytest.approx(8 * layers * one)
    assert found.backward == 2 * found.forward
    again = costs.summa(q, batch, tokens, h, layers, recompute=True, element=8)
    assert (again.forward, again.backward) == (found.forward, 3 * found.forward)
    assert again.backward == pytest.approx(8 * layers * backward)


def test_a_tree_sends_more_than_a_ring_from_16_ranks_on() -> None:
    for ranks, times in [(4, 2.0), (16, 8 / 3), (64, 24 / 7)]:
        tree, ring = (papers.stem_elements("optimus", ranks, B, L, H, broadcast=kind)[0] for kind in ("tree", "ring"))
        assert tree / ring == pytest.approx(times)


@pytest.mark.parametrize(("ranks", "times"), [(4, 2.4), (16, 0.92), (64, 0.41)])
def test_2d_sends_less_than_1d_above_as_many_tokens_as_published(ranks: int, times: float) -> None:
    hidden = 4096
    crossing = papers.tokens_where_2d_sends_less(ranks, hidden)
    assert crossing / hidden == pytest.approx(times, abs=0.006)
    step = papers.tokens_where_2d_sends_less(ranks, hidden, training=True)
    for tokens, is_less in [(0.99, False), (1.01, True)]:
        both = [
            papers.stem_elements(system, ranks, 1, int(tokens * crossing), hidden)[0]
            for system in ("optimus", "tensor")
        ]
        assert (both[0] < both[1]) is is_less
        both = [
            sum(papers.stem_elements(system, ranks, 1, int(tokens * step), hidden)) for system in ("optimus", "tensor")
        ]
        assert (both[0] < both[1]) is is_less


TABLES = {
    # block, system: states, activations and scores in elements, as printed
    ("mlp", "tensor"): lambda n: (32 * H**2 / n, 4 * B * L * H / n + B * L * H, 0),
    ("mlp", "rsa"): lambda n: (32 * H**2, 5 * B * L * H / n, 0),
    ("attention", "tensor"): lambda n: (16 * A * Z * H / n, 4 * B * L * Z * A / n + B * L * H, B * Z * L**2 / n),
    ("attention", "rsa"): lambda n: (16 * A * Z * H, 4 * B * Z * L * A / n + B * L * H / n, B * Z * L**2 / n),
    ("linformer", "rsa"): lambda n: (
        2 * A * Z * H,
        2 * B * L * Z * A / n + B * L * H / n + 2 * B * Z * 16 * A,
        B * Z * L * 16 / n,
    ),
}


@pytest.mark.parametrize(("block", "system"), TABLES)
def test_memory_of_a_block_is_as_printed(block: str, system: str) -> None:
    for n in (2, 4, 8):
        found = papers.block_memory(block, system, n, B, L, H, Z, projection=16)
        assert tuple(found.values()) == TABLES[block, system](n)
        assert list(found) == ["states", "activations", "scores"]


def test_a_model_is_its_blocks() -> None:
    for system in ("tensor", "rsa"):
        blocks = [papers.block_memory(block, system, 4, B, L, H, Z) for block in ("mlp", "attention")]
        model = costs.memory(system, 4, B, L, H, Z, 3)
        assert sum(model.values()) == 3 * sum(sum(block.values()) for block in blocks)


@pytest.mark.parametrize(("block", "times"), [("mlp", 32), ("attention", 16)])
def test_a_sequence_cut_is_smaller_above_the_printed_crossing(block: str, times: int) -> None:
    assert papers.tokens_where_sequence_is_smaller(block, H, ranks=4) == times * H
    for tokens, is_less in [(times * H - 1, False), (times * H + 1, True)]:
        cut, whole = (sum(papers.block_memory(block, s, 4, 1, tokens, H, Z).values()) for s in ("rsa", "tensor"))
        assert (cut < whole) is is_less


def test_with_states_cut_the_crossings_go_down_with_layers_and_ranks() -> None:
    """The weights of one layer are left of all states: over 12 layers of 64 ranks, less than a token a feature."""
    found = {
        b: papers.tokens_where_sequence_is_smaller(b, H, ranks=64, layers=12, sharded=True)
        for b in ("mlp", "attention")
    }
    assert found == {"mlp": pytest.approx(8 * H * 64 / 63 / 12), "attention": pytest.approx(4 * H * 64 / 63 / 12)}
    assert found["mlp"] < H


def test_published_figures_stand_beside_those_of_the_formulas() -> None:
    found = papers.comparisons()
    assert [one.published for one in found] == [13.7, 3.0, 2.7, 10.2, 2.0, None, None, 8.0]
    expected = [10.7, 3.2, 1.8, 7.3, 2.3, 20, 27, 9.7]
    assert [one.formula for one in found] == [pytest.approx(figure, rel=0.02) for figure in expected]
    ring_batch, ring_length = found[5], found[6]
    assert ring_batch.formula > 13.7
    assert ring_length.formula > 3.0
    assert "34 bytes a token and feature" in found[7].note
    assert "480 and 60" in str(found[7])
    assert str(found[0]).startswith("batch of BERT Base, RSA on 64, 1D on 12: published 13.7x, formula 10.7x (")
    assert "published -" in str(ring_batch)


@pytest.mark.parametrize("card", [15e9, 16e9, 2**34])
def test_the_batch_of_optimus_is_8_to_10_times_that_of_1d(card: float) -> None:
    assert 8 <= papers.comparisons(card)[-1].formula <= 10


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    fits = lambda rows: costs.memory("ring", 4, rows, L, H, Z, 3, vocabulary=100, head=True)
    room = 10 * sum(fits(1).values())
    most = papers.largest(room, fits)
    assert sum(fits(most).values()) <= room < sum(fits(most + 1).values())
    assert papers.largest(1, fits) == 0


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
        (lambda: papers.block_memory("linformer", "tensor", 4, B, L, H, Z), ["linformer"]),
    ],
)
def test_numbers_that_cannot_be_are_refused(act, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        act()
    assert [word for word in words if word not in str(refusal.value)] == []


def test_it_needs_no_torch() -> None:
    code = "import sys, patrickstar.parallel.costs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
