"""What ranks do with models of `transformers`, whole and cut over them. Their processes import it: nothing of pytest is in it."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    BertModel,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from patrickstar.errors import Error, RankError
from patrickstar.parallel import ContextParallel, traffic
from tests.parallel.programs_of_attention import contexts
from tests.ranks import kill_me

WORDS, ROWS = 50, 2
BATCHES = ("plain", "padded", "packed", "odd", "few labels", "no labels")


def model_of(kind: str, *, double: bool = True) -> Any:
    """A small model of fp64, without dropout, the same on all ranks."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    made: Any
    if kind == "llama":
        config = LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, max_position_embeddings=64, **sizes)
        made = LlamaForCausalLM(config)
    elif kind == "gpt2":
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        made = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=2, n_head=4, n_positions=24, **none))
    else:
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        made = BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=24, **sizes, **none))
    with torch.no_grad():
        for parameter in made.parameters():  # zero biases and gains of one hide what happens to them
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return made.double() if double else made


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    """A batch, of 23 tokens if it is odd, else of 24."""
    torch.manual_seed(1)
    length = 23 if kind == "odd" else 24
    batch = {"input_ids": torch.randint(WORDS, (ROWS, length))}
    batch["labels"] = torch.randint(WORDS, (ROWS, length))
    batch["labels"][0, 3:9] = -100
    if kind == "padded":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, 19:] = 0
        batch["labels"][0, 19:] = -100
    elif kind == "packed":
        batch["position_ids"] = torch.stack([torch.arange(length) % 9, torch.arange(length) % 17])
    elif kind == "few labels":  # some ranks have none
        batch["labels"][:, 4:] = -100
    elif kind == "no labels":
        batch["labels"][:] = -100
    return batch


