"""A tiny model twice: under a session whose budget makes it move, and in plain PyTorch with the defined update.

What a test does, it does to both; then every bit must be the same. The plain one is stepped by `patrickstar.AdamW`, the
same update outside of any session, which `tests/optim/` compares with a definition of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import patrickstar
from patrickstar import BudgetError
from patrickstar.core.planes import STEP
from patrickstar.memory.works_under_way import MakeLane
from patrickstar.plan.actions import Issue, Wait
from patrickstar.plan.plan import Plan
from patrickstar.plan.update_choice import UpdateChoice
from patrickstar.session.manage import assemble
from patrickstar.torch_private import unobserved
from tests.parity.compare import compare_mappings, same_bits

WIDTH = 32
LAYERS = 6
CHUNK = 2048
"""Elements of a chunk: one layer of `mlp`, weight and bias."""
SLOT = 4 * CHUNK
TIGHT = 5 * SLOT + 4096
"""Bytes for five of the twenty-four slots of model data and the activations: one more than an update needs at once."""


def machine_with(name: str, nbytes: int | str, disk: Path) -> dict[str, Any]:
    """Arguments of `manage` for a machine with so many bytes where a model computes."""
    if name == "cpu+disk":
        return {"device": "cpu", "host_memory": nbytes, "disk": disk}
    below = {"host_memory": 12 * SLOT, "disk": disk} if name == "emulated+disk" else {}
    return {"device": "emulated", "device_memory": nbytes, **below}


MACHINES: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "emulated": lambda disk: machine_with("emulated", TIGHT, disk),
    "cpu+disk": lambda disk: machine_with("cpu+disk", TIGHT + SLOT, disk),
    "emulated+disk": lambda disk: machine_with("emulated+disk", TIGHT, disk),
}
"""Arguments of `manage` for machines on which `mlp` does not fit, given a directory."""

EMULATED = {"device": "emulated", "device_memory": TIGHT}
ROOMY = {"device": "emulated", "device_memory": "64MiB"}


def mlp(seed: int = 0, *, layers: int = LAYERS) -> nn.Sequential:
    """Linear layers of one chunk each; the same bits at each call."""
    torch.manual_seed(seed)
    return nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def tied() -> nn.Sequential:
    """Two of its layers share a weight."""
    model = mlp()
    model[8].weight = model[2].weight
    return model


def transposed() -> nn.Sequential:
    """A weight lies the other way round in memory."""
    model = mlp()
    model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    return model


def tiny_gpt2(**given: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **given))


def batch(number: int = 0, *, rows: int = 4, width: int = WIDTH) -> Tensor:
    """Inputs, the same for a number whatever has been drawn before."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(number))


def options(**given: Any) -> patrickstar.Options:
    """Slots are poisoned as they are given back, in every test."""
    return patrickstar.Options(**{"chunk_size": CHUNK, "poison": True, **given})


def loss_of(model: nn.Module, number: int = 0, *, rows: int = 4) -> Tensor:
    return model(batch(number, rows=rows)).square().mean()


def backward(model: nn.Module, optimizer: Any = None, number: int = 0, *, rows: int = 4) -> Tensor:
    """A forward and a backward; gives the loss, without its graph. The optimizer is not used."""
    loss = loss_of(model, number, rows=rows)
    loss.backward()
    return loss.detach().clone()


