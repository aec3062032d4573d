"""Train deepspan-tiny from scratch on CPU: `python -m training.train OUT`; run again to go on where it stopped.

Goes through the stages of `training.curriculum`. Beside the answers, the tower learns what lies under each cell, image
rows where they are, and the indexer where attention falls. The rate rises, stays, and falls to zero over the last part.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deepspan.config.model import ModelConfig, load_model_config
from deepspan.model.attention import Indexer
from deepspan.model.batch import ForwardBatch
from deepspan.model.network import DeepseekV4
from deepspan.runtime.batch_builder import SequenceInput, build_batch
from deepspan.runtime.runner import emission_order
from deepspan.skills.suite import TRAIN_SEED
from training.curriculum import CURRICULUM, Stage, chosen_stages, stage_at
from training.data import Batches, Example
from training.heads import Heads
from training.ops import Recorder, training_ops
from training.optim import Muon, uses_muon
from training.ranks import Ranks, launch
from training.recipe import TEXT_EXPERTS, new_network, raw_config
from training.tokenizer import write_tokenizer

AVERAGE_EVERY = 20  # steps
PLACE_LAYER = 1
NUMBER_LAYER = 3  # one compressed layer has seen the pictures before
COUNT_SHARE = 0.2  # of the weight of places
NEW_LAYER_SHARE = 0.1  # of what a copied layer adds to the streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What a step costs and moves. Rates are peaks. average_steps: how far back the mean of the weights reaches."""

    decay_share: float = 0.3
    batch_tokens: int = 6000
    muon_rate: float = 0.005
    adam_rate: float = 1e-3
    index_weight: float = 0.3
    cell_weight: float = 0.3
    place_weight: float = 0.3
    balance_rate: float = 1e-3
    average_steps: int = 400
    seed: int = 1
    bf16: bool = True

    def rate(self, step: int, total: int) -> float:
        """Factor on the peak rates in a run of `total` steps."""
        fall = self.decay_share * total
        left = max((total - step) / fall, 0.0) if fall else 1.0
        return min(1.0, (step + 1) / 100, left)


