"""What the exactness suite compares with: transformers on the same file, teacher-forced with what came out."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from loongserve.runtime.engine import Engine

# Largest difference of a logit, relative to the largest logit of the step.
TOLERANCE = 3e-5

# Text, or tokens at random where the text says so: flat distributions, and no pattern that attention could lean on.
PROMPT_LENGTHS = (1, 2, 3, 5, 17, 64, 257, 500, 1000, 2048, 3001, 4099)
RANDOM_LENGTHS = (5, 257, 1000)


@dataclass
class Reference:
    """Logits of transformers in float32, by prompt and output; cached, since every history gives the same tokens."""

    model: torch.nn.Module
    cache: dict[tuple[tuple[int, ...], tuple[int, ...]], np.ndarray] = field(default_factory=dict)

    def logits(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> np.ndarray:
        """Return [len(output), vocab]: what each output token should have been chosen from."""
        key = (prompt, output)
        if key not in self.cache:
            ids = torch.tensor([[*prompt, *output[:-1]]])
            with torch.inference_mode():
                # One pass over all: teacher forcing.
                logits = self.model(ids, use_cache=False, logits_to_keep=len(output)).logits[0]
            self.cache[key] = logits.float().numpy()
        return self.cache[key]


@pytest.fixture(scope="session")
def tolerance():
    """Largest relative difference that float32 rounding explains."""
    return TOLERANCE


@pytest.fixture(scope="session")
def reference():
    from transformers import AutoModelForCausalLM, GgufConfig

    from loongserve.runtime.model.embedded import find_embedded_model

    path = find_embedded_model()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    return Reference(model.eval())


@pytest.fixture(scope="session")
def prompts():
    """By length: token ids."""
    from loongserve.runtime.model.source import open_model

    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = open_model().load_tokenizer()(text * 4)["input_ids"]
    draw = random.Random(2404)
    return {
        n: tuple(draw.randrange(100, 49000) for _ in range(n)) if n in RANDOM_LENGTHS else tuple(ids[n : 2 * n])
        for n in PROMPT_LENGTHS
    }


@pytest.fixture(scope="session")
def worst_difference(reference):
    """Run prompts through an engine; return the largest relative difference of a logit. Greedy tokens must be equal."""

    def run(engine: Engine, prompts: Sequence[tuple[int, ...]], new_tokens: int) -> float:
        streams = [engine.submit(p, max_new_tokens=new_tokens, return_logits=True) for p in prompts]
        worst = 0.0
        for prompt, stream in zip(prompts, streams, strict=True):
            tokens = list(stream)
            output = tuple(t.token for t in tokens)
            assert len(output) == new_tokens, f"prompt of {len(prompt)}: {len(output)} of {new_tokens} tokens"
            ours = np.stack([np.frombuffer(t.logits, np.float32) for t in tokens])
            theirs = reference.logits(prompt, output)
            difference = np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max(axis=1)
            # A NaN is the worst there is.
            worst = max(worst, float(np.nan_to_num(difference, nan=np.inf).max()))
            greedy = tuple(int(t) for t in theirs.argmax(axis=1))
            if worst <= TOLERANCE:
                assert output == greedy, f"prompt of {len(prompt)}: greedy tokens differ: {output} and {greedy}"
        return worst

    return run


@pytest.fixture(scope="session")
def assert_exact(worst_difference) -> Callable[[Engine, Sequence[tuple[int, ...]], int], None]:
    def check(engine: Engine, prompts: Sequence[tuple[int, ...]], new_tokens: int) -> None:
        worst = worst_difference(engine, prompts, new_tokens)
        print(f"worst relative difference {worst:.2e}")
        assert worst <= TOLERANCE

    return check