def finish(loss: Tensor, optimizer: Any) -> Tensor:
    """What comes after the forward in the ordinary loop; gives the loss, without its graph."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().clone()


def train_step(model: nn.Module, optimizer: Any, number: int = 0, *, rows: int = 4) -> Tensor:
    """One step of the ordinary loop; gives the loss."""
    loss = backward(model, optimizer, number, rows=rows)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train(model: nn.Module, optimizer: Any, steps: int = 3, *, first: int = 0) -> Tensor:
    """Some steps of the ordinary loop; gives their losses."""
    return torch.stack([train_step(model, optimizer, number) for number in range(first, first + steps)])


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> Callable[[], nn.Module]:
    """What makes the same bits at each call."""

    def build() -> nn.Module:
        torch.manual_seed(seed)
        return make()

    return build


class Layers(nn.Module):
    """A model around a `mlp`, whose forward is that of its layers unless it has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class WithLoss(Layers):
    """A model that computes its loss itself, so that a forecast sees all of a step."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Adapted(nn.Module):
    """A frozen base with low-rank adapters beside each layer, as LoRA has them."""

    def __init__(self, layers: int = 4, rank: int = 4) -> None:
        super().__init__()
        self.base = mlp(layers=layers)
        self.base.requires_grad_(False)
        torch.manual_seed(7)
        self.down = nn.ModuleList(nn.Linear(WIDTH, rank, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(rank, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(len(self.down)):
            linear, act = self.base[2 * number], self.base[2 * number + 1]
            x = act(linear(x) + self.up[number](self.down[number](x)))
        return x


def step_with_loss(model: nn.Module, optimizer: Any, number: int = 0, *, rows: int = 4) -> Tensor:
    return finish(model(batch(number, rows=rows)), optimizer)


def adamw(model: nn.Module) -> patrickstar.AdamW:
    """An update in which every hyper-parameter counts."""
    return patrickstar.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.1)


def managed(model: nn.Module, **keywords: Any) -> Any:
    """A session of a model; without a budget, the tight one of the emulated device."""
    return patrickstar.manage(model, adamw(model), **{"options": options(), **(keywords or EMULATED)})


class Pair:
    """A model under a session, and its plain twin.

    Attributes:
        model, original, session: the managed one, with the optimizer that was passed to `manage`.
        plain, plain_optimizer: the twin.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module] = mlp,
        *,
        make_optimizer: Callable[[nn.Module], Any] = adamw,
        before: Callable[[nn.Module, Any], object] | None = None,
        with_options: Mapping[str, Any] | None = None,
        make_lane: MakeLane | None = None,
        choice: UpdateChoice | None = None,
        **keywords: Any,
    ) -> None:
        """`before`: done to both before `manage` is called. `make_lane`, `choice`: lanes, and when chunks are updated, of the test's own."""
        self.plain, self.model = build(), build()
        self.plain_optimizer, self.original = make_optimizer(self.plain), make_optimizer(self.model)
        if before is not None:
            before(self.plain, self.plain_optimizer)
            before(self.model, self.original)
        inside = {"make_lane": make_lane} if choice is None else {"make_lane": make_lane, "choice": choice}
        manage = patrickstar.manage if not any(inside.values()) else partial(assemble, **inside)
        self.session = manage(
            self.model, self.original, options=options(**(with_options or {})), **(keywords or EMULATED)
        )

    @property
    def optimizer(self) -> Any:
        """The session's."""
        return self.session.optimizer

    def each(self, act: Callable[..., Any], *args: Any, **keywords: Any) -> tuple[Any, Any]:
        """`act(model, optimizer, ...)` for both from the same random state: what the plain one gave, what the managed."""
        state = torch.get_rng_state()
        with unobserved():  # what the twin makes is no matter of the session's
            want = act(self.plain, self.plain_optimizer, *args, **keywords)
        torch.set_rng_state(state)
        return want, act(self.model, self.optimizer, *args, **keywords)

    def same(self, act: Callable[..., Any], *args: Any, **keywords: Any) -> None:
        """As `each`; what it gives is the same, and so are the weights where parameters are ordinary ones."""
        want, got = self.each(act, *args, **keywords)
        assert alike(want, got), f"{got}, plain PyTorch has {want}"
        if is_ordinary(self.model):  # where they lie
            assert alike(list(self.plain.parameters()), list(self.model.parameters()))

    def train(self, steps: int = 3, *, first: int = 0, by: Callable[..., Any] | None = None) -> None:
        """Trains both by steps of the ordinary loop, or these; every loss must be the same."""
        if by is None:
            self.same(train, steps, first=first)
        for number in range(first, first + steps) if by is not None else ():
            self.same(by, number)

    def train_same(self, steps: int = 3, *, first: int = 0, by: Callable[..., Any] | None = None) -> None:
        """As `train`; then all that is held is the same, too."""
        self.train(steps, first=first, by=by)
        self.expect_same()

    def close(self) -> None:
        """Closes the session: the model has ordinary parameters again, of the same bits."""
        self.session.close()
        assert is_ordinary(self.model)
        expect_bits(values(self.plain), values(self.model))

    def step(self) -> None:
        """What comes after a backward, for both."""
        self.each(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))

    def expect_same(self) -> None:
        """Weights, buffers, moments and counts of updates have the same bits, and bytes have moved."""
        assert_same(self.plain, self.plain_optimizer, self.session)
        assert sum(self.session.stats().moved.values()), "nothing moved, which shows nothing"

    def expect_same_gradients(self) -> None:
        """So have the gradients."""
        want = {name: p.grad for name, p in self.plain.named_parameters() if p.grad is not None}
        assert not (found := compare_mappings("gradient of", want, dict(self.session.gradients()))), "\n".join(found)