class Trainer:
    """Network, optimisers and counters; everything that a resumed run needs is in `state()`."""

    def __init__(
        self,
        folder: Path,
        schedule: Schedule,
        compiled: bool,
        ranks: Ranks | None = None,
        stages: Sequence[Stage] = CURRICULUM,
    ) -> None:
        """folder: of the run, prepared by `prepare`."""
        self.folder, self.schedule, self.ranks, self.stages = folder, schedule, ranks or Ranks(), stages
        self.config = load_model_config(folder)
        self.recorder = Recorder()
        self.network = new_network(self.config, training_ops(self.recorder, compiled), schedule.seed)
        self.heads = Heads(self.config.hidden_size)
        for module in self.network.modules():
            if isinstance(module, Indexer):  # its loss moves the indexer alone
                module.register_forward_pre_hook(lambda _, args: (args[0].detach(), args[1].detach(), *args[2:]))
        named = dict(self.network.named_parameters())
        self.muon = Muon([p for n, p in named.items() if uses_muon(n, p)], schedule.muon_rate, 0.95, 0.01)
        adam = [p for n, p in named.items() if not uses_muon(n, p) and "gate.bias" not in n]
        self.adam = torch.optim.AdamW(
            [*adam, *self.heads.parameters()],
            schedule.adam_rate,
            (0.9, 0.95),
            weight_decay=0,
        )
        # What is exported: at a high rate the weights of one step are noisy, their mean is not (see docs/log.md).
        self.average: dict[str, Tensor] = {}
        self.step, self.next_sample = 0, 0
        self.meters: dict[str, list[float]] = defaultdict(list)

    @property
    def stage(self) -> Stage:
        return stage_at(self.stages, self.step)

    @property
    def total(self) -> int:
        """Steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def state(self) -> dict[str, Any]:
        return {
            "network": self.network.state_dict(),
            "average": self.average,
            **{name: head.state_dict() for name, head in self.heads.named_children()},
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "step": self.step,
            "next_sample": self.next_sample,
        }

    def save(self) -> None:
        """Replace the saved state whole: a run can be ended at any moment."""
        torch.save(self.state(), self.folder / "state.new")
        os.replace(self.folder / "state.new", self.folder / "state.pt")

    def resume(self) -> None:
        file = self.folder / "state.pt"
        if file.exists():
            state = torch.load(file)
            self.network.load_state_dict(state["network"])
            self.average = state.get("average", {})
            for name, head in self.heads.named_children():
                head.load_state_dict(state[name])
            self.muon.load_state_dict(state["muon"])
            self.adam.load_state_dict(state["adam"])
            self.step, self.next_sample = state["step"], state["next_sample"]

    def start_from(self, file: Path) -> None:
        """Begin with the weights of an earlier run, as written by `save_start`; optimisers start afresh."""
        tensors = {
            name: value.float() if value.is_floating_point() else value for name, value in load_file(file).items()
        }
        for name, head in self.heads.named_children():
            mine = [key for key in tensors if key.startswith(f"{name}.")]
            if mine:  # weights of before this head was added leave it as it starts
                head.load_state_dict({key.removeprefix(f"{name}."): tensors.pop(key) for key in mine})
        self.network.load_state_dict(self._with_last_layer(tensors))
        _level(self.network)

    def _with_last_layer(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights of a network one layer shallower begin this one: its last layer copies the one before, faintly.

        The streams pass the new layer as they pass any at the start of a run from scratch.
        """
        before, last = (f"layers.{len(self.network.layers) - back}." for back in (2, 1))
        if not any(name.startswith(last) for name in tensors):
            fresh = self.network.state_dict()
            for name in [name for name in tensors if name.startswith(before)]:
                new = name.replace(before, last)
                share = NEW_LAYER_SHARE if any(part in name for part in ("wo_b", ".w2.")) else 1
                tensors[new] = fresh[new] if ".hc_" in name else tensors[name] * share
        return tensors

    def train_step(self, batch: list[Example]) -> None:
        """One update."""
        self.recorder.clear()
        self.recorder.dense = self.stage.dense
        loss = self._loss(batch)
        self.muon.zero_grad()
        self.adam.zero_grad()
        loss.backward()
        self.ranks.average_gradients([*self.network.parameters(), *self.heads.parameters()])
        grown = nn.utils.clip_grad_norm_([p for p in self.network.parameters() if p.grad is not None], 1.0)
        self.meters["grad_norm"].append(float(grown))
        rate = self.schedule.rate(self.step, self.total)
        for optimiser, peak in ((self.muon, self.schedule.muon_rate), (self.adam, self.schedule.adam_rate)):
            for group in optimiser.param_groups:
                group["lr"] = peak * rate
            optimiser.step()
        if self.stage.network:
            _level(self.network)
            _balance(self.network, self.ranks.add_up(self.recorder.loads), self.schedule.balance_rate * rate)
        self.step += 1
        if self.step % AVERAGE_EVERY == 0:
            self._update_average()

    @torch.no_grad()
    def _update_average(self) -> None:
        """Move the mean of the weights towards those of now."""
        share = AVERAGE_EVERY / self.schedule.average_steps
        for name, value in self.network.state_dict().items():
            if name not in self.average or not value.is_floating_point():
                self.average[name] = value.clone()
            else:
                self.average[name].lerp_(value, share)

    def _loss(self, batch: list[Example]) -> Tensor:
        # The tower alone in bf16: its few large products gain, while the network's many shapes would each be compiled.
        bf16, stage = self.schedule.bf16, self.stage
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16), torch.set_grad_enabled(stage.tower):
            rows, cell_loss = self._see(batch)
        if not stage.network:
            return cell_loss
        built = network_batch(batch, rows, self.config)
        output = self.network(built, stream_taps=(PLACE_LAYER, NUMBER_LAYER))
        early, late = (output.streams[layer][built.image_rows].mean(1) for layer in (PLACE_LAYER, NUMBER_LAYER))
        place_loss = self.heads.place(early, late, batch, self.config, self.meters)
        place_loss = place_loss + COUNT_SHARE * self.heads.count(late, batch, self.meters)
        logits = output.logits
        targets = torch.cat([torch.from_numpy(e.targets[e.targets >= 0]) for e in batch])
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        self._meter_answers(batch, logits.detach(), targets)
        answer_loss = losses.mean()
        index_losses = self.recorder.index_losses
        index_loss = torch.stack(index_losses).mean() if index_losses else torch.zeros(())
        self.meters["answer_loss"].append(float(answer_loss.detach()))
        self.meters["index_loss"].append(float(index_loss.detach()))
        schedule = self.schedule
        beside = schedule.cell_weight * cell_loss + schedule.place_weight * place_loss
        return answer_loss + schedule.index_weight * index_loss + beside

    def _see(self, batch: list[Example]) -> tuple[list[Tensor], Tensor]:
        """Encoder rows of every image, and the loss of the probe on them."""
        images = [image for e in batch for image in e.images]
        if not images:
            return [], torch.zeros(())
        patches = torch.cat([torch.from_numpy(image.patches) for image in images])
        rows = self.network.encode_images(patches, [(image.grid_rows, image.grid_cols) for image in images])
        loss = self.heads.see(rows, batch, self.meters)
        return list(rows.float().split([len(image.block.encoder_rows) for image in images])), loss

    def _meter_answers(self, batch: list[Example], logits: Tensor, targets: Tensor) -> None:
        right = (logits.argmax(1) == targets).split([int((e.targets >= 0).sum()) for e in batch])
        for example, hits in zip(batch, right, strict=True):
            turns = torch.from_numpy(example.turns[example.targets >= 0])
            for turn, skill in enumerate(example.skills):
                self.meters[skill].append(float(hits[turns == turn].all()))


