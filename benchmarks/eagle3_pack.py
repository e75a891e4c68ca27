"""A draft checkpoint in 8 bits a weight: one GGUF file, in the layout that launch/models.py unpacks."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

BLOCK = 32  # weights of a Q8_0 block; rows must be whole blocks


def pack(folder: Path, file: Path) -> int:
    """Write ``file`` from config.json and model.safetensors of ``folder``; its bytes.

    Matrices become Q8_0, vectors stay float32. Every tensor's dtype is kept beside it. Raises ImportError without gguf.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    writer, kind = GGUFWriter(file, "eagle3-draft"), GGMLQuantizationType.Q8_0
    writer.add_string("dspark.config", (folder / "config.json").read_text())
    for name, weight in load_file(folder / "model.safetensors").items():
        values = weight.float().numpy()
        if weight.dtype == torch.bfloat16 and weight.ndim == 2 and weight.shape[1] % BLOCK == 0:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
        writer.add_string(f"dspark.dtype.{name}", str(weight.dtype).removeprefix("torch."))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.stat().st_size
