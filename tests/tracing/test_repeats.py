"""Blocks of one kind are traced once: the trace of a model is that of all of its blocks, one by one, or these are traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from patrickstar.core.chunk_size import search_chunk_numel
from patrickstar.core.formats import FP32, SessionFormats
from patrickstar.core.layout import TensorSpec, build_layout
from patrickstar.core.planes import GradientUse
from patrickstar.core.trace import Trace
from patrickstar.parameters.blocks import places_in
from patrickstar.parameters.bound import names_by_id
from patrickstar.plan.touches import Touches, UseCounts
from patrickstar.tracing import repeats
from patrickstar.tracing.offline import OfflineTracer
from patrickstar.tracing.twin import Unlike

WIDTH = 16
Forward = Callable[["Block", Tensor], Any]


def mlp(block: Block, x: Tensor) -> Tensor:
    return x + block.drop(block.second(F.gelu(block.first(block.norm(x)))))


class Block(nn.Module):
    """Layers around a forward of its own."""

    def __init__(self, number: int, forward: Forward = mlp, *, inner: int = 24, p: float = 0.1) -> None:
        super().__init__()
        self.number, self.run, self.inner = number, forward, inner
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(p)
        self.first, self.second = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, *_: Any) -> Any:
        return self.run(self, x)


def in_a_row(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


class Model(nn.Module):
    """Blocks between two layers. `calls`: how they are called; `changed`: what is done to some of them."""

    def __init__(
        self,
        calls: Callable[[Model, Tensor], Tensor] = in_a_row,
        forward: Forward = mlp,
        changed: Callable[[nn.ModuleList], Any] = lambda blocks: None,
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block(number, forward) for number in range(4))
        self.calls = calls
        changed(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.calls(self, self.first(x))).square().mean()


@dataclass(frozen=True)
class Case:
    """A model, how many of its blocks are told (None: the trial run shows that they cannot be), what it is given, and what is on meanwhile."""

    build: Callable[[], nn.Module]
    told: int | None = 4
    inputs: Callable[[], Mapping[str, Any]] = lambda: {"x": torch.zeros(3, 5, WIDTH)}
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    traced: Mapping[str, Any] = field(default_factory=dict)
    binds_inner: bool = False


@pytest.fixture
def count_told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of blocks that have been told."""
    told: list[str] = []
    output = repeats._Telling.output
    monkeypatch.setattr(
        repeats._Telling, "output", lambda self, given: told.append(self.member.path) or output(self, given)
    )
    return told


def traced(case: Case, use: GradientUse, *, in_blocks: bool, repeated: bool | None) -> Trace:
    """The trace of a case. `repeated`: whether blocks are told; None: as forecasts are made."""
    torch.manual_seed(0)
    model = case.build()
    named = dict(model.named_parameters())
    specs = [TensorSpec(name, tuple(p.shape), p.requires_grad) for name, p in named.items()]
    layout = build_layout(specs, chunk_numel=search_chunk_numel(specs))
    more = {
        name: dict.fromkeys(named, what) if isinstance(what, torch.dtype) else named
        for name, what in case.traced.items()
    }
    tracer = OfflineTracer(
        layout=layout,
        make_touches=lambda: Touches(
            layout, gradients=use, updates=named.__contains__, formats=SessionFormats(FP32), counts=UseCounts()
        ),
        gradients=use,
        **more,
    )
    places = places_in(model, names_by_id(named)) if in_blocks else ()
    blocks = [one.path for place in places for one in (place.inner if case.binds_inner else (place,))]
    with case.context():
        if repeated is None:
            return tracer.foresee(model, named, (), case.inputs(), blocks=blocks).trace
        return tracer._run(model, named, (), case.inputs(), blocks=blocks, quantile=0.5, repeats=repeated).trace


def expect_same(case: Case, told: list[str], use: GradientUse, *, in_blocks: bool) -> None:
    """The trace with blocks told is that of all blocks."""
    if case.told is None:
        with pytest.raises(Unlike):
            traced(case, use, in_blocks=in_blocks, repeated=True)
        return
    got = traced(case, use, in_blocks=in_blocks, repeated=True)
    assert len(told) == case.told
    want = traced(case, use, in_blocks=in_blocks, repeated=False)
    assert len(told) == case.told, "nothing is told where blocks are traced"
    assert str(got) == str(want)
    assert got == want


