"""Load a model's tokenizer with transformers, for the front end.

Imports neither torch nor transformers by itself, so that a program which only asks for help starts at once.
"""

import logging
from pathlib import Path
from typing import Any

from loongserve.runtime.model.gguf_header import read_gguf_header

logger = logging.getLogger(__name__)

_GPT2_SPLITS = ("default", "gpt-2")


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
    """Split text as the file says that its merges were learned, where transformers does not know that way.

    transformers then splits as GPT-2 does, which changes the tokens of some texts.
    """
    from tokenizers import pre_tokenizers

    metadata = read_gguf_header(location).metadata
    name = metadata.get("tokenizer.ggml.pre", _GPT2_SPLITS[0])
    if name == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif name not in _GPT2_SPLITS and isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        logger.warning(
            "%s splits text in the way %r, which is not known here: some texts will get other tokens than the model "
            "was trained with; a Hugging Face folder of the model has no such gap",
            location,
            name,
        )
    return tokenizer
