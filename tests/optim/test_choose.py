import logging
import os
import platform
import subprocess
import sys
from functools import partial

import pytest
import torch

from patrickstar.errors import ConfigError, DeviceError
from patrickstar.optim import choose, reference
from patrickstar.optim.choose import choose_kernel, choose_kernels
from patrickstar.optim.passes import Passes


@pytest.mark.parametrize("value", [None, "", "torch"])
def test_torch_is_the_kernel_where_nothing_else_is_asked_for(value, monkeypatch):
    if value is None:
        monkeypatch.delenv("PATRICKSTAR_ISA", raising=False)
    else:
        monkeypatch.setenv("PATRICKSTAR_ISA", value)
    assert choose_kernel() is reference.update_fused


@pytest.mark.parametrize("value", ["scalar", "avx2", "avx512", "neon"])
def test_native_kernels_are_promised_not_ignored(value, monkeypatch):
    monkeypatch.setenv("PATRICKSTAR_ISA", value)
    with pytest.raises(ConfigError, match=f"PATRICKSTAR_ISA='{value}'.*later version"):
        choose_kernel()


@pytest.mark.parametrize(("value", "nearest"), [("avx215", "avx2"), ("tourch", "torch"), ("AVX512", None)])
def test_an_unknown_kernel_is_refused_with_the_nearest_name(value, nearest, monkeypatch):
    monkeypatch.setenv("PATRICKSTAR_ISA", value)
    with pytest.raises(
        ConfigError, match="expected 'torch' .'scalar' or 'avx2' or 'avx512' or 'neon' arrives"
    ) as refusal:
        choose_kernel()
    assert nearest is None or f'did you mean "{nearest}"' in str(refusal.value)


def test_on_the_host_there_are_passes_of_the_host_only():
    passes = choose_kernels(torch.device("cpu"))
    assert {device: each.kernel for device, each in passes.items()} == {"cpu": reference.update_fused}
    assert "patrickstar.optim.triton_kernels" not in sys.modules, "triton is imported where a GPU is used"


def test_on_a_gpu_without_triton_torchs_operations_update_and_a_warning_says_so(monkeypatch, caplog):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(choose, "_agrees", lambda *_: True)
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it fails
    with caplog.at_level(logging.WARNING, logger="patrickstar"):
        passes = choose_kernels(torch.device("cuda", 0))
    assert passes["cuda"].kernel is reference.update
    (message,) = caplog.messages
    assert message.startswith("Triton's kernels cannot be used on cuda:0 (ModuleNotFoundError")
    assert "the same bits" in message


@pytest.mark.parametrize(
    ("capability", "machine", "trains"),
    [("DEFAULT", "x86_64", False), ("AVX2", "x86_64", True), ("AVX512", "x86_64", True), ("DEFAULT", "aarch64", True)],
)
def test_a_processor_that_does_not_fuse_is_refused(capability, machine, trains, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr("platform.machine", lambda: machine)
    if trains:
        assert choose_kernel() is reference.update_fused
        return
    with pytest.raises(DeviceError, match="does not fuse multiply-adds on this processor.*AVX2"):
        choose_kernel()


def unfused(weight, grad, exp_avg, exp_avg_sq, *, step, hyper):
    """Rounds the product of one formula before it is added."""
    start = exp_avg.clone()
    reference.update(weight, grad, exp_avg, exp_avg_sq, step=step, hyper=hyper)
    exp_avg.copy_(start + (grad + weight * hyper.weight_decay - start) * (1 - hyper.beta1))


def test_a_device_that_rounds_otherwise_is_refused(monkeypatch):
    stand_in, host = torch.device("cpu"), Passes(choose_kernel())
    assert choose._torchs_passes(stand_in, host).kernel is reference.update
    monkeypatch.setattr(choose, "Passes", partial(Passes, unfused))
    with pytest.raises(DeviceError, match="operations on cpu round other than the host's"):
        choose._torchs_passes(stand_in, host)


IN_BASELINE = """
import torch
import patrickstar

layer = torch.nn.Linear(3, 3)
before = [parameter.detach().clone() for parameter in layer.parameters()]
layer(torch.ones(3)).sum().backward()
alone = patrickstar.AdamW(layer.parameters())
for call in (lambda: patrickstar.manage(layer, torch.optim.AdamW(layer.parameters()), device="cpu"), alone.step):
    try:
        call()
    except patrickstar.DeviceError as refusal:
        assert "CPU capability DEFAULT" in str(refusal), refusal
    else:
        raise AssertionError("it trains")
assert not alone.state
assert all(map(torch.equal, before, layer.parameters()))
print("as it should be")
"""

ON_AVX2 = """
import torch
from patrickstar.optim.choose import choose_kernel
from patrickstar.optim.hyper import Hyper
from tests.optim.oracle import different, special_planes, update
from tests.optim.planes import planes_of

torch.set_num_threads(1)
assert torch.backends.cpu.get_cpu_capability() == "AVX2"
for decoupled in (True, False):
    for beta1 in (0.9, 0.25):
        hyper = dict(lr=1e-3, beta1=beta1, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=decoupled)
        for planes in (planes_of(331, special=False), special_planes()):
            want = update(planes, step=3, **hyper)
            choose_kernel()(*planes, step=3, hyper=Hyper(**hyper))
            differ = [different(*pair) for pair in zip((planes[0], planes[2], planes[3]), want)]
            assert differ == [0, 0, 0], (differ, hyper)
print("as it should be")
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="ATEN_CPU_CAPABILITY lowers x86 machines only")
@pytest.mark.parametrize(("capability", "script"), [("default", IN_BASELINE), ("avx2", ON_AVX2)])
def test_torch_is_the_definition_with_other_instructions_or_nothing_changes(capability, script, pytestconfig):
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    environment.pop("PATRICKSTAR_ISA", None)
    options = {"env": environment, "cwd": pytestconfig.rootpath, "capture_output": True, "text": True}
    run = subprocess.run([sys.executable, "-c", script], check=False, **options)
    assert run.stdout.strip() == "as it should be", run.stderr
