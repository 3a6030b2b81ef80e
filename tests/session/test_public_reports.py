"""What people have reported of other libraries that put parameters elsewhere, tried on ours: right, or refused before anything is computed.

Everything fits, in fp32 on the CPU, where a user least expects a difference.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import patrickstar
from patrickstar import StateError
from patrickstar.tracing.seen_operations import shown_to
from tests.composed import Composed
from tests.parity.compare import same_bits
from tests.session.builders import adamw, assert_same, expect_bits, finish, seeded, values
from tests.session.random_parts import Default, Silent

MakePair = Callable[..., Any]
Forward = Callable[[Any, Tensor], Tensor]
UNREADABLE = "placeholder|Storage that is invalid"


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def inputs(number: int = 0, rows: int = 4) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(number))


@pytest.fixture
def managed() -> Iterator[nn.Sequential]:
    model = stack()
    with patrickstar.manage(model, adamw(model), device="emulated", device_memory="64MiB"):
        yield model


# views of a weight that autograd saves


def spectral(use: Forward) -> nn.Module:
    """A real weight that is used as a complex one, by a function of it."""
    torch.manual_seed(0)
    return Composed(
        lambda model, x: use(model, model.first(x)).square().sum() + model.odd.sum(),
        first=nn.Linear(8, 8),
        odd=nn.Parameter(torch.randn(3)),  # so that the weight does not begin where its unit does
        weight=nn.Parameter(torch.randn(3, 2)),
    )


VIEWS: dict[str, Forward] = {
    "multiplied": lambda m, x: torch.fft.irfft(torch.fft.rfft(x)[..., :3] * torch.view_as_complex(m.weight), n=8),
    "conjugated": lambda m, x: (torch.fft.rfft(x)[..., :3] * torch.view_as_complex(m.weight).conj()).abs(),
    "einsum": lambda m, x: torch.einsum("bi,i->b", torch.fft.rfft(x)[..., :3], torch.view_as_complex(m.weight)).abs(),
    "bmm": lambda m, x: torch.bmm(torch.fft.rfft(x)[None, :, :3], torch.view_as_complex(m.weight)[None, :, None]).abs(),
    "transposed": lambda m, x: (
        torch.fft.rfft(x)[..., :3] @ torch.view_as_complex(m.weight)[:, None].mH.mT.conj()
    ).abs(),
    "its imaginary part": lambda m, x: x[:, :3] * torch.view_as_complex(m.weight).conj().imag,
    "its bits": lambda m, x: x[:, :2] * (m.weight.view(torch.int32) % 7)[0] * m.weight[1],
    "as other numbers": lambda m, x: x[:, :6] * m.weight.view(torch.uint8)[:2].flatten()[:6] * m.weight.flatten(),
}


@pytest.mark.parametrize("use", VIEWS.values(), ids=VIEWS)
def test_a_view_of_a_weight_keeps_its_traits_until_backward(make_pair: MakePair, use: Forward) -> None:
    def step(model: nn.Module, optimizer: Any, number: int) -> Tensor:
        return finish(model(inputs(number)), optimizer)

    for tight in ({"device": "cpu"}, {"device": "emulated", "device_memory": "64KiB"}):
        pair = make_pair(lambda: spectral(use), with_options={"chunk_size": 1024}, **tight)
        pair.train(3, by=step)
        expect_bits(pair.plain.state_dict(), dict(pair.session.state_dict()))


# transforms, tracers, compilers, and classes that switch overrides off


def jagged(x: Tensor, *lengths: int) -> Tensor:
    return torch.nested.nested_tensor(list(x.split(lengths)), layout=torch.jagged)


def under(context: Any, act: Callable[[], Any]) -> Any:
    with context:
        return act()


def forward_mode(model: nn.Sequential, x: Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        weight = torch.autograd.forward_ad.make_dual(model[0].weight, torch.ones(8, 8))
        return torch.autograd.forward_ad.unpack_dual(F.linear(x, weight)).tangent


def traced_by_fake_tensors(model: nn.Module, x: Tensor) -> Any:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return model(mode.from_tensor(x))


REFUSED: dict[str, tuple[Forward, str]] = {
    "grad": (lambda m, x: torch.func.grad(lambda x: m(x).sum())(x), "torch.func"),
    "grad of a layer": (lambda m, x: torch.func.grad(lambda x: m[0](x).sum())(x), "torch.func"),
    "jvp": (lambda m, x: torch.func.jvp(m, (x,), (x,))[1], "torch.func"),
    "jacrev": (lambda m, x: torch.func.jacrev(m)(x), "torch.func"),
    "jacfwd": (lambda m, x: torch.func.jacfwd(m)(x), "torch.func"),
    "hessian": (lambda m, x: torch.func.hessian(lambda x: m(x).sum())(x), "torch.func"),
    "vmap": (lambda m, x: torch.vmap(m)(x), "torch.func"),
    "forward mode over a weight": (forward_mode, "forward-mode"),
    "functional_call": (
        lambda m, x: torch.func.functional_call(m, dict(stack().named_parameters()), x),
        "functional_call",
    ),
    "overrides off": (lambda m, x: under(torch._C.DisableTorchFunctionSubclass(), lambda: m(x)), "__torch_function__"),
    "a class that asks no other": (lambda m, x: m(x.as_subclass(Silent)), "Silent.*as_subclass"),
    "jagged": (lambda m, x: m(jagged(x, 1, 3)), "NestedTensor.*to_padded_tensor"),
    "jagged, other lengths": (lambda m, x: m(jagged(x, 2, 2)), "NestedTensor"),
    "fake tensors": (traced_by_fake_tensors, "FakeTensorMode"),
    "jit.trace": (lambda m, x: torch.jit.trace(m, x), "jit.trace"),
    "export": (lambda m, x: torch.export.export(m, (x,)).module()(x), "FakeTensorMode"),
    "compile": (lambda m, x: torch.compile(m, backend="eager")(x), "torch.compile.*the loss"),
    "compile, aot_eager": (lambda m, x: torch.compile(m, backend="aot_eager")(x), "torch.compile"),
    "a function that is compiled": (
        lambda m, x: torch.compile(lambda x: m(x).sum(), backend="eager")(x),
        "torch.compile",
    ),
    "module.compile": (lambda m, x: (m.compile(backend="eager"), m(x)), "torch.compile"),
    "a layer's compile": (
        lambda m, x: (m[0].compile(backend="eager"), m(x)),
        "torch.compile.* of Linear cannot see 0.weight",
    ),
}


@pytest.mark.parametrize(("act", "says"), REFUSED.values(), ids=REFUSED)
def test_what_would_read_placeholders_is_refused_before_anything_is_computed(
    managed: nn.Sequential, act: Forward, says: str
) -> None:
    calls: list[str] = []
    managed[0].register_forward_hook(lambda *_: calls.append("0"))
    with pytest.raises(StateError, match=says):
        act(managed, inputs())
    torch._dynamo.reset()
    assert not calls
    for module in managed.modules():
        module._compiled_call_impl = None
    assert same_bits(stack()(inputs()), managed(inputs()))


@pytest.mark.parametrize(
    "wrap", [lambda m: torch.compile(m, backend="eager"), lambda m: m.compile(backend="eager") or m]
)
def test_a_model_that_is_compiled_already_is_not_run_by_use(wrap: Any) -> None:
    model = wrap(stack())
    with patrickstar.manage(model, adamw(model)), pytest.raises(StateError, match=r"torch\.compile"):
        model(inputs())


UNSEEN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "grad_and_value": lambda w, x: torch.func.grad_and_value(lambda w: (x @ w.T).sum())(w),
    "grad": lambda w, x: torch.func.grad(lambda w: (x @ w.T).sum())(w),
    "vjp": lambda w, x: torch.func.vjp(lambda w: x @ w.T, w),
    "vmap": lambda w, x: torch.vmap(lambda w: w * 2)(w),
    "functionalize": lambda w, x: torch.func.functionalize(lambda w: w * 2)(w),
    "overrides off": lambda w, x: under(torch._C.DisableTorchFunctionSubclass(), lambda: x @ w.T),
    "all overrides off": lambda w, x: under(torch._C.DisableTorchFunction(), lambda: x @ w.T),
    "a class that asks no other": lambda w, x: F.linear(x.as_subclass(Silent), w),
    "a compiled function": lambda w, x: torch.compile(lambda w: x @ w.T, backend="eager")(w),
    "a detached alias": lambda w, x: torch.func.grad(lambda w: (x @ w.T).sum())(w.detach()),
    "its gradient": lambda w, x: torch.func.grad(lambda g: (x @ g.T).sum())(w.grad),
    "its memory": lambda w, x: under(torch._C.DisableTorchFunctionSubclass(), lambda: w.detach().numpy()),
}


@pytest.mark.parametrize("act", UNSEEN.values(), ids=UNSEEN)
def test_a_placeholder_that_no_check_sees_cannot_be_read(managed: nn.Sequential, act: Any) -> None:
    """torch itself raises: an error, or the right values, and never a number that is neither."""
    managed(inputs()).sum().backward()
    weight, plain = managed[0].weight, stack()[0].weight
    with pytest.raises((StateError, RuntimeError), match=f"{UNREADABLE}|torch.func"):
        act(weight, inputs())
    assert same_bits(plain.detach(), weight.detach().clone())


OPERATIONS = [
    pytest.param(info, id=info.formatted_name, marks=pytest.mark.campaign if number % 20 != 10 else ())
    for number, info in enumerate(info for info in op_db if info.supports_dtype(torch.float32, "cpu"))
]
"""Every twentieth in `make test`; `tests/tracing/test_trial_operations.py` has others."""


@pytest.mark.parametrize("info", OPERATIONS)
def test_each_operation_of_torch_gives_what_it_gives_of_a_plain_tensor(info: Any) -> None:
    """A managed weight in the place of each floating input of the first sample: the same bits, gradients too, or the same refusal of torch's."""
    torch.manual_seed(0)
    sample = next(iter(info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd)), None)
    leaves, shape = tree_flatten((sample.input, sample.args, sample.kwargs) if sample is not None else ())
    places = [place for place, leaf in enumerate(leaves) if is_managed_here(leaf)]
    if not places:
        return
    plain, model = (
        nn.ParameterDict({f"p{place}": nn.Parameter(leaves[place].detach().clone()) for place in places})
        for _ in range(2)
    )
    with patrickstar.manage(model, adamw(model), device="emulated", device_memory="64MiB"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place in places:
            want, got = (results_of(info, leaves, shape, place, of[f"p{place}"]) for of in (plain, model))
            if isinstance(got, StateError):  # refused with a way round
                assert info.name == "as_strided_scatter", f"in place {place}: {got!r}"
            elif isinstance(want, Exception) or isinstance(got, Exception):
                assert type(want) is type(got), (
                    f"in place {place}: plain PyTorch has {want!r}, a managed weight {got!r}"
                )
            else:
                assert all(map(same_bits, want, got)), (
                    f"in place {place}: plain PyTorch has {want}, a managed weight {got}"
                )


def is_managed_here(leaf: Any) -> bool:
    return (
        isinstance(leaf, Tensor) and leaf.dtype is torch.float32 and leaf.layout is torch.strided and leaf.numel() > 0
    )


def results_of(info: Any, leaves: list[Any], shape: Any, place: int, weight: nn.Parameter) -> list[Tensor] | Exception:
    """What the operation gives, and the weight's gradient; or the error."""
    given = [
        leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    given[place] = weight
    first, args, kwargs = tree_unflatten(given, shape)
    torch.manual_seed(1)
    try:
        result = info.op(first, *args, **kwargs)
        if info.name.startswith(("empty", "new_empty")):  # whatever was in memory
            return []
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
        roots = [leaf for leaf in found if leaf.grad_fn is not None]
        shown = [leaf.detach().clone() for leaf in found]
        if roots:
            sum((root.abs() if root.is_complex() else root).sum() for root in roots).backward()
        return shown if weight.grad is None else [*shown, weight.grad.clone()]
    except Exception as error:
        return error


# optimizers, values and texts


SECOND: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "AdamW, fused": lambda rest: torch.optim.AdamW(rest, lr=1e-2, fused=True),
    "Adam, amsgrad, fused": lambda rest: torch.optim.Adam(rest, lr=1e-2, amsgrad=True, fused=True),
    "SGD, fused": lambda rest: torch.optim.SGD(rest, lr=1e-2, momentum=0.9, fused=True),
    "Adagrad, fused": lambda rest: torch.optim.Adagrad(rest, lr=1e-2, fused=True),
    "AdamW, foreach": lambda rest: torch.optim.AdamW(rest, lr=1e-2, foreach=True),
    "RMSprop": lambda rest: torch.optim.RMSprop(rest, lr=1e-3),
    "ours": lambda rest: patrickstar.AdamW(rest, lr=1e-2),
}


def of_the_first(model: nn.Module) -> patrickstar.AdamW:
    """What it would do to them is no matter here: the others are not its own."""
    return patrickstar.AdamW(list(model.parameters())[:6], lr=0.0, weight_decay=0.0)


@pytest.mark.parametrize(("precision", "budget"), [("fp32", "200KiB"), ("bf16", "160KiB")])
@pytest.mark.parametrize("second", SECOND.values(), ids=SECOND)
def test_a_second_optimizer_over_what_the_managed_one_lacks(
    make_pair: MakePair, second: Any, precision: str, budget: str, tmp_path: Path
) -> None:
    """A step that changes many parameters in one operation: whether torch counts the changes or not, they are kept, and written back."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    others: dict[nn.Module, Any] = {}

    def step(model: nn.Module, optimizer: Any, number: int) -> None:
        rest = others[model] = others.get(model) or second(list(model.parameters())[6:])
        model(torch.randn(4, 64, generator=torch.Generator().manual_seed(number)).to(dtype)).square().mean().backward()
        optimizer.step()
        rest.step()
        model.zero_grad()

    pair = make_pair(
        seeded(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to(dtype)),
        make_optimizer=of_the_first,
        with_options={} if precision == "fp32" else {"compute": "bf16"},
        precision=precision,
        host_memory=budget,
        disk=tmp_path / "disk",
    )
    pair.train(4, by=step)
    expect_bits(values(pair.plain), values(pair.model))
    assert sum(pair.session.stats().moved.values()), "nothing moved, which shows nothing"


@pytest.mark.parametrize("metered", [False, True])
def test_a_change_of_many_weights_in_one_operation_is_noticed_under_a_meter(make_pair: MakePair, metered: bool) -> None:
    """The meter of the emulated device is no dispatch mode, under which torch would count no such change."""
    machine = {"device": "emulated", "device_memory": "64KiB"} if metered else {"device": "cpu"}
    pair = make_pair(stack, **machine)

    def act(model: nn.Module, _: Any) -> list[Any]:
        loss = model(inputs()).square().sum()
        with torch.no_grad():
            torch._foreach_mul_([p.detach() for p in model.parameters()], 0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(same_bits, *pair.each(act)))


def test_a_change_of_many_weights_under_a_users_mode_is_kept(make_pair: MakePair) -> None:
    """torch counts no such change under a dispatch mode, which `FlopCounterMode` is: a chunk would leave as clean."""
    pair = make_pair(
        seeded(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))), device="emulated", device_memory="120KiB"
    )

    def act(model: nn.Module, optimizer: Any) -> list[Any]:
        for _ in range(2):
            finish(model(torch.ones(4, 64)).square().mean(), optimizer)
            with torch.no_grad(), FlopCounterMode(display=False):
                model(torch.ones(4, 64))
                torch._foreach_mul_(list(model.parameters()), 0.5)
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(same_bits, *pair.each(act)))
    assert sum(pair.session.stats().moved.values()), "nothing moved, which shows nothing"


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_values_that_are_assigned_as_data_are_taken_over(make_pair: MakePair, precision: str, device: str) -> None:
    def act(model: nn.Module, optimizer: Any) -> None:
        vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach() * 0.5
        torch.nn.utils.vector_to_parameters(vector, model.parameters())
        model[0].weight.data = torch.ones(32, 32)
        model[2].weight.data = model[4].weight.data.clone()

    pair = make_pair(precision=precision, device=device)
    for number in range(2):
        pair.each(act)
        if precision == "fp32":
            pair.train(1, first=number)
    if precision == "bf16":  # exact: halves of values that a bf16 weight has, in the fp32 master too
        assert same_bits(pair.session.state_dict()["0.weight"], torch.ones(32, 32))
    else:
        expect_bits(pair.plain.state_dict(), dict(pair.session.state_dict()))


TEXTS: dict[str, Callable[[nn.Module], str]] = {
    "a number of data": lambda m: f"{m.scale.data:.3f}",
    "a number of an alias": lambda m: f"{m.scale.detach():.1e}",
    "an element": lambda m: f"{m.weight.data[1, 1]:.2f} {m.weight[1, 1]:.2f}",
    "a gradient": lambda m: f"{m.scale.grad:.4f} {m.weight.grad!r}",
    "data": lambda m: f"{m.weight.data!r} {m.weight.data} {m.weight.detach()}",
    "a parameter": lambda m: f"{m.weight!r} {m.scale}",
    "a view": lambda m: f"{m.weight.data[0]} {m.weight.data.t()!r}",
}


def scaled() -> nn.Module:
    torch.manual_seed(0)
    scale, weight = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(3, 3))
    return Composed(lambda model, x: x[:, :3] @ model.weight * model.scale, scale=scale, weight=weight)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_what_is_printed_is_what_pytorch_prints(make_pair: MakePair, text: Callable[[nn.Module], str]) -> None:
    pair = make_pair(scaled, device="emulated", device_memory="1MiB")
    pair.each(lambda model, _: model(inputs()).sum().backward())
    pair.same(lambda model, _: text(model))
    with pytest.raises(TypeError):  # as of a plain parameter
        f"{pair.model.scale:.3f}"


OFFSETS: dict[str, Callable[[Tensor], Any]] = {
    "an offset": lambda w: w.as_strided((2, 2), (3, 1), 1),
    "by name": lambda w: torch.as_strided(w, (3,), (2,), storage_offset=4),
    "none": lambda w: w[1].as_strided((2,), (1,)),
    "of a view": lambda w: w[1].as_strided((2,), (1,), w[1].storage_offset() + 1),
    "of data": lambda w: w.data.as_strided((4,), (1,), w.data.storage_offset()),
    "of a view as other numbers": lambda w: w.view(torch.int16).as_strided((2,), (1,), 2).float() + w[0, 0],
    "a number": lambda w: w[2, 1:].storage_offset() + w.flatten()[4:].storage_offset() * w.sum(),
    "scattered": lambda w: w.clone().as_strided_scatter(torch.zeros(2), (2,), (1,), 3),
}


@pytest.mark.parametrize("view", OFFSETS.values(), ids=OFFSETS)
def test_an_offset_of_storage_counts_from_the_start_of_the_parameter(make_pair: MakePair, view: Any) -> None:
    """A slot holds others before it."""

    def act(model: nn.Module, _: Any) -> list[Tensor]:
        found = view(model.weight)
        (found.sum() + model.scale).backward()
        return [
            found.detach().clone(),
            *(torch.zeros(0) if p.grad is None else p.grad.clone() for p in model.parameters()),
        ]

    pair = make_pair(scaled, device="emulated", device_memory="1MiB")
    assert all(map(same_bits, *pair.each(act)))
    with pytest.raises(StateError, match="clone"):
        pair.model.weight.as_strided_scatter(torch.zeros(2), (2,), (1,), 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_of_16_bits_under_autocast_are_taken_as_they_are(make_pair: MakePair, dtype: torch.dtype) -> None:
    def act(model: nn.Module, _: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(inputs().to(dtype)).detach()

    pair = make_pair(
        lambda: nn.Sequential(*(nn.Tanh() for _ in range(4)), *stack()), device="cpu"
    )  # rounded four times
    assert same_bits(*pair.each(act))


class Logged(Tensor):
    """An input of a class that writes down what is done with it."""

    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if result is not NotImplemented and func.__name__ != "__get__":
            cls.calls.append(func.__name__)
        return result


@pytest.mark.parametrize("recomputed", [False, True])
def test_what_is_computed_of_an_input_of_a_class_is_of_that_class(make_pair: MakePair, recomputed: bool) -> None:
    def act(model: nn.Module, _: Any) -> tuple[Tensor, list[str]]:
        Logged.calls = []
        x = inputs().as_subclass(Logged)
        out = checkpoint(model[0], x, use_reentrant=False) if recomputed else model(x)
        assert type(out) is Logged
        assert type(torch.where(x[:, :1] > 0, model[0].weight[0], 0)) is Logged
        calls = Logged.calls[:]
        out.square().sum().backward()
        return model[0].weight.grad.clone().as_subclass(Tensor), [
            call for call in calls if call in ("linear", "tanh", "where")
        ]

    pair = make_pair(stack, device="cpu")
    (want, names), (got, theirs) = pair.each(act)
    assert same_bits(want, got)
    assert names == theirs


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_saves_nothing_but_weights_is_recomputed(make_pair: MakePair, reentrant: bool) -> None:
    """Each run changes a weight, of which backward needs nothing but the weight itself."""

    def block(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.weight.mul_(0.75)
        return x + model.weight.square().mean()

    run = lambda model, x: checkpoint(block, model, x.requires_grad_(), use_reentrant=reentrant)
    pair = make_pair(seeded(lambda: Composed(run, weight=nn.Parameter(torch.randn(8, 8)))), device="cpu")

    def act(model: nn.Module, optimizer: Any) -> Tensor:
        model(inputs()).sum().backward()
        return model.weight.detach().clone()

    assert same_bits(*pair.each(act))
    pair.expect_same_gradients()


@pytest.mark.parametrize("machine", [{"device": "cpu"}, {"device": "emulated", "device_memory": "64KiB"}], ids=str)
def test_a_mode_around_a_forward_alone_is_left_after_it(make_pair: MakePair, machine: dict[str, Any]) -> None:
    """A meter of ours stays until the backward has ended, and is no mode."""

    def act(model: nn.Module, _: Any) -> list[Any]:
        counter = FlopCounterMode(display=False)
        with counter:
            loss = model(inputs()).square().sum()
        counted = counter.get_total_flops()
        assert not _get_current_dispatch_mode_stack()
        inside = len(shown_to())
        loss.backward()
        model(inputs()).square().sum().backward()
        assert counter.get_total_flops() == counted
        return [counted, inside]

    pair = make_pair(lambda: nn.Sequential(*stack(), Hidden()), **machine)
    (want, _), (got, inside) = pair.each(act)
    assert want == got > 0
    assert inside == 1, "no meter was on, which shows nothing"
    pair.session.close()
    assert not shown_to()


FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "prod": lambda y, x: torch.stack([y, x]).prod(0),
    "prod of all": lambda y, x: (y * x).prod(),
    "cumprod": lambda y, _: y.cumprod(-1),
    "a new tensor of its own class": lambda y, _: y * Default([0.5] * 8).as_subclass(Tensor),
}


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
@pytest.mark.parametrize("machine", [{"device": "cpu"}, {"device": "emulated", "device_memory": "64KiB"}], ids=str)
def test_torch_chooses_the_same_formulas_in_a_measured_step(
    make_pair: MakePair, machine: dict[str, Any], formula: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Under a dispatch mode it would take every tensor for one without a storage."""
    seen: list[int] = []

    def act(model: nn.Module, optimizer: Any, _: int) -> Tensor:
        loss = formula(model(inputs()), inputs(1)).sum()
        seen.append(len(shown_to()))
        return finish(loss, optimizer)

    pair = make_pair(lambda: nn.Sequential(*stack(), Hidden()), **machine)
    pair.train(3, by=act)
    assert_same(pair.plain, pair.plain_optimizer, pair.session)
    assert any(seen), "no meter was on, which shows nothing"


class Hidden(nn.Module):
    """Has no forecast: it asks for a value, so that its steps are measured."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (2 if x.sum().item() > 0 else 3)


ASIDE: dict[str, Callable[[nn.Sequential], Any]] = {
    "an alias": lambda m: torch.func.grad(lambda x: (x @ m[0].weight.detach()).sum())(inputs()),
    "data": lambda m: torch.func.grad(lambda x: (x @ m[0].weight.data).sum())(inputs()),
    "memory": lambda m: torch.func.grad(lambda x: x.sum() * float(m[0].weight.numpy(force=True)[0, 0]))(inputs()),
    "a gradient": lambda m: torch.func.grad(lambda x: (x @ m[0].weight.grad).sum())(inputs()),
    "an alias of a gradient": lambda m: torch.func.grad(lambda x: (x @ m[0].weight.grad.detach()).sum())(inputs()),
    "a copy": lambda m: torch.func.grad(lambda x: copy.deepcopy(m)(x).sum())(inputs()),
    "hooks are forbidden": lambda m: under(
        torch.autograd.graph.disable_saved_tensors_hooks("not here"), lambda: m[0](inputs())
    ),
}


@pytest.mark.parametrize("act", ASIDE.values(), ids=ASIDE)
def test_a_parameter_that_a_transform_finds_on_its_way_is_refused(managed: nn.Sequential, act: Any) -> None:
    managed(inputs()).sum().backward()
    with pytest.raises(StateError, match=r"torch\.func"):
        act(managed)
    assert same_bits(stack()[0].weight.detach(), managed[0].weight.detach().clone())
