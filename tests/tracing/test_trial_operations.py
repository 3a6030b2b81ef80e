"""What operations of one form give is found out once: each time it is what torch would give."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from patrickstar.core.chunk_size import search_chunk_numel
from patrickstar.core.formats import FP32, SessionFormats
from patrickstar.core.layout import TensorSpec, build_layout
from patrickstar.core.planes import GradientUse
from patrickstar.core.trace import Trace
from patrickstar.parameters.blocks import places_in
from patrickstar.parameters.bound import names_by_id
from patrickstar.plan.touches import Touches
from patrickstar.tracing import trial_operations
from patrickstar.tracing.offline import OfflineTracer
from patrickstar.tracing.trial_operations import TrialOperations, result_of
from tests.composed import Composed
from tests.sampling import only

WIDTH = 16


class Forgetful(TrialOperations):
    """Leaves each operation to torch."""

    def _first(self, func: Any, args: Any, kwargs: Any, *_: Any) -> Any:
        return result_of(func, args, kwargs)


OPERATIONS = [
    pytest.param(info, id=info.formatted_name, marks=pytest.mark.campaign if number % 20 else ())
    for number, info in enumerate(info for info in op_db if info.supports_dtype(torch.float32, "cpu"))
]
"""Every twentieth in `make test`."""


@pytest.mark.parametrize("info", OPERATIONS)
def test_an_operation_gives_once_more_what_it_has_given(info: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in islice(info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd), 3):
            remembering = TrialOperations(0.5)
            want, *got = (seen(info, sample, by) for by in (Forgetful(0.5), remembering, remembering))
            assert got == [want, want]


def seen(info: Any, sample: Any, by: TrialOperations) -> list[Any]:
    """All that is done by an operation of torch and its backward: forms of results, and which of them share memory."""
    found: list[Any] = []
    alive: list[Any] = []  # so that no other memory is in the same place

    def form(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return type(value)
        storage = value.untyped_storage()
        known = [other._cdata for other in alive]
        number = known.index(storage._cdata) if storage._cdata in known else alive.append(storage) or len(known)
        traits = value.requires_grad, type(value.grad_fn), value.is_conj(), value.is_neg()
        place = tuple(value.shape), value.stride(), value.storage_offset(), storage.nbytes(), number
        return type(value), *place, value.dtype, value.device, *traits

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return by.fakes.from_tensor(value.detach()).requires_grad_(value.requires_grad)

    by.seer = lambda func, result: found.append((func, *map(form, tree_leaves(result))))
    with by:
        given, args, kwargs = tree_map(fake, (sample.input, sample.args, sample.kwargs))
        try:
            results = [leaf for leaf in tree_leaves(info.op(given, *args, **kwargs)) if isinstance(leaf, Tensor)]
            roots = [result for result in results if result.grad_fn is not None]
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
            leaves = [leaf for leaf in tree_leaves((given, args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_leaf]
            found += [(form(one), one._version) for one in results]
            found += [form(leaf.grad) for leaf in leaves]
        except Exception as error:
            found.append(type(error))
    return found


def test_operands_that_are_equal_and_of_other_types_are_others() -> None:
    with TrialOperations(0.5):
        x = torch.zeros(3, dtype=torch.long)
        assert [(x + number).dtype for number in (1, 1.0, True)] == [torch.long, torch.float32, torch.long]


def test_what_changes_the_form_or_the_memory_of_an_operand_is_done_each_time() -> None:
    with TrialOperations(0.5):
        for _ in range(2):
            x, y = torch.zeros(2, 3), torch.zeros(2, 3)
            x.t_()
            assert x.shape == (3, 2)
            x.t_().set_(y)
            assert x.untyped_storage()._cdata == y.untyped_storage()._cdata


def test_a_conjugate_is_one_each_time() -> None:
    with TrialOperations(0.5):
        z = torch.zeros(2, dtype=torch.complex64)
        assert [z.conj().is_conj(), z.conj().conj().is_conj(), z.conj().is_conj()] == [True, False, True]


def test_a_number_in_the_memory_of_several_has_that_each_time() -> None:
    with TrialOperations(0.5):
        losses = [F.mse_loss(torch.zeros(2, 3), torch.zeros(2, 3)) for _ in range(2)]
        assert [loss.untyped_storage().nbytes() for loss in losses] == [24, 24]


def block_of(run: Callable[[Any, Tensor], Any]) -> Composed:
    layers = {"first": nn.Linear(WIDTH, 24), "second": nn.Linear(24, WIDTH)}
    return Composed(run, norm=nn.LayerNorm(WIDTH), drop=nn.Dropout(0.1), **layers)


def mlp(block: Any, x: Tensor) -> Tensor:
    return x + block.drop(block.second(F.gelu(block.first(block.norm(x)))))


class Model(nn.Module):
    """Blocks between two layers. `call`: how each is called."""

    def __init__(
        self,
        forward: Callable[[Any, Tensor], Any] = mlp,
        call: Callable[[Any, Tensor], Tensor] = lambda block, x: block(x),
        count: int = 3,
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(block_of(forward) for _ in range(count))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.last(x).square().mean()


@dataclass(frozen=True)
class Case:
    """A model, what it is given, and what is on meanwhile."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Mapping[str, Any]] = lambda: {"x": torch.zeros(3, 5, WIDTH)}
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    traced: Mapping[str, Any] = field(default_factory=dict)


