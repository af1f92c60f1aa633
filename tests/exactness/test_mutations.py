"""The exactness suite is worth something: it fails when one thing is wrong in one place."""

import pytest

from loongserve.policies.scripted import Script, ScriptedPolicy, spread_unevenly
from loongserve.runtime import batch, esp_attention
from loongserve.runtime.config import EngineConfig
from loongserve.runtime.engine import Engine, start_threads

NUM_INSTANCES = 3


@pytest.fixture
def measure(worst_difference, prompts):
    """The suite's measure over instances in threads of this process, where a mutation reaches them."""

    def run():
        script = Script(
            lambda chunk: tuple(range(NUM_INSTANCES)),
            spread_unevenly(NUM_INSTANCES),
            master=lambda k: k % NUM_INSTANCES,
        )
        config = EngineConfig(instances=NUM_INSTANCES, dtype="float32", device="cpu", kv_tokens=1024)
        with Engine(config, policy=ScriptedPolicy(script), start=start_threads) as engine:
            return worst_difference(engine, [prompts[64]], 6)

    return run


def test_no_mutation(measure, tolerance):
    assert measure() <= tolerance


def test_one_dropped_kv_row(monkeypatch, measure, tolerance):
    ring_block = batch._ring_block

    def drop(striped, source, member, group, table):
        block = ring_block(striped, source, member, group, table)
        if block.slots is not None and (source, member) == (1, 0):
            first = (block.slots >= 0).nonzero()[0]
            block.slots[first] = -1
        return block

    monkeypatch.setattr(batch, "_ring_block", drop)
    assert measure() > tolerance


def test_one_flipped_diagonal(monkeypatch, measure, tolerance):
    ring_block = batch._ring_block

    def flip(striped, source, member, group, table):
        block = ring_block(striped, source, member, group, table)
        if block.diagonals and (source, member) == (2, 1):
            block.diagonals[0] = -1 - block.diagonals[0]
        return block

    monkeypatch.setattr(batch, "_ring_block", flip)
    assert measure() > tolerance


def test_one_uninitialised_empty_state(monkeypatch, measure, tolerance):
    """As in the LoongServe artifact: a state that no key reached is whatever lay in memory, and is merged."""
    monkeypatch.setattr(esp_attention, "_reset", lambda state: None)
    assert measure() > tolerance
