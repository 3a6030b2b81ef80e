"""The longest sequence and the largest batch that train in the same `host_memory` a rank, on one process and on 4 ranks over gloo.

    python benchmarks/mesh_memory.py [--memory MIB] [--steps N] [--width N] [--layers N] [--vocabulary N] [--rows-of N] [--write]

A Llama in fp32 whose activations are most of what it takes, under `manage` with `host_memory` of so much for each rank: a sequence on one process
and on a ring; a batch of sequences of `--rows-of` tokens on one process and in 2 x 2 blocks. The largest size is looked for in forecasts, as
`plan --json` does, to within a sixty-fourth. New processes then train steps of it, and others of a sixteenth more, which all ranks have to refuse.
Prints sizes, the peaks of resident memory by rank, above the size that a process had before `manage` without its weights, and ratios to one process.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from machine import describe_machine, usable_cores
from sequences import begin
from transformers import LlamaConfig, LlamaForCausalLM

import patrickstar
from patrickstar.cli.batches import as_batch
from patrickstar.cli.loop import ResidentGrowth
from patrickstar.cli.predict import predict
from patrickstar.cli.together import Together, Tried, largest
from patrickstar.config.arguments import check_arguments
from patrickstar.core.shard_layout import RankOf
from patrickstar.units import MIB
from ranks import Team

WANTED: Final = 3.5


@dataclass(frozen=True, slots=True)
class Way:
    """A way of training. Attributes: grows: the length of one sequence, or the number of rows. context, q: as `Together` has them."""

    name: str
    grows: str
    context: int = 1
    q: int = 1

    @property
    def together(self) -> Together:
        """How ranks share a batch."""
        return Together(context=self.context, q=self.q)

    def shape(self, size: int, rows_of: int) -> tuple[int, int]:
        """Rows and tokens of a batch."""
        return (1, size) if self.grows == "tokens" else (size, rows_of)


WAYS: Final = (
    Way("one process", "tokens"),
    Way("ring of 4", "tokens", context=4),
    Way("one process", "rows"),
    Way("2 x 2 blocks", "rows", q=2),
)


def build(arguments: argparse.Namespace) -> LlamaForCausalLM:
    """A decoder, the same on all ranks.

    With the cache of keys and values that is the default of transformers: without one, a trace cannot tell that one process needs no mask.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.width,
        intermediate_size=4 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.width // 64,
        num_key_value_heads=arguments.width // 64,
    )
    return LlamaForCausalLM(config).train()


def foreseen(way: Way, arguments: argparse.Namespace) -> tuple[int, int]:
    """The largest size that fits, and bytes of model states of one rank."""
    with torch.device("meta"):
        model = build(arguments)
    together = way.together
    torch.set_num_threads(max(1, usable_cores() // together.size))  # as each rank has: what kernels keep goes by it
    memory = check_arguments(device="cpu", precision="fp32", host_memory=together.size * arguments.memory * MIB)
    which, known = RankOf(0, together.size, together.size), []

    def tried(size: int) -> Tried:
        rows, tokens = way.shape(size, arguments.rows_of)
        known.append(
            predict(
                model,
                batch_size=rows,
                seq_len=tokens,
                clip=False,
                arguments=memory,
                which=which,
                together=together,
                advises=False,
            )
        )
        return Tried.of(size, known[-1])

    with together.imagined(model, ranks=together.size):
        found = largest(tried, 64 * together.size, of=together.multiple if way.grows == "tokens" else 1)
    return found, (known[-1].by_rank or (known[-1].model_data_bytes,))[0]


def train(pipe: Connection, rank: int, size: int, store: str, asked_for: tuple[Way, argparse.Namespace]) -> None:
    """One rank: trains steps on a batch of a size, each time it is asked to, and says its losses and its peak, or why it does not."""
    begin(rank, size, store)
    way, arguments = asked_for
    model, together = build(arguments), way.together
    together.begin(model, ranks=size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    growth, nbytes = ResidentGrowth(model), size * arguments.memory * MIB
    session = patrickstar.manage(model, optimizer, device="cpu", host_memory=nbytes, mesh=together.mesh)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        rows, tokens = way.shape(asked, arguments.rows_of)
        ids = torch.randint(arguments.vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(0))
        losses = []
        try:
            for _ in range(arguments.steps):
                loss = model(**together.shard(as_batch(ids))).loss
                loss.backward()
                session.optimizer.step()
                session.optimizer.zero_grad()
                losses.append(loss.item())
        except patrickstar.BudgetError as error:
            pipe.send({"refused": str(error)})
        else:
            pipe.send({"losses": losses, "peak_bytes": growth.peak()})
    session.close(keep_weights=False)
    dist.destroy_process_group()


def measured(way: Way, arguments: argparse.Namespace) -> dict[str, Any]:
    """The largest size, trained, and a larger one, refused."""
    size, state_bytes = foreseen(way, arguments)
    multiple, ranks = way.together.multiple if way.grows == "tokens" else 1, way.together.size
    above = math.ceil(size * 17 / 16 / multiple) * multiple
    answers = []
    for number in (size, above):
        team = Team(ranks, train, (way, arguments))
        answers.append(team.ask(number))
        team.end()
    fits, too_much = answers
    for answer in fits:
        assert "losses" in answer, f"{way.name}, {size} {way.grows}: {answer}"
        assert answer["losses"] == fits[0]["losses"], f"{way.name}, {size} {way.grows}: ranks have other losses"
    assert all("refused" in answer for answer in too_much), f"{way.name}, {above} {way.grows}: {too_much}"
    row = {
        **asdict(way),
        "ranks": ranks,
        "largest": size,
        "refused": above,
        "refusal": too_much[0]["refused"].splitlines()[0],
        "state_bytes": state_bytes,
        "peak_bytes": [answer["peak_bytes"] for answer in fits],
        "losses": fits[0]["losses"],
    }
    peaks = ", ".join(f"{nbytes / MIB:.0f}" for nbytes in row["peak_bytes"])
    print(
        f"{way.name}: {size} {way.grows} trained (peaks {peaks} MiB, model states {state_bytes / MIB:.0f} MiB a rank), {above} refused",
        flush=True,
    )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=int, default=512, help="MiB of each rank")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--rows-of", type=int, default=128)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = [measured(way, arguments) for way in WAYS]
    for one, many in zip(rows[::2], rows[1::2], strict=True):
        many["ratio"] = many["largest"] / one["largest"]
        print(f"{many['name']}: {many['ratio']:.2f} x the {many['grows']} of one process", flush=True)
    result = {
        "what": "the largest size that trains in the same host_memory a rank, on 4 ranks of gloo and on one process",
        "wanted": WANTED,
        "model": {name: getattr(arguments, name) for name in ("width", "layers", "vocabulary")},
        "memory_bytes": arguments.memory * MIB,
        "rows_of": arguments.rows_of,
        "rows": rows,
        "command": " ".join(["python", "benchmarks/mesh_memory.py", *sys.argv[1:]]),
        "machine": describe_machine(),
    }
    if arguments.write:
        path = Path(__file__).parent / "results" / "mesh_memory.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