def network_batch(batch: list[Example], rows: list[Tensor], config: ModelConfig) -> ForwardBatch:
    """Whole conversations for the network, logits wanted where the loss falls. rows: of every image, raster order."""
    features = _features(batch, rows)
    sequences = [
        SequenceInput(
            token_ids=e.token_ids, kinds=e.kinds, spans=e.spans, features=f, wanted=(e.targets >= 0).nonzero()[0]
        )
        for e, f in zip(batch, features, strict=True)
    ]
    return build_batch(sequences, config, "cpu", query_block=max(len(e.token_ids) for e in batch))


def _features(batch: list[Example], rows: list[Tensor]) -> list[Tensor | None]:
    """Rows of each example's images in emission order."""
    waiting = iter(rows)
    own = [[next(waiting) for _ in example.images] for example in batch]
    return [emission_order(torch.cat(r), e.images) if r else None for e, r in zip(batch, own, strict=True)]


@torch.no_grad()
def _balance(network: DeepseekV4, all_loads: list[Tensor], rate: float) -> None:
    """Move the selection biases towards equal load among the experts that rows of a kind started with."""
    if not all_loads:
        return
    for layer, loads in zip(network.layers, all_loads, strict=True):
        for rows, bias in zip(loads, (layer.ffn.gate.bias, layer.ffn.gate.bias_vl), strict=True):
            if bias is None or rows.sum() == 0:
                continue
            is_text = bias is layer.ffn.gate.bias
            own = torch.tensor([(expert in TEXT_EXPERTS) == is_text for expert in range(len(bias))])
            share = rows[own].float()
            bias[own] += rate * torch.sign(share.mean() - share)


