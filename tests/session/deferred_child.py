"""The life of a model whose weights are four times the memory it is given, in a process of its own: how far that process grew in each part."""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from patrickstar.memory.process import peak_resident_bytes, reset_peak, resident_bytes
from tests.memory import resident

MIB = 1 << 20


def in_child(**wanted: Any) -> dict[str, Any]:
    """What `life` gives in a process of its own, under glibc."""
    return resident.in_child(None, "life", **wanted)


def life(*, config: Mapping[str, Any], share: float, disk: str, deferred: bool = True) -> dict[str, Any]:
    """Builds, trains three steps, evaluates, checks every weight; bytes of growth by part.

    Args:
        share: `host_memory`, of the weights' bytes. deferred: or built in memory, which the check must notice.
    """
    import torch
    import transformers
    from transformers import GPT2Config, GPT2LMHeadModel

    import patrickstar

    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    tokens = torch.randint(0, config["vocab_size"], (1, 12), generator=torch.Generator().manual_seed(1))
    parts: dict[str, int] = {}
    manage, deferred_init = patrickstar.manage, patrickstar.deferred_init  # all that they import is there now
    GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **{**config, "n_layer": 1, "n_embd": 16}))
    gc.collect()
    base = resident_bytes()

    @contextlib.contextmanager
    def part(name: str) -> Iterator[None]:
        assert reset_peak()
        yield
        parts[name] = peak_resident_bytes() - base

    def build() -> Any:
        torch.manual_seed(5)
        return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, use_cache=False, **config)).train()

    with part("build"):
        with deferred_init() if deferred else contextlib.nullcontext():
            model = build()
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    budget = int(weight_bytes * share)
    with part("manage"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        session = manage(model, optimizer, precision="fp32", host_memory=budget, disk=disk)
    first = hashes(session)
    for number in range(3):
        with part(f"step {number}"):
            model(input_ids=tokens, labels=tokens).loss.backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
    with part("evaluate"), torch.no_grad():
        loss = model.eval()(input_ids=tokens, labels=tokens).loss.item()
    with part("check"):
        last = hashes(session)
    session.close()
    del model, session, optimizer
    # Ordinary construction, once nothing is measured any more.
    want = {name: digest(tensor) for name, tensor in build().state_dict().items()}
    return {
        "budget": budget,
        "weights": weight_bytes,
        "parts": parts,
        "loss": loss,
        "wrong": [name for name in want if want[name] != first[name]],
        "unchanged": [name for name in first if first[name] == last[name]],
    }


def hashes(session: Any) -> dict[str, str]:
    """Every tensor of the state dict, one at a time."""
    return {name: digest(tensor) for name, tensor in session.state_dict().items()}


def digest(tensor: Any) -> str:
    """Of a tensor's bytes."""
    return hashlib.sha256(tensor.detach().contiguous().numpy()).hexdigest()
