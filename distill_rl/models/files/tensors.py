"""Whether the files of a model hold the tensors that its class has: names and shapes, without the weights.

`plainly_whole` knows the tensors of the Llama kind of families and imports nothing. What it does not confirm, the model
class itself decides on the meta device (`weights.compare`), which takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distill_rl.errors import problem
from distill_rl.models.families import head_size
from distill_rl.models.files.headers import FLOATS

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of every tensor in a model's files, by name."""
_NAMED = 3
"""Number of tensors that a line names."""


def plainly_whole(hf_config: Any, shapes: Shapes) -> bool:
    """Whether a Llama, Mistral, Qwen2 or Qwen3 model has exactly the tensors that its config asks for.

    False means only that it must be asked of the model class: another family, unusual biases, or a tensor that is
    missing, of another shape or not expected.
    """
    if hf_config.model_type not in ("llama", "mistral", "qwen2", "qwen3"):
        return False
    if hf_config.hidden_act not in ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu"):
        return False  # the class knows whether there is such a function
    if getattr(hf_config, "attention_bias", False) or getattr(hf_config, "mlp_bias", False):
        return False
    hidden, inner, columns = hf_config.hidden_size, hf_config.intermediate_size, hf_config.vocab_size
    size = head_size(hf_config) or 0
    queries, keys = size * hf_config.num_attention_heads, size * hf_config.num_key_value_heads
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if hf_config.model_type == "qwen2":
        layer |= {
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.bias": (keys,),
        }
    if hf_config.model_type == "qwen3":
        layer |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
    expected = {"model.embed_tokens.weight": (columns, hidden), "model.norm.weight": (hidden,)}
    for i in range(hf_config.num_hidden_layers):
        expected |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    head = {"lm_head.weight": (columns, hidden)}
    if hf_config.tie_word_embeddings and "lm_head.weight" not in shapes:
        head = {}
    return dict(shapes) == expected | head


def dtype_problems(key: str, headers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns one line if there are weights that are no floats of 16 bits or more, such as those of a quantized model.

    Args:
        key: the setting that names the model, for the line.
        headers: as `read_headers` returns them.
    """
    others = {name: entry["dtype"] for name, entry in headers.items() if entry["dtype"] not in FLOATS}
    if not others:
        return []
    listed = first_few([f"{name} is {dtype}" for name, dtype in others.items()])
    rule = f"the weights must be floats of 16 bits or more ({', '.join(FLOATS)})"
    remedy = "use the original, unquantized weights, or for a teacher quantization: as_stored or the backend vllm"
    return [problem(key, rule, listed, remedy)]


def first_few(names: list[str]) -> str:
    """The first few names, and an ellipsis if there are more."""
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
