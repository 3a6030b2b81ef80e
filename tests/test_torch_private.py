"""What each private name of torch that we rely on must do."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from patrickstar.torch_private import (
    Plain,
    Undispatched,
    Unseen,
    all_gather,
    all_to_all,
    are_saved_tensors_hooks_allowed,
    at_end_of_backward,
    backward_id,
    backward_makes_graph,
    broadcast,
    call_without_hooks_of_all_modules,
    checks_for_nan,
    fake_over,
    has_step_pre_hooks,
    has_views,
    inside_backward_node,
    inside_node_of_torch,
    is_checkpoints,
    is_profiled,
    next_sequence_number,
    one_thread_here,
    saves_on_cpu,
    storage_at,
    top_saved_tensors_hooks,
    unprofiled,
    without_modes,
    writes_by_schema,
)
from tests.parallel import programs_of_groups
from tests.ranks import Team, all_well


def test_groups_that_torch_keeps_no_list_of_gather_and_exchange():
    store = dist.HashStore()
    groups = [None, None]

    def make(rank):
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timeout=timedelta(seconds=60))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mine = [torch.tensor([4 * rank, 4 * rank + 1], dtype=torch.uint8) for rank in (0, 1)]
    gathered, exchanged = ([torch.zeros(n, dtype=torch.uint8) for _ in mine] for n in (4, 2))
    works = [all_gather(group, gathered[rank], mine[rank]) for rank, group in enumerate(groups)]
    works += [all_to_all(group, exchanged[rank], mine[rank]) for rank, group in enumerate(groups)]
    given = [tensor.clone() for tensor in mine]
    works += [broadcast(group, given[rank], 1) for rank, group in enumerate(groups)]
    for work in works:
        work.wait()
    assert [t.tolist() for t in gathered] == [[0, 1, 4, 5]] * 2
    assert [t.tolist() for t in exchanged] == [[0, 4], [1, 5]]
    assert [t.tolist() for t in given] == [[4, 5], [4, 5]]


def test_plain_switches_subclass_handlers_off():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("the handler was called")

    tensor = torch.ones(2).as_subclass(Loud)
    with Plain():
        assert (tensor + 1).shape == (2,)


def test_unseen_switches_modes_off_too():
    class Loud(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError("the mode was called")

    with Loud(), Unseen():
        assert (torch.ones(2) + 1).shape == (2,)


def test_only_the_topmost_hooks_are_seen():
    assert top_saved_tensors_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: ("outer", t), lambda p: p[1]):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: ("inner", t), lambda p: p[1]):
            hooks = top_saved_tensors_hooks()
            assert hooks is not None
            assert hooks[0](torch.ones(1))[0] == "inner"
        hooks = top_saved_tensors_hooks()
        assert hooks is not None
        assert hooks[0](torch.ones(1))[0] == "outer"
    assert top_saved_tensors_hooks() is None


def test_checkpointings_hooks_are_told_from_others():
    seen = []

    def block(x):
        hooks = top_saved_tensors_hooks()
        assert hooks is not None
        seen.append(is_checkpoints(hooks))
        return x * x

    checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [True, True], "in forward, and where it is computed again"
    for others in (
        torch.autograd.graph.save_on_cpu(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    ):
        with others:
            hooks = top_saved_tensors_hooks()
            assert hooks is not None
            assert not is_checkpoints(hooks)


def test_a_schema_tells_what_writes_its_arguments():
    assert writes_by_schema(torch.ops.aten.embedding_renorm_)
    assert writes_by_schema(torch.ops.aten.embedding_renorm_.default)
    assert writes_by_schema(torch.ops.aten.add)  # its overload with out=
    assert not writes_by_schema(torch.ops.aten.add.Tensor)
    assert not writes_by_schema(torch.ops.aten.embedding.default)
    assert not writes_by_schema(torch.add)
    assert not writes_by_schema(nn.functional.embedding)


@pytest.mark.parametrize(
    "hold",
    [lambda p: p.data, lambda p: p.detach(), lambda p: p.view(-1), lambda p: p[1:] * torch.ones(1, requires_grad=True)],
)
def test_a_tensor_has_views_as_long_as_code_or_a_graph_holds_one(hold):
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    parameter.untyped_storage().owner = "anybody"
    same = parameter, [parameter]
    assert not has_views(parameter)
    held = hold(parameter)
    assert has_views(parameter)
    del held
    assert not has_views(same[0])


def test_a_backward_has_an_id_a_node_and_an_end():
    seen: list[tuple[str, int, bool]] = []
    layer = nn.Linear(2, 2)

    def hook(_parameter):
        seen.append(("during", backward_id(), inside_backward_node()))
        at_end_of_backward(lambda: seen.append(("end", backward_id(), inside_backward_node())))

    layer.weight.register_post_accumulate_grad_hook(hook)
    assert backward_id() == -1
    layer(torch.ones(1, 2)).sum().backward()
    assert backward_id() == -1
    assert [what for what, _, _ in seen] == ["during", "end"]
    assert seen[0][1] >= 0
    assert seen[0][2]
    assert not seen[1][2]


def test_the_end_of_a_nested_backward_is_inside_a_node_of_the_outer_one():
    ends: list[bool] = []

    def hook(_parameter):
        at_end_of_backward(lambda: ends.append(inside_backward_node()))

    layer = nn.Linear(2, 2)
    layer.weight.register_post_accumulate_grad_hook(hook)
    x = torch.ones(1, 2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True).sum().backward()
    assert ends == [True]


def test_hooks_that_are_pushed_in_a_node_go_when_it_ends():
    """Nobody pops them: torch gives each node the state of the thread that has called the backward, and its own thread its own state back."""
    seen: list[object] = []

    def unpack(tensor):
        seen.append((inside_node_of_torch(), top_saved_tensors_hooks()))
        saved_tensors_hooks(str, str).__enter__()
        return tensor

    x = torch.ones(2, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: tensor, unpack):
        y = x.sin().cos()
    outer = saved_tensors_hooks(repr, repr)
    with outer:
        y.sum().backward()
        assert top_saved_tensors_hooks() == (repr, repr)
    assert seen == [(True, (repr, repr))] * 2
    assert top_saved_tensors_hooks() is None


def test_hooks_are_allowed_but_where_somebody_forbids_them():
    assert are_saved_tensors_hooks_allowed()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert not are_saved_tensors_hooks_allowed()
    assert are_saved_tensors_hooks_allowed()


def asking_in_backward(ask, seen):
    """A function of others, which writes down what it is told in its backward."""

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(ask())
            return gradient

    return Asks.apply


def test_nodes_of_torch_are_told_from_functions_of_others():
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(inside_node_of_torch()))
    asking_in_backward(inside_node_of_torch, seen)(y).sum().backward()
    assert seen == [False, True]
    assert not inside_node_of_torch()


def test_undispatched_switches_dispatch_modes_off():
    class Loud(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError("the mode was called")

    with Loud(), Undispatched():
        assert (torch.ones(2) + 1).tolist() == [2, 2]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_backward_that_makes_a_graph_is_told_from_others(create_graph, retain_graph):
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    (asking_in_backward(backward_makes_graph, seen)(x) ** 2).sum().backward(
        create_graph=create_graph, retain_graph=retain_graph or create_graph
    )
    assert seen == [create_graph]
    assert not backward_makes_graph()


def test_nor_does_one_make_a_graph_that_recomputes_with_gradients_on():
    seen: list[bool] = []

    def block(x):
        seen.append(backward_makes_graph())
        return torch.tanh(x)

    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    assert seen == [False, False]


def test_a_profiler_is_noticed_while_it_is_on():
    assert not is_profiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert is_profiled()
    assert not is_profiled()


def test_a_storage_at_an_address_owns_nothing_and_is_fresh_each_time():
    owner = torch.arange(6.0)
    first, second = (storage_at(owner.data_ptr(), owner.nbytes, owner.device) for _ in range(2))
    assert first._cdata != second._cdata
    assert first.nbytes() == owner.nbytes
    tensor = torch.empty(0).set_(first, 0, (6,), (1,))
    tensor.add_(1)
    del tensor, first, second
    assert owner.tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("of_all", [False, True])
def test_what_is_called_before_a_step_is_seen(of_all):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    assert not has_step_pre_hooks(optimizer)
    register = register_optimizer_step_pre_hook if of_all else optimizer.register_step_pre_hook
    handle = register(lambda *_: None)
    assert has_step_pre_hooks(optimizer)
    handle.remove()
    assert not has_step_pre_hooks(optimizer)


def test_one_thread_may_compute_alone_while_others_do_not():
    before, seen = torch.get_num_threads(), []

    def compute():
        with one_thread_here():
            seen.append(torch.get_num_threads())
            other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            other.start()
            other.join()
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert seen == [1, before, before]
    with pytest.raises(ZeroDivisionError), one_thread_here():
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


def test_no_mode_is_on_but_the_default_device():
    class Loud(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class LoudBelow(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[object] = []
    with Loud(), torch.device("meta"), Loud(), LoudBelow():
        with without_modes():
            assert torch.ones(2).is_meta
        assert torch.ones not in seen
        assert torch.ones(2).is_meta
        assert seen.count(torch.ones) == 2, "the inner one and the outer one are on again"
    assert not torch.ones(2).is_meta


def test_a_profile_shows_nothing_of_what_is_unprofiled():
    with torch.autograd.profiler.profile() as profile:
        torch.ones(2).exp()
        with unprofiled():
            torch.ones(2).sin()
        torch.ones(2).cos()
    names = {event.key for event in profile.key_averages()}
    assert {"aten::exp", "aten::cos"} <= names
    assert "aten::sin" not in names


def test_a_call_without_hooks_of_all_modules_has_the_modules_own():
    seen: list[str] = []
    layer = nn.Linear(2, 2)
    layer.register_forward_pre_hook(lambda *_: seen.append("own"))
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append("of all"))
    try:
        call_without_hooks_of_all_modules(layer, torch.ones(2))
        assert seen == ["own"]
    finally:
        handle.remove()


def test_hooks_that_save_on_the_cpu_are_told_from_others():
    seen = []
    for hooks in (torch.autograd.graph.save_on_cpu(), saved_tensors_hooks(lambda t: t, lambda t: t)):
        with hooks:
            top = top_saved_tensors_hooks()
            assert top is not None
            seen.append(saves_on_cpu(top))
    assert seen == [True, False]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_search_for_nan_is_on_where_anomalies_are_detected():
    assert not checks_for_nan()
    with torch.autograd.detect_anomaly(check_nan=False):
        assert not checks_for_nan()
    with torch.autograd.detect_anomaly():
        assert checks_for_nan()


def test_numbers_of_nodes_rise_and_the_next_one_is_told() -> None:
    first = next_sequence_number()
    made = torch.ones(1, requires_grad=True) * 2
    assert made.grad_fn is not None
    assert first <= made.grad_fn._sequence_nr() < next_sequence_number()


def test_a_fake_tensor_is_made_as_its_constructor_makes_it() -> None:
    mode, device = FakeTensorMode(), torch.device("cpu")
    like = FakeTensor(mode, torch.empty(0, device="meta"), device)
    want, got = (
        FakeTensor(mode, torch.empty(2, 3, device="meta"), device),
        fake_over(torch.empty(2, 3, device="meta"), like),
    )
    assert (got.shape, got.device) == (want.shape, want.device)
    assert vars(got) == vars(want)
    assert torch._C._dispatch_keys(got) == torch._C._dispatch_keys(want)
    with pytest.raises(RuntimeError):
        got.data_ptr()
    with mode:
        assert (got + 1).shape == (2, 3)


def test_a_process_group_is_found_by_what_an_operation_is_given(two: Team) -> None:
    assert all_well(two.run(programs_of_groups.found_again)) == [[True, True, True]] * 2
