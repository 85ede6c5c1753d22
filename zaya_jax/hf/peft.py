"""Write adapters as a folder of the `peft` library (0.21), for the `zaya` model of `transformers`.

`peft` adapts a linear layer by `lora_A.weight` [rank, in] and `lora_B.weight` [out, rank]. The experts of a layer are
3-D parameters of one module (`target_parameters`): their A are stacked to [e·rank, in] and their B to [out, rank·e],
and the module is wrapped once for each parameter, the first one innermost (`peft.tuners.lora.layer.ParamWrapper`).
"""

from pathlib import Path
from typing import Any

from zaya_jax.config import LoraConfig, ModelConfig
from zaya_jax.hf.config import to_hf
from zaya_jax.hf.exporter import CARD, Read, output_folder, stored_dtype, write_tensors
from zaya_jax.hf.tensors import tensors
from zaya_jax.hf.tokenizer_files import complete_tokenizer_files
from zaya_jax.model.experts import HF_EXPERTS
from zaya_jax.model.hf_names import HfTensor, transposed
from zaya_jax.model.lora import ADAPTED, adapter_names
from zaya_jax.model.tree import roles
from zaya_jax.model.zaya import abstract_model
from zaya_jax.run.files import json_text


def write_peft_folder(
    folder: Path,
    config: ModelConfig,
    lora: LoraConfig,
    base: str,
    read: Read,
    dtype: str,
    carry: Path | None,
    card: str,
) -> None:
    """Write adapters atomically; see `write_folder`.

    `lora` has their rank and scale. `base` is the folder or Hugging Face name of the base model, which `peft` loads.
    `read` returns an adapter, given its name (`lora.adapter_names`) and its index in the stack. `README.md` is `card`.
    """
    kind = stored_dtype(dtype)
    to_hf(config, kind.name)  # raises for an architecture that `transformers` does not have
    role = roles(abstract_model(config))
    matrices = [tensor for tensor in tensors(config) if role.get(tensor.leaf) in ADAPTED]
    files, _ = complete_tokenizer_files(carry)
    files[CARD] = card
    files["adapter_config.json"] = json_text(_adapter_config(matrices, lora, base))
    rows = [row for matrix in matrices for row in adapter_tensors(matrix, lora.rank)]
    with output_folder(folder, files) as partial:
        write_tensors(partial, {"adapter_model.safetensors": rows}, read, kind)


def adapter_tensors(matrix: HfTensor, rank: int) -> tuple[HfTensor, HfTensor]:
    """Return the tensors of the adapters A and B of a matrix."""
    module, _, parameter = matrix.name.rpartition(".")
    *stack, out, width = matrix.shape
    if stack:
        (e,) = stack
        to_a = lambda a: transposed(a.reshape(e, rank, width)), lambda a: transposed(a).reshape(e * rank, width)
        to_b = (
            lambda b: b.reshape(out, rank, e).transpose(2, 1, 0),
            lambda b: b.transpose(2, 1, 0).reshape(out, rank * e),
        )
    else:
        e, to_a, to_b = 1, (transposed, transposed), (transposed, transposed)
    inner = ".base_layer" if stack and HF_EXPERTS[0].endswith(parameter) else ""
    name = f"base_model.model.{module}{inner}.lora_"
    leaf_a, leaf_b = adapter_names(matrix.leaf)
    tensor_a = HfTensor(f"{name}A.weight", leaf_a, (e * rank, width), *to_a, group=matrix.group)
    return tensor_a, HfTensor(f"{name}B.weight", leaf_b, (out, rank * e), *to_b, group=matrix.group)


def _adapter_config(matrices: list[HfTensor], lora: LoraConfig, base: str) -> dict[str, Any]:
    in_layer = dict.fromkeys(matrix.name.split(".", 3)[3] for matrix in matrices)  # after 'model.layers.0.'
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [name.removesuffix(".weight") for name in in_layer if name not in HF_EXPERTS],
        "target_parameters": [name for name in in_layer if name in HF_EXPERTS],
    }
