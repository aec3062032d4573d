"""The examples of README.md do what they say, against the bundled model."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from server_helpers import serving

from deepspan.bundled import BUNDLED_MODEL
from deepspan.server.params import SamplingDefaults

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def example(language, containing):
    """The one fenced block of a language that contains a text."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    (found,) = (block for block in blocks if containing in block)
    return found


def run(arguments, **options):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def server():
    defaults = SamplingDefaults.of_checkpoint(BUNDLED_MODEL)
    with serving(BUNDLED_MODEL, names=("deepspan-tiny",), defaults=defaults) as running:
        yield running


def test_python_example_of_the_client_answers(server):
    code = example("python", "from openai import OpenAI").replace(ADDRESS, server.url)
    assert run([sys.executable, "-c", code]).strip() == re.search(r"print\(.*\)  # (.*)", code)[1]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not there")
def test_curl_example_answers(server):
    code = example("sh", "curl").replace(ADDRESS, server.url)
    assert '"role":"assistant"' in run(["bash", "-c", code])


def test_python_example_of_the_package_answers():
    code = example("python", "from deepspan import LLM, SamplingParams")
    lines = run([sys.executable, "-c", code]).strip().splitlines()
    assert lines == re.findall(r"  # (.*)", code)
