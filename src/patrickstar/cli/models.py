"""The shapes that `--model` knows by name: the original's table, common current ones, and what `make train` trains.

Sources: the original's table is that of Tencent/PatrickStar, `examples/model_builder.py` (hidden size, layers, heads
and positions as there, the feed-forward layer four times as wide). Its names stay, though some promise another size:
megatron_3.9B has 2.0B parameters, GPT_310B has 413B. The others are the `config.json` files that the models' makers
publish. Only shapes are taken: weights are drawn afresh, from the seed. Dropout is off in all of them, as in current
pre-training; a file of one's own (`--model FILE.json`) is taken as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from patrickstar.errors import ConfigError, nearest

DEFAULT: Final = "gpt2-120m"
"""What `make train` trains: GPT-2's width, a vocabulary that a small corpus can fill, more than 100M parameters."""


@dataclass(frozen=True, slots=True)
class Gpt2:
    """A GPT-2 decoder: learned positions, biases everywhere, the head shares the embedding."""

    layers: int
    hidden: int
    heads: int
    vocab: int = 50257
    positions: int = 1024
    family: str = "gpt2"

    def numel(self) -> int:
        block = 12 * self.hidden**2 + 13 * self.hidden
        return (self.vocab + self.positions) * self.hidden + self.layers * block + 2 * self.hidden

    def settings(self) -> dict[str, Any]:
        last = self.vocab - 1
        return {
            "model_type": "gpt2",
            "vocab_size": self.vocab,
            "n_positions": self.positions,
            "n_embd": self.hidden,
            "n_layer": self.layers,
            "n_head": self.heads,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": last,
            "eos_token_id": last,
        }


@dataclass(frozen=True, slots=True)
class Bert:
    """The original's encoder, here as a decoder: the same blocks with a causal mask, the head shares the embedding."""

    layers: int
    hidden: int
    heads: int
    vocab: int = 30522
    positions: int = 512
    family: str = "bert"

    def numel(self) -> int:
        hidden = self.hidden
        embeddings = (self.vocab + self.positions + 2) * hidden + 2 * hidden
        block = 12 * hidden**2 + 13 * hidden
        head = hidden**2 + hidden + 2 * hidden + self.vocab
        return embeddings + self.layers * block + head

    def settings(self) -> dict[str, Any]:
        return {
            "model_type": "bert",
            "is_decoder": True,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }


