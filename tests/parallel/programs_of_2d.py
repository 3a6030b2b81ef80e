"""What ranks of a q x q mesh compute beside one process that has everything. Each of their processes imports it, and nothing of pytest."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import patrickstar
from patrickstar.errors import RankError
from patrickstar.parallel import Tensor2D, summa_ab, summa_abt, summa_atb, traffic
from patrickstar.parallel.grid import Cut, Grid
from patrickstar.parallel.layers_2d import NormBlock
from patrickstar.tracing.live_bytes import LiveBytes

VOCABULARY = 67  # odd, as GPT-2's
PRODUCTS: dict[str, tuple[Any, Any, str, str]] = {
    "ab": (summa_ab, lambda a, b: a @ b, "mk", "kn"),
    "abt": (summa_abt, lambda a, b: a @ b.t(), "mn", "kn"),
    "atb": (summa_atb, lambda a, b: a.t() @ b, "mk", "mn"),
}


@cache
def mesh_of(q: int) -> DeviceMesh:
    """The mesh, made once: a process that is kept would make groups again and again."""
    return init_device_mesh("cpu", (q, q), mesh_dim_names=("row", "col"))


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest element."""
    assert got.shape == wanted.shape
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


def product(rank: int, q: int, name: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Errors of a product, its gradients and their gradients; bytes sent, and the most that was alive beside what it was given."""
    torch.manual_seed(1)
    of_blocks, dense, first, second = PRODUCTS[name]
    grid = Grid.of(mesh_of(q))
    a, b = (
        torch.randn([sizes[each] for each in shape], dtype=torch.float64).requires_grad_() for shape in (first, second)
    )
    c = dense(a, b)
    upstream = torch.randn_like(c)
    wanted = list(torch.autograd.grad(c, (a, b), upstream, create_graph=True))
    wanted += torch.autograd.grad(wanted[0].sin().sum() + wanted[1].cos().sum(), (a, b))
    mine = [Cut(tuple(each.shape), 0, 1).block(each.detach(), grid).requires_grad_() for each in (a, b)]
    up = Cut(tuple(c.shape), 0, 1).block(upstream, grid)
    forward = lambda: of_blocks(*mine, mesh_of(q), sizes["k"])
    with traffic() as seen, alive() as living:
        block = forward()
    peak = living.peak
    with traffic() as seen_backward:
        torch.autograd.grad(forward(), mine, up)
    got = list(torch.autograd.grad(forward(), mine, up, create_graph=True))
    got += torch.autograd.grad(got[0].sin().sum() + got[1].cos().sum(), mine)
    pairs = zip([block, *got], [c, *wanted])
    errors = [error(Cut(tuple(whole.shape), 0, 1).whole(each.detach(), grid), whole) for each, whole in pairs]
    twice = {name: seen_backward.sent[name] - sent for name, sent in seen.sent.items()}
    return {
        "errors": errors,
        "sent": seen.sent,
        "backward": twice,
        "peak": peak,
        "blocks": [block.nbytes, *(t.nbytes for t in mine)],
    }


@contextmanager
def alive() -> Iterator[LiveBytes]:
    """Counts bytes of tensors that are made, and are alive at once."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.namespace == "aten":
                living(func, result)
            return result

    living = LiveBytes(lambda _: False)
    with Mode():
        yield living


def gpt2(q: int, **more: Any) -> nn.Module:
    """A small GPT-2."""
    no_dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 12 * q, "n_layer": 2, "n_head": 2 * q}
    return GPT2LMHeadModel(
        GPT2Config(**{**sizes, **no_dropout, "bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM", **more})
    )


