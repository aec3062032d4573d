"""Write a trained state as a checkpoint in the released format: `python -m training.export RUN OUT`.

Large matrices are rounded to bf16, what the release keeps in fp32 stays fp32, and what the release stores without
reading (the correction bias of hash layers) is stored as zeros.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from deepspan.config.model import load_model_config
from deepspan.weights.table import backbone_tensors
from deepspan.weights.tiny import file_dtype


def export(run: Path, out: Path) -> None:
    """run: folder of a training run with `state.pt`. out: checkpoint folder, made if needed.

    Written is the mean of the weights over the last steps, which answers better than those of any one step.
    """
    out.mkdir(parents=True, exist_ok=True)
    state = torch.load(run / "state.pt", map_location="cpu")
    trained = state.get("average") or state["network"]
    tensors = {}
    for name, spec in backbone_tensors(load_model_config(run)).items():
        value = torch.zeros(spec.shape) if spec.unused else trained[name]
        tensors[name] = value.to(file_dtype(spec)).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    # Its answers are exact or wrong: a server that is asked nothing else takes the likeliest token.
    (out / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.0}) + "\n")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(run / name, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    export(arguments.run, arguments.out)


if __name__ == "__main__":
    main()