def traced(case: Case, *, in_blocks: bool) -> Trace:
    """The trace of a case."""
    torch.manual_seed(0)
    model = case.build()
    named = dict(model.named_parameters())
    specs = [TensorSpec(name, tuple(p.shape), p.requires_grad) for name, p in named.items()]
    layout = build_layout(specs, chunk_numel=search_chunk_numel(specs))
    touches = {"updates": named.__contains__, "formats": SessionFormats(FP32)}
    more = {
        name: dict.fromkeys(named, what) if isinstance(what, torch.dtype) else named
        for name, what in case.traced.items()
    }
    tracer = OfflineTracer(
        layout=layout,
        make_touches=lambda: Touches(layout, gradients=GradientUse.CHUNK, **touches),
        **more,
    )
    places = places_in(model, names_by_id(named)) if in_blocks else ()
    with case.context():
        return tracer.foresee(model, named, (), case.inputs(), blocks=[place.path for place in places]).trace


LANGUAGE = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "use_cache": False}
GPT2 = {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 96, "n_positions": 16, "use_cache": False}
MIXTRAL = LANGUAGE | {"intermediate_size": 48, "num_key_value_heads": 1, "num_local_experts": 2}
VIT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 16}
T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 2, "use_cache": False}


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


def recomputes(*, use_reentrant: bool) -> Callable[[Any, Tensor], Tensor]:
    return lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant)


def encoder() -> nn.Module:
    layers = [nn.TransformerEncoderLayer(WIDTH, 2, 24, batch_first=True) for _ in range(3)]
    model = Model()
    model.blocks = nn.ModuleList(layers)
    return model


CASES: dict[str, Case] = {
    "a stack": Case(Model),
    "saves its output": Case(lambda: Model(lambda block, x: (block.second(block.first(x)) + x).sigmoid())),
    "writes": Case(lambda: Model(lambda block, x: mlp(block, x.mul_(2)))),
    "views": Case(lambda: Model(lambda block, x: torch.cat(mlp(block, x).transpose(0, 1).chunk(2, -1), -1))),
    "asks": Case(lambda: Model(lambda block, x: mlp(block, x) if torch.rand(()) < 0.7 else x)),
    "recomputed": Case(lambda: Model(call=recomputes(use_reentrant=False))),
    "recomputed, re-entrant": Case(lambda: Model(call=recomputes(use_reentrant=True))),
    "no gradients": Case(lambda: Model().eval(), context=torch.no_grad),
    "inference": Case(lambda: Model().eval(), context=torch.inference_mode),
    "autocast": Case(Model, context=lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "in 16 bits": Case(Model, traced={"dtypes": torch.bfloat16}),
    "copies": Case(Model, traced={"copied": None}),
    "encoder layers": Case(encoder),
    "lstm": Case(lambda: nn.LSTM(WIDTH, WIDTH, 3), lambda: {"input": torch.zeros(3, 5, WIDTH)}),
    "gpt2": Case(model_of("GPT2LMHeadModel", "GPT2Config", **GPT2), tokens),
    "llama": Case(model_of("LlamaForCausalLM", "LlamaConfig", **LANGUAGE, intermediate_size=48), tokens),
    "mixtral": Case(model_of("MixtralForCausalLM", "MixtralConfig", **MIXTRAL), tokens),
    "vit": Case(model_of("ViTForImageClassification", "ViTConfig", **VIT, patch_size=8), images),
    "t5": Case(
        model_of("T5ForConditionalGeneration", "T5Config", **T5, decoder_start_token_id=0, pad_token_id=0), tokens
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("in_blocks", [False, True], ids=["use", "blocks"])
@pytest.mark.parametrize("name", only([name for name in CASES if name not in ("llama", "mixtral", "vit")], CASES))
def test_the_trace_is_that_of_operations_that_are_all_left_to_torch(
    name: str, in_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = traced(CASES[name], in_blocks=in_blocks)
    monkeypatch.setattr(TrialOperations, "_first", Forgetful._first)
    want = traced(CASES[name], in_blocks=in_blocks)
    assert str(got) == str(want)
    assert got == want


@pytest.mark.parametrize("in_blocks", [False, True], ids=["use", "blocks"])
@pytest.mark.parametrize("call", [lambda block, x: block(x), recomputes(use_reentrant=False)], ids=["", "recomputed"])
def test_what_further_blocks_do_is_known(
    call: Callable[[Any, Tensor], Tensor], in_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Any] = []
    monkeypatch.setattr(
        trial_operations, "result_of", lambda func, *given: left.append(func) or result_of(func, *given)
    )
    counts = []
    for count in (3, 9):
        left.clear()
        assert traced(Case(lambda count=count: Model(call=call, count=count)), in_blocks=in_blocks).moments
        counts.append(len(left))
    parameters = 6 * len([*block_of(mlp).parameters()])
    assert counts[0] <= counts[1] <= counts[0] + parameters, "each of these lies elsewhere in its chunk"
