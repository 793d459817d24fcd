"""The way of a token, as the text lists it, is the way that the command takes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import inspect, json, sys
from pathlib import Path

from sigma0.cli import app

entered = set()


def enter(frame, event, argument):
    code = frame.f_code
    # bodies of modules and classes are no functions, and what an import calls is no step of the way
    if event != "call" or not code.co_flags & inspect.CO_OPTIMIZED or code.co_filename in entered:
        return
    while frame := frame.f_back:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.endswith(".py"):
            return
    entered.add(code.co_filename)


sys.setprofile(enter)
app(["generate", "Mary went to the park. Where is Mary?"], standalone_mode=False)
sys.setprofile(None)
files = {Path(name).resolve() for name in entered if name.endswith(".py")}
print("FILES", json.dumps(sorted(map(str, files))))
"""


@pytest.mark.slow
def test_the_way_of_a_token_is_as_listed():
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, check=True, capture_output=True, text=True)
    files = [Path(name) for name in json.loads(done.stdout.rpartition("FILES")[2])]
    ours = [ROOT / name for name in ("sigma0", "kernels", "serve", "bench")]
    entered = {str(path.relative_to(ROOT)) for path in files if any(map(path.is_relative_to, ours))}
    text = (ROOT / "sigma0" / "decode" / "README.md").read_text().split("## The way of a token")[1]
    listed = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    assert set(re.findall(r"`(.*?)`", " ".join(listed))) == entered
