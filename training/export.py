"""Write a trained state as a checkpoint in the released format: `python -m training.export RUN OUT`.

With `--drafts`, a run of `training.drafts` adds its stages to the checkpoint that it was trained on.

Large matrices are rounded to bf16, what the release keeps in fp32 stays fp32, and what the release stores without
reading (the correction bias of hash layers) is stored as zeros.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from deepspan.config.model import load_model_config, parse_model_config
from deepspan.text.tokenizer import Tokenizer
from deepspan.weights.table import DraftKind, backbone_tensors, draft_tensors
from deepspan.weights.tiny import file_dtype
from deepspan.weights.writer import write_json, write_tensors
from training.recipe import DRAFT_STAGES, NOISE, with_draft_fields


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
    write_tensors(out / "model.safetensors", tensors)
    # Its answers are exact or wrong: a server that is asked nothing else takes the likeliest token.
    (out / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.0}) + "\n")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(run / name, out / name)


def add_drafts(drafts: Path, out: Path) -> None:
    """Give a checkpoint the stages of a run of `training.drafts`. out: checkpoint folder, changed in place."""
    state = torch.load(drafts / "drafts.pt", map_location="cpu")
    raw = json.loads((out / "config.json").read_text(encoding="utf-8"))
    (noise,) = Tokenizer(out, vision=True).encode_raw(NOISE)
    raw = with_draft_fields(raw, noise)
    tensors = {name: value for name, value in load_file(out / "model.safetensors").items() if "mtp." not in name}
    for name, spec in draft_tensors(parse_model_config(raw), DRAFT_STAGES, DraftKind.DSPARK).items():
        tensors[name] = state["drafter"][name].to(file_dtype(spec)).contiguous()
    write_tensors(out / "model.safetensors", tensors)
    write_json(out / "config.json", raw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="of the network; a checkpoint folder is left as it is")
    parser.add_argument("out", type=Path)
    parser.add_argument("--drafts", type=Path, help="run of the draft stages")
    arguments = parser.parse_args()
    if (arguments.run / "state.pt").exists():
        export(arguments.run, arguments.out)
    elif arguments.run != arguments.out:
        shutil.copytree(arguments.run, arguments.out, dirs_exist_ok=True)
    if arguments.drafts is not None:
        add_drafts(arguments.drafts, arguments.out)


if __name__ == "__main__":
    main()
