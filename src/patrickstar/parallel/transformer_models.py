"""Models of `transformers` whose attention and loss go over ranks, by its public registries of attention and masks and its setter of the loss.

(1) What is not known to be right is refused: by configuration and modules when a model is parallelized, by arguments when it is called.
(2) A loss of the rank's own tokens is never given out: the model's loss is ours, or an error.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from patrickstar.config.kinds import refuse
from patrickstar.errors import ConfigError, StateError
from patrickstar.hooks import watch_arguments
from patrickstar.parallel.cut_batches import TOKENS
from patrickstar.parallel.group import MeshGroup
from patrickstar.parallel.tensor_2d import grid_of
from patrickstar.parallel.token_losses import CausalLoss, token_losses

_MORE_THAN_CAUSAL: Final = ("sliding_window", "softcap", "s_aux", "position_bias")
_OF_LENGTH: Final = frozenset({"dynamic", "longrope"})
_KINDS_OF_LAYERS: Final = frozenset({"full_attention"})
_WINDOWS: Final = frozenset({"sliding_attention", "chunked_attention"})


class Parallelized:
    """The part of a model that is ours: its attention and loss over a `ContextParallel`, and a look at its calls. A copy of the model shares it."""

    def __init__(self, model: Any, over: Any) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415  (an extra, and seconds)

        self.over = over
        self._has_made_loss = False
        self._signature = inspect.signature(model.forward)
        self._before = (model.config._attn_implementation, vars(model).get("_loss_function"))
        # A name of this one's own: two models of one process may differ. The registries keep it for as long as the program runs.
        name = f"patrickstar_{over.method}_{id(self):x}"
        AttentionInterface.register(name, self.attend)
        AttentionMaskInterface.register(name, self.mask)
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise ConfigError(f"parallelize: {type(model).__name__} does not let its attention be set: {_ATTENTION}")
        model.loss_function = CausalLoss(self.mean, shifts=False)
        self._watched = watch_arguments(model, self._before_forward, self._after_forward)

    def __deepcopy__(self, _: Any) -> Parallelized:
        return self  # ranks are not copied

    @classmethod
    def part_of(cls, model: nn.Module) -> Parallelized | None:
        """The part of a model that is ours, if it is parallelized."""
        loss = vars(model).get("_loss_function")
        ours = loss.mean.__self__ if isinstance(loss, CausalLoss) and hasattr(loss.mean, "__self__") else None
        return ours if isinstance(ours, cls) else None

    def undo(self, model: Any) -> None:
        """Has a model be as it was."""
        implementation, loss = self._before
        self._watched.close()
        model.set_attn_implementation(implementation)
        if loss is None:
            del model._loss_function
        else:
            model.loss_function = loss

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The output [B, L/N, Z, A], as an attention of `transformers` gives it, and no weights."""
        odd = [name for name in _MORE_THAN_CAUSAL if kwargs.get(name) is not None]
        refuse([f"{type(module).__name__} gives {name}: {_ATTENTION}" for name in odd], of="a parallelized model")
        segments = None
        if attention_mask is not None:
            _refuse_mask(attention_mask)
            segments = attention_mask[:, 0, 0, :]
        number = getattr(module, "layer_idx", None)
        layer = type(module).__name__ + ("" if number is None else f" of layer {number}")
        out = self.over.within(layer).attention(
            query,
            key,
            value,
            dropout_p=dropout,
            is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
            scale=scaling,
            enable_gqa=True,
            segments=segments,
        )
        return out.transpose(1, 2).contiguous(), None

    def mask(self, *_: Any, attention_mask: Tensor | None = None, use_vmap: bool = False, **kwargs: Any) -> None:
        """No mask: what `shard` has made is none that is asked for here. Cut positions jump, and look like packed documents: that is passed over."""
        if attention_mask is not None:
            _refuse_mask(attention_mask)
        if use_vmap or kwargs.get("local_size") is not None:
            refuse([f"it masks more than what comes later: {_ATTENTION}"], of="a parallelized model")

    def mean(self, logits: Tensor, labels: Tensor, ignore_index: int, count: Any) -> Tensor:
        """The loss of the group's tokens, as the model's own is of its tokens."""
        self._has_made_loss = True
        mean: Tensor = self.over.token_mean(
            token_losses(logits, labels, ignore_index), labels != ignore_index, of=count
        )
        return mean

    def _before_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {name: value for name, value in self._given(args, kwargs).items() if value is not None}
        self._has_made_loss = False
        if "past_key_values" in given or given.get("logits_to_keep", 0):
            raise StateError("generate and caches need whole sequences: call cp.release(model) first")
        if "position_ids" not in given:
            raise StateError("a batch without position_ids: call the model with **cp.shard(batch)")
        if "labels" in given and "shift_labels" not in given:
            raise StateError("labels that are not shifted: call the model with **cp.shard(batch)")
        if "attention_mask" in given:
            _refuse_mask(given["attention_mask"])

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = self._given(args, kwargs)
        if given.get("labels") is not None and not self._has_made_loss:
            raise StateError(
                f"{type(model).__name__} makes its loss itself, of this rank's own tokens: call it without labels, and then "
                "cp.cross_entropy(output.logits, labels) with this rank's labels"
            )
        tokens = next(given[name] for name in TOKENS if given.get(name) is not None)
        logits = getattr(output, "logits", None)
        if logits is not None and logits.shape[:2] != tokens.shape[:2]:
            raise StateError(
                f"{type(model).__name__} has logits {list(logits.shape)} for tokens {list(tokens.shape[:2])}: only what it gives "
                f"a token can go over ranks. {_ATTENTION}"
            )

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        given = dict(self._signature.bind_partial(*args, **kwargs).arguments)
        return {**given, **given.pop("kwargs", {})}