def llama(q: int, **more: Any) -> nn.Module:
    """A small Llama, with two query heads a key head."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 12 * q, "intermediate_size": 18 * q, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(
            **{**sizes, "num_attention_heads": 2 * q, "num_key_value_heads": q, "max_position_embeddings": 16, **more}
        )
    )


def with_torchs_norms(model: nn.Module) -> nn.Module:
    """A Llama whose norms compute in fp64 where it does: its own compute in fp32."""
    for name, module in list(model.named_modules()):
        if name.endswith("norm"):
            norm = nn.RMSNorm(module.weight.shape[0], module.variance_epsilon)
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], norm)
    return model


class Own(nn.Module):
    """A model of nobody's: queries, keys and values of one `nn.Linear`, norms of torch's, a head of its own with a bias."""

    PLAN: ClassVar = {
        "words": "embedding",
        "place": "positions",
        "qkv": "linear_qkv",
        "out": "linear",
        "*norm": "norm",
        "head": "head",
    }

    def __init__(self, q: int) -> None:
        super().__init__()
        self.words, self.place = nn.Embedding(VOCABULARY, 12 * q, padding_idx=1), nn.Embedding(16, 12 * q)
        self.first_norm, self.last_norm = nn.RMSNorm(12 * q), nn.LayerNorm(12 * q, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(12 * q, 36 * q), nn.Linear(12 * q, 12 * q, bias=False)
        self.head = nn.Linear(12 * q, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        x = self.words(input_ids) + self.place(torch.arange(input_ids.shape[1]))
        parts = self.qkv(self.first_norm(x)).chunk(3, -1)
        queries, keys, values = (part.unflatten(-1, (-1, 6)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.head(self.last_norm(x + self.out(seen.transpose(1, 2).flatten(2))))


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "gpt2": gpt2,
    "llama": lambda q: llama(q, pad_token_id=1),
    "llama, tied, biases, norms in fp64": lambda q: with_torchs_norms(
        llama(q, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    ),
    "own": Own,
}


def batch_of(rows: int) -> dict[str, torch.Tensor]:
    """Ids of every block of the vocabulary, repeated ones, padding, and a first row without a valid label."""
    ids = torch.randint(0, VOCABULARY, (rows, 9))
    ids[:, 2], ids[:2, :2] = VOCABULARY - 1, 1
    mask = torch.ones_like(ids)
    mask[1, -3:], mask[-1, -1] = 0, 0
    labels = torch.where(mask == 1, ids, -100)
    labels[0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def logits_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(**{name: value for name, value in batch.items() if name != "labels"})
    return getattr(output, "logits", output)


def train(rank: int, q: int, name: str, rows: int) -> dict[str, Any]:
    """A forward and backward in blocks beside one in one process; the model is copied, and has been made twice."""
    torch.manual_seed(0)
    plain = MODELS[name](q).double()
    for parameter in plain.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.3)
    batch, mesh = batch_of(rows), mesh_of(q)
    tp, model = Tensor2D(mesh), copy.deepcopy(plain)
    assert tp.parallelize(model, getattr(model, "PLAN", None)) is model
    model, mine = copy.deepcopy(model), tp.shard(batch)
    with keeping(plain) as kept_plain:
        logits = logits_of(plain, batch)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    loss.backward()
    with traffic() as seen, keeping(model) as kept:
        if name == "own":
            blocks = logits_of(model, mine)
            shifted = F.pad(mine["labels"], (0, 1), value=-100)[..., 1:]
            got = tp.cross_entropy(blocks, shifted, VOCABULARY)
        else:
            output = model(**mine)
            blocks, got = output.logits, output.loss
    with traffic() as seen_backward:
        got.backward()
    gradients = dict(tp.gradients(model))
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    state, states = plain.state_dict(), dict(tp.state_dict(model))
    assert states.keys() == state.keys()
    assert gradients.keys() == wanted.keys()
    return {
        "loss": abs(got.item() - loss.item()) / loss.item(),
        "value": got.item(),
        "logits": error(tp.unshard(blocks), logits),
        "gradients": {name: error(gradients[name], value) for name, value in wanted.items() if value is not None},
        "state": all(torch.equal(states[name], value) for name, value in state.items()),
        "numel": [(tuple(whole.shape), block.numel()) for whole, block in zip(plain.parameters(), model.parameters())],
        "kinds": {type(parameter) for parameter in model.parameters()},
        "sent": (seen.sent, seen_backward.sent),
        "kept": (sum(kept.values()), sum(kept_plain.values())),
        "rows": mine["input_ids"].shape[0],
    }


@contextmanager
def keeping(model: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes kept for backward, by storage, without those of parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            kept[place] = tensor.untyped_storage()
        return tensor

    found: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
    found |= {place: storage.nbytes() for place, storage in kept.items()}


def steps(rank: int, q: int, name: str) -> tuple[list[float], list[float]]:
    """Losses of 20 steps in fp32, of one process and of blocks."""
    torch.manual_seed(0)
    plain = MODELS[name](q)
    tp, model, both = Tensor2D(mesh_of(q)), copy.deepcopy(plain), []
    batches = [batch_of(2 * q + 1) for _ in range(20)]
    for trained, cut in ((plain, lambda batch: batch), (tp.parallelize(model), tp.shard)):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
        both.append([])
        for batch in batches:
            loss = trained(**cut(batch)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            both[-1].append(loss.item())
    return both[0], both[1]


def losses(rank: int, q: int) -> dict[str, float]:
    """Errors of a loss and its gradient, by what is particular about it."""
    torch.manual_seed(0)
    grid, tp = Grid.of(mesh_of(q)), Tensor2D(mesh_of(q))
    logits = torch.randn(2 * q + 1, 3, VOCABULARY, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (2 * q + 1, 3))
    some = torch.where(torch.rand(labels.shape) < 0.3, 7, labels)
    none = torch.full_like(labels, -100)
    cases = {"all": (logits, labels, -100), "large": (logits * 1e4, labels, -100), "ignored": (logits, some, 7)}
    found = {}
    for name, (values, wanted, ignored) in {**cases, "none": (logits, none, -100)}.items():
        whole = values.clone().requires_grad_()
        total = F.cross_entropy(whole.flatten(0, 1), wanted.flatten(), ignore_index=ignored, reduction="sum")
        (total / max(1, (wanted != ignored).sum().item())).mul(3).backward()
        block = Cut(tuple(whole.shape), 0, 2).block(whole.detach(), grid).requires_grad_()
        loss = tp.cross_entropy(block, tp.shard(wanted), VOCABULARY, ignore_index=ignored)
        (3 * loss).backward()
        found[name] = abs(loss.item() - total.item() / max(1, (wanted != ignored).sum().item()))
        found[f"{name}, gradient"] = (tp.unshard(block.grad) - whole.grad).abs().max().item()
    model, batch = tp.parallelize(gpt2(q).double()), batch_of(2 * q)
    mean, of_five = (model(**tp.shard(batch), **more).loss for more in ({}, {"num_items_in_batch": 5}))
    found["a count that is given"] = (mean * (batch["labels"][:, 1:] != -100).sum() - 5 * of_five).abs().item()
    return found


def norms(rank: int, q: int) -> dict[str, float]:
    """Errors in fp32 of a norm of features with a large mean, over those of torch's own."""
    torch.manual_seed(0)
    grid, x = Grid.of(mesh_of(q)), 1000 + torch.randn(4, 5, 48, dtype=torch.float64)
    found = {}
    for norm in (nn.LayerNorm(48), nn.RMSNorm(48)):
        wanted = copy.deepcopy(norm).double()(x)
        block = NormBlock(grid, norm, lambda parameter, cut: nn.Parameter(cut.block(parameter.detach(), grid)))
        mine = block(Cut(tuple(x.shape), None, 2).block(x.float(), grid))
        got = Cut(tuple(x.shape), None, 2).whole(mine.detach(), grid)
        found[type(norm).__name__] = error(got.double(), wanted) / error(norm(x.float()).detach().double(), wanted)
    return found


