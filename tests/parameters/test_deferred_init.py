"""What is built under `deferred_init()` has no memory, and later the bits of ordinary construction."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import init
from torch.nn.utils import parametrizations

import patrickstar
from patrickstar import LayoutError, StateError
from patrickstar.deferred.deferred_init import deferred_by
from patrickstar.deferred.recording import DeferredRecorder
from tests.parameters.toy import initial_value
from tests.parity.compare import same_bits

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
TOKENS = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def hf(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    kind, of_config = getattr(transformers, model), getattr(transformers, config)
    return lambda: kind(of_config(**settings))


def convolutions() -> nn.Module:
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 3), nn.GroupNorm(2, 4), nn.Conv1d(4, 4, 3)
    return nn.Sequential(*layers)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": hf("GPT2LMHeadModel", "GPT2Config", **TOKENS, n_layer=2, n_embd=64, n_head=4, n_positions=32),
    "llama": hf("LlamaForCausalLM", "LlamaConfig", **SMALL, **TOKENS),
    "bert": hf("BertForMaskedLM", "BertConfig", **SMALL, **TOKENS),
    "t5": hf(
        "T5ForConditionalGeneration", "T5Config", **TOKENS, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4
    ),
    "vit": hf("ViTForImageClassification", "ViTConfig", **SMALL, image_size=32, patch_size=8),
    "mixtral": hf("MixtralForCausalLM", "MixtralConfig", **SMALL, **TOKENS, num_key_value_heads=2, num_local_experts=4),
    "lstm": lambda: nn.LSTM(16, 32, 2, bidirectional=True),
    "convolutions": convolutions,
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3),
}


class Holder(nn.Module):
    """Parameters `a` and `b`, and what a test does to them."""

    def __init__(self, initialise: Callable[[Any], object]) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(8, 8))
        self.b = nn.Parameter(torch.empty(8, 8))
        init.normal_(self.b)
        initialise(self)


def deferred(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with patrickstar.deferred_init():
        return build()


def expect_as_ordinary(build: Callable[[], nn.Module], seed: int = 0) -> None:
    """Values, strides, types, gradients wanted, buffers, and random states before and after making the values."""
    torch.manual_seed(seed)
    plain, state = build(), torch.get_rng_state()
    model = deferred(build, seed)
    assert torch.equal(state, torch.get_rng_state())
    want, got = dict(plain.named_parameters()), dict(model.named_parameters())
    assert list(want) == list(got)
    for name, parameter in got.items():
        assert deferred_by(parameter) is not None, f"{name} is in memory"
        value = initial_value(parameter)
        assert same_bits(want[name], value), name
        assert (want[name].stride(), want[name].requires_grad) == (value.stride(), parameter.requires_grad), name
    for (name, buffer), (_, other) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        assert type(other) is Tensor
        assert same_bits(buffer, other), name
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [0, 17, 4242])
@pytest.mark.parametrize("name", MODELS)
def test_the_values_are_those_of_ordinary_construction(name: str, seed: int) -> None:
    expect_as_ordinary(MODELS[name], seed)


def replace(holder: Any, value: Callable[[Any], Tensor]) -> None:
    holder.a = nn.Parameter(value(holder))


INITIALISERS: dict[str, Callable[[Any], object]] = {
    "orthogonal": lambda m: init.orthogonal_(m.a, gain=2),
    "sparse": lambda m: init.sparse_(m.a, 0.3),
    "eye": lambda m: init.eye_(m.a),
    "rejection sampling": lambda m: init.trunc_normal_(m.a, std=2.0, a=-1, b=1),
    "twice": lambda m: (init.kaiming_normal_(m.a), init.xavier_uniform_(m.a)),
    "scaled": lambda m: (init.kaiming_normal_(m.a), m.a.data.mul_(0.5)),
    "its own values": lambda m: m.b.data.copy_(m.b.data * 2),
    "assigned data": lambda m: setattr(m.a, "data", torch.randn(8, 8)),
    "replaced by an expression of itself": lambda m: replace(m, lambda m: m.a.data + 3),
    "a generator": lambda m: init.normal_(m.a, generator=torch.Generator().manual_seed(4)),
    "parts": lambda m: (m.b.data[2:4].uniform_(), m.b.data[:, 1].zero_()),
    "transposed": lambda m: m.a.data.t().uniform_(),
    "flat": lambda m: m.a.data.view(-1).normal_(),
    "literals": lambda m: replace(m, lambda _: torch.tensor([2.65, 1.0])),
    "an expression": lambda m: replace(m, lambda _: torch.log(torch.arange(1.0, 9.0)).repeat(4, 1)),
    "strides": lambda m: replace(m, lambda _: torch.randn(4, 3).t() * 0.02),
    "pieces of one tensor": lambda m: replace(m, lambda _: torch.randn(8, 4).split(4)[1]),
    "a permutation": lambda m: m.a.data.copy_(torch.randperm(64).view(8, 8)),
    "coins": lambda m: m.a.data.bernoulli_(0.3),
    "dropout": lambda m: m.a.data.copy_(nn.functional.dropout(torch.ones(8, 8), 0.4)),
    "a decision by its values": lambda m: init.zeros_(m.b) if m.b.sum() > 0 else init.ones_(m.b),
    "a buffer of its values": lambda m: m.register_buffer("total", m.b.detach().sum()),
    "another type": lambda m: m.to(torch.bfloat16),
    "channels last": lambda m: (m.add_module("c", nn.Conv2d(3, 4, 3)), m.to(memory_format=torch.channels_last)),
    "frozen": lambda m: m.a.requires_grad_(False),
    "a copy": lambda m: (setattr(m, "c", copy.deepcopy(m.b)), init.zeros_(m.b)),
    "a list": lambda m: setattr(m, "c", nn.ParameterList([torch.randn(3) for _ in range(3)])),
    "orthogonal parametrization": lambda m: parametrizations.orthogonal(m, "b"),
    "made of another": lambda m: setattr(m, "c", nn.Parameter(m.b.data * 2)),
    "weight norm": lambda m: parametrizations.weight_norm(m, "b"),
    "spectral norm": lambda m: parametrizations.spectral_norm(m, "b"),
    "an empty one": lambda m: replace(m, lambda _: torch.zeros(0, 3)),
}


@pytest.mark.parametrize("what", INITIALISERS)
def test_an_initialiser_gives_what_it_gives_in_memory(what: str) -> None:
    for seed in (1, 2):
        expect_as_ordinary(lambda: Holder(INITIALISERS[what]), seed)


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "NumPy": (lambda m: m.a.data.copy_(torch.from_numpy(np.ones((8, 8)))), r"Holder\.a .*copy_\(\).*NumPy"),
    "an array": (lambda m: m.a.data.copy_(torch.tensor(np.ones((8, 8)))), r"Holder\.a .*_to_copy\(\).*NumPy"),
    "a parameter of an array": (
        lambda m: replace(m, lambda _: torch.from_numpy(np.ones(3, np.float32))),
        r"Holder\.a .*NumPy",
    ),
    "its memory": (lambda m: m.a.detach().numpy(), r"Holder\.a .*numpy\(\) hands out"),
    "a list of it": (lambda m: m.a.tolist(), r"Holder\.a .*tolist\(\)"),
    "another's values": (lambda m: m.a.data.copy_(m.b.data * 2), r"Holder\.a .*copy_\(\) reads .*Holder\.b"),
    "several at once": (lambda m: torch._foreach_zero_([m.a.data, m.b.data]), r"_foreach_zero_\(\) changes several"),
    "many literals": (
        lambda m: (replace(m, lambda _: torch.empty(20_000)), m.a.data.copy_(torch.tensor([1.0] * 20_000))),
        r"Holder\.a .*78\.12 KiB",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_recorded_is_refused_by_module_and_operation(what: str) -> None:
    initialise, message = REFUSED[what]
    Holder(initialise)  # fine in memory
    with pytest.raises(LayoutError, match=message):
        deferred(lambda: Holder(initialise))
    assert type(nn.Linear(2, 2).weight) is nn.Parameter, "the context has not ended"


def test_each_value_can_be_made_alone_in_any_order_and_again() -> None:
    model = deferred(MODELS["vit"], 3)
    torch.manual_seed(3)
    want = dict(MODELS["vit"]().named_parameters())
    for name, parameter in [*reversed(list(model.named_parameters())), *model.named_parameters()]:
        assert same_bits(want[name], initial_value(parameter)), name


def test_tied_parameters_stay_one() -> None:
    model: Any = deferred(MODELS["gpt2"])
    assert model.lm_head.weight is model.transformer.wte.weight
    assert len(list(model.parameters())) == len(list(MODELS["gpt2"]().parameters()))


def test_the_generator_would_be_left_elsewhere_if_nothing_were_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    write = DeferredRecorder._write

    def without_drawing(self: Any, signature: Any, *args: Any, **keywords: Any) -> None:
        signature.draws = False
        write(self, signature, *args, **keywords)

    monkeypatch.setattr(DeferredRecorder, "_write", without_drawing)
    with pytest.raises(AssertionError):
        expect_as_ordinary(lambda: nn.Linear(4, 4))


USES: dict[str, Callable[[nn.Linear], object]] = {
    "forward": lambda m: m(torch.ones(1, 4)),
    "state_dict": lambda m: m.state_dict(),
    "reading": lambda m: m.weight.sum(),
    "writing": lambda m: init.zeros_(m.weight),
    "data": lambda m: m.weight.data,
    "a view": lambda m: m.weight[0],
    "numpy": lambda m: m.weight.numpy(),
    "casting": lambda m: m.double(),
    "copying": lambda m: copy.deepcopy(m),
    "loading": lambda m: m.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)}),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_before_manage_is_refused_by_name(use: str) -> None:
    model: Any = deferred(lambda: nn.Linear(4, 4))
    with pytest.raises((StateError, RuntimeError), match=r"Linear\.weight"):
        USES[use](model)


def test_an_alias_that_was_kept_cannot_be_read_either() -> None:
    model: Any = deferred(lambda: Holder(lambda m: setattr(m, "view", m.b.detach()[0])))
    with pytest.raises(StateError, match=r"Holder\.b"):
        model.view.sum()


def test_what_needs_no_values_can_be_asked_and_set() -> None:
    model: Any = deferred(lambda: nn.Linear(4, 3))
    assert isinstance(model.weight, nn.Parameter)
    assert (model.weight.shape, model.weight.numel(), model.weight.dtype) == ((3, 4), 12, torch.float32)
    assert model.weight.stride() == (4, 1)
    assert "without values" in repr(model.weight)
    model.weight.requires_grad = False
    model.bias.requires_grad_(False)
    model.zero_grad()
    assert [p.requires_grad for p in model.eval().parameters()] == [False, False]
    torch.optim.AdamW(model.parameters())


def test_a_context_inside_of_another_is_refused_and_the_outer_goes_on() -> None:
    with patrickstar.deferred_init():
        with pytest.raises(StateError, match="one is enough"), patrickstar.deferred_init():
            pass
        inner = nn.Linear(2, 2)
    assert deferred_by(inner.weight) is not None


def test_modules_of_other_threads_are_ordinary() -> None:
    built: list[nn.Linear] = []
    with patrickstar.deferred_init():
        thread = threading.Thread(target=lambda: built.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
    assert type(built[0].weight) is nn.Parameter


def test_parameters_from_before_stay_as_they_are() -> None:
    before = nn.Linear(4, 4)
    value = before.weight.detach().clone()
    with patrickstar.deferred_init():
        head = nn.Linear(4, 4)
        head.weight = before.weight
        init.zeros_(before.bias)
    assert head.weight is before.weight
    assert type(before.weight) is nn.Parameter
    assert same_bits(before.weight, value)
    assert not before.bias.any()