def on_one(kind: str, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, logits and gradients of the model by itself. Its loss in fp64, as torch has it; documents by a mask of pairs."""
    model = model_of(kind)
    given = {name: value for name, value in batch.items() if name != "labels"}
    if "position_ids" in batch:
        number = (batch["position_ids"] == 0).cumsum(1)
        seen = (number[:, :, None] == number[:, None, :]).unsqueeze(1)
        given["attention_mask"] = seen if kind == "bert" else seen.tril()
    logits = model(**given).logits
    labels = batch["labels"]
    if kind == "bert":
        flat, labels = logits.flatten(0, 1), labels.flatten()
    else:
        flat, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = F.cross_entropy(flat, labels, reduction="sum")
    loss = total / max(1, int((labels != -100).sum()))
    loss.backward()
    return loss.detach(), logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def over_ranks(kind: str, cp: ContextParallel, batch: dict[str, torch.Tensor]) -> tuple[Any, Any, dict[str, Any]]:
    """Loss, whole logits and gradients of the model over ranks, released again."""
    model = cp.parallelize(model_of(kind))
    mine = cp.shard(batch)
    if kind == "bert":
        labels = mine.pop("labels")
        del mine["shift_labels"]
        output = model(**mine)
        loss = cp.cross_entropy(output.logits, labels)
    else:
        output = model(**mine)
        loss = output.loss
    loss.backward()
    cp.reduce_gradients(model)
    logits = cp.unshard(output.logits, length=batch["input_ids"].shape[1])
    cp.release(model)
    return loss.detach(), logits, {name: parameter.grad for name, parameter in model.named_parameters()}


def errors(rank: int, size: int, kind: str, batch_kind: str) -> dict[tuple[str, str], float]:
    """The largest error of loss, logits and gradients by way, relative to the largest element of each; a gradient may be zero but for rounding."""
    batch = batch_of(batch_kind)
    loss, logits, gradients = on_one(kind, batch)
    valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    largest = max(float(grad.abs().max()) for grad in gradients.values()) or 1.0
    found = {}
    for way, cp in contexts(size).items():
        my_loss, my_logits, mine = over_ranks(kind, cp, batch)
        of_gradients = [
            float((mine[name] - grad).abs().max()) / max(float(grad.abs().max()), 1e-3 * largest)
            for name, grad in gradients.items()
        ]
        of_logits = float((my_logits - logits)[valid].abs().max() / logits.abs().max())
        found[way] = max(abs(float(my_loss - loss)) / (float(loss) or 1.0), of_logits, *of_gradients)
    return found


def verified(rank: int, size: int) -> dict[str, Any]:
    """What `verify` says of models, right ones and one with gradients that are too large, and whether it changes nothing else."""
    cp = ContextParallel(init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)))
    found: dict[str, Any] = {}
    for kind in ("llama", "gpt2", "bert"):
        model = cp.parallelize(model_of(kind)).train()
        batch = batch_of("padded")
        if kind == "bert":
            del batch["labels"]
        weight = next(model.parameters())
        weight.grad = torch.ones_like(weight)
        found[kind] = cp.verify(model, batch)
        found[f"{kind} after"] = (model.training, bool(weight.grad.eq(1).all()), model.config._attn_implementation[:11])
    cp._gradient_scale = 1  # what `reduce_gradients` divides by, and what a loss multiplies with
    spoiled = ContextParallel(init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)), gradients="mean")
    spoiled._gradient_scale = 1
    model = spoiled.parallelize(model_of("gpt2"))
    spoiled.token_mean = lambda values, valid, of=None: cp.token_mean(values, valid) * size  # type: ignore[method-assign]
    found["spoiled"] = spoiled.verify(model, batch_of("plain"))
    return found


def shared_and_released(rank: int, size: int) -> dict[str, bool]:
    """What becomes of models beside parallelized ones, of their copies, and of released ones."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    ring, ulysses = ContextParallel(mesh), ContextParallel(mesh, "ulysses", gradients="mean")
    batch = batch_of("packed")
    loss, logits, gradients = on_one("gpt2", batch)
    one, other, plain = model_of("gpt2"), model_of("gpt2"), model_of("gpt2")
    before = (one.config._attn_implementation, set(vars(one)), len(one._forward_hooks), len(one._forward_pre_hooks))
    ring.parallelize(one)
    ulysses.parallelize(other)
    copied = copy.deepcopy(one)
    found = {"two in one process": True}
    for model, cp in ((one, ring), (other, ulysses), (copied, ring)):
        mine = model(**cp.shard(batch)).loss
        mine.backward()
        found["two in one process"] &= abs(float(mine - loss)) < 1e-11
    weight, of_weight = other.transformer.wte.weight, gradients["transformer.wte.weight"]
    mean = weight.grad.clone()
    torch.distributed.all_reduce(mean)
    found["gradients that others average"] = bool(torch.allclose(mean / size, of_weight, rtol=1e-10, atol=1e-12))
    ulysses.reduce_gradients(other)
    found["and that are reduced here"] = bool(torch.allclose(weight.grad, of_weight, rtol=1e-10, atol=1e-12))
    whole = {name: value for name, value in batch.items() if name != "position_ids"}
    found["a plain one beside them"] = plain(**whole).loss is not None
    ring.release(one)
    after = (one.config._attn_implementation, set(vars(one)), len(one._forward_hooks), len(one._forward_pre_hooks))
    found["as before"] = before == after
    found["generates again"] = one.generate(batch["input_ids"][:, :4], max_new_tokens=2, do_sample=False).shape[1] == 6
    found["a number of items"] = halves(one, ring, batch)
    found["shapes"] = says_nothing(ring.parallelize(one), ring.shard(batch))
    return found


def says_nothing(model: Any, mine: dict[str, torch.Tensor]) -> bool:
    """Whether a model of fake tensors has a loss and gradients, and says nothing to other ranks."""
    with traffic() as seen, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        parameters = {name: mode.from_tensor(value) for name, value in model.named_parameters()}
        given = {name: mode.from_tensor(value) for name, value in mine.items()}
        loss = torch.func.functional_call(model, parameters, (), given).loss
        grads = torch.autograd.grad(loss, list(parameters.values()))
    return seen.sent == {} and loss.shape == () and len(grads) == len(parameters)


def trained(rank: int, size: int) -> list[float]:
    """How far losses and weights of a model are from those of one rank, relative to their largest, after steps of training."""
    cp = ContextParallel(init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)))
    models = [model_of("llama"), cp.parallelize(model_of("llama"))]
    models[1].gradient_checkpointing_enable()  # its ring goes round again in backward
    losses: list[list[float]] = [[], []]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for kind in ("plain", "padded", "odd", "few labels"):
        whole = {name: value for name, value in batch_of(kind).items() if name != "labels"}
        labels = batch_of(kind)["labels"][:, 1:].flatten()
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            given = cp.shard(batch_of(kind)) if number else whole
            output = model(**given)
            loss = output.loss if number else F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels)
            loss.backward()
            if number:
                cp.reduce_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            losses[number].append(loss.item())
    of_weights = [
        float((one - other).abs().max() / one.abs().max())
        for one, other in zip(*(model.parameters() for model in models), strict=True)
    ]
    return [max(of_weights), *(abs(one / other - 1) for one, other in zip(*losses, strict=True))]