def narrow(rank: int, q: int) -> dict[str, Any]:
    """Errors of logits in 16 bits, over those of one process; types, and the loss's error, under autocast."""
    torch.manual_seed(0)
    tp, batch, wide = Tensor2D(mesh_of(q)), batch_of(2 * q), with_torchs_norms(llama(q)).double()
    plain = copy.deepcopy(wide).bfloat16()
    wanted, in_one = logits_of(wide, batch), logits_of(plain, batch)
    in_blocks = tp.unshard(logits_of(tp.parallelize(plain), tp.shard(batch)))
    model = tp.parallelize(gpt2(q))
    exact = model(**tp.shard(batch)).loss
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**tp.shard(batch))
    output.loss.backward()
    return {
        "ratio": error(in_blocks.double(), wanted) / error(in_one.double(), wanted),
        "logits": output.logits.dtype,
        "gradients": {parameter.grad.dtype for parameter in model.parameters()},
        "loss": abs(output.loss - exact).item(),
    }


def deferred(rank: int, q: int) -> bool:
    """Tells whether a model built without memory has the values of one built with it, and leaves the same random numbers."""
    tp = Tensor2D(mesh_of(q))
    torch.manual_seed(0)
    plain, after = gpt2(q).state_dict(), torch.rand(1)
    torch.manual_seed(0)
    with patrickstar.deferred_init():
        model = gpt2(q)
    assert torch.equal(torch.rand(1), after)
    states = dict(tp.state_dict(tp.parallelize(model)))
    return states.keys() == plain.keys() and all(torch.equal(states[name], value) for name, value in plain.items())


