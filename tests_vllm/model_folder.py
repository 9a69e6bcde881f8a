"""Prints the folder of the test model's weights, as safetensors in float32."""

from __future__ import annotations

import torch

from penstock.engine import weights
from penstock.engine.support import check_supported

print(
    weights.gguf_folder(
        weights.embedded_gguf(), torch.float32, check_supported, weights.say_nothing
    )
)
