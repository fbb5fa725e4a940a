"""One typed door to the safetensors writer, for the programs here that write weights."""

from pathlib import Path

import torch
from safetensors.torch import (
    load_file,  # pyright: ignore[reportUnknownVariableType] - its path type is left open
    save_file,  # pyright: ignore[reportUnknownVariableType] - its path type is left open
)


def save_weights(weights: dict[str, torch.Tensor], path: Path) -> None:
    """Write `weights` (contiguous, no two sharing memory) to `path`, readable by everyone."""
    save_file(weights, path, metadata={"format": "pt"})
    # The library creates its file for the owner alone.
    path.chmod(0o644)


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of one safetensors file, by name."""
    return load_file(path)