def drop(rank: int, q: int) -> dict[str, Any]:
    """Masks of dropout by rank, in two forwards of a model and of its copy; gradients with and without checkpointing."""
    tp, found = Tensor2D(mesh_of(q)), {}
    torch.manual_seed(0)
    model = tp.parallelize(gpt2(q, attn_pdrop=0.3, embd_pdrop=0.3, resid_pdrop=0.3)).train()
    batch = tp.shard(batch_of(2 * q))
    model.config.use_cache = False  # as with checkpointing: keys that have been in a cache lie otherwise, and some processors have other bits then
    noise = nn.Dropout(0.5)
    model.transformer.drop = nn.Sequential(model.transformer.drop, Seen(noise, found))
    before = torch.get_rng_state()
    losses = [run(**batch).loss.item() for run in (model, model, copy.deepcopy(model))]
    after = torch.get_rng_state()
    gradients = []
    for checkpoints in (False, True):
        if checkpoints:
            model.activation_checkpointing_enable()
        torch.set_rng_state(before)
        model(**batch).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    model.eval()
    here = torch.get_rng_state()
    model(**batch)
    return {
        "masks": found["masks"][:3],
        "losses": losses,
        "state": after.numpy().tobytes(),
        "recomputed": all(torch.equal(*pair) for pair in zip(*gradients)),
        "eval draws": not torch.equal(here, torch.get_rng_state()),
    }


class Seen(nn.Module):
    """Dropout of a tensor of ones, which it shows."""

    def __init__(self, noise: nn.Module, found: dict[str, list[bytes]]) -> None:
        super().__init__()
        self.noise, self.found = noise, found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        masks = self.found.setdefault("masks", [])
        masks.append(self.noise(torch.ones(200)).numpy().tobytes())
        return x

    def __deepcopy__(self, memo: dict[int, Any]) -> Seen:
        return Seen(copy.deepcopy(self.noise, memo), self.found)


def faked(rank: int, q: int) -> dict[str, Any]:
    """A step of a copy whose tensors are fake: shapes, and bytes that are sent."""
    torch.manual_seed(0)
    tp = Tensor2D(mesh_of(q))
    model, batch = copy.deepcopy(tp.parallelize(llama(q))), tp.shard(batch_of(2 * q))
    mode = FakeTensorMode()
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: mode.from_tensor(value) for name, value in tensors.items() if value is not None})
    with traffic() as seen, mode:
        output = model(**{name: mode.from_tensor(value) for name, value in batch.items()})
        output.loss.backward()
    return {
        "logits": tuple(output.logits.shape),
        "sent": seen.sent,
        "all": all(p.grad is not None for p in model.parameters()),
    }


