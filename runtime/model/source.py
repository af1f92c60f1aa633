"""Open a model: the embedded one, a GGUF file, or a Hugging Face folder.

``open_model(None)`` is the embedded model. What it gives has the config, shares the weights among processes and loads
the tokenizer:

    model = open_model(path)
    shared = model.share_weights(torch.bfloat16)      # in the parent, once
    weights = attach_weights(shared.describe())       # in each rank
    tokenizer = model.load_tokenizer()
"""

from pathlib import Path
from typing import Any

import torch

from loongserve.runtime.model.config import ModelConfig
from loongserve.runtime.model.embedded import find_embedded_model
from loongserve.runtime.model.gguf_file import GGUFFile
from loongserve.runtime.model.safetensors_folder import SafetensorsFolder
from loongserve.runtime.model.tokenizer import load_tokenizer
from loongserve.runtime.model.weights import SharedWeights, WeightFile, share_weights


class Model:
    """An open model. Nothing of the weights is read before ``share_weights``."""

    def __init__(self, file: WeightFile) -> None:
        self._file = file

    @property
    def path(self) -> Path:
        """The GGUF file or the folder."""
        return self._file.path

    @property
    def config(self) -> ModelConfig:
        """The decoder's shape."""
        return self._file.config

    def share_weights(self, dtype: torch.dtype) -> SharedWeights:
        """Make the weights attachable by this machine's processes, in ``dtype`` (float32 or bfloat16)."""
        return share_weights(self._file, dtype)

    def load_tokenizer(self) -> Any:
        """Load the model's tokenizer (a transformers fast tokenizer)."""
        return load_tokenizer(self.path)


def open_model(path: str | Path | None = None) -> Model:
    """Open the embedded model (None), a ``.gguf`` file, or a Hugging Face folder of Llama architecture.

    Raises:
        FileNotFoundError: nothing there, or a file of the folder is missing.
        ValueError: not a model that is supported; the message names the file, what it has and what is supported.
    """
    location = find_embedded_model() if path is None else Path(path).expanduser()
    if location.is_dir():
        return Model(SafetensorsFolder(location))
    if not location.exists():
        raise FileNotFoundError(f"{location} does not exist: expected a .gguf file or a Hugging Face model folder")
    if location.suffix != ".gguf":
        raise ValueError(f"{location}: expected a .gguf file or a folder with config.json and safetensors")
    return Model(GGUFFile(location))
