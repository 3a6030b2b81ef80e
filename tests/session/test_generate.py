"""`generate()` under a budget: the plain model's bits, planned as it will be at its bound, and refused where a forward does not fit."""

from __future__ import annotations

from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

import patrickstar
from patrickstar import BudgetError
from patrickstar.plan.actions import Issue
from patrickstar.plan.pilot import Pilot
from patrickstar.plan.stretch import Stretch, StretchKind
from patrickstar.tracing.offline import OfflineTracer
from tests.memory.stores import keep_log
from tests.session.builders import in_the_smallest, machine_with, options, store_of

pytestmark = pytest.mark.blocks

PROMPT, NEW = 6, 8
SIZES = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
DECODER = SIZES | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2}
ENCODER = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", SIZES | {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "windows": ("Gemma3ForCausalLM", "Gemma3TextConfig", DECODER | WINDOWS),
    "encoder": ("T5ForConditionalGeneration", "T5Config", SIZES | ENCODER),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 8},
    "beams": {"do_sample": False, "num_beams": 2},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 2},
    "assisted": {"do_sample": False, "assistant": True},
}


def build(name: str = "Llama", **configured: int) -> Any:
    torch.manual_seed(0)
    model, config, given = MODELS[name]
    built = getattr(transformers, model)(getattr(transformers, config)(**given)).eval()
    built.generation_config.eos_token_id = None  # as many tokens as were asked for
    built.generation_config.update(**configured)
    return built


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(1, 64, (rows, PROMPT), generator=torch.Generator().manual_seed(3))


def generate(model: Any, way: str = "greedy", *, rows: int = 2, new: int = NEW, name: str = "Llama") -> Tensor:
    torch.manual_seed(5)
    given = {**WAYS[way], "max_new_tokens": new}
    if given.pop("assistant", False):
        given["assistant_model"] = build(name)
    found: Tensor = model.generate(tokens(1 if way in ("lookup", "assisted") else rows), **given)
    return found


@cache
def plain(way: str = "greedy", *, name: str = "Llama", new: int = NEW) -> Tensor:
    return generate(build(name), way, new=new, name=name)


def managed(model: Any, nbytes: int | str, disk: Path | None = None) -> patrickstar.Session:
    name = "emulated" if disk is None else "cpu+disk"
    return patrickstar.manage(model, options=options(), **machine_with(name, nbytes, disk or Path()))


