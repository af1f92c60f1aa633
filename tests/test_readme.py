"""Every Python script in the README runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
SCRIPTS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("script", SCRIPTS, ids=[re.findall(r"import (\w+)", s)[-1] for s in SCRIPTS])
def test_script(script, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "False" not in done.stdout


def test_links_lead_somewhere():
    root = Path(__file__).parents[1]
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (root / target).exists(), target