def two_kinds(change: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    """A model of which two blocks are of another kind."""
    return lambda: Model(changed=lambda blocks: [change(block) for block in blocks[2:]])


def one_alone(change: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    """A model of which one block is of another kind."""
    return lambda: Model(changed=lambda blocks: change(blocks[2]))


def wider(block: Block) -> None:
    """Gives a block other shapes, of which no attribute tells."""
    block.first.weight, block.first.bias = nn.Parameter(torch.ones(40, WIDTH)), nn.Parameter(torch.ones(40))
    block.second.weight = nn.Parameter(torch.ones(WIDTH, 40))


def looks_at_its_number(block: Block, x: Tensor) -> Tensor:
    return mlp(block, x) if block.number % 2 else mlp(block, x) + mlp(block, x)


def keeps(block: Block, x: Tensor) -> Tensor:
    block.kept.append(mlp(block, x))
    return block.kept[-1] * 2


def gives_a_view(block: Block, x: Tensor) -> Tensor:
    return mlp(block, x).transpose(0, 1).transpose(0, 1)


def writes_its_input(block: Block, x: Tensor) -> Tensor:
    return mlp(block, x.mul_(2))


def asks(block: Block, x: Tensor) -> Tensor:
    return mlp(block, x) if torch.rand(()) < 0.7 else x


def saves_what_it_gives(block: Block, x: Tensor) -> Tensor:
    return (block.second(block.first(x)) + x).sigmoid()


def gives_several(block: Block, x: Tensor) -> Any:
    y = mlp(block, x)
    return {"y": y, "more": (y.sum(-1), x, 3)}


def of_several(model: Model, x: Tensor) -> Tensor:
    total = x.new_zeros(())
    for block in model.blocks:
        out = block(x)
        x, total = out["y"], total + out["more"][0].mean()
    return x + total


def twice(model: Model, x: Tensor) -> Tensor:
    return model.blocks[0](in_a_row(model, x))


def skips(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks[1:]:
        x = block(x)
    return x


def shortens(model: Model, x: Tensor) -> Tensor:
    for number, block in enumerate(model.blocks):
        x = block(x[:, :2].contiguous() if number == 2 else x)
    return x


def with_a_table(model: Model, x: Tensor) -> Tensor:
    table = torch.ones(5, WIDTH)
    for block in model.blocks:
        x = block(x, table) * table
    return x


def recomputes(*, use_reentrant: bool) -> Callable[[Model, Tensor], Tensor]:
    def calls(model: Model, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    return calls


class WithTable(Block):
    """A block that saves a table which all share."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x + self.second(self.first(x * table).relu())


def with_tables(blocks: nn.ModuleList) -> None:
    for number in range(4):
        blocks[number] = WithTable(number)


def all_outputs(model: Model, x: Tensor) -> Tensor:
    outs = [x := block(x) for block in model.blocks]
    return torch.stack(outs).sum(0)


def nested() -> nn.Module:
    """Lists in lists: the outer blocks differ."""
    inner = [nn.Sequential(*(Block(number, inner=size) for number in range(2))) for size in (24, 32)]
    return Model(lambda model, x: model.blocks[1](model.blocks[0](x)), changed=lambda blocks: blocks.__init__(inner))  # type: ignore[misc]


def eval_only() -> nn.Module:
    return Model().eval()


CASES: dict[str, Case] = {
    "alike": Case(Model),
    "another width": Case(one_alone(wider), told=3),
    "two frozen": Case(two_kinds(lambda block: block.requires_grad_(requires_grad=False))),
    "one frozen": Case(one_alone(lambda block: block.requires_grad_(requires_grad=False)), told=3),
    "a frozen layer": Case(one_alone(lambda block: block.first.requires_grad_(requires_grad=False)), told=3),
    "one not training": Case(one_alone(nn.Module.eval), told=3),
    "another attribute": Case(one_alone(lambda block: setattr(block.drop, "p", 0.0)), told=3),
    "another class": Case(one_alone(lambda block: setattr(block, "drop", nn.Identity())), told=3),
    "another object": Case(one_alone(lambda block: setattr(block, "run", lambda own, x: mlp(own, x) * 2)), told=3),
    "its own number": Case(lambda: Model(forward=looks_at_its_number), told=0),
    "keeps": Case(lambda: Model(forward=keeps), told=0),
    "keeps, no gradients": Case(lambda: Model(forward=keeps), told=0, context=torch.no_grad),
    "a view": Case(lambda: Model(forward=gives_a_view), told=0),
    "writes": Case(lambda: Model(forward=writes_its_input), told=0),
    "asks": Case(lambda: Model(forward=asks), told=0),
    "saves its output": Case(lambda: Model(forward=saves_what_it_gives)),
    "several outputs": Case(lambda: Model(of_several, gives_several)),
    "skipped": Case(lambda: Model(skips), told=3),
    "another shape": Case(lambda: Model(shortens)),
    "a shared table": Case(lambda: Model(with_a_table, changed=with_tables)),
    "called twice": Case(lambda: Model(twice), told=None),
    "a shared module": Case(lambda: Model(changed=lambda blocks: blocks.__setitem__(3, blocks[1])), told=None),
    "used elsewhere": Case(lambda: Model(lambda m, x: in_a_row(m, x) * m.blocks[1].norm.weight), told=None),
    "all outputs": Case(lambda: Model(all_outputs), told=None),
    "around it": Case(lambda: Model(lambda m, x: x + m.blocks[1](x) + m.blocks[0](x)), told=None),
    "recomputed": Case(lambda: Model(recomputes(use_reentrant=False)), told=0),
    "recomputed, re-entrant": Case(lambda: Model(recomputes(use_reentrant=True)), told=0),
    "nested": Case(nested, binds_inner=True),
    "evaluation": Case(eval_only),
    "no gradients": Case(eval_only, context=torch.no_grad),
    "inference": Case(eval_only, context=torch.inference_mode),
    "autocast": Case(Model, told=0, context=lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "in 16 bits": Case(Model, traced={"dtypes": torch.bfloat16}),
    "copies": Case(Model, traced={"copied": None}),
}


@pytest.mark.parametrize("in_blocks", [False, True], ids=["use", "blocks"])
@pytest.mark.parametrize("use", [GradientUse.CHUNK, GradientUse.UPDATE], ids=["kept", "used"])
@pytest.mark.parametrize("name", CASES)
def test_a_model_has_the_trace_of_all_of_its_blocks(
    name: str, use: GradientUse, in_blocks: bool, count_told: list[str]
) -> None:
    expect_same(CASES[name], count_told, use, in_blocks=in_blocks)


LANGUAGE = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "use_cache": False}


def model_of(kind: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**settings))
        return model.train()

    return build


def tokens() -> dict[str, Tensor]:
    ids = torch.zeros(2, 8, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.zeros(2, 3, 16, 16), "labels": torch.zeros(2, dtype=torch.long)}


GPT2 = {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 96, "n_positions": 16, "use_cache": False}
MIXTRAL = LANGUAGE | {"intermediate_size": 48, "num_key_value_heads": 1, "num_local_experts": 2}
VIT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 16}
T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 2, "use_cache": False}
LIBRARY: dict[str, Case] = {
    "gpt2": Case(model_of("GPT2LMHeadModel", "GPT2Config", **GPT2), 3, tokens),
    "llama": Case(model_of("LlamaForCausalLM", "LlamaConfig", **LANGUAGE, intermediate_size=48), 3, tokens),
    "mixtral": Case(model_of("MixtralForCausalLM", "MixtralConfig", **MIXTRAL), 3, tokens),
    "vit": Case(model_of("ViTForImageClassification", "ViTConfig", **VIT, patch_size=8), 3, images),
    "t5, whose blocks share a bias": Case(
        model_of("T5ForConditionalGeneration", "T5Config", **T5, decoder_start_token_id=0, pad_token_id=0), None, tokens
    ),
}


@pytest.mark.parametrize("in_blocks", [False, True], ids=["use", "blocks"])
@pytest.mark.parametrize("name", LIBRARY)
def test_so_has_a_model_of_a_library(name: str, in_blocks: bool, count_told: list[str]) -> None:
    expect_same(LIBRARY[name], count_told, GradientUse.CHUNK, in_blocks=in_blocks)


def test_so_have_encoder_layers_of_torchs_that_are_bound_by_use(count_told: list[str]) -> None:
    layers = [nn.TransformerEncoderLayer(WIDTH, 2, 24, batch_first=True) for _ in range(3)]
    case = Case(lambda: Model(changed=lambda blocks: blocks.__init__(layers)), told=3)  # type: ignore[misc]
    expect_same(case, count_told, GradientUse.CHUNK, in_blocks=False)


def test_where_blocks_cannot_be_told_after_all_each_is_traced() -> None:
    case = CASES["called twice"]
    got = traced(case, GradientUse.CHUNK, in_blocks=False, repeated=None)
    assert got == traced(case, GradientUse.CHUNK, in_blocks=False, repeated=False)


BLOCKS = st.lists(
    st.tuples(
        st.sampled_from([16, 24]),
        st.sampled_from([0.0, 0.1]),
        st.booleans(),
        st.booleans(),
        st.sampled_from([mlp, saves_what_it_gives]),
    ),
    min_size=2,
    max_size=6,
)


@settings(max_examples=25, deadline=None)
@given(
    kinds=BLOCKS,
    use=st.sampled_from([GradientUse.CHUNK, GradientUse.UPDATE]),
    in_blocks=st.booleans(),
    frozen=st.booleans(),
)
def test_whatever_blocks_follow_each_other_the_trace_is_that_of_all(
    kinds: list[tuple[int, float, bool, bool, Forward]], use: GradientUse, in_blocks: bool, frozen: bool
) -> None:
    def build() -> nn.Module:
        blocks = []
        for number, (inner, p, trains, has_bias, forward) in enumerate(kinds):
            block = Block(number, forward, inner=inner, p=p).train(trains)
            block.first.bias.requires_grad_(has_bias)
            blocks.append(block)
        model = Model(changed=lambda old: old.__init__(blocks))  # type: ignore[misc]
        model.first.requires_grad_(not frozen)
        return model

    case = Case(build)
    got, want = (traced(case, use, in_blocks=in_blocks, repeated=repeated) for repeated in (True, False))
    assert str(got) == str(want)
