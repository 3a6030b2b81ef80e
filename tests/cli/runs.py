"""Runs of the command line on a tiny model and a little text, in this process."""

import json
from pathlib import Path

from patrickstar.cli.main import main

TINY = {"model_type": "gpt2", "vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 1, "n_head": 2}


class Runs:
    """One directory with a model's configuration (dropout as transformers has it) and a text."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.model = home / "config.json"
        self.text = home / "text.txt"
        self.checkpoints = home / "runs" / "checkpoints"
        self.model.write_text(json.dumps({**TINY, "bos_token_id": 0, "eos_token_id": 0}))
        self.text.write_text("".join(f"{n} bottles stand on the wall, and {n} bottles stay.\n" for n in range(1000)))

    def train(self, *arguments: object, data: object = None, log: str = "log.jsonl", steps: int = 4) -> int:
        """`patrickstar train` on the model and the text, or other data; gives the exit status."""
        common = f"--device cpu --batch-size 2 --seq-len 16 --steps {steps} --schedule constant --warmup 5 --lr 1e-3"
        files = ["--data", data or self.text, "--model", self.model, "--log-json", self.home / log]
        return main([str(word) for word in ("train", *common.split(), *files, *arguments)])

    def rows(self, log: str = "log.jsonl", event: str | None = None) -> list[dict]:
        rows = [json.loads(line) for line in (self.home / log).read_text().splitlines()]
        return [row for row in rows if event in (None, row["event"])]

    def losses(self, log: str = "log.jsonl") -> dict[int, str]:
        """Every bit of every step's loss, by step."""
        return {row["step"]: row["loss_hex"] for row in self.rows(log, "step")}

    def saved(self) -> list[str]:
        return sorted(path.name for path in self.checkpoints.glob("step-*"))
