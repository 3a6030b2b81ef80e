"""2D tensor parallelism (Optimus, arXiv 2104.05343): every matrix, activation and optimizer state in q x q blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from patrickstar.deferred.deferred_init import deferred_by
from patrickstar.errors import ConfigError, StateError
from patrickstar.hooks import watch_root
from patrickstar.parallel.grid import Cut, Grid, gather, piece
from patrickstar.parallel.group import MeshGroup
from patrickstar.parallel.layers_2d import (
    BlockLayer,
    LinearBlock,
    SharedInput,
    TakeBlock,
    TiedHeadBlock,
    cross_entropy_of_blocks,
)
from patrickstar.parallel.plans_2d import KINDS, Placed, Plan, placed
from patrickstar.parallel.token_losses import CausalLoss, mean_alone
from patrickstar.parameters.transforms import is_compiled
from patrickstar.torch_private import without_modes

_Model = TypeVar("_Model", bound=nn.Module)
_SEEN: Final = 1024


class Tensor2D:
    """2D tensor parallelism over a mesh of two dimensions of equal size q: rows, then columns.

        tp = Tensor2D(mesh["row", "col"])
        tp.parallelize(model)  # before the optimizer is made
        loss = model(**tp.shard(batch)).loss

    Activations are cut by the batch over rows and by features, heads or the vocabulary over columns. Every rank of a column has the same pieces of
    vectors (biases, norms, positions), and gradients of these are summed there in backward. Loss and gradients are those of one process.
    With q = 1 nothing changes. Objects hold a mesh and no more; models of several can live in one process.

    Raises:
        ConfigError: a mesh of another shape.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.grid = Grid.of(mesh)

    @property
    def size(self) -> int:
        """Number of rows, and of columns."""
        return self.grid.q

    def parallelize(self, model: _Model, plan: Plan | None = None) -> _Model:
        """Turns a model's parameters into this rank's blocks, in place, and gives it back. All ranks do it.

        Parameters keep their names, and are ordinary ones. They may have been built under `deferred_init`; then one at a time is made whole.

        Args:
            plan: names of modules with `*` to "linear", "linear_qkv" (queries, keys and values side by side), "norm", "embedding", "positions" or
                "head". `a.q+k+v`: linear layers that are called with one tensor after each other, which is then sent once. None: the model's own,
                by its `config.model_type`: Llama and GPT-2. A module's code must take the number of heads from what it is given.
        Raises:
            ConfigError: a model without a plan, a plan that does not fit, or sizes that do not divide by q, with the numbers.
            StateError: a model that is parallelized already. RankError: other ranks have other values, as of another seed; on all ranks.
        """
        if grid_of(model) is not None:
            raise StateError(f"{type(model).__name__} is parallelized already: its parameters are blocks")
        if any(map(is_compiled, model.modules())):
            raise ConfigError(
                "a compiled model cannot be cut into blocks: parallelize what torch.compile was given, and do not compile it"
            )
        if self.size == 1:
            return model
        found = placed(model, plan, self.size)
        vocabulary = [one.module.num_embeddings for one in found if one.kind == "embedding"]
        device = next(model.parameters()).device
        _replace(model, found, self.grid)
        if hasattr(type(model), "loss_function") and vocabulary:  # a property, which warns when it is asked
            mean = partial(cross_entropy_of_blocks, self.grid, vocabulary[0])
            setattr(model, "loss_function", CausalLoss(mean, shifts=True))  # noqa: B010
        watch_root(model, RandomStreams(self.grid.everyone.rank, device), in_copies=True)
        return model

    def shard(self, batch: Any) -> Any:
        """The rows of a batch that belong to this rank's row of the mesh, from a tensor or from a mapping of tensors.

        What has one row for all of the batch (`position_ids`) stays whole, and so does what is no tensor. `inputs_embeds` are cut by columns,
        too. Labels are not shifted.

        Raises:
            ConfigError: fewer rows than q.
        """
        if isinstance(batch, Tensor):
            return self._rows(batch)
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
        n_rows = max((value.shape[0] for value in tensors.values()), default=0)
        sharded = {name: self._rows(value) for name, value in tensors.items() if value.shape[0] == n_rows}
        if "inputs_embeds" in sharded:
            sharded["inputs_embeds"] = piece(sharded["inputs_embeds"], -1, self.grid.cols.rank, self.size)
        return {**batch, **sharded}

    def unshard(self, tensor: Tensor) -> Tensor:
        """The whole of which all ranks have blocks: the first dimension by row, the last, if there is another, by column. Without a gradient."""
        tensor = tensor.detach()
        if self.size == 1:
            return tensor
        if tensor.dim() > 1:
            tensor = self._gathered(tensor, tensor.dim() - 1, self.grid.cols)
        return self._gathered(tensor, 0, self.grid.rows)

    def cross_entropy(
        self, logits: Tensor, labels: Tensor, vocab_size: int | None = None, *, ignore_index: int = -100
    ) -> Tensor:
        """The mean cross-entropy of the whole batch, the same on all ranks; 0 where no label is valid. Its gradient is this rank's share.

        Args:
            logits: this rank's block [B, ..., V]. labels: [B, ...] of its row, each the one that its logits are about.
            vocab_size: of the whole, where q does not divide it.
        """
        if self.size == 1:
            return mean_alone(logits, labels, ignore_index)
        size = logits.shape[-1] * self.size if vocab_size is None else vocab_size
        return cross_entropy_of_blocks(self.grid, size, logits, labels, ignore_index)

    def state_dict(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors of what `model.state_dict()` has, in the model's own layout, one at a time. All ranks ask for all of them."""
        return self._whole(model, model.state_dict().items())

    def gradients(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Names and whole gradients of the parameters that have one, one at a time. All ranks ask for all of them."""
        return self._whole(model, ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None))

    def _whole(self, model: nn.Module, blocks: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        cuts = cuts_of(model)
        for name, block in blocks:
            yield name, cuts[name].whole(block, self.grid) if name in cuts else block

    def _rows(self, tensor: Tensor) -> Tensor:
        if tensor.shape[0] < self.size:
            raise ConfigError(
                f"a batch of {tensor.shape[0]} over {self.size} rows of ranks: each row of the mesh takes one at least"
            )
        # As even as can be: a row without any would have nothing to do.
        return tensor.tensor_split(self.size)[self.grid.rows.rank]

    def _gathered(self, tensor: Tensor, dim: int, line: MeshGroup) -> Tensor:
        sizes = line.gather(torch.tensor(tensor.shape[dim], device=tensor.device))
        return torch.cat(gather(tensor, dim, line, sizes.tolist()), dim)


def _replace(model: nn.Module, found: Sequence[Placed], grid: Grid) -> None:
    tables = {id(one.module.weight) for one in found if one.kind == "embedding"}
    together: dict[str, list[LinearBlock]] = {}
    seen = hashlib.sha256()
    take = _take_blocks(grid, seen)
    for one in found:
        owner, _, name = one.name.rpartition(".")
        parent: Any = model.get_submodule(owner)
        if isinstance(getattr(parent, name), BlockLayer):
            continue  # the owner has several names
        is_tied = one.kind == "head" and id(one.module.weight) in tables
        layer = (TiedHeadBlock if is_tied else KINDS[one.kind][0])(grid.within(one.name), one.module, take)
        setattr(parent, name, layer)
        if one.kind == "linear_qkv" and hasattr(parent, "split_size"):  # GPT-2: where queries end and keys begin
            parent.split_size //= grid.q
        if one.together and isinstance(layer, LinearBlock):
            together.setdefault(one.together, []).append(layer)
    for layers in together.values():
        SharedInput(layers)
    grid.everyone.agree(
        "the values that blocks are cut from",
        f"digest {seen.hexdigest()[:8]}",
        advice="Call torch.manual_seed(0) before the model is built, on all of them",
    )


def _take_blocks(grid: Grid, seen: hashlib._Hash) -> TakeBlock:
    """Makes blocks of parameters, one of each, however many modules have it. `seen`: is told of some elements of all of them."""
    made: dict[nn.Parameter, tuple[nn.Parameter, Cut]] = {}

    def take(parameter: nn.Parameter, cut: Cut) -> nn.Parameter:
        if parameter not in made:
            recorder = deferred_by(parameter)
            whole = parameter.detach() if recorder is None else recorder.value(parameter)
            if not whole.is_meta:
                some = whole.flatten()[:: max(1, whole.numel() // _SEEN)]
                seen.update(some.cpu().contiguous().view(torch.uint8).numpy().data)
            made[parameter] = nn.Parameter(cut.block(whole, grid), requires_grad=parameter.requires_grad), cut
        block, as_cut = made[parameter]
        if as_cut != cut:
            raise ConfigError(
                f"a parameter {list(cut.shape)} of several modules would be cut in two ways: {as_cut}, {cut}; plan= them alike"
            )
        return block

    return take


class RandomStreams:
    """Random numbers of ranks whose activations are blocks of one tensor: masks of dropout must differ from block to block.

    Outside of a forward all ranks have the same random state, with which they shuffle data alike. In it each has another, which follows from that one
    and from the rank's place. So whoever saves random states, or restores them to run a block again, needs to know nothing of this.

    Events of a model's forward, as `patrickstar.hooks.watch_root` takes them. `place`: this rank's number in its grid.
    """

    def __init__(self, place: int, device: torch.device) -> None:
        self._place, self._devices = place, [device] if device.type == "cuda" else []

        self._forward = ExitStack()
        self._began: list[bytes] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> RandomStreams:
        return self  # of a copied model, whose forwards are none within another's

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        """Switches to this rank's numbers."""
        if kwargs.get("past_key_values") is not None:
            raise StateError(
                "a 2D model does not generate: its logits are blocks. Gather its state_dict() into a whole model for that"
            )
        if not module.training:
            return
        seed = int.from_bytes(
            hashlib.sha256(b"".join([*self._states(), self._place.to_bytes(4, "little")])).digest()[:8], "little"
        )
        self._forward.enter_context(torch.random.fork_rng(self._devices))
        torch.manual_seed(seed)
        self._began = self._states()

    def after_forward(self, module: nn.Module) -> None:  # noqa: ARG002
        """Goes back to those of all; the next forward gets others, if this one has drawn any."""
        has_drawn = self._began and self._began != self._states()
        self._began = []
        self._forward.close()
        if has_drawn:
            torch.rand(())

    def _states(self) -> list[bytes]:
        with without_modes():  # fake tensors are none that can be read
            states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]
            return [state.numpy().tobytes() for state in states]


def grid_of(model: nn.Module) -> Grid | None:
    """The ranks that have blocks of a model, where it is cut."""
    return next((module.grid for module in model.modules() if isinstance(module, BlockLayer)), None)


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """The ways in which parameters are cut, by all their names."""
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, BlockLayer))
    return {f"{name}.{own}".lstrip("."): cut for name, layer in layers for own, cut in layer.cuts.items()}