@torch.no_grad()
def _level(network: DeepseekV4) -> None:
    """Take from the routers what tells the two halves of the experts apart: that is left to the selection biases.

    Their mean rows become equal, so that no input scores one half higher as a whole. Which expert of its half a row
    prefers does not change by it.
    """
    for layer in network.layers:
        weight = layer.ffn.gate.weight
        half = torch.tensor([expert in TEXT_EXPERTS for expert in range(len(weight))])
        gap = weight[half].mean(0) - weight[~half].mean(0)
        weight[half] -= gap / 2
        weight[~half] += gap / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop (and save) after this long")
    parser.add_argument("--eager", action="store_true", help="do not compile the small operations")
    parser.add_argument("--start", type=Path, help="weights to begin a new run with, instead of random ones")
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the work")
    parser.add_argument("--stages", default="", help="instead of the whole curriculum: name=steps,name=steps,...")
    parser.add_argument("--skills", default="", help="instead of the stages' mixes: name=weight,name=weight,...")
    for name, value in asdict(Schedule()).items():
        kind = {"action": argparse.BooleanOptionalAction} if isinstance(value, bool) else {"type": type(value)}
        parser.add_argument(f"--{name.replace('_', '-')}", default=value, **kind)
    arguments = vars(parser.parse_args())
    out, minutes, eager = arguments.pop("out"), arguments.pop("minutes"), arguments.pop("eager")
    pairs = [pair.split("=") for pair in arguments.pop("skills").split(",") if pair]
    skills = {name: float(weight) for name, weight in pairs} or None
    stages = chosen_stages(arguments.pop("stages"), skills)
    num_ranks, start = arguments.pop("ranks"), arguments.pop("start")
    prepare(out)
    launch(num_ranks, work, out, Schedule(**arguments), not eager, minutes, stages, start)


def prepare(folder: Path) -> None:
    """Write what a run starts from: tokenizer and configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(raw_config(vocab_size), indent=2) + "\n", encoding="utf-8")


def save_start(states: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Join saved states into weights that a new run can begin with, in bf16.

    states: for "vision" (tower, aligner and probe) and "text" (all the rest), the state of the run that knows it best.
    """
    of_images = ("vision.", "aligner.")
    tensors = {f"probe.{name}": value for name, value in states["vision"]["probe"].items()}
    for head in ("places", "counts"):
        tensors |= {f"{head}.{name}": value for name, value in states["text"][head].items()}
    for side, state in states.items():
        named = state["network"].items()
        tensors |= {name: value for name, value in named if name.startswith(of_images) == (side == "vision")}
    save_file({n: v.bfloat16() if v.is_floating_point() else v for n, v in tensors.items()}, file)


def work(
    ranks: Ranks,
    folder: Path,
    schedule: Schedule,
    compiled: bool,
    minutes: float,
    stages: Sequence[Stage],
    start: Path | None,
) -> None:
    """Train to the end of the stages or of the time; rank 0 logs a line of means every 20 steps, saves every 100."""
    trainer, started = Trainer(folder, schedule, compiled, ranks, stages), time.monotonic()
    if start is not None and not (folder / "state.pt").exists():
        trainer.start_from(start)
    trainer.resume()
    batches, stage = None, None
    while trainer.step < trainer.total and ranks.agree(time.monotonic() - started < minutes * 60):
        if batches is None or stage is not trainer.stage:
            stage = trainer.stage
            if batches is not None:
                batches.close()
            first = trainer.next_sample + ranks.rank
            batches = Batches(folder, first, dict(stage.skills), schedule.batch_tokens, TRAIN_SEED, ranks.size)
        after, batch = batches.next()
        trainer.next_sample = after - ranks.rank
        before = time.monotonic()
        trainer.train_step(batch)
        trainer.meters["seconds"].append(time.monotonic() - before)
        if ranks.rank == 0 and trainer.step % 20 == 0:
            line = {name: round(sum(v) / len(v), 4) for name, v in trainer.meters.items()}
            line = {"step": trainer.step, "stage": stage.name, "samples": trainer.next_sample, **line}
            print(json.dumps(line), flush=True)
            with (folder / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
            trainer.meters.clear()
        if ranks.rank == 0 and trainer.step % 100 == 0:
            trainer.save()
    if ranks.rank == 0:
        trainer.save()
    if batches is not None:
        batches.close()


if __name__ == "__main__":
    main()