def groups_of(model: nn.Module) -> dict[str, MeshGroup]:
    """The groups, by the mesh's dimension: none of a model that is not cut. ConfigError: gradients are for others to average."""
    grid, ours = grid_of(model), Parallelized.part_of(model)
    if ours is not None and ours.over.gradients == "mean":
        refuse(['gradients="mean" is for DDP and FSDP2, which average: leave it out under manage()'], of="manage")
    lines = () if grid is None else (grid.rows, grid.cols)
    return {group.name: group for group in (*lines, *(() if ours is None else (ours.over.group,)))}


_ATTENTION: Final = "call ContextParallel.attention in a model of your own"


def refuse_unknown(model: nn.Module, over: Any) -> None:
    """Nothing, where a model is known to be right over ranks. Raises as `ContextParallel.parallelize` does."""
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        kind = type(model).__name__
        refuse([f"{kind} is no model of transformers: {_ATTENTION}, and cross_entropy"], of="parallelize")
    if Parallelized.part_of(model) is not None:
        raise StateError("parallelize: the model is parallelized: call release(model) first")
    refuse(list(_problems(model, over)), of=f"parallelize {type(model).__name__}")


def _problems(model: Any, over: Any) -> Iterator[str]:
    config, modules = model.config.get_text_config(), dict(model.named_modules())

    def has(name: str) -> Any:
        return getattr(config, name, None)

    mixing = [name for name, each in modules.items() if isinstance(each, nn.modules.conv._ConvNd | nn.RNNBase)]
    mixing += sorted(set(has("layer_types") or ()) - _KINDS_OF_LAYERS - _WINDOWS)
    window = has("sliding_window") if getattr(config, "use_sliding_window", True) else None
    rope = has("rope_parameters") or {}
    ropes = {str(each.get("rope_type")) for each in (rope, *(v for v in rope.values() if isinstance(v, dict)))}
    parameters = inspect.signature(model.forward).parameters
    takes_more = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    checks = (
        (mixing, f"tokens mix in other ways than attention ({', '.join(mixing[:3])}): {_ATTENTION}"),
        (
            window or _WINDOWS & set(has("layer_types") or ()),
            f"attention has windows (sliding_window={window}): set it to None if all is to be seen",
        ),
        (
            has("attn_logit_softcapping"),
            "attention has soft caps (attn_logit_softcapping), and is to be causal or full",
        ),
        (config.is_encoder_decoder or has("add_cross_attention"), "it attends to another sequence: models of one can"),
        (has("output_router_logits"), "its router's loss is of a rank's own tokens: set output_router_logits=False"),
        (ropes & _OF_LENGTH, f"its positions depend on the length that a rank has (rope_type {', '.join(ropes)})"),
        (
            any(name.rpartition(".")[2] == "pooler" for name in modules),
            "it pools a sequence's first token, which one rank has: build it with add_pooling_layer=False",
        ),
        (any(each._compiled_call_impl is not None for each in modules.values()), "it is compiled: without that it can"),
        (
            "position_ids" not in parameters or not takes_more,
            f"its forward takes no position_ids, or no further arguments: {_ATTENTION}",
        ),
    )
    yield from (text for is_so, text in checks if is_so)
    if heads := has("num_attention_heads"):
        yield from over.head_problems(heads, has("num_key_value_heads") or heads)


def _refuse_mask(mask: Tensor) -> None:
    """Nothing for segments as `shard` makes them."""
    if mask.ndim != 4 or mask.shape[1:3] != (1, 1) or mask.dtype != torch.int32:
        raise StateError(f"attention_mask {list(mask.shape)} of {mask.dtype}: call the model with **cp.shard(batch)")
