"""Plans of 2D parallelism: which module of a model is what, by name, and the refusals of those that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from patrickstar.errors import ConfigError, nearest, some
from patrickstar.parallel.grid import chunk_sizes
from patrickstar.parallel.layers_2d import (
    BlockLayer,
    EmbeddingBlock,
    LinearBlock,
    NormBlock,
    PositionsBlock,
    norm_eps,
    norm_size,
)

Plan = Mapping[str, str]

PLANS: Final[Mapping[str, Plan]] = MappingProxyType(
    {
        "gpt2": MappingProxyType(
            {"*wte": "embedding", "*wpe": "positions", "*ln_*": "norm", "*.attn.c_attn": "linear_qkv"}
            | {"*.attn.c_proj": "linear", "*.mlp.c_*": "linear", "lm_head": "head"}
        ),
        "llama": MappingProxyType(
            {"*embed_tokens": "embedding", "*norm": "norm", "*.self_attn.q_proj+k_proj+v_proj": "linear"}
            | dict.fromkeys(("*.self_attn.o_proj", "*.mlp.gate_proj+up_proj", "*.mlp.down_proj"), "linear")
            | {"lm_head": "head"}
        ),
    }
)
"""By `model_type`. Siblings joined by `+` are called with one tensor, which is sent once for all of them."""
_OF_CONFIG: Final = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_LINEAR: Final = "nn.Linear, or Conv1D of transformers"
_NORM: Final = "nn.LayerNorm or nn.RMSNorm of one dimension, or a norm that computes as these do"
_TABLE: Final = "nn.Embedding without max_norm, sparse or scale_grad_by_freq"
KINDS: Final[Mapping[str, tuple[Callable[..., BlockLayer], str]]] = MappingProxyType(
    {
        "linear": (LinearBlock, _LINEAR),
        "linear_qkv": (partial(LinearBlock, parts=3), _LINEAR),
        "norm": (NormBlock, _NORM),
        "embedding": (EmbeddingBlock, _TABLE),
        "positions": (PositionsBlock, _TABLE),
        "head": (LinearBlock, "nn.Linear"),
    }
)
"""The layer of blocks that each kind becomes, and what it may have been. A head whose weight is the embedding's becomes a `TiedHeadBlock`."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A module of a plan. `together`: those that are called with one tensor have this name in common; "": it has none with others."""

    name: str
    module: Any
    kind: str
    together: str


def placed(model: nn.Module, plan: Plan | None, q: int) -> list[Placed]:
    """The modules of a model that become blocks.

    ConfigError: no plan, a kind that is none, modules that the plan leaves out or calls what they are not, sizes that do not divide.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    plan = PLANS.get(model_type or "") if plan is None else plan
    if plan is None:
        raise ConfigError(
            f"{type(model).__name__} (model_type {model_type!r}) has no plan for 2D parallelism, as {', '.join(PLANS)} do: "
            f"give plan=, names of modules with * to {', '.join(KINDS)}"
        )
    for pattern, kind in plan.items():
        if kind not in KINDS:
            raise ConfigError(
                f"plan[{pattern!r}] is {kind!r}, which is none of {', '.join(KINDS)}{nearest(kind, KINDS)}"
            )
    modules = model.named_modules(remove_duplicate=False)
    found = [one for name, module in modules if (one := _placed(name, module, plan)) is not None]
    sizes = {name: getattr(getattr(model, "config", None), name, None) or 0 for name in _OF_CONFIG}
    problems = [f"{name} {size} does not divide by {q}" for name, size in sizes.items() if size % q]
    problems = problems or [problem for one in found if (problem := _problem(one, q))]
    of_plan = {id(parameter) for one in found for parameter in one.module.parameters()}
    left_out = [name for name, parameter in model.named_parameters() if id(parameter) not in of_plan]
    if left_out:
        problems.append(f"the plan has no module for the parameters {some(left_out, most=3)}: name it in plan=")
    if problems:
        text = f"{type(model).__name__} cannot be cut over {q} x {q} ranks: {some(problems, most=4, separator='; ')}"
        raise ConfigError(text, problems=problems)
    return found


def _placed(name: str, module: nn.Module, plan: Plan) -> Placed | None:
    for pattern, kind in plan.items():
        stem, dot, leaves = pattern.rpartition(".")
        if any(fnmatchcase(name, f"{stem}{dot}{leaf}") for leaf in leaves.split("+")):
            return Placed(name, module, kind, f"{name.rpartition('.')[0]}.{leaves}" if "+" in leaves else "")
    return None


def _problem(one: Placed, q: int) -> str:
    module, kind = one.module, one.kind
    if not _is_of(kind, module):
        return f"{one.name} is {type(module).__name__}, and {kind!r} takes {KINDS[kind][1]}"
    if kind == "norm":
        sizes: list[float] = [norm_size(module)]
    else:
        sizes = list(module.weight.shape)
        if kind in {"head", "embedding"} and not all(chunk_sizes(module.weight.shape[0], q)):
            return f"{one.name} has a vocabulary of {sizes[0]}, of which not each of {q} blocks has a part"
        if kind == "linear_qkv":
            sizes[0 if isinstance(module, nn.Linear) else 1] /= 3
        elif kind != "linear":
            del sizes[0]
    uneven = " and ".join(f"{size:g}" for size in sizes if size % q)
    return f"{one.name} has dimensions {list(module.weight.shape)}: {uneven} does not divide by {q}" if uneven else ""


def _is_of(kind: str, module: Any) -> bool:
    if kind == "norm":
        return _is_norm(module)
    if KINDS[kind][1] is _TABLE:
        plain = type(module) is nn.Embedding and module.max_norm is None
        return plain and not module.sparse and not module.scale_grad_by_freq
    return type(module) is nn.Linear or (type(module).__name__ == "Conv1D" and kind != "head")


def _is_norm(module: Any) -> bool:
    """Tells whether a norm is one of torch's, or gives what `nn.RMSNorm` does: others add one to their weight, or scale otherwise."""
    if type(module) in (nn.LayerNorm, nn.RMSNorm):
        return len(module.normalized_shape) == 1
    size, eps, names = norm_size(module), norm_eps(module), [name for name, _ in module.named_parameters()]
    if names != ["weight"] or eps is None or not size:
        return False
    x, weight = torch.linspace(-1, 2, size)[None], torch.linspace(0.5, 1.5, size)
    expected = weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    with torch.no_grad():
        return torch.allclose(torch.func.functional_call(module, {"weight": weight}, (x,)), expected, rtol=1e-5)
