"""Tiny models of transformers' architectures beyond the matrix, each with a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Built = tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]

DECODER = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
GROUPED = DECODER | {"num_key_value_heads": 2}
SEQUENCE_TO_SEQUENCE = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 256,
}
TEXT_TOWER = DECODER | {"max_position_embeddings": 32, "eos_token_id": 2}
VISION = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
PATCHES = {"image_size": 32, "patch_size": 8}


def tokens() -> Tensor:
    return torch.randint(3, 253, (2, 12), generator=torch.Generator().manual_seed(5))


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def sound(*shape: int) -> Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(3))


def language_loss(model: Any) -> Tensor:
    loss: Tensor = model(input_ids=tokens(), labels=tokens()).loss
    return loss


def encoding_loss(model: Any) -> Tensor:
    loss: Tensor = model(input_ids=tokens(), attention_mask=torch.ones(2, 12)).last_hidden_state.square().mean()
    return loss


def picture_loss(model: Any) -> Tensor:
    loss: Tensor = model(pixel_values=images()).last_hidden_state.square().mean()
    return loss


def _built(name: str, loss: Callable[[Any], Tensor], **settings: Any) -> Built:
    kind = getattr(transformers, name)
    return lambda: kind(kind.config_class(**settings)), loss


ARCHITECTURES: Mapping[str, Callable[[], Built]] = {
    "opt": lambda: _built("OPTForCausalLM", language_loss, **DECODER, ffn_dim=128, word_embed_proj_dim=64),
    "neox": lambda: _built("GPTNeoXForCausalLM", language_loss, **DECODER),
    "bloom": lambda: _built("BloomForCausalLM", language_loss, hidden_size=64, n_layer=2, n_head=4, vocab_size=256),
    "mistral": lambda: _built("MistralForCausalLM", language_loss, **GROUPED),
    "qwen2-tied": lambda: _built("Qwen2ForCausalLM", language_loss, **GROUPED, tie_word_embeddings=True),
    "qwen3": lambda: _built("Qwen3ForCausalLM", language_loss, **GROUPED, head_dim=16),
    "gemma2": lambda: _built("Gemma2ForCausalLM", language_loss, **GROUPED, head_dim=16),
    "phi": lambda: _built("PhiForCausalLM", language_loss, **DECODER),
    "phi3": lambda: _built("Phi3ForCausalLM", language_loss, **GROUPED, pad_token_id=0),
    "falcon": lambda: _built(
        "FalconForCausalLM", language_loss, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
    ),
    "gptj": lambda: _built(
        "GPTJForCausalLM", language_loss, n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=64, rotary_dim=8
    ),
    "mamba": lambda: _built("MambaForCausalLM", language_loss, hidden_size=64, num_hidden_layers=2, vocab_size=256),
    "rwkv": lambda: _built(
        "RwkvForCausalLM", language_loss, hidden_size=64, num_hidden_layers=2, vocab_size=256, context_length=64
    ),
    "qwen2-moe": lambda: _built(
        "Qwen2MoeForCausalLM",
        language_loss,
        **GROUPED,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
    "deepseek-v3": lambda: _built(
        "DeepseekV3ForCausalLM",
        language_loss,
        **DECODER,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        qk_nope_head_dim=16,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
    ),
    "bart": lambda: _built(
        "BartForConditionalGeneration", language_loss, **SEQUENCE_TO_SEQUENCE, max_position_embeddings=64
    ),
    "roberta": lambda: _built("RobertaModel", encoding_loss, **DECODER),
    "distilbert": lambda: _built(
        "DistilBertModel", encoding_loss, dim=64, n_layers=2, n_heads=4, hidden_dim=128, vocab_size=256
    ),
    "deberta": lambda: _built(
        "DebertaV2Model",
        encoding_loss,
        **DECODER,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
    ),
    "electra": lambda: _built("ElectraModel", encoding_loss, **DECODER, embedding_size=32),
    "xlnet": lambda: _built("XLNetModel", encoding_loss, d_model=64, n_layer=2, n_head=4, d_inner=128, vocab_size=256),
    "modernbert": lambda: _built("ModernBertModel", encoding_loss, **DECODER, pad_token_id=0),
    "longformer": lambda: _built(
        "LongformerModel", encoding_loss, **{**DECODER, "max_position_embeddings": 80}, attention_window=8
    ),
    "funnel": lambda: _built(
        "FunnelModel", encoding_loss, vocab_size=256, block_sizes=[1, 1], d_model=64, n_head=4, d_head=16, d_inner=128
    ),
    "convnext": lambda: _built("ConvNextModel", picture_loss, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1]),
    "resnet": lambda: _built("ResNetModel", picture_loss, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]),
    "swin": lambda: _built(
        "SwinModel",
        picture_loss,
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
    ),
    "segformer": lambda: _built(
        "SegformerModel",
        picture_loss,
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        num_attention_heads=[1, 2],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
    ),
    "wav2vec2": lambda: _built(
        "Wav2Vec2Model",
        lambda model: model(sound(400)).last_hidden_state.square().mean(),
        **VISION,
        conv_dim=[16, 16],
        conv_stride=[5, 2],
        conv_kernel=[10, 3],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        mask_time_prob=0.0,
    ),
    "whisper": lambda: _built(
        "WhisperForConditionalGeneration",
        lambda model: model(input_features=sound(8, 40), labels=tokens()).loss,
        **SEQUENCE_TO_SEQUENCE,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
    "clip": lambda: _built(
        "CLIPModel",
        lambda model: model(input_ids=tokens(), pixel_values=images(), return_loss=True).loss,
        text_config=TEXT_TOWER,
        vision_config=VISION | PATCHES,
        projection_dim=32,
    ),
    "vit-mae": lambda: _built(
        "ViTMAEForPreTraining",
        lambda model: model(pixel_values=images()).loss,
        **VISION,
        **PATCHES,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
    ),
}
"""What builds each, and its loss."""
