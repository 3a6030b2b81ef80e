"""What ranks do with models of `transformers`, whole and cut over them. A module by itself: each of their processes imports it, and nothing of pytest."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from patrickstar.parallel import ContextParallel
from tests.parallel.programs_of_attention import WAYS

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


def errors(rank: int, size: int, kinds: list[str], batches: list[str], ways: Any = WAYS) -> dict[Any, float]:
    """The largest error of loss, logits and gradients, relative to the largest element of each kind (a gradient may be zero), by case."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    made = {way: ContextParallel(mesh, way[0], layout=way[1]) for way in ways}
    found = {}
    for kind in kinds:
        for name in batches:
            batch = batch_of(name)
            loss, logits, gradients = on_one(kind, batch)
            valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
            largest = max(float(grad.abs().max()) for grad in gradients.values()) or 1.0
            for way, cp in made.items():
                my_loss, my_logits, mine = over_ranks(kind, cp, batch)
                worst = [
                    abs(float(my_loss - loss)) / (float(loss) or 1.0),
                    float((my_logits - logits)[valid].abs().max() / logits.abs().max()),
                    *(
                        float((mine[each] - grad).abs().max()) / max(float(grad.abs().max()), 1e-3 * largest)
                        for each, grad in gradients.items()
                    ),
                ]
                found[kind, name, *way] = max(worst)
    return found
