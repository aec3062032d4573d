"""`deepspan serve` as a process: it says where it listens, answers, and ends in order on a signal."""

import re
import signal
import subprocess
import sys
import threading

import httpx
import pytest

COMMAND = [sys.executable, "-c", "from deepspan.cli.main import main; main()", "serve"]


@pytest.fixture
def process(model_folder, tmp_path):
    """(process, url, what it has said)"""
    options = ["--model", str(model_folder), "--port", "0", "--default-effort", "none", "--api-key", "k"]
    running = subprocess.Popen(
        [*COMMAND, *options, "--image-folder", str(tmp_path)], stderr=subprocess.PIPE, text=True, env=None
    )
    said, ready = [], threading.Event()

    def read():
        for line in running.stderr:
            said.append(line)
            if "http://" in line:
                ready.set()
        ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert ready.wait(120)
    found = re.search(r"http://\S+(?=/v1)", "".join(said))
    assert found, said
    yield running, found.group(), said
    if running.poll() is None:
        running.kill()
    running.wait(30)
    reader.join(30)
    running.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_answers_and_ends_in_order_on_a_signal(process, number):
    running, url, said = process
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "ignore_eos": True}
    assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 401
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers={"authorization": "Bearer k"}, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert answer.json()["model"] == "vision"
    running.send_signal(number)
    assert running.wait(60) == 0
    assert "Traceback" not in "".join(said)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "/nowhere"], "config.json"),
        (["--default-effort", "lots"], "--default-effort must be one of"),
        (["--image-folder", "/nowhere"], "--image-folder: there is no folder"),
        (["--host", "203.0.113.1", "--port", "1"], "cannot listen on 203.0.113.1:1"),
    ],
)
def test_serve_that_cannot_begin_says_why_in_a_line(model_folder, options, message):
    given = options if "--model" in options else ["--model", str(model_folder), *options]
    done = subprocess.run([*COMMAND, *given], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    line = done.stderr.strip()  # where loading had begun, its bar has vanished and left an empty line
    assert line.startswith("error: ")
    assert message in line
    assert "\n" not in line
