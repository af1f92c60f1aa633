"""The invariant: logits and greedy tokens do not depend on DoP, placement, chunking or scaling history.

Over real processes, on real weights in float32, against transformers. ``make exact`` runs all histories on all prompts;
``make test`` a few of them on short prompts.
"""

import pytest

from loongserve.policies.scripted import Script, ScriptedPolicy, all_on, spread_evenly, spread_unevenly
from loongserve.runtime.config import EngineConfig
from loongserve.runtime.engine import Engine


def everyone(num_instances):
    return lambda chunk: tuple(range(num_instances))


def steady(num_instances):
    """Prefill on all; decode where the KV is, in every placement."""
    last = num_instances - 1
    yield "all-on-one", Script(everyone(num_instances), all_on(last), master=lambda k: last)
    if num_instances > 1:
        yield "even", Script(everyone(num_instances), spread_evenly(num_instances), master=lambda k: last)
        yield "uneven", Script(everyone(num_instances), spread_unevenly(num_instances), master=lambda k: 0)


def eventful(num_instances):
    """Histories that need more than one instance."""
    everywhere = everyone(num_instances)
    # The decode group is {0}, then {0, 1}, ...: new KV goes to the newcomer, old KV stays.
    yield "scale-up", Script(everywhere, all_on(0), master=lambda k: min(k // 8, num_instances - 1))
    yield "master-change", Script(everywhere, spread_unevenly(num_instances), master=lambda k: k // 3 % num_instances)
    # Chunks of a prefill on groups of changing size and order, over what earlier chunks left anywhere.
    yield (
        "chunks",
        Script(
            lambda chunk: tuple((chunk + i) % num_instances for i in range(1 + chunk % num_instances)),
            spread_unevenly(num_instances),
            master=lambda k: 0,
            chunk=100,
        ),
    )
    yield (
        "several-steps",
        Script(everywhere, spread_unevenly(num_instances), master=lambda k: k // 5 % num_instances, steps=5),
    )


HISTORIES = [
    pytest.param(n, script, id=f"{n}-{name}")
    for n in (1, 2, 3, 4)
    for name, script in (*steady(n), *(eventful(n) if n > 1 else ()))
]
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
            policy = ScriptedPolicy(Script(everyone(num_instances), all_on(0), master=lambda k: 0))
            config = EngineConfig(instances=num_instances, dtype="float32", device="cpu", kv_tokens=16384)
            kept[num_instances] = Engine(config, policy=policy), policy
        return kept[num_instances]

    yield get
    for engine, _ in kept.values():
        engine.close()


def at_baseline(engine):
    return all(i.free_slots == i.num_slots for i in engine.status().instances)


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