def other_seeds(rank: int, q: int) -> str:
    """What is said where the last rank has built its model from another seed."""
    torch.manual_seed(rank // 3)
    try:
        Tensor2D(mesh_of(q)).parallelize(llama(q))
    except RankError as error:
        return str(error)
    return "nothing"


def refused(rank: int, q: int) -> dict[str, str]:
    """What bad input is answered with, by what it is; nothing is sent meanwhile."""
    torch.manual_seed(0)
    mesh, tp = mesh_of(q), Tensor2D(mesh_of(q))
    line = init_device_mesh("cpu", (q * q,), mesh_dim_names=("row",))
    uneven = init_device_mesh("cpu", (1, q * q), mesh_dim_names=("row", "col"))
    done = tp.parallelize(gpt2(q))
    biased, compiled = Own(q), nn.Module()
    biased.qkv = nn.Linear(24, 75)
    tied = Own(q)
    tied.words = nn.Embedding(16, 24)
    tied.place.weight = tied.words.weight
    compiled._orig_mod = gpt2(q)  # as torch's own, which takes seconds to import
    acts = {
        "a line": lambda: Tensor2D(line),
        "not square": lambda: Tensor2D(uneven),
        "no mesh": lambda: Tensor2D((2, 2)),
        "heads": lambda: tp.parallelize(llama(q, hidden_size=30, num_attention_heads=3, num_key_value_heads=3)),
        "key heads": lambda: tp.parallelize(llama(q, num_key_value_heads=1)),
        "hidden": lambda: tp.parallelize(gpt2(q, n_embd=27, n_head=3)),
        "intermediate": lambda: tp.parallelize(llama(q, intermediate_size=35)),
        "rows": lambda: tp.shard(torch.zeros(1, 3)),
        "rows of a batch": lambda: tp.shard({"input_ids": torch.zeros(1, 3), "labels": None}),
        "no plan": lambda: tp.parallelize(Own(q)),
        "a kind": lambda: tp.parallelize(Own(q), {"words": "embeding"}),
        "left out": lambda: tp.parallelize(Own(q), {"words": "embedding", "qkv": "linear_qkv"}),
        "another type": lambda: tp.parallelize(Own(q), {**Own.PLAN, "out": "norm"}),
        "thirds": lambda: tp.parallelize(biased, Own.PLAN),
        "another norm": lambda: tp.parallelize(with_norm(q), Own.PLAN),
        "two cuts": lambda: tp.parallelize(tied, Own.PLAN),
        "twice": lambda: tp.parallelize(done),
        "compiled": lambda: tp.parallelize(compiled),
        "generate": lambda: done.generate(torch.zeros(2, 3, dtype=torch.int64), max_new_tokens=2),
        "blocks": lambda: summa_ab(torch.zeros(3, 4), torch.zeros(5, 6), mesh),
    }
    found = {}
    with traffic() as seen:
        for name, act in acts.items():
            try:
                act()
            except Exception as problem:
                found[name] = f"{type(problem).__name__}: {problem}"
            assert not seen.calls, name
    return found


def with_norm(q: int) -> nn.Module:
    """A model with a norm that adds one to its weight."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.zeros(12 * q)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(x, (x.shape[-1],), 1 + self.weight, self.eps)

    model = Own(q)
    model.first_norm = Shifted()
    return model


def alone(rank: int) -> dict[str, bool]:
    """What a mesh of one rank changes."""
    mesh = mesh_of(1)
    tp, model = Tensor2D(mesh), gpt2(1)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    tp.parallelize(model)
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    batch = batch_of(2)
    with traffic() as seen:
        same = torch.equal(summa_ab(a, b, mesh), a @ b)
        logits = torch.randn(4, 9)
        labels = torch.tensor([1, -100, 3, 8])
        loss = torch.equal(tp.cross_entropy(logits, labels), F.cross_entropy(logits, labels))
        none = tp.cross_entropy(logits, torch.full((4,), -100)).item() == 0
        whole = torch.equal(tp.unshard(a), a) and torch.equal(tp.shard(batch)["labels"], batch["labels"])
    changed = before != {name: id(parameter) for name, parameter in model.named_parameters()}
    return {"product": same, "loss": loss, "no labels": none, "whole": whole, "model": not changed, "calls": seen.calls}
