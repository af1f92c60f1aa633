"""Load a model's tokenizer with transformers, for the front end.

Imports neither torch nor transformers by itself, so that a program which only asks for help starts at once.
"""

from pathlib import Path
from typing import Any

from loongserve.runtime.model.gguf_header import read_gguf_header


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a GGUF file or a Hugging Face folder, with its chat template.

    Returns:
        A ``transformers.PreTrainedTokenizerFast``: ``encode``, ``decode``, ``apply_chat_template``.

    Raises:
        ValueError: transformers cannot make a tokenizer of what is there.
    """
    location = Path(path)
    try:
        if location.is_dir():
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(str(location), local_files_only=True)
        # Not AutoTokenizer, which first reads the whole header again, for seconds, only to choose this class.
        from transformers import PreTrainedTokenizerFast

        return _repair(
            PreTrainedTokenizerFast.from_pretrained(
                str(location.parent), gguf_file=location.name, local_files_only=True
            ),
            location,
        )
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{location}: no tokenizer can be loaded: {error}") from error


def _repair(tokenizer: Any, location: Path) -> Any:
    """Split digits off first where the file says that the merges were learned so; transformers does not know."""
    from tokenizers import pre_tokenizers

    if read_gguf_header(location).metadata.get("tokenizer.ggml.pre") == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer
