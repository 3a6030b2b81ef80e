import pytest
import torch

from tests.benchmarks.scripts import script

speeds = script("benchmarks", "speeds")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_of_products_is_a_number_of_operations_a_second(dtype):
    assert 1e6 < speeds.matmul_peak(dtype, size=64, times=2) < 1e16


@pytest.fixture
def widths(monkeypatch):
    """Products that take a nanosecond for each multiplication, and what was multiplied."""
    seen = []

    def product(left, right):
        seen.append(left.shape[0])
        return left.shape[0] ** 3 * 1e-9

    monkeypatch.setattr(speeds, "_product", product)
    return seen


def test_products_grow_to_the_size_that_is_asked_for(widths):
    assert speeds.matmul_peak(torch.float32, size=768, times=1, seconds=1.0) == pytest.approx(2e9)
    assert widths == [256, 512, 768]


def test_a_processor_that_is_slow_in_a_type_is_not_given_large_products(widths):
    # 512: 0.13 s. 1024 would take 1.07 s.
    assert speeds.matmul_peak(torch.bfloat16, size=2048, times=2, seconds=1.0) == pytest.approx(2e9)
    assert widths == [256, 256, 512, 512]


@pytest.mark.slow
def test_a_disk_reads_and_writes(tmp_path):
    found = speeds.disk_bandwidth(tmp_path, units=4, times=1)
    assert found.keys() == {"read", "write", "both"}
    assert min(found.values()) > 1e5
    assert not list(tmp_path.iterdir())
