"""The models of the parity matrix, each with its batches, its loss and its optimizer groups.

Nothing here imports the library: a case is what a user would have written before hearing of it. All are built from
configurations, need no network, and train a step in milliseconds.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity import modules
from tests.parity.modules import VOCABULARY, WIDTH

Batch = dict[str, Any]
Groups = list[dict[str, Any]]

STEPS = 5
BATCH, TOKENS = 2, 8
NONE = ("none",)
ALL = ("none", "non-reentrant", "reentrant")


def language_loss(model: nn.Module, batch: Batch) -> Tensor:
    """What a Hugging Face model computes when it is given labels."""
    loss: Tensor = model(**batch).loss
    return loss


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of a model from tokens to logits."""
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())


def square_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).square().mean()
    return loss


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def long_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(batch["tokens"]).square().mean()
    return loss


def token_logits(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(batch["tokens"])
    return logits


def penalised_loss(model: nn.Module, batch: Batch) -> Tensor:
    """A value plus the squared norm of its gradient by the input: `autograd.grad`, then a backward through it."""
    if not torch.is_grad_enabled():
        return square_loss(model, batch)
    x = batch["x"].clone().requires_grad_()
    value = model(x).mean()
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    return value.square() + slope.square().sum()


def two_groups(model: nn.Module) -> Groups:
    """Matrices with decay, the rest without and with other betas: the optimizer's order is not the model's."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": others, "lr": 2e-3, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.0},
        {"params": matrices, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    ]


def one_group(model: nn.Module) -> Groups:
    return [{"params": list(model.parameters()), "lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}]


def all_but_the_loose_layer(model: nn.Module) -> Groups:
    """One group that leaves out `loose`, which therefore has gradients and no update; frozen ones are in it."""
    (group,) = one_group(model)
    group["params"] = [p for name, p in model.named_parameters() if not name.startswith("loose.")]
    return [group]


def change_nothing(model: nn.Module, step: int) -> None:
    """Most loops only train."""


def thaw(model: nn.Module, step: int) -> None:
    """From the third step on the frozen layers learn too: their moments and step counts start there."""
    if step == 3:
        for parameter in model.parameters():
            parameter.requires_grad_(True)


def schedule(group: Mapping[str, Any], step: int) -> dict[str, float]:
    """A group's hyper-parameters at a step (from 1), from those it was built with: a falling rate, a later decay."""
    factor = (1.0, 0.5, 0.75, 0.3, 0.1)[(step - 1) % 5]
    return {"lr": group["lr"] * factor, "weight_decay": group["weight_decay"] * (0.5 if step >= 4 else 1.0)}


def micro_seed(step: int, micro: int, rank: int = 0) -> int:
    """What torch's RNG is set to before each micro-step of a rank, so that dropout draws the same numbers in both runs."""
    return 100_000 * rank + 1_000 * step + micro


@dataclass(frozen=True)
class Case:
    """One model and how it is trained."""

    name: str
    make: Callable[[str], nn.Module]
    """The model with "none", "non-reentrant" or "reentrant" checkpointing."""
    draw: Callable[[], Batch]
    """One micro-batch, from torch's global RNG."""
    loss_of: Callable[[nn.Module, Batch], Tensor]
    checkpointing: tuple[str, ...] = NONE
    groups: Callable[[nn.Module], Groups] = two_groups
    algorithm: str = "AdamW"
    """ "AdamW" or "Adam": the class of `torch.optim` the user began with."""
    before_step: Callable[[nn.Module, int], None] = field(default=change_nothing)
    zero: str = "optimizer"
    """Whose `zero_grad` ends a step: the optimizer's or the model's."""
    look: Callable[[nn.Module, Batch], Tensor] | None = None
    """What an evaluation between steps compares; by default the loss."""
    chunk_numel: int = 2048
    max_norm: float = 1.0
    """What the rows with clipping clip to: below some of the case's norms."""

    def build(self, checkpointing: str = "none") -> nn.Module:
        """The model in training mode; the same bits at each call."""
        assert checkpointing in self.checkpointing, f"{self.name} has no {checkpointing} checkpointing"
        torch.manual_seed(zlib.crc32(self.name.encode()))
        return self.make(checkpointing).train()

    def batches(self, seed: int, count: int = 4 * STEPS) -> list[Batch]:
        """Micro-batches, the same for a seed whatever has been drawn before."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return [self.draw() for _ in range(count)]


# Batches


def ids() -> Tensor:
    return torch.randint(1, VOCABULARY, (BATCH, TOKENS))


def causal_batch() -> Batch:
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens}


def masked_batch() -> Batch:
    """Tokens with padding at the end of one row and labels on about half of the others."""
    tokens, mask = ids(), torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[-1, -2:] = 0
    labels = torch.where((torch.rand(BATCH, TOKENS) < 0.5) & mask.bool(), tokens, -100)
    labels[0, 0] = tokens[0, 0]  # a batch without a label has a NaN for its loss
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def translation_batch() -> Batch:
    return {"input_ids": ids(), "labels": ids()[:, :6].contiguous()}


def picture_batch() -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(0, 5, (BATCH,))}


def image_batch() -> Batch:
    return {"images": torch.randn(4, 3, 8, 8), "labels": torch.randint(0, 5, (4,))}


def token_batch() -> Batch:
    return {"tokens": ids(), "labels": ids()}


def long_batch() -> Batch:
    return {"tokens": torch.randint(0, 2000, (BATCH, TOKENS))}


def vectors(width: int) -> Callable[[], Batch]:
    def draw() -> Batch:
        return {"x": torch.randn(BATCH, TOKENS, width)}

    return draw


def flagged_vectors() -> Batch:
    return {"x": torch.randn(BATCH, TOKENS, 48), "flag": bool(torch.rand(()) < 0.6)}


def leaf_vectors() -> Batch:
    """Inputs that ask for gradients themselves, as re-entrant checkpointing of a first block needs."""
    return {"x": torch.randn(BATCH, TOKENS, 44).requires_grad_()}


# Hugging Face models


def hugging_face(name: str, **options: Any) -> Callable[[str], nn.Module]:
    """A maker of `transformers`' model of that class from a configuration; imported when first built."""

    def make(checkpointing: str) -> nn.Module:
        import transformers

        kind = getattr(transformers, name)
        model: Any = kind(kind.config_class(use_cache=False, **options))
        if checkpointing != "none":
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        return model  # type: ignore[no-any-return]

    return make


LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**LAYERS, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": TOKENS}
ENCODER = {**LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": TOKENS}
GPT2 = hugging_face(
    "GPT2LMHeadModel",
    vocab_size=VOCABULARY,
    n_positions=TOKENS,
    n_embd=48,
    n_layer=2,
    n_head=4,
    bos_token_id=0,
    eos_token_id=0,
)  # dropout of 0.1 in three places, by default
LLAMA = hugging_face("LlamaForCausalLM", **DECODER, hidden_size=48, intermediate_size=96)
BERT = hugging_face("BertForMaskedLM", **ENCODER, hidden_size=WIDTH, intermediate_size=64)
T5 = hugging_face(
    "T5ForConditionalGeneration",
    vocab_size=VOCABULARY,
    d_model=WIDTH,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
)
VIT = hugging_face(
    "ViTForImageClassification",
    **{**LAYERS, "hidden_size": WIDTH, "intermediate_size": 64, "image_size": 16, "patch_size": 4, "num_labels": 5},
)
MIXTRAL = hugging_face(
    "MixtralForCausalLM",
    **{**DECODER, "hidden_size": WIDTH, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    output_router_logits=True,
)
ALBERT = hugging_face(
    "AlbertForMaskedLM",
    **{**ENCODER, "embedding_size": 24, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4},
)


def plain(module: Callable[[], nn.Module]) -> Callable[[str], nn.Module]:
    """A maker for a module that knows no checkpointing."""
    return lambda checkpointing: module()


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("gpt2", GPT2, causal_batch, language_loss, ALL),
        Case("llama", LLAMA, causal_batch, language_loss, ALL),
        Case("bert", BERT, masked_batch, language_loss, ALL),
        Case("t5", T5, translation_batch, language_loss, ALL, groups=one_group),
        Case("vit", VIT, picture_batch, language_loss, ALL, max_norm=1.2),
        Case("mixtral", MIXTRAL, causal_batch, language_loss, ALL),
        Case("albert", ALBERT, masked_batch, language_loss),
        Case("one-block", modules.OneBlock, token_batch, token_loss, ALL, algorithm="Adam"),
        Case("conv", modules.ConvNet, image_batch, class_loss, ALL),
        Case("lstm", plain(modules.recurrent), token_batch, token_loss, groups=one_group, max_norm=0.16),
        Case("encoder", modules.Encoder, token_batch, token_loss, ALL, look=token_logits, max_norm=0.905),
        Case("held", modules.Held, vectors(WIDTH), square_loss, ("none", "non-reentrant")),
        Case(
            "weight-norm",
            plain(lambda: modules.WeightNormed(by_hook=False)),
            vectors(WIDTH),
            square_loss,
            max_norm=0.04,
        ),
        Case(
            "weight-norm-hook",
            plain(lambda: modules.WeightNormed(by_hook=True)),
            vectors(WIDTH),
            square_loss,
            max_norm=0.048,
        ),
        Case("function", modules.CustomFunction, vectors(64), square_loss, ("none", "non-reentrant"), max_norm=0.12),
        Case("tied", modules.Tied, token_batch, token_loss, ALL),
        Case("long-embedding", plain(modules.long_embedding), long_batch, long_loss, max_norm=0.65),
        Case("scalars", plain(modules.Scalars), vectors(48), square_loss, algorithm="Adam"),
        Case("branches", plain(modules.branches), flagged_vectors, square_loss, max_norm=0.28),
        Case(
            "adapted",
            modules.Adapted,
            token_batch,
            token_loss,
            ALL,
            groups=all_but_the_loose_layer,
            zero="model",
            max_norm=0.19,
        ),
        Case("thawed", plain(modules.thawed), vectors(48), square_loss, before_step=thaw, max_norm=0.08),
        Case("tower", modules.Tower, leaf_vectors, square_loss, ALL, max_norm=0.055),
        Case(
            "save-on-cpu", lambda kind: modules.Tower(kind, on_cpu=True), leaf_vectors, square_loss, ALL, max_norm=0.034
        ),
        Case("strided", plain(modules.Strided), image_batch, class_loss, max_norm=0.75),
        Case("penalised", plain(modules.penalised), vectors(48), penalised_loss, max_norm=0.05),
        Case("autocast", modules.Autocast, vectors(48), square_loss, ("none", "non-reentrant"), max_norm=0.58),
    )
}


def without_dropout(case: Case) -> Case:
    """The same model, trained as by any other rank that has a part of the same batch."""

    def make(checkpointing: str) -> nn.Module:
        model = case.make(checkpointing)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    return replace(case, make=make)