@dataclass(frozen=True, slots=True)
class Llama:
    """A Llama-like decoder: rotary positions, gated feed-forward, grouped keys; biases only in Qwen2's attention."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    positions: int
    tied: bool = False
    head_dim: int | None = None
    theta: float = 10000.0
    eps: float = 1e-5
    family: str = "llama"

    def numel(self) -> int:
        hidden, width = self.hidden, self.head_dim or self.hidden // self.heads
        queries, keys = self.heads * width, self.kv_heads * width
        attention = 2 * hidden * queries + 2 * hidden * keys
        biases = queries + 2 * keys if self.family == "qwen2" else 0
        block = attention + biases + 3 * hidden * self.ffn + 2 * hidden
        return (1 if self.tied else 2) * self.vocab * hidden + self.layers * block + hidden

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "model_type": self.family,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.eps,
            "tie_word_embeddings": self.tied,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if self.head_dim is not None:
            settings["head_dim"] = self.head_dim
        if self.family == "mistral":
            settings["sliding_window"] = None
        return settings


Shape = Gpt2 | Bert | Llama
"""One architecture with its numbers, and what these come to: parameters, shared ones once, and a Hugging Face configuration."""

MODELS: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        DEFAULT: Gpt2(16, 768, 12, vocab=8192),
        "gpt2": Gpt2(12, 768, 12),
        "gpt2-medium": Gpt2(24, 1024, 16),
        "gpt2-large": Gpt2(36, 1280, 20),
        "gpt2-xl": Gpt2(48, 1600, 25),
        "llama-2-7b": Llama(32, 4096, 32, 32, 11008, 32000, 4096),
        "llama-2-13b": Llama(40, 5120, 40, 40, 13824, 32000, 4096),
        "llama-3.2-1b": Llama(16, 2048, 32, 8, 8192, 128256, 131072, tied=True, head_dim=64, theta=500000.0),
        "llama-3.2-3b": Llama(28, 3072, 24, 8, 8192, 128256, 131072, tied=True, head_dim=128, theta=500000.0),
        "llama-3.1-8b": Llama(32, 4096, 32, 8, 14336, 128256, 131072, theta=500000.0),
        "llama-3.1-70b": Llama(80, 8192, 64, 8, 28672, 128256, 131072, theta=500000.0),
        "mistral-7b": Llama(32, 4096, 32, 8, 14336, 32768, 32768, theta=1000000.0, family="mistral"),
        "qwen2.5-0.5b": Llama(
            24, 896, 14, 2, 4864, 151936, 32768, tied=True, theta=1000000.0, eps=1e-6, family="qwen2"
        ),
        "qwen2.5-1.5b": Llama(
            28, 1536, 12, 2, 8960, 151936, 131072, tied=True, theta=1000000.0, eps=1e-6, family="qwen2"
        ),
        "qwen2.5-3b": Llama(
            36, 2048, 16, 2, 11008, 151936, 32768, tied=True, theta=1000000.0, eps=1e-6, family="qwen2"
        ),
        "qwen2.5-7b": Llama(28, 3584, 28, 4, 18944, 152064, 131072, theta=1000000.0, eps=1e-6, family="qwen2"),
        "qwen2.5-14b": Llama(48, 5120, 40, 8, 13824, 152064, 131072, theta=1000000.0, family="qwen2"),
        "qwen2.5-32b": Llama(64, 5120, 40, 8, 27648, 152064, 131072, theta=1000000.0, family="qwen2"),
        # The original's table, in its order. Its short GPT2small sequence is no misprint.
        "Bert": Bert(6, 768, 12),
        "Bertlarge": Bert(24, 1024, 16),
        "GPT2small": Gpt2(24, 1536, 16, positions=128),
        "GPT2_1B": Gpt2(20, 2048, 16),
        "megatron_1.3B": Gpt2(24, 2048, 32),
        "GPT2_2B": Gpt2(40, 2048, 16),
        "megatron_3.9B": Gpt2(24, 2560, 40),
        "GPT2_4B": Gpt2(64, 2304, 16),
        "GPT3_6B": Gpt2(53, 3072, 16),
        "GPT3_8B": Gpt2(72, 3072, 16),
        "GPT3_10B": Gpt2(50, 4096, 16),
        "GPT3_11B": Gpt2(55, 4096, 16),
        "GPT3_12B": Gpt2(60, 4096, 16),
        "GPT3_13B": Gpt2(65, 4096, 16),
        "GPT3_15B": Gpt2(78, 4096, 16),
        "GPT3_18B": Gpt2(90, 4096, 16),
        "GPT_NV_18B": Gpt2(40, 6144, 16),
        "GPT_NV_39B": Gpt2(48, 8192, 16),
        "GPT_NV_76B": Gpt2(60, 10240, 16),
        "GPT_DS_20B": Gpt2(25, 8192, 16),
        "GPT_DS_40B": Gpt2(50, 8192, 16),
        "GPT_DS_50B": Gpt2(62, 8192, 16),
        "GPT_DS_60B": Gpt2(75, 8192, 16),
        "GPT_DS_68B": Gpt2(66, 9216, 16),
        "GPT_175B": Gpt2(96, 12288, 96),
        "GPT_220B": Gpt2(120, 12288, 96),
        "GPT_250B": Gpt2(137, 12288, 96),
        "GPT_310B": Gpt2(128, 16384, 128),
        "GPT_454B": Gpt2(90, 20480, 128),
    }
)


def shape_named(name: str) -> Shape:
    """The shape that has a given name.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if name in MODELS:
        return MODELS[name]
    # People type gpt2-XL and gpt_175b: the nearest name is the same one in another case.
    close = {known.lower(): known for known in MODELS}.get(name.lower())
    hint = f'; did you mean "{close}"?' if close else nearest(name, MODELS)
    raise ConfigError(
        f"--model {name}: no name that `patrickstar models` lists, no configuration (FILE.json), no directory{hint}"
    )