def alike(want: Any, got: Any) -> bool:
    """Whether two results, tensors in lists too, have the same bits."""
    if isinstance(want, Tensor):
        return same_bits(want, got)
    if isinstance(want, list | tuple):
        return len(want) == len(got) and all(map(alike, want, got))
    return bool(want == got)


MakePair = Callable[..., Pair]


def assert_same(plain: nn.Module, plain_optimizer: Any, session: patrickstar.Session) -> None:
    """What a session holds has the bits of a plain model and its optimizer."""
    found = compare_mappings("state dict's", plain.state_dict(), dict(session.state_dict()))
    if plain_optimizer is not None:
        found += compare_mappings("state of", states(plain_optimizer), held_states(session))
    assert not found, "\n".join(found)


def states(optimizer: Any) -> dict[str, Tensor]:
    """Moments and counts of updates by the parameter's number."""
    return {
        f"{number}.{key}": value
        for number, entry in optimizer.state_dict()["state"].items()
        for key, value in entry.items()
    }


def held_states(session: patrickstar.Session) -> dict[str, Tensor]:
    """The same of a session, read one tensor at a time: the whole may not fit."""
    parts, found = session._parts, dict[str, Tensor]()
    names = {id(parameter): name for name, parameter in parts.named.items()}
    parameters = [parameter for group in session.optimizer.param_groups for parameter in group["params"]]
    session.stats()  # a pending step is carried out
    for number, parameter in enumerate(parameters):
        name = names[id(parameter)]
        if name in parts.steps:
            found[f"{number}.step"] = torch.tensor(float(parts.steps[name]))
            for plane in ("exp_avg", "exp_avg_sq"):
                found[f"{number}.{plane}"] = parts.weights.read(name, plane)
    return found


def everything(session: patrickstar.Session) -> dict[str, Tensor]:
    """Copies of all that a session would have to keep: weights, buffers, moments, counts."""
    held = {name: tensor.clone() for name, tensor in session.state_dict().items()}
    return held | ({} if session.optimizer is None else held_states(session))


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's state."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def expect_bits(want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> None:
    """Two mappings of tensors have the same keys and bits."""
    assert not (found := compare_mappings("", want, got)), "\n".join(found)


def is_ordinary(model: nn.Module) -> bool:
    """Whether no parameter is a session's."""
    return all(type(parameter) is nn.Parameter for parameter in model.parameters())


def in_the_smallest(
    begin: Callable[[int], Any], nbytes: int = 4096, *, spare: int = 0
) -> tuple[Any, list[BudgetError]]:
    """What `begin` gives in the first budget that is enough, from so many bytes on; and the refusals, each of which names the next."""
    refusals: list[BudgetError] = []
    for _ in range(20):
        try:
            return begin(nbytes), refusals
        except BudgetError as refusal:
            assert refusal.smallest_bytes is not None
            assert refusal.smallest_bytes + spare > nbytes, str(refusal)
            refusals.append(refusal.with_traceback(None))  # whose frames would keep a session
            nbytes = refusal.smallest_bytes + spare
    raise AssertionError(f"still refused after {[refusal.smallest_bytes for refusal in refusals]}")


def update_moments(plan: Plan) -> tuple[dict[int, int], dict[int, int]]:
    """The moments in which the update of each chunk is issued and waited for."""
    begins, ends = dict[int, int](), dict[int, int]()
    for index, actions in enumerate(plan.moments):
        for action in actions:
            if isinstance(action, Issue | Wait) and action.of.plane == STEP:
                (begins if isinstance(action, Issue) else ends)[action.of.chunk] = index
    return begins, ends


def store_of(session: patrickstar.Session) -> Any:
    """What carries out actions."""
    return session._parts.executor.store
