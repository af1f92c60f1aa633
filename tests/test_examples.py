"""Each example of one primitive runs as it stands, and says something."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    "name",
    [
        "striped_attention",
        "paged_attention",
        "merge_states",
        "ring_exchange",
        "query_exchange",
        "kv_pool",
        "kv_migration",
        "policy",
    ],
)
def test_example_runs(name):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-P", EXAMPLES / f"{name}.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not done.stderr
