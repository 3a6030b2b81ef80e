"""What the library takes for granted of CUDA and of torch on it, one thing a test: what fails here explains what fails elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from patrickstar.memory.driver import DeviceAddresses, granule_bytes
from patrickstar.torch_private import storage_at
from patrickstar.units import MIB
from tests.cuda.schedules import Accelerator

CUDA = torch.device("cuda", 0)
IS_GPU = hasattr(torch._C, "_cuda_sleep")  # the test device has no kernel that takes its time, and is slow
SHAPES = ((64, 64, 64), (33, 100, 260), (512, 768, 768), (1024, 1024, 4096), (2048, 4096, 4096))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def over(address: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor over memory at an address of the device."""
    storage = storage_at(address, numel * dtype.itemsize, CUDA)
    return torch.empty(0, dtype=dtype, device=CUDA).set_(storage, 0, (numel,), (1,))


@pytest.fixture
def addresses(accelerator: Accelerator) -> Iterator[DeviceAddresses]:
    """A range of 96 MiB, of which the first 80 MiB have memory."""
    made = DeviceAddresses(96 * MIB, device=0)
    made.map(0, 80 * MIB)
    yield made
    torch.accelerator.synchronize()
    made.close()


# memory of the driver


def test_the_driver_maps_memory_in_granules_of_two_mib() -> None:
    assert granule_bytes(0) == 2 * MIB


def test_a_tensor_over_mapped_memory_is_one_of_the_device(addresses: DeviceAddresses) -> None:
    tensor = over(addresses.start, 1024)
    assert tensor.device == CUDA
    assert tensor.data_ptr() == addresses.start
    assert tensor.untyped_storage().nbytes() == 4096
    assert torch.equal(tensor.fill_(3.0).cpu(), torch.full((1024,), 3.0))


def test_mapped_memory_is_none_of_the_allocators(accelerator: Accelerator) -> None:
    before = torch.accelerator.memory_reserved(), accelerator.driver_bytes()
    made = DeviceAddresses(64 * MIB, device=0)
    made.map(16 * MIB, 32 * MIB)
    assert torch.accelerator.memory_reserved() == before[0]
    assert accelerator.driver_bytes() == before[1] + 32 * MIB
    made.close()
    assert accelerator.driver_bytes() == before[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [16, 32, 48, 128, 256, 1008], ids="{} elements".format)
def test_products_have_the_same_bits_wherever_a_weight_lies(
    offset: int, dtype: torch.dtype, addresses: DeviceAddresses
) -> None:
    """Kernels may be chosen by alignment. Parameters lie at multiples of 16 elements."""
    torch.manual_seed(0)
    for rows, inner, columns in SHAPES if IS_GPU else SHAPES[:2]:
        x, weight = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype)
        x, alone = x.to(CUDA), weight.to(CUDA)
        moved = over(addresses.start + offset * dtype.itemsize, weight.numel(), dtype).view_as(alone).copy_(alone)
        grad = torch.randn(rows, columns, dtype=dtype).to(CUDA)
        for name, of_alone, of_moved in (
            ("forward", x @ alone.T, x @ moved.T),
            ("backward", grad @ alone, grad @ moved),
            ("linear", torch.nn.functional.linear(x, alone), torch.nn.functional.linear(x, moved)),
        ):
            assert torch.equal(of_alone.cpu(), of_moved.cpu()), (name, rows, inner, columns)


def test_an_embedding_and_a_norm_have_the_same_bits_wherever_their_weights_lie(addresses: DeviceAddresses) -> None:
    torch.manual_seed(0)
    table, ids = torch.randn(1000, 64).to(CUDA), torch.randint(0, 1000, (8, 32)).to(CUDA)
    moved = over(addresses.start + 64, table.numel()).view_as(table).copy_(table)
    assert torch.equal(torch.nn.functional.embedding(ids, table).cpu(), torch.nn.functional.embedding(ids, moved).cpu())
    x, weight = torch.randn(64, 64).to(CUDA), table[0]
    scaled = over(addresses.start + MIB + 64, 64).copy_(weight)
    for bias in (None, table[1]):
        want = torch.nn.functional.layer_norm(x, (64,), weight, bias)
        assert torch.equal(want.cpu(), torch.nn.functional.layer_norm(x, (64,), scaled, bias).cpu())


# streams, events and threads


def test_an_event_of_one_thread_is_waited_for_by_another(accelerator: Accelerator) -> None:
    here, there = torch.Stream(device=CUDA), torch.Stream(device=CUDA)
    torch.accelerator.synchronize()
    tensor = torch.zeros(1 << 20, device=CUDA)
    torch.accelerator.synchronize()
    with here:
        for _ in range(50):
            tensor.add_(1.0)
        event = here.record_event()
    found = list[float]()

    def read() -> None:
        with there:
            there.wait_event(event)
            copy = tensor * 1.0
            there.synchronize()
        found.append(float(copy[-1].cpu()))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert found == [50.0]
    assert event.query()


def test_backward_runs_on_a_thread_of_its_own_and_on_the_streams_of_the_forward(accelerator: Accelerator) -> None:
    seen = list[tuple[int, int]]()

    def note(tensor: Tensor) -> Tensor:
        seen.append((threading.get_ident(), torch.accelerator.current_stream(CUDA).stream_id))
        return tensor

    stream = torch.Stream(device=CUDA)
    weight = torch.ones(4, 4, device=CUDA, requires_grad=True)
    torch.accelerator.synchronize()
    with stream, torch.autograd.graph.saved_tensors_hooks(note, note):
        loss = (weight @ weight).sum()
        packed = list(seen)
        seen.clear()
    weight.register_post_accumulate_grad_hook(lambda _: seen.append((threading.get_ident(), -1)))
    loss.backward()
    torch.accelerator.synchronize()
    assert {thread for thread, _ in packed} == {threading.get_ident()}
    assert threading.get_ident() not in {thread for thread, _ in seen}
    assert {number for _, number in seen if number != -1} == {stream.stream_id}


def test_a_context_of_a_stream_is_the_threads_own(accelerator: Accelerator) -> None:
    stream = torch.Stream(device=CUDA)
    found = list[int]()
    with stream:
        thread = threading.Thread(target=lambda: found.append(torch.accelerator.current_stream(CUDA).stream_id))
        thread.start()
        thread.join()
        assert torch.accelerator.current_stream(CUDA).stream_id == stream.stream_id
    assert found != [stream.stream_id]


def test_torch_tells_of_memory_that_is_missing(accelerator: Accelerator) -> None:
    assert hasattr(torch._C, "_cuda_attach_out_of_memory_observer")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 48, dtype=torch.uint8, device=CUDA)
