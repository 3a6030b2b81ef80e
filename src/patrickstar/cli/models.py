"""Models that `--model` means: a name of the table, a configuration file, a directory with weights; the verb `models`. Hugging Face builds them.

The table has the original's shapes, common current ones, and what `make train` trains. Sources: the original's table is that of
Tencent/PatrickStar, `examples/model_builder.py` (hidden size, layers, heads and positions as there, the feed-forward layer four times as wide). Its
names stay, though some promise another size: megatron_3.9B has 2.0B parameters, GPT_310B has 413B. The others are the `config.json` files that the
models' makers publish. Only shapes are taken: weights are drawn afresh, from the seed. Dropout is off in all of them, as in current pre-training; a
file of one's own (`--model FILE.json`) is taken as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import click

from patrickstar.config.json_file import read_json
from patrickstar.errors import ConfigError, Error, nearest

if TYPE_CHECKING:
    from torch import nn

DEFAULT: Final = "gpt2-120m"
"""What `make train` trains: GPT-2's width, a vocabulary that a small corpus can fill, more than 100M parameters."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One decoder with its numbers.

    Families: `gpt2`, learned positions, biases everywhere, the head shares the embedding; `bert`, the original's encoder with a causal mask; `llama`
    and `mistral`, rotary positions, gated feed-forward, grouped keys; `qwen2`, the same with biases in attention.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0
    ffn: int = 0
    vocab: int = 50257
    positions: int = 1024
    tied: bool = False
    head_dim: int | None = None
    theta: float = 1e4
    eps: float = 1e-5
    family: str = "gpt2"

    def numel(self) -> int:
        """Parameters, shared ones once."""
        hidden, embedding = self.hidden, self.vocab * self.hidden
        if self.family in ("gpt2", "bert"):
            head = hidden**2 + 5 * hidden + self.vocab if self.family == "bert" else 0  # with the two types of tokens
            beside = embedding + (self.positions + 2) * hidden + head
            return beside + self.layers * (12 * hidden**2 + 13 * hidden)
        width = self.head_dim or hidden // self.heads
        queries, keys = self.heads * width, self.kv_heads * width
        biases = queries + 2 * keys if self.family == "qwen2" else 0
        block = 2 * hidden * (queries + keys) + biases + 3 * hidden * self.ffn + 2 * hidden
        return (1 if self.tied else 2) * embedding + self.layers * block + hidden

    def settings(self) -> dict[str, Any]:
        """The configuration as Hugging Face's classes take it."""
        settings: dict[str, Any] = {
            "model_type": self.family,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
        }
        if self.family == "gpt2":
            settings |= dict.fromkeys(("bos_token_id", "eos_token_id"), self.vocab - 1)
            return settings | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        if self.family == "bert":
            settings |= {"is_decoder": True, "intermediate_size": 4 * self.hidden}
            return settings | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        settings |= {"intermediate_size": self.ffn, "num_key_value_heads": self.kv_heads, "rms_norm_eps": self.eps}
        settings |= {"tie_word_embeddings": self.tied, "bos_token_id": 1, "eos_token_id": 2}
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": self.theta}
        if self.head_dim is not None:
            settings["head_dim"] = self.head_dim
        if self.family == "mistral":
            settings["sliding_window"] = None
        return settings


