#!/usr/bin/env python3
"""
Writes safetensors/ beside this script: files of the safetensors package and of huggingface_hub, for our reader to read
and our writer to reproduce.

    pip install torch safetensors huggingface_hub       (CPU builds suffice; nothing else is downloaded)
    python3 test/golden/make_safetensors.py

All values are small multiples of 1/8, which every type holds exactly. Running the script again gives the same bytes.
"""

import os
import shutil

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file

folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "safetensors")
shutil.rmtree(folder, ignore_errors=True)
os.makedirs(folder)


def ramp(*shape, dtype=torch.float32):
    n = 1
    for size in shape:
        n *= size
    return ((torch.arange(n) - n // 2) / 8).reshape(shape).to(dtype)


# all that can be read, and two types that cannot be weights
save_file(
    {
        "single": ramp(2, 3),
        "double": ramp(5, dtype=torch.float64),
        "half": ramp(3, 3, dtype=torch.float16),
        "brain": ramp(7, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "nothing": torch.zeros(0, 4),
        "positions": torch.arange(3),
        "mask": torch.tensor([True, False, True]),
    },
    os.path.join(folder, "mixed.safetensors"),
    metadata={"format": "pt", "made by": 'a "test"'},
)

# files that the writer must make byte for byte
for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
    state = {"wte.weight": ramp(5, 4, dtype=dtype), "h.0.norm": ramp(4, dtype=dtype), "h.0.bias": ramp(3, dtype=dtype)}
    os.makedirs(os.path.join(folder, name))
    save_torch_state_dict(state, os.path.join(folder, name), max_shard_size="5GB")
state = {"wte.weight": ramp(5, 4), "h.0.norm": ramp(4), "h.0.bias": ramp(3), "h.1.norm": ramp(4), "h.1.fc": ramp(4, 4)}
os.makedirs(os.path.join(folder, "sharded"))
save_torch_state_dict(state, os.path.join(folder, "sharded"), max_shard_size=64)
