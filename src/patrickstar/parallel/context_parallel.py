"""Context parallelism: sequences cut over the ranks of a group, which is one rank with more memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from patrickstar.config.kinds import choice, refuse
from patrickstar.errors import StateError
from patrickstar.parallel.cut_batches import IGNORED, TOKENS, cut
from patrickstar.parallel.group import MeshGroup, digest
from patrickstar.parallel.kernels import autocast
from patrickstar.parallel.layouts import TokenLayout
from patrickstar.parallel.ring import Ring
from patrickstar.parallel.strips import StripAttention, Strips
from patrickstar.parallel.swapped_heads import SwappedHeads
from patrickstar.parallel.token_losses import mean_alone, mean_over, token_losses
from patrickstar.parallel.transformer_models import Parallelized, refuse_unknown
from patrickstar.torch_private import FakeTensor

Model = TypeVar("Model", bound=nn.Module)
_LAYOUTS: Final = MappingProxyType(
    {"ring": ("zigzag", "contiguous"), "rsa": ("contiguous",), "ulysses": ("contiguous",)}
)


@dataclass(frozen=True, slots=True)
class Verification:
    """The largest differences, relative to the largest element of each.

    Attributes:
        loss: of the loss; of the mean square of the logits, where a batch has no labels. logits: of those of tokens that are no padding.
        gradients: the largest of all parameters, relative to a thousandth of the largest gradient of all at least. parameter: which has it.
    """

    loss: float
    logits: float
    gradients: float
    parameter: str

    def __str__(self) -> str:
        return f"loss {self.loss:.1e}, logits {self.logits:.1e}, gradients {self.gradients:.1e} ({self.parameter})"


class ContextParallel:
    """Attention, batches and losses of ranks that each have a part of every sequence.

        cp = ContextParallel(mesh["cp"])
        cp.parallelize(model)
        loss = model(**cp.shard(batch)).loss

    Loss, gradients and their norm are those of one rank with the whole sequences: the loss is the same on each, and `reduce_gradients` sums gradients
    over the group. A copy of what holds it shares it.

    Args:
        mesh: of one dimension, of any name.
        method: `"ring"` (arXiv 2310.01889), `"rsa"` (Ring Self-Attention, arXiv 2105.13120) or `"ulysses"` (arXiv 2309.14509).
        layout: `"zigzag"` or `"contiguous"`; None: the first that the method has, of which only `"ring"` has both.
        gradients: `"sum"`, or `"mean"` where something else averages them over the group, as DDP and FSDP2 do: they are N times as large then.

    Raises:
        ConfigError: all that is wrong with the arguments, before any collective. RankError: other ranks have others.

    Attributes:
        group: the ranks. size, rank: number of ranks, and the place of this one. method, layout, gradients: see above.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        method: Literal["ring", "rsa", "ulysses"] = "ring",
        *,
        layout: Literal["zigzag", "contiguous"] | None = None,
        gradients: Literal["sum", "mean"] = "sum",
    ) -> None:
        refuse(list(_problems(mesh, method, layout, gradients)), of="ContextParallel")
        self.method, self.gradients = method, gradients
        self.layout = layout or _LAYOUTS[method][0]
        self.group = MeshGroup.along(mesh, is_apart=True)
        self.size, self.rank = self.group.size, self.group.rank
        self._tokens = TokenLayout(self.layout, self.group.size)
        self._gradient_scale = self.size if gradients == "mean" else 1
        self._seen: set[str] = set()
        self.group.agree("ContextParallel", f"method {method!r}, layout {self.layout!r}, gradients {gradients!r}")

    def __deepcopy__(self, _: Any) -> ContextParallel:
        """The object itself: its ranks are not copied."""
        return self

    def within(self, layer: str) -> ContextParallel:
        """A view of this, whose errors of ranks name a layer."""
        named = copy.copy(self)
        named.group = replace(self.group, layer=layer)
        return named

    @property
    def multiple(self) -> int:
        """Number by which lengths are divisible."""
        return self._tokens.multiple

    def positions(self, length: int, *, device: torch.device | str | None = None) -> Tensor:
        """The positions [L/N] of a sequence that this rank has, in its order.

        Raises:
            ConfigError: `length` is not divisible by `multiple`.
        """
        if pad := -length % self.multiple:
            problem = (
                f"a length of {length} over {self.size} ranks: make it {length + pad}, a multiple of {self.multiple}"
            )
            refuse([f"{problem} (a batch that is a mapping is padded)"], of=f"{self.method}, {self.layout}")
        return self._tokens.positions(self.rank, length).to(device)

    def shard(self, batch: Any, dim: int = 1) -> Any:
        """The part that this rank has of a batch, which all ranks of the group have alike.

        Args:
            batch: a tensor, which is cut along `dim`, or a mapping as `transformers` names it (`input_ids`, `inputs_embeds`, `attention_mask` [B, L],
                `position_ids`, `token_type_ids`, `labels`), which is padded; that changes no result. Labels are shifted before the cut
                (`shift_labels`). Positions that start again are packed documents, unless there is a mask.

        Raises:
            ConfigError: a tensor whose length is not divisible by `multiple`; something in the mapping that cannot be cut.
            RankError: another rank of the group has another batch; on all ranks.
        """
        if isinstance(batch, Tensor):
            self._agree_on({"a tensor": batch})
            return batch.index_select(dim, self.positions(batch.shape[dim], device=batch.device))
        if self.size == 1:
            return dict(batch)
        self._agree_on({name: value for name, value in batch.items() if isinstance(value, Tensor)})
        return cut(
            batch,
            multiple=self.multiple,
            of_rank=lambda each: each.index_select(1, self.positions(each.shape[1], device=each.device)),
        )

    @torch.no_grad()
    def unshard(self, tensor: Tensor, dim: int = 1, length: int | None = None) -> Tensor:
        """The whole of what ranks have parts of along `dim`, without gradients. `length`: without what comes after, padding for instance."""
        if self.size == 1:
            return tensor.narrow(dim, 0, tensor.shape[dim] if length is None else length)
        parts = torch.cat(list(self.group.gather(tensor)), dim)
        order = torch.cat([self._tokens.positions(rank, parts.shape[dim]) for rank in range(self.size)])
        parts = parts.index_select(dim, order.argsort().to(tensor.device))
        return parts if length is None else parts.narrow(dim, 0, length)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        segments: Tensor | None = None,
    ) -> Tensor:
        """Attention to all tokens of the sequences, as `torch.nn.functional.scaled_dot_product_attention` has it on one rank.

        Args:
            query: [B, Z, L/N, A], this rank's tokens in the order of `positions`. key, value: [B, Zk, L/N, A]; Zk < Z with `enable_gqa`.
            attn_mask: [.., L/N, L], additive, or boolean and true where a token is seen; `"rsa"` only.
            dropout_p: of attention weights; not in a ring.
            segments: [B, L/N], integers: tokens see those with the same.

        Raises:
            ConfigError: what the method does not do, and heads that do not divide, before any collective. RankError: other ranks have other shapes.
        """
        given = (query, key, value, attn_mask, dropout_p, enable_gqa, segments)
        refuse(self._attention_problems(*given), of="attention")
        query, key, value = autocast(query, key, value)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if segments is not None:
            segments = segments.to(torch.int32).expand(query.shape[0], -1).contiguous()
        if self.size == 1:
            return SwappedHeads(self.group, is_causal, scale, dropout_p).whole(query, key, value, segments, attn_mask)
        shapes = [tuple(each.shape) for each in (query, key, value)]
        call = (
            f"{shapes}, {query.dtype}, {is_causal=}, {dropout_p=}, {scale=}, {segments is None=}, {attn_mask is None=}"
        )
        if call not in self._seen and not isinstance(query, FakeTensor):
            self._seen.add(call)
            self.group.agree("attention", call)
        if self.method == "ring":
            return Ring(self.group, self._tokens, is_causal, scale)(query, key, value, segments)
        if self.method == "rsa":
            strips = Strips(self.group, is_causal, scale, dropout_p)
            return StripAttention.apply(query, key, value, segments, attn_mask, strips)
        return SwappedHeads(self.group, is_causal, scale, dropout_p)(query, key, value, segments)

    def cross_entropy(self, logits: Tensor, labels: Tensor, ignore_index: int = IGNORED) -> Tensor:
        """The mean cross-entropy of the valid tokens of the group: the whole's value, this rank's share of the gradient.

        Args:
            logits: [B, L/N, V]. labels: [B, L/N], cut as the tokens are; what is to be predicted is shifted before the cut.
        """
        if self.size == 1:
            return mean_alone(logits, labels, ignore_index)
        return self.token_mean(token_losses(logits, labels, ignore_index), labels != ignore_index)

    def token_mean(self, values: Tensor, valid: Tensor, *, of: Tensor | int | None = None) -> Tensor:
        """The mean of the valid values of the group, 0 where there are none: the whole's value, this rank's share of the gradient.

        Args:
            values: one a token, of this rank's tokens. valid: booleans of the same shape. of: a number to divide their sum by, in place of theirs.
        """
        return mean_over(values, valid, self.group, gradient_scale=self._gradient_scale, of=of)

    @torch.no_grad()
    def reduce_gradients(self, model: nn.Module) -> None:
        """Sums gradients over the group, once after backward, where nothing else does it."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.size == 1 or not parameters:
            return
        # A rank whose tokens do not reach a parameter has none, and takes part.
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
        for parameter, count in zip(parameters, self.group.sum(has)[0].tolist(), strict=True):
            if count:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                (total,) = self.group.sum(grad.to(torch.promote_types(grad.dtype, torch.float32)))
                parameter.grad = grad.copy_(total.div_(self._gradient_scale))

    def parallelize(self, model: Model) -> Model:
        """A `transformers` model whose attention and loss go over the group from now on, itself. Batches come from `shard`.

        Raises:
            ConfigError: tokens mix in other ways than causal or full attention, or it is no model of `transformers`. StateError: it is parallelized.
        """
        refuse_unknown(model, self)
        if self.size > 1:
            Parallelized(model, self)
        return model

    def release(self, model: Model) -> Model:
        """The model as it was before `parallelize`, itself. StateError: it is not parallelized by this object."""
        if self.size > 1:
            self._part_of(model, "release").undo(model)
        return model

    def verify(self, model: nn.Module, batch: Mapping[str, Any]) -> Verification:
        """The largest relative differences of a `transformers` model run on a batch whole, on each rank, and cut over the group.

        The model is in evaluation mode meanwhile, and has the gradients that it had.

        Args:
            model: parallelized, with parameters that fit beside two of their gradients. batch: whole, as for `shard`, alike on all ranks.
        """
        if self.size > 1:
            self._part_of(model, "verify")
        before, was_training = [parameter.grad for parameter in model.parameters()], model.training
        tokens = next(batch[name] for name in TOKENS if batch.get(name) is not None)
        mask = batch.get("attention_mask")
        valid = (torch.ones(tokens.shape[:2], device=tokens.device) if mask is None else mask).to(torch.bool)
        model.eval()
        try:
            self.release(model)
            try:
                loss, logits, gradients = _run(model, batch, lambda values: (values * valid).sum() / valid.sum())
            finally:
                self.parallelize(model)
            is_valid = self.shard({"input_ids": valid.long()})["input_ids"].bool()
            mine = _run(model, self.shard(batch), lambda x: self.token_mean(x, is_valid), self.reduce_gradients)
        finally:
            model.train(was_training)
            for parameter, grad in zip(model.parameters(), before, strict=True):
                parameter.grad = grad
        # A gradient may be zero but for rounding, as those of biases before a softmax are: it is looked at beside the others.
        least = 1e-3 * max((float(grad.abs().max()) for grad in gradients.values()), default=0.0)
        found = {name: _difference(mine[2][name], grad, least=least) for name, grad in gradients.items()}
        worst = max(found, key=lambda name: found[name], default="")
        return Verification(
            loss=_difference(mine[0], loss),
            logits=_difference(self.unshard(mine[1], 1, tokens.shape[1])[valid], logits[valid]),
            gradients=found.get(worst, 0.0),
            parameter=worst,
        )

    def _part_of(self, model: nn.Module, verb: str) -> Parallelized:
        ours = Parallelized.part_of(model)
        if ours is None or ours.over is not self:
            raise StateError(f"{verb}: the model is not parallelized by this object: call parallelize(model) first")
        return ours

    def _agree_on(self, tensors: Mapping[str, Tensor]) -> None:
        # Of shapes alone, nobody says anything.
        if self.size > 1 and not any(isinstance(tensor, FakeTensor) for tensor in tensors.values()):
            self.group.agree("shard", ", ".join(f"{name} {digest(tensors[name])}" for name in sorted(tensors)))

    def _attention_problems(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, has_gqa: bool, ids: Tensor | None
    ) -> list[str]:
        shapes = f"query {list(q.shape)}, key {list(k.shape)}, value {list(v.shape)}"
        if not q.ndim == k.ndim == v.ndim == 4 or q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3]:
            return [f"{shapes}: [B, Z, L/N, A] is expected of each, of as many rows"]
        (rows, heads, local, _), parts = q.shape, self.multiple // self.size
        sizes = () if mask is None else zip(mask.shape[::-1], (self.size * local, local, heads, rows), strict=False)
        checks = (
            (q.shape[2:] != k.shape[2:], f"{shapes}: each has as many queries as keys, and both are of one size"),
            (
                heads != k.shape[1] and not has_gqa,
                f"{heads} heads and {k.shape[1]} key heads: enable_gqa=True shares them",
            ),
            (local % parts, f"{local} tokens a rank: {self.layout} has {parts} equal parts on each"),
            (
                mask is not None and self.method != "rsa",
                f'attn_mask in method="{self.method}": segments= works in all, any mask with method="rsa"',
            ),
            (
                any(n not in {1, of} for n, of in sizes),
                f"attn_mask {[] if mask is None else list(mask.shape)}: [.., {local}, {self.size * local}] is expected",
            ),
            (
                dropout and self.method == "ring",
                f'dropout {dropout} in method="ring": "rsa" and "ulysses" have it, or set it to 0 (attn_pdrop)',
            ),
        )
        problems = [*self.head_problems(heads, k.shape[1]), *(text for is_so, text in checks if is_so)]
        if ids is not None and (ids.ndim != 2 or ids.shape[1] != local or ids.is_floating_point()):
            problems.append(f"segments {list(ids.shape)} of {ids.dtype}: integers [{rows}, {local}]")
        return problems

    def head_problems(self, heads: int, key_heads: int) -> list[str]:
        """Reasons why so many heads cannot be computed here."""
        n = self.size
        if heads % key_heads:
            return [f"{heads} heads over {key_heads} key heads: no multiple"]
        if self.method != "ulysses":
            return []
        only = '"ulysses" needs a multiple{}; "ring" does not'
        problems = [f"{heads} heads over {n} ranks: {only.format('')}"] if heads % n else []
        if key_heads % n and n % key_heads:
            problems.append(f"{key_heads} key heads over {n} ranks: {only.format(' or a divisor')}")
        return problems


def _problems(mesh: Any, method: str, layout: str | None, gradients: str) -> list[str]:
    problems = []
    if not isinstance(mesh, DeviceMesh):
        problems.append(f'mesh={mesh!r}: a DeviceMesh of one dimension is expected, as mesh["cp"]')
    elif mesh.ndim != 1:
        names = ", ".join(map(repr, mesh.mesh_dim_names or ()))
        problems.append(f'mesh has {mesh.ndim} dimensions ({names}): give one of them, as mesh["cp"]')
    elif mesh.get_coordinate() is None:
        problems.append(f"mesh={mesh}: this process is not in it")
    problems += [*choice(*_LAYOUTS).problems("method", method), *choice("sum", "mean").problems("gradients", gradients)]
    if layout is not None and layout not in _LAYOUTS.get(method, {layout}):
        problems.append(f"layout={layout!r} for {method!r}: it has {', '.join(map(repr, _LAYOUTS[method]))}")
    return problems


def _run(
    model: nn.Module,
    batch: Mapping[str, Any],
    mean: Callable[[Tensor], Tensor],
    reduce: Callable[[nn.Module], None] = lambda _: None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, logits and gradients. `mean`: of a number a token, where there are no labels."""
    model.zero_grad(set_to_none=True)
    output = model(**batch)
    loss = output.loss if batch.get("labels") is not None else mean(output.logits.double().square().mean(-1))
    loss.backward()
    reduce(model)
    gradients = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), output.logits.detach(), gradients


def _difference(one: Tensor, other: Tensor, *, least: float = 0.0) -> float:
    one, other = one.double(), other.double()
    return float((one - other).abs().max() / other.abs().max().clamp_min(least or torch.finfo(torch.float64).tiny))