MODELS: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        DEFAULT: Shape(16, 768, 12, vocab=8192),
        "gpt2": Shape(12, 768, 12),
        "gpt2-medium": Shape(24, 1024, 16),
        "gpt2-large": Shape(36, 1280, 20),
        "gpt2-xl": Shape(48, 1600, 25),
        "llama-2-7b": Shape(32, 4096, 32, 32, 11008, 32000, 4096, family="llama"),
        "llama-2-13b": Shape(40, 5120, 40, 40, 13824, 32000, 4096, family="llama"),
        "llama-3.2-1b": Shape(16, 2048, 32, 8, 8192, 128256, 131072, tied=True, head_dim=64, theta=5e5, family="llama"),
        "llama-3.2-3b": Shape(
            28, 3072, 24, 8, 8192, 128256, 131072, tied=True, head_dim=128, theta=5e5, family="llama"
        ),
        "llama-3.1-8b": Shape(32, 4096, 32, 8, 14336, 128256, 131072, theta=5e5, family="llama"),
        "llama-3.1-70b": Shape(80, 8192, 64, 8, 28672, 128256, 131072, theta=5e5, family="llama"),
        "mistral-7b": Shape(32, 4096, 32, 8, 14336, 32768, 32768, theta=1e6, family="mistral"),
        "qwen2.5-0.5b": Shape(24, 896, 14, 2, 4864, 151936, 32768, tied=True, theta=1e6, eps=1e-6, family="qwen2"),
        "qwen2.5-1.5b": Shape(28, 1536, 12, 2, 8960, 151936, 131072, tied=True, theta=1e6, eps=1e-6, family="qwen2"),
        "qwen2.5-3b": Shape(36, 2048, 16, 2, 11008, 151936, 32768, tied=True, theta=1e6, eps=1e-6, family="qwen2"),
        "qwen2.5-7b": Shape(28, 3584, 28, 4, 18944, 152064, 131072, theta=1e6, eps=1e-6, family="qwen2"),
        "qwen2.5-14b": Shape(48, 5120, 40, 8, 13824, 152064, 131072, theta=1e6, family="qwen2"),
        "qwen2.5-32b": Shape(64, 5120, 40, 8, 27648, 152064, 131072, theta=1e6, family="qwen2"),
        # The original's table, in its order. Its short GPT2small sequence is no misprint.
        "Bert": Shape(6, 768, 12, vocab=30522, positions=512, family="bert"),
        "Bertlarge": Shape(24, 1024, 16, vocab=30522, positions=512, family="bert"),
        "GPT2small": Shape(24, 1536, 16, positions=128),
        "GPT2_1B": Shape(20, 2048, 16),
        "megatron_1.3B": Shape(24, 2048, 32),
        "GPT2_2B": Shape(40, 2048, 16),
        "megatron_3.9B": Shape(24, 2560, 40),
        "GPT2_4B": Shape(64, 2304, 16),
        "GPT3_6B": Shape(53, 3072, 16),
        "GPT3_8B": Shape(72, 3072, 16),
        "GPT3_10B": Shape(50, 4096, 16),
        "GPT3_11B": Shape(55, 4096, 16),
        "GPT3_12B": Shape(60, 4096, 16),
        "GPT3_13B": Shape(65, 4096, 16),
        "GPT3_15B": Shape(78, 4096, 16),
        "GPT3_18B": Shape(90, 4096, 16),
        "GPT_NV_18B": Shape(40, 6144, 16),
        "GPT_NV_39B": Shape(48, 8192, 16),
        "GPT_NV_76B": Shape(60, 10240, 16),
        "GPT_DS_20B": Shape(25, 8192, 16),
        "GPT_DS_40B": Shape(50, 8192, 16),
        "GPT_DS_50B": Shape(62, 8192, 16),
        "GPT_DS_60B": Shape(75, 8192, 16),
        "GPT_DS_68B": Shape(66, 9216, 16),
        "GPT_175B": Shape(96, 12288, 96),
        "GPT_220B": Shape(120, 12288, 96),
        "GPT_250B": Shape(137, 12288, 96),
        "GPT_310B": Shape(128, 16384, 128),
        "GPT_454B": Shape(90, 20480, 128),
    }
)


@click.command()
def models() -> None:
    """List what --model knows by name."""
    from patrickstar.cli.display import print_table

    rows: list[tuple[str, ...]] = [
        ("name", "family", "layers", "hidden", "heads", "vocabulary", "positions", "parameters")
    ]
    for name, shape in MODELS.items():
        numbers = (shape.layers, shape.hidden, shape.heads, shape.vocab, shape.positions)
        numel = shape.numel()
        count = f"{numel / 1e9:.2f}B" if numel >= 1e9 else f"{numel / 1e6:.1f}M"
        rows.append((name, shape.family, *map(str, numbers), count))
    print_table(rows)