@pytest.fixture
def stretches(monkeypatch: pytest.MonkeyPatch) -> list[Stretch]:
    """The evaluations that have begun."""
    begun: list[Stretch] = []

    def begin(self: Any, stretch: Stretch) -> None:
        if stretch.kind is StretchKind.EVALUATION:
            begun.append(stretch)
        real(self, stretch)

    real = Pilot.begin
    monkeypatch.setattr(Pilot, "begin", begin)
    return begun


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens in the cache of each forward that was traced."""
    lengths: list[int] = []

    def foresee(self: Any, model: Any, named: Any, args: Any, kwargs: Any, **given: Any) -> Any:
        lengths.append(kwargs["past_key_values"].past)
        return real(self, model, named, args, kwargs, **given)

    real = OfflineTracer.foresee
    monkeypatch.setattr(OfflineTracer, "foresee", foresee)
    return lengths


def peak_of(name: str, way: str) -> int:
    """What a device holds where nothing has to move."""
    model = build(name)
    with managed(model, "64MiB") as session:
        assert torch.equal(generate(model, way, name=name), plain(way, name=name))
        return session.stats().peak["device"]


@pytest.mark.parametrize("disk", [False, True], ids=["device", "disk"])
@pytest.mark.parametrize("share", [75, 50])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_generation_has_the_bits_of_the_plain_model_and_is_planned(
    name: str, way: str, share: int, disk: bool, tmp_path: Path, stretches: list[Stretch]
) -> None:
    nbytes = peak_of(name, way) * share // 100
    stretches.clear()
    model = build(name)
    with managed(model, nbytes, tmp_path / "disk" if disk else None) as session:
        assert torch.equal(generate(model, way, name=name), plain(way, name=name))
        stats = session.stats()
        assert stats.moved["K>H" if disk else "H>D"]
        assert stats.peak["host" if disk else "device"] <= nbytes
    assert not [stretch.reason for stretch in stretches if stretch.reason]


@pytest.mark.parametrize("way", ["greedy", "static cache"])
def test_the_smallest_budget_is_what_the_refusals_name(way: str) -> None:
    def run(nbytes: int) -> patrickstar.Session:
        model = build()
        with managed(model, nbytes) as session:
            assert torch.equal(generate(model, way, new=4), plain(way, new=4))
            assert session.stats().peak["device"] <= nbytes
            return session

    _, refusals = in_the_smallest(run)
    assert "cache of" in str(refusals[-1])
    with pytest.raises(BudgetError):
        run(refusals[-1].smallest_bytes - 1)


@pytest.mark.parametrize(
    ("name", "way", "why"),
    [("windows", "greedy", ""), ("encoder", "greedy", ""), ("windows", "static cache", "cannot be traced")],
)
def test_windows_and_encoders_are_planned_too_and_with_other_caches_a_forward_runs_unplanned(
    name: str, way: str, why: str, stretches: list[Stretch]
) -> None:
    nbytes = peak_of(name, way) * 6 // 10
    stretches.clear()
    model = build(name)
    with managed(model, nbytes) as session:
        assert torch.equal(generate(model, way), plain(way, name=name))
        assert session.stats().moved["H>D"]
    assert stretches
    assert all(why in stretch.reason and bool(why) == bool(stretch.reason) for stretch in stretches)


def test_a_step_is_neither_traced_nor_planned_anew_and_fetches_a_block_that_moves_once(
    stretches: list[Stretch], traced: list[int]
) -> None:
    nbytes = peak_of("Llama", "greedy") * 3 // 4
    stretches.clear()
    traced.clear()
    model = build(max_length=64)
    with managed(model, nbytes) as session:
        store = keep_log(store_of(session))
        marks: list[int] = []
        model.register_forward_pre_hook(lambda *_: marks.append(len(store.log)))
        generate(model, new=24)
        assert session.stats().binding.startswith("7 blocks")
    assert traced == [0, 63]
    plans = [stretch.plan for stretch in stretches[-9:]]
    assert plans[1:] == plans[:1] * 8
    assert {id(plan) for plan in plans} == {id(plans[0])}
    fetched = [
        sorted(
            action.of
            for action in store.log[start:end]
            if isinstance(action, Issue) and action.work.tier is store.state.compute
        )
        for start, end in zip(marks[-9:], marks[-8:], strict=False)
    ]
    assert fetched[0]
    assert all(units == fetched[0] == sorted(set(units)) for units in fetched)


@pytest.mark.parametrize(
    ("configured", "new", "lengths"),
    [
        ({"max_length": 20}, 12, [0, 19]),
        ({"max_length": 10}, 13, [0, 9, 16, 32]),
        ({"max_new_tokens": 12}, 12, [0, PROMPT + 11]),
        ({"max_new_tokens": 4}, 12, [0, PROMPT + 3, 10 + 3, 14 + 3]),
        ({}, 13, [0, 8, 16, 32]),
    ],
    ids=str,
)
def test_the_bound_is_what_the_model_is_configured_for_and_then_a_power_of_two(
    configured: dict[str, int], new: int, lengths: list[int], traced: list[int]
) -> None:
    model = build(**configured)
    with managed(model, "160KiB"):
        assert torch.equal(generate(model, new=new), plain(new=new))
        assert traced == lengths
        assert torch.equal(generate(model, new=3), plain(new=3))
        assert traced == lengths, "a shorter generation has the plans of a longer one"


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "windows"])
def test_what_is_foreseen_at_the_bound_is_what_a_forward_takes_there(name: str) -> None:
    model = build(name, max_length=20)
    with managed(model, "160KiB") as session:
        generate(model, new=20 - PROMPT + 1)  # the last forward finds 19 tokens in its cache
        known = next(reversed(session._parts.stretches.known.kinds.values()))
        assert known.measured is not None
        assert known.offline is not None
        assert known.measured.moments == known.offline.moments


def test_what_does_not_fit_is_refused_before_its_forward_computes(traced: list[int]) -> None:
    model, calls = build(max_length=64), list[int]()
    blocks = model.model.layers
    with managed(model, "64KiB") as session:
        blocks[0].register_forward_pre_hook(lambda *_: calls.append(0))
        blocks[-1].register_forward_hook(lambda *_: calls.append(1))
        cache = DynamicCache(config=model.config)
        with pytest.raises(BudgetError) as refused:
            model.generate(tokens(), max_new_tokens=50, do_sample=False, past_key_values=cache)
        held = cache.get_seq_length()
        assert calls == [0, 1] * (held - PROMPT + 1)
        assert f"it adds 1 tokens of 2 sequences to a cache of {held}, which takes " in str(refused.value)
        assert "max_new_tokens" in str(refused.value)
        assert refused.value.needed_bytes > refused.value.available_bytes == 64 * 1024 >= session.stats().peak["device"]
        assert held + 1 > PROMPT + NEW
        *tried, _ = [length for length, _ in groupby(traced)]  # in blocks, and by use
        assert len(tried) == len(set(tried)) <= 12, "less and less is tried, and nothing twice"
        traced.clear()
        del cache
        assert torch.equal(generate(model), plain()), "the session stays usable"
        assert not traced
        with pytest.raises(BudgetError, match="it adds 6 tokens of 40 sequences to a cache of 0"):
            generate(model, rows=40)
        with pytest.raises(BudgetError, match="it adds 6 tokens of 2 sequences to a cache of 200"):
            model.generate(tokens(), max_new_tokens=4, past_key_values=StaticCache(model.config, max_cache_len=200))
        assert torch.equal(generate(model), plain())


def test_a_forward_that_a_user_makes_with_a_cache_is_planned_too(stretches: list[Stretch]) -> None:
    """In a loop of one's own, without a mask."""

    def loop(model: nn.Module) -> list[Tensor]:
        cache, ids, outputs = DynamicCache(), tokens(), list[Tensor]()
        with torch.inference_mode():
            for _ in range(6):
                logits = model(ids, past_key_values=cache, use_cache=True).logits
                outputs.append(logits)
                ids = logits[:, -1:].argmax(-1)
        return outputs

    model = build()
    with managed(model, "128KiB"):
        assert all(map(torch.equal, loop(model), loop(build())))
    assert not [stretch.reason for stretch in stretches if stretch.reason]
