"""Memory of a conversion: some of the largest tensors, however much the checkpoint holds."""

import subprocess
import sys
from pathlib import Path

import pytest

from deepspan.weights.tiny import write_tiny

MIB = 1 << 20
LARGEST = 2 * MIB  # a projection of an expert
BOUND = 60 * MIB

CONVERT = """
import re, sys
from pathlib import Path
from deepspan.weights import source
from deepspan.weights.convert import convert

def peak():  # not what getrusage says, which begins with the memory of the parent process
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

source.MAX_MAPPED = 16 << 20
small, large, out, to = sys.argv[1:]
convert(Path(small), Path(out) / "small", to)  # what is needed once is there now
before = peak()
done = convert(Path(large), Path(out) / "large", to, shard_bytes=64 << 20)
print(done.bytes, peak() - before)
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One of a few MB, and one whose layer has 32 experts of 6 MB."""
    root = tmp_path_factory.mktemp("memory")
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 1024}
    return [
        write_tiny(root / str(experts), ratios=(0,), vision=False, overrides=sizes | {"n_routed_experts": experts})
        for experts in (2, 32)
    ]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell")
@pytest.mark.parametrize("to", ["bf16", "fp8-fp4", "w8a8"])
def test_memory_does_not_grow_with_the_checkpoint(checkpoints, tmp_path, to):
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, *checkpoints, tmp_path, to], capture_output=True, text=True, check=True
    )
    written, grown = map(int, done.stdout.split())
    read = sum(file.stat().st_size for file in checkpoints[1].glob("*.safetensors"))
    assert read > 32 * 3 * LARGEST > 2 * BOUND
    assert written > 24 * LARGEST
    assert grown < BOUND, f"{grown / MIB:.0f} MiB for {read / MIB:.0f} MiB read, {written / MIB:.0f} MiB written"
