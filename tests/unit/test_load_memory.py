"""Loading a layer of the release's dimensions takes the memory of its file: nothing is held twice, not for a moment.

The file is sparse zeros (a scale byte of 0 is 2**-127, which is allowed). A process of its own loads it and then
touches every page of every weight, so that pages that were merely mapped count too; its peak is what the kernel says.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from header_helpers import write_headers
from released import flash

from deepspan.config.model import parse_model_config
from deepspan.weights.inventory import expected_headers

LIBRARIES = 256 << 20  # what importing PyTorch for CPUs takes at most
STATUS = Path("/proc/self/status")
LOAD = """
import json, re, sys
from pathlib import Path
import torch
from deepspan.weights.load import load_model

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

torch.set_num_threads(1)
before = peak()
network = load_model(sys.argv[1], dtype=torch.bfloat16).network
loaded, held = peak(), 0
for value in network.state_dict().values():
    held += value.nbytes
    value.flatten().view(torch.uint8)[::4096].max()
print(json.dumps({"before": before, "loaded": loaded, "touched": peak(), "held": held}))
"""


@pytest.fixture(scope="module")
def layer(tmp_path_factory):
    """One layer with indexer and all 256 experts; few tokens, since embedding and head are no part of it."""
    folder = tmp_path_factory.mktemp("layer")
    raw = flash() | {"num_hidden_layers": 1, "compress_ratios": [4], "vocab_size": 256, "num_hash_layers": 0}
    (folder / "config.json").write_text(json.dumps(raw))
    write_headers(folder / "model.safetensors", expected_headers(parse_model_config(raw), folder).tensors)
    return folder


@pytest.mark.skipif(not STATUS.exists() or "VmHWM" not in STATUS.read_text(), reason="the kernel does not say the peak")
def test_loading_a_layer_of_the_release_peaks_at_its_file_and_a_tenth(layer):
    size = (layer / "model.safetensors").stat().st_size
    assert size > 3 << 30
    result = subprocess.run([sys.executable, "-c", LOAD, str(layer)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["held"] >= size - (1 << 20)  # all weights, less the header
    assert found["touched"] >= found["held"]  # so the peak did see them
    larger = max(0, found["before"] - LIBRARIES)  # PyTorch for accelerators; loading cannot help it
    assert found["touched"] - larger <= 1.1 * size, found
    # Loading alone looks at scales and converts what must be fp32: the experts' weights stay in the file.
    assert found["loaded"] - found["before"] <= 0.2 * size, found
