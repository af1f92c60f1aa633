"""The invariant: logits and greedy tokens do not depend on DoP, placement, chunking or scaling history.

Over real processes, on real weights in float32, against transformers. ``make exact`` runs all histories on all prompts;
``make test`` a few of them on short prompts.
"""

import time

import pytest

from loongserve.policies.scripted import Script, ScriptedPolicy, all_on, histories
from loongserve.runtime.config import EngineConfig
from loongserve.runtime.engine import Engine

HISTORIES = [pytest.param(n, script, id=f"{n}-{name}") for n in (1, 2, 3, 4) for name, script in histories(n)]
FAST = ("1-all-on-one", "2-chunks", "3-all-on-one", "3-scale-up", "3-several-steps")


@pytest.fixture(scope="module")
def engines():
    """One engine at a time, kept while the number of instances stays the same."""
    kept = {}

    def get(num_instances):
        if num_instances not in kept:
            for engine, _ in kept.values():
                engine.close()
            kept.clear()
            policy = ScriptedPolicy(Script(lambda chunk: (0,), all_on(0), master=lambda k: 0))
            config = EngineConfig(instances=num_instances, dtype="float32", device="cpu", kv_tokens=16384)
            kept[num_instances] = Engine(config, policy=policy), policy
        return kept[num_instances]

    yield get
    for engine, _ in kept.values():
        engine.close()


def at_baseline(engine):
    """Slots come back when the last iteration ends, which may be after its tokens have come: wait a little."""
    deadline = time.monotonic() + 10
    while not (whole := all(i.free_slots == i.num_slots for i in engine.status().instances)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return whole


@pytest.mark.exact
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("num_instances", "script"), HISTORIES)
def test_exact(engines, prompts, assert_exact, num_instances, script):
    engine, policy = engines(num_instances)
    policy.script = script
    assert_exact(engine, list(prompts.values()), 32)
    assert at_baseline(engine)


@pytest.mark.parametrize(("num_instances", "script"), [h for h in HISTORIES if h.id in FAST])
def test_exact_on_short_prompts(engines, prompts, assert_exact, num_instances, script):
    engine, policy = engines(num_instances)
    policy.script = script
    assert_exact(engine, [prompts[n] for n in (1, 2, 5, 64, 257)], 18)
    counters = engine.status().counters
    assert counters["plan_violations"] == counters["fallback_plans"] == 0
    assert at_baseline(engine)
