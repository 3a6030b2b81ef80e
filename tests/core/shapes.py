"""The parameters of well-known models, as specs: names and shapes only, in registration order."""

from patrickstar.core.layout import TensorSpec


def _specs(shapes):
    return [TensorSpec(name, tuple(shape)) for name, shape in shapes]


def _linear(name, rows, cols):
    return [(f"{name}.weight", (rows, cols)), (f"{name}.bias", (rows,))]


def _norm(name, width):
    return [(f"{name}.weight", (width,)), (f"{name}.bias", (width,))]


def gpt2(layers=12, width=768, vocabulary=50257, positions=1024):
    shapes = [("wte.weight", (vocabulary, width)), ("wpe.weight", (positions, width))]
    for i in range(layers):
        shapes += _norm(f"h.{i}.ln_1", width)
        shapes += [(f"h.{i}.attn.c_attn.weight", (width, 3 * width)), (f"h.{i}.attn.c_attn.bias", (3 * width,))]
        shapes += _linear(f"h.{i}.attn.c_proj", width, width) + _norm(f"h.{i}.ln_2", width)
        shapes += [(f"h.{i}.mlp.c_fc.weight", (width, 4 * width)), (f"h.{i}.mlp.c_fc.bias", (4 * width,))]
        shapes += [(f"h.{i}.mlp.c_proj.weight", (4 * width, width)), (f"h.{i}.mlp.c_proj.bias", (width,))]
    return _specs(shapes + _norm("ln_f", width))


def llama(layers, width, hidden, vocabulary=32000, kv_width=None):
    kv_width = kv_width or width
    shapes = [("embed_tokens.weight", (vocabulary, width))]
    for i in range(layers):
        rows = {"q": width, "k": kv_width, "v": kv_width, "o": width}
        shapes += [(f"layers.{i}.self_attn.{name}_proj.weight", (n, width)) for name, n in rows.items()]
        shapes += [(f"layers.{i}.mlp.{name}_proj.weight", (hidden, width)) for name in ("gate", "up")]
        shapes += [(f"layers.{i}.mlp.down_proj.weight", (width, hidden))]
        shapes += [(f"layers.{i}.{name}_layernorm.weight", (width,)) for name in ("input", "post_attention")]
    return _specs([*shapes, ("norm.weight", (width,)), ("lm_head.weight", (vocabulary, width))])


MODELS = {
    "gpt2": gpt2(),
    "gpt2-xl": gpt2(48, 1600),
    "gpt3-175b": gpt2(96, 12288, positions=2048),
    "gpt2-class of 4M": gpt2(4, 256, vocabulary=4096),
    "tinyllama": llama(22, 2048, 5632, kv_width=256),
    "llama-7b": llama(32, 4096, 11008),
    "llama3-8b": llama(32, 4096, 14336, vocabulary=128256, kv_width=1024),
    "llama-70b": llama(80, 8192, 28672, kv_width=1024),
}