def halves(model: Any, cp: ContextParallel, batch: dict[str, torch.Tensor]) -> bool:
    """Whether a loss over a number of items that is given is its sum over them, as trainers accumulate."""
    mine = cp.shard(batch)
    valid = int((batch["labels"][:, 1:] != -100).sum())
    cp.parallelize(model)
    whole, half = model(**mine).loss, model(**mine, num_items_in_batch=2 * valid).loss
    cp.release(model)
    return abs(float(whole / half) - 2) < 1e-12


def refusals(rank: int, size: int) -> dict[str, str]:
    """The kinds of errors, and what they say, by what was wrong."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    cp, rsa, ulysses = ContextParallel(mesh), ContextParallel(mesh, "rsa"), ContextParallel(mesh, "ulysses")
    batch = batch_of("plain")
    mine = cp.shard(batch)
    llama = cp.parallelize(model_of("llama"))
    bert = cp.parallelize(model_of("bert"))
    q = torch.randn(2, 4, 8, 4)

    def given(**changes: Any) -> dict[str, Any]:
        return {name: value for name, value in {**mine, **changes}.items() if value is not None}

    def built(kind: Any, config: Any) -> Any:
        return cp.parallelize(kind(config))

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    llama.config.sliding_window = 4  # which its layers do not have
    of_mask = {"config": llama.config, "inputs_embeds": torch.zeros(2, 12, 16), "position_ids": mine["position_ids"]}
    of_mask |= {"attention_mask": None, "past_key_values": None}
    of_keys = {**sizes, "num_key_value_heads": 4}
    capped = Gemma2Config(head_dim=4, layer_types=["full_attention"], sliding_window=None, **of_keys)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    classes = GPT2Config(n_embd=16, n_layer=1, n_head=4, vocab_size=WORDS, pad_token_id=0, attn_pdrop=0.0)
    compiled = model_of("gpt2")
    compiled.transformer.h[0].compile()
    dropping = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=1, n_head=4, n_positions=24)).train()
    cp.parallelize(dropping)
    things: dict[str, Any] = {
        "a length that does not divide": lambda: cp.shard(torch.zeros(2, 10, 3)),
        "positions of such a length": lambda: cp.positions(10),
        "no method": lambda: ContextParallel(mesh, "rign"),  # type: ignore[arg-type]
        "no layout": lambda: ContextParallel(mesh, "rsa", layout="zigzag"),
        "no gradients": lambda: ContextParallel(mesh, gradients="half"),  # type: ignore[arg-type]
        "two dimensions": lambda: ContextParallel(init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "cp"))),
        "no mesh": lambda: ContextParallel("cp"),  # type: ignore[arg-type]
        "heads": lambda: ulysses.attention(q[:, :3], q[:, :3], q[:, :3]),
        "key heads": lambda: ulysses.attention(q.repeat(1, 3, 1, 1), q[:, :3], q[:, :3], enable_gqa=True),
        "key heads unasked": lambda: cp.attention(q, q[:, :2], q[:, :2]),
        "dropout in a ring": lambda: cp.attention(q, q, q, dropout_p=0.1),
        "a mask in a ring": lambda: cp.attention(q, q, q, torch.zeros(8, 16)),
        "a mask in ulysses": lambda: ulysses.attention(q, q, q, torch.zeros(8, 16)),
        "a mask of another shape": lambda: rsa.attention(q, q, q, torch.zeros(8, 9)),
        "half of a zigzag": lambda: cp.attention(q[:, :, :5], q[:, :, :5], q[:, :, :5]),
        "segments of another shape": lambda: cp.attention(q, q, q, segments=torch.zeros(2, 16, dtype=torch.int64)),
        "three dimensions": lambda: cp.attention(q[0], q[0], q[0]),
        "labels of another shape": lambda: cp.cross_entropy(torch.zeros(2, 8, 9), torch.zeros(2, 16, dtype=torch.int64)),
        "an unknown tensor": lambda: cp.shard({**batch, "pixel_values": q}),
        "a batch that is cut": lambda: cp.shard(mine),
        "no tokens": lambda: cp.shard({"labels": batch["labels"]}),
        "a mask of pairs": lambda: cp.shard({**batch, "attention_mask": torch.ones(2, 1, 24, 24)}),
        "one label a row": lambda: cp.shard({**batch, "labels": torch.zeros(2, dtype=torch.int64)}),
        "labels of padding": lambda: cp.shard({**batch, "attention_mask": torch.zeros(2, 24)}),
        "a module": lambda: cp.parallelize(torch.nn.Linear(2, 2)),
        "twice": lambda: rsa.parallelize(llama),
        "a window": lambda: built(MistralForCausalLM, MistralConfig(sliding_window=4, **of_keys)),
        "soft caps": lambda: built(Gemma2ForCausalLM, capped),
        "states": lambda: built(MambaForCausalLM, MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=9)),
        "a pooler": lambda: built(BertModel, BertConfig(**sizes)),
        "a router's loss": lambda: built(MixtralForCausalLM, MixtralConfig(output_router_logits=True, **of_keys)),
        "two sequences": lambda: built(BertLMHeadModel, BertConfig(is_decoder=True, add_cross_attention=True, **sizes)),
        "positions of a length": lambda: built(LlamaForCausalLM, LlamaConfig(rope_parameters=rope, **sizes)),
        "compiled": lambda: cp.parallelize(compiled),
        "heads of a model": lambda: ulysses.parallelize(LlamaForCausalLM(LlamaConfig(**{**sizes, "num_attention_heads": 1}))),
        "a row's class": lambda: built(GPT2ForSequenceClassification, classes)(**given(labels=None, shift_labels=None)),
        "dropout in a model": lambda: dropping(**mine),
        "a batch that is whole": lambda: llama(**batch),
        "labels that are whole": lambda: llama(**given(shift_labels=None)),
        "a mask that is whole": lambda: llama(**given(attention_mask=torch.ones(2, 12))),
        "a cap": lambda: llama(**mine, softcap=30.0),
        "a mask of the model's own": lambda: create_causal_mask(or_mask_function=lambda *_: True, **of_mask),
        "a window's mask": lambda: create_sliding_window_causal_mask(**of_mask),
        "a cache": lambda: llama(**mine, past_key_values=DynamicCache()),
        "generate": lambda: llama.generate(batch["input_ids"], max_new_tokens=1),
        "generate without a cache": lambda: llama.generate(batch["input_ids"], max_new_tokens=1, use_cache=False),
        "a loss of its own": lambda: bert(**mine),
        "released by another": lambda: rsa.release(llama),
        "verify before": lambda: cp.verify(model_of("gpt2"), batch),
    }  # fmt: skip
    found = {}
    for name, act in things.items():
        with traffic() as seen:
            try:
                act()
                found[name] = "nothing"
            except Error as error:
                found[name] = f"{type(error).__name__}: {error}{' (late)' if seen.sent else ''}"
    return found


def unlike(rank: int, size: int) -> list[str]:
    """What is said where ranks of a group differ, in their batches, lengths, methods and shapes."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    cp = ContextParallel(mesh)
    q = torch.randn(1, 2, 4 + 2 * rank, 4)
    things: list[Any] = [
        lambda: cp.shard({"input_ids": torch.full((2, 8), rank)}),
        lambda: cp.shard({"input_ids": torch.zeros(2, 8 + 4 * rank, dtype=torch.int64)}),
        lambda: cp.shard(torch.zeros(2, 8 + 4 * rank, 3)),
        lambda: ContextParallel(mesh, "rsa" if rank else "ring"),
        lambda: cp.attention(q, q, q),
    ]
    found = []
    for act in things:
        try:
            act()
            found.append("nothing")
        except RankError as error:
            found.append(str(error))
    return found


def killed_in_a_hop(rank: int, size: int) -> str:
    """What is said where the last rank is killed while the others wait for its hop."""
    cp = ContextParallel(init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)))
    q = torch.randn(1, 2, 4, 4)
    cp.attention(q, q, q)
    if rank == size - 1:
        kill_me()
    try:
        cp.attention(q, q, q)
    except RankError as error:
        return str(error)
    return "nothing"
