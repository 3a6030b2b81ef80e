"""examples/finetune_7b.py, scaled down: a small model's directory, a little text, and less memory than its model data takes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from patrickstar.units import KIB
from tests.docs.pages import ROOT
from tests.forked import run_script

WIDTH, LAYERS = 64, 4


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """What `save_pretrained` leaves of a small model and of a tokenizer that knows bytes."""
    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": LAYERS, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path / "model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
@pytest.mark.parametrize("device", ["emulated", "cpu"])
def test_it_fine_tunes_with_less_memory_than_the_model_takes(device: str, directory: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} bottles stand on the wall, and {n} bottles stay.\n" for n in range(200)))
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(directory).parameters())
    model_data = 12 * parameters
    memory = ["--disk", tmp_path / "scratch"]
    if device == "emulated":
        memory += ["--device-memory", "700KiB", "--host-memory", model_data // 2]
    tries = ["--steps", 6, "--seq-len", 32, "--lr", 3e-3, "--out", tmp_path / "out", "--device", device]
    done = run_script(
        ROOT / "examples" / "finetune_7b.py",
        directory,
        text,
        *tries,
        *memory,
        cwd=tmp_path,
        environment={"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))},
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d of 6: loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    if device == "emulated":
        assert model_data > 700 * KIB + model_data // 2
        assert float(re.findall(r"^fetched +([\d.]+) [KMG]iB", done.stdout, re.MULTILINE)[0]) > 0
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (directory, tmp_path / "out"))
    changed = [not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert all(changed)
