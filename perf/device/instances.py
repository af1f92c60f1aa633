"""Several elastic instances on one device: threads of this process, which share the weights, against transformers.

The real manager, executor, exchange and model run; messages between instances are copies on the device. On a CPU the
same code runs with a smaller model.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from device.bench import Bench, Inputs, NotRun, environment
from device.results import Check, same, within

if TYPE_CHECKING:
    from loongserve.runtime.engine import Engine

# Largest difference of a logit, relative to the largest logit of its step. In bfloat16 every activation is rounded to 8
# bits, which is some hundredths of a logit here; what is gross is found.
TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 8e-2}
NEW_TOKENS = 18


def providers(bench: Bench) -> AbstractContextManager[None]:
    """Choose kernels that threads may call at once: Triton's interpreter is not made for that."""
    return environment(LOONG_KERNELS="cpu", LOONG_CPU_NATIVE="0") if bench.tiny else nullcontext()


def check_ring_of_threads(bench: Bench) -> Iterator[Check]:
    """Send blocks round a ring of three threads while kernels that write and read them are queued on the device."""
    from loongserve.comm.local import LocalWorld
    from loongserve.comm.ring import RingExchange

    inputs = Inputs(bench, torch.float32)
    size, rounds = 3, bench.choose(50, 5)
    side = bench.choose(1024, 16)
    # Unequal blocks, one of them empty; sums of them are whole numbers, exact in any order.
    rows = (side, 0, side // 2 + 1)
    world = LocalWorld(size)
    source = inputs.order(side * side).view(side, 1, side).float() % 97
    identity = torch.eye(side, device=bench.device)
    sums = torch.zeros(size, rounds, dtype=torch.float64, device=bench.device)
    errors: list[BaseException] = []

    def run(member: int) -> None:
        try:
            ring = RingExchange(world.transport(member), tuple(range(size)), rows)
            for number in range(rounds):
                # Products keep the device busy: the block is far from written when it is posted.
                block = source[: rows[member]].squeeze(1) + number
                for _ in range(5):
                    block = block @ identity
                block = block.unsqueeze(1).contiguous()
                for _, k, v in ring.blocks(block, block + 1):
                    sums[member, number] += k.double().sum() + 2 * v.double().sum()
        except BaseException as error:
            errors.append(error)
            world.close()

    threads = [threading.Thread(target=run, args=(member,)) for member in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    world.close()
    expected = torch.zeros(rounds, dtype=torch.float64, device=bench.device)
    for number in range(rounds):
        for count in rows:
            block = source[:count].double() + number
            expected[number] += block.sum() + 2 * (block + 1).sum()
    for member in range(size):
        yield same(f"ring of threads: sums of member {member}", sums[member], expected)


def save_random_llama(folder: Path, tiny: bool, dtype: torch.dtype) -> Any:
    """Write a random Llama in float32, with grouped heads and weights that ``dtype`` holds exactly, and answer it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 48, "intermediate_size": 88, "num_attention_heads": 6, "head_dim": 16}
    if not tiny:
        shape = {"hidden_size": 576, "intermediate_size": 1024, "num_attention_heads": 18, "head_dim": 64}
    config = LlamaConfig(
        vocab_size=311 if tiny else 5003,
        num_hidden_layers=2 if tiny else 4,
        num_key_value_heads=2 if tiny else 6,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        initializer_range=0.2 if tiny else 0.05,
        **shape,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            weight.copy_(weight.to(dtype))
    model.save_pretrained(folder)
    return model


def count_missing(engine: Engine) -> int:
    """Count the slots that are not free; they come back when the last iteration ends, shortly after its tokens."""
    deadline = time.monotonic() + 10
    while True:
        missing = sum(i.num_slots - i.free_slots for i in engine.status().instances)
        if missing == 0 or time.monotonic() > deadline:
            return missing
        time.sleep(0.01)


def check_instances(bench: Bench, dtype: torch.dtype) -> Iterator[Check]:
    """Generate at DoP 1, 2 and 3 in every history: logits agree with transformers, greedy tokens with all others."""
    try:
        import numpy as np

        from loongserve.policies.scripted import Script, ScriptedPolicy, all_on, histories
        from loongserve.runtime.config import EngineConfig
        from loongserve.runtime.engine import Engine, start_threads
    except ModuleNotFoundError as error:
        raise NotRun(f"needs {error.name}: pip install 'loongserve[serve]'") from error
    draw = random.Random(2404)
    with tempfile.TemporaryDirectory() as name, providers(bench):
        try:
            model = save_random_llama(Path(name), bench.tiny, dtype)
        except ModuleNotFoundError as error:
            raise NotRun(f"needs {error.name}: pip install 'loongserve[serve]'") from error
        lengths = bench.choose((1, 2, 5, 64, 257, 1000), (1, 2, 5, 40))
        new_tokens = bench.choose(NEW_TOKENS, 7)
        prompts = [[draw.randrange(model.config.vocab_size) for _ in range(n)] for n in lengths]
        alone: list[list[int]] | None = None
        for num_instances in (1, 2, 3):
            scripts = list(histories(num_instances))
            policy = ScriptedPolicy(Script(lambda chunk: (0,), all_on(0), master=lambda k: 0))
            config = EngineConfig(
                model=name,
                instances=num_instances,
                dtype="float32" if dtype == torch.float32 else "bfloat16",
                device="cpu" if bench.tiny else "cuda",
                kv_tokens=4096,
            )
            with Engine(config, policy=policy, start=start_threads) as engine:
                for history, script in scripts:
                    policy.script = script
                    streams = [engine.submit(p, max_new_tokens=new_tokens, return_logits=True) for p in prompts]
                    answers = [list(stream) for stream in streams]
                    tokens = [[token.token for token in answer] for answer in answers]
                    alone = tokens if alone is None else alone
                    title = f"{num_instances} instances on one device, {history}"
                    worst = 0.0
                    for prompt, answer in zip(prompts, answers, strict=True):
                        output = [token.token for token in answer]
                        with torch.inference_mode():
                            ids = torch.tensor([[*prompt, *output[:-1]]])
                            theirs = model(ids, use_cache=False, logits_to_keep=len(output)).logits[0].numpy()
                        ours = np.stack([np.frombuffer(token.logits, np.float32) for token in answer])
                        difference = np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max(axis=1)
                        # A NaN is the worst there is.
                        worst = max(worst, float(np.nan_to_num(difference, nan=np.inf).max()))
                    yield within(f"{title}: logits", dtype, worst, TOLERANCES[dtype])
                    if dtype == torch.float32:
                        yield same(f"{title}: greedy tokens", torch.tensor(tokens), torch.tensor(alone))
                    yield within(f"{title}: slots that are not free again", dtype, float(count_missing(engine)), 0.0)
                counters = engine.status().counters
                broken = counters["plan_violations"] + counters["fallback_plans"]
                yield within(f"{num_instances} instances on one device: plans refused", dtype, float(broken), 0.0)
