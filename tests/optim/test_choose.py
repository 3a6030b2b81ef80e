import logging
import os
import platform
import subprocess
import sys

import pytest
import torch

from patrickstar.errors import ConfigError
from patrickstar.optim import choose
from patrickstar.optim.choose import choose_kernel, choose_kernels
from patrickstar.optim.fused import Fused
from patrickstar.optim.reference import Reference

FUSES = torch.backends.cpu.get_cpu_capability() != "DEFAULT"


@pytest.mark.parametrize("value", [None, "", "torch"])
def test_torch_is_the_kernel_where_nothing_else_is_asked_for(value, monkeypatch):
    if value is None:
        monkeypatch.delenv("PATRICKSTAR_ISA", raising=False)
    else:
        monkeypatch.setenv("PATRICKSTAR_ISA", value)
    assert choose_kernel().name == ("torch" if FUSES else "reference")


@pytest.mark.parametrize("value", ["scalar", "avx2", "avx512", "neon"])
def test_native_kernels_are_promised_not_ignored(value, monkeypatch):
    monkeypatch.setenv("PATRICKSTAR_ISA", value)
    with pytest.raises(ConfigError, match=f"PATRICKSTAR_ISA={value}.*later version"):
        choose_kernel()


@pytest.mark.parametrize(("value", "nearest"), [("avx215", "avx2"), ("tourch", "torch"), ("AVX512", None)])
def test_an_unknown_kernel_is_refused_with_the_nearest_name(value, nearest, monkeypatch):
    monkeypatch.setenv("PATRICKSTAR_ISA", value)
    with pytest.raises(ConfigError, match="one of torch, scalar, avx2, avx512, neon") as refusal:
        choose_kernel()
    assert nearest is None or f'did you mean "{nearest}"' in str(refusal.value)


def test_what_is_asked_for_by_argument_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("PATRICKSTAR_ISA", "neon")
    assert choose_kernel("torch").name in {"torch", "reference"}


def test_on_the_host_there_are_passes_of_the_host_only():
    passes = choose_kernels(torch.device("cpu"))
    assert {device: each.name for device, each in passes.items()} == {"cpu": choose_kernel().name}
    assert "patrickstar.optim.triton_kernels" not in sys.modules, "triton is imported where a GPU is used"


def test_on_a_gpu_without_triton_torchs_operations_update_and_a_warning_says_so(monkeypatch, caplog):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(choose, "fusing_operations", lambda device: None)
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it fails
    with caplog.at_level(logging.WARNING, logger="patrickstar"):
        passes = choose_kernels(torch.device("cuda", 0))
    assert passes["cuda"].name == "reference"
    (message,) = caplog.messages
    assert message.startswith("Triton's kernels cannot be used on cuda:0 (ModuleNotFoundError")
    assert "the same bits" in message


@pytest.mark.parametrize("spoiled", ["exp_avg_sq", "weight", "l2"])
def test_a_fused_kernel_of_other_bits_is_replaced_and_said(spoiled, monkeypatch, caplog):
    honest = Fused.update

    def update(self, weight, grad, exp_avg, exp_avg_sq, *, step, hyper):
        honest(self, weight, grad, exp_avg, exp_avg_sq, step=step, hyper=hyper)
        if spoiled != "l2" or not hyper.decoupled:
            plane = exp_avg_sq if spoiled == "exp_avg_sq" else weight
            plane[7] = torch.nextafter(plane[7], torch.tensor(torch.inf))  # one unit of the last place, once

    monkeypatch.setattr(Fused, "update", update)
    with caplog.at_level(logging.WARNING, logger="patrickstar"):
        kernel = choose_kernel()
    assert isinstance(kernel, Reference)
    assert "reference kernel" in caplog.text


ON_OTHER_CAPABILITY = """
import torch
from patrickstar.optim.choose import choose_kernel
from patrickstar.optim.hyper import Hyper
from tests.optim.oracle import different, random_planes, special_planes, update

torch.set_num_threads(1)
assert torch.backends.cpu.get_cpu_capability() == "{capability}", torch.backends.cpu.get_cpu_capability()
kernel = choose_kernel()
assert kernel.name == "{kernel}", kernel.name
for decoupled in (True, False):
    for beta1 in (0.9, 0.25):
        hyper = dict(lr=1e-3, beta1=beta1, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=decoupled)
        for planes in (random_planes(331), special_planes()):
            want = update(planes, step=3, **hyper)
            kernel.update(*planes, step=3, hyper=Hyper(**hyper))
            differ = [different(*pair) for pair in zip((planes[0], planes[2], planes[3]), want)]
            assert differ == [0, 0, 0], (differ, hyper)
print("equal")
"""


@pytest.mark.skipif(platform.machine() != "x86_64" or not FUSES, reason="ATEN_CPU_CAPABILITY lowers x86 machines only")
@pytest.mark.parametrize(("capability", "kernel"), [("default", "reference"), ("avx2", "torch")])
def test_bits_are_the_definition_whatever_instructions_torch_uses(capability, kernel, pytestconfig):
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    environment.pop("PATRICKSTAR_ISA", None)
    script = ON_OTHER_CAPABILITY.format(capability=capability.upper(), kernel=kernel)
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.strip() == "equal", run.stderr