class ModelError(Error):
    """A model's files hold something other than what they should."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A causal language model that can be built: its configuration, and its directory where it has weights."""

    name: str
    settings: Mapping[str, Any]
    weights: Path | None = None

    @classmethod
    def find(cls, name: str) -> ModelSource:
        """The source that `--model NAME|DIR|FILE.json` means; a directory or file goes first. ConfigError: none such; names the nearest."""
        path = Path(name)
        if path.is_file():
            return cls(name, read_json(path, what="--model"))
        if not path.is_dir():
            if path.suffix == ".json" or len(path.parts) > 1:
                raise ConfigError(f"--model {name}: no such file or directory")
            if name not in MODELS:
                raise ConfigError(
                    f"--model {name}: no name that `patrickstar models` lists, no configuration (FILE.json), no directory{nearest(name, MODELS)}"
                )
            return cls(name, MODELS[name].settings())
        config = path / "config.json"
        if not config.is_file():
            raise ConfigError(f"--model {path}: the directory has no config.json")
        if not any(path.glob("*.safetensors")):
            raise ConfigError(
                f"--model {path}: the directory has no *.safetensors weights (other formats are not read); "
                f"to start from fresh weights pass --model {config}"
            )
        return cls(str(path), read_json(config, what="--model"), weights=path)

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer that belongs to the weights, where they came with one."""
        file = self.weights / "tokenizer.json" if self.weights else None
        return file if file is not None and file.is_file() else None

    def config(self) -> Any:
        """The Hugging Face configuration, without a cache of keys and values. ConfigError: transformers has no causal model of it."""
        transformers = _transformers()
        settings = dict(self.settings)
        kind = settings.pop("model_type", None)
        if not isinstance(kind, str):
            raise ConfigError(f"--model {self.name}: the configuration has no model_type")
        try:
            config = transformers.AutoConfig.for_model(kind, **settings)
        except Exception as error:  # whatever a stranger's file makes its configuration class raise
            raise ConfigError(f"--model {self.name}: transformers refuses the configuration: {error}") from error
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ConfigError(
                f"--model {self.name}: {kind} is none of the causal language models of transformers, "
                "which are what this command trains"
            )
        # Caches of keys and values serve generation; a training step would build one and throw it away.
        config.use_cache = False
        if not isinstance(getattr(config, "vocab_size", None), int):
            raise ConfigError(f"--model {self.name}: the configuration has no vocab_size")
        return config

    def build(self) -> nn.Module:
        """The model in fp32 and in training mode: with its weights, or fresh ones from torch's random numbers. ModelError: no weights."""
        import torch

        if self.weights is None:
            return self._fresh()
        given = {"config": self.config(), "dtype": torch.float32, "local_files_only": True, "use_safetensors": True}
        try:
            model: nn.Module = _transformers().AutoModelForCausalLM.from_pretrained(self.weights, **given).train()
        except Exception as error:  # damaged files: safetensors, transformers and the file system each have their own
            raise ModelError(f"{self.weights}: the weights cannot be read: {error}") from error
        return self._complete(model)

    def build_deferred(self) -> nn.Module:
        """A model without memory for its parameters, which `manage` fills. ModelError, CheckpointError: its files do not hold its weights."""
        from patrickstar.deferred.deferred_init import deferred_init

        with deferred_init():
            model = self._fresh()
        return self._complete(model)

    def _fresh(self) -> nn.Module:
        import torch

        model: nn.Module = _transformers().AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32)
        return model.train()

    def _complete(self, model: nn.Module) -> nn.Module:
        """The model, if its files have all of its tensors: others would be drawn afresh. Else raises ModelError."""
        from patrickstar.checkpoint.matching import match
        from patrickstar.checkpoint.naming import naming_of
        from patrickstar.checkpoint.weight_files import WeightFiles
        from patrickstar.session.loading import tensors_of

        if self.weights is not None:
            with closing(WeightFiles(self.weights)) as files:
                missing = match(files, tensors_of(model), naming_of(model)).missing
            if missing:
                raise ModelError(
                    f"{self.weights}: {len(missing)} tensors of the model are not in the files, {missing[0]} first"
                )
        return model

    def build_on_meta(self) -> nn.Module:
        """The model's structure without memory for its parameters."""
        import torch

        with torch.device("meta"):
            return self._fresh()


def check_length(config: Any, seq_len: int) -> None:
    """Refuses sequences longer than the model has positions. ConfigError: with the longest that it takes."""
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and seq_len > positions:
        raise ConfigError(f"--seq-len {seq_len}: this model has {positions} positions")


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ConfigError(
            "transformers is not installed, which builds the command line's models: pip install 'patrickstar[train]'"
        ) from error
    # Its progress bars and advice would tear our display; what matters comes as an exception.
    transformers.utils.logging.set_verbosity(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    return transformers
