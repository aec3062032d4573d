"""Train the draft stages of a trained checkpoint: `python -m training.drafts MODEL OUT`; run again to go on.

The network is frozen; the stages learn from its streams what it will say. For every token of an answer but the last,
one block of slots, as wide as a random depth. A slot counts as long as the network itself would have said the tokens
before it, so that what is learnt are its own answers, the wrong ones included. Loss per slot: a little cross-entropy,
the total variation to the network's distribution (one minus half of it is the share that sampling accepts), and the
confidence head against that share.
"""

import argparse
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deepspan.config.model import parse_model_config
from deepspan.model.batch import AttentionMetadata, ForwardBatch, Part
from deepspan.model.rope import BatchRope
from deepspan.ops.blocks import QueryBlock
from deepspan.ops.rows import FlatRows
from deepspan.skills.suite import TRAIN_SEED, WEIGHTS
from deepspan.text.tokenizer import Tokenizer
from deepspan.weights.load import load_model
from training.data import Batches, Example
from training.heads import Meters
from training.ops import Recorder, training_ops
from training.optim import Muon, uses_muon
from training.ranks import Ranks, launch
from training.recipe import NOISE, new_drafter, with_draft_fields
from training.train import network_batch

DEPTHS = (5, 5, 5, 5, 3, 4, 6, 7, 8, 2, 1)  # widths of blocks, drawn from
SLOT_DECAY = 4.0
SKILLS = {**WEIGHTS, "listing": 1, "sentence": 10, "series": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """rows: flat rows of the blocks' first tokens, int64 [A]. firsts: flat row where the sequence of each begins.

    slots: flat rows of all slots, int64 [A, B]; is_there: bool [A, B], whether a slot's token is one of the answer.
    """

    rows: Tensor
    firsts: Tensor
    slots: Tensor
    is_there: Tensor


def find_anchors(batch: Sequence[Example], width: int) -> Anchors:
    """Every token of an answer behind which another one of the same answer comes."""
    rows, firsts, slots, there, first = [], [], [], [], 0
    for example in batch:
        said, turns = example.targets >= 0, example.turns
        # A row is an anchor if it was said itself, and something is said behind it.
        anchors = np.flatnonzero(said[1:] & said[:-1] & (turns[1:] == turns[:-1])) + 1
        places = anchors[:, None] + np.arange(width)
        inside = np.minimum(places, len(said) - 1)
        same = said[inside] & (turns[inside] == turns[anchors, None]) & (places < len(said))
        rows.append(first + anchors)
        firsts.append(np.full(len(anchors), first))
        slots.append(first + inside)
        there.append(np.logical_and.accumulate(same, axis=1))
        first += len(said)
    return Anchors(
        rows=torch.from_numpy(np.concatenate(rows)),
        firsts=torch.from_numpy(np.concatenate(firsts)),
        slots=torch.from_numpy(np.concatenate(slots)),
        is_there=torch.from_numpy(np.concatenate(there)),
    )


class BlockAttention:
    """The stages' attention over flat contexts. Before each forward pass, `start` says what the blocks see."""

    def __init__(self, window: int) -> None:
        self._window = window

    def start(self, context: Sequence[Tensor], anchors: Anchors) -> None:
        """context: rows [T, K] of each stage, in order."""
        self._context, self._width = iter(context), anchors.slots.shape[1]
        places = anchors.rows[:, None] - self._window + torch.arange(self._window)
        self._seen = places >= anchors.firsts[:, None]
        self._places = places.clamp(min=0)

    def attend(
        self,
        q_RHK: Tensor,
        rows: FlatRows,
        _lo: Tensor,
        _hi: Tensor,
        _entries: object,
        _entry_hi: Tensor,
        _selected: object,
        sink_H: Tensor,
        scale: float,
        _blocks: object,
    ) -> Tensor:
        """As the reference, all blocks at once: each sees the context before its anchor, and all of itself."""
        own = rows.rows.unflatten(0, (-1, self._width))
        keys = torch.cat((next(self._context)[self._places], own), dim=1)
        q = q_RHK.unflatten(0, (-1, self._width))
        seen = torch.cat((self._seen, torch.ones(own.shape[:2], dtype=torch.bool)), dim=1)
        scores = torch.einsum("abhk,ask->abhs", q, keys).float() * scale
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        sink = sink_H[:, None].expand(*scores.shape[:3], 1)
        probs = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        return torch.einsum("abhs,ask->abhk", probs, keys).flatten(0, 1)


class DraftTrainer:
    """Stages and optimisers of one run."""

    def __init__(self, model: Path, folder: Path, total: int, ranks: Ranks) -> None:
        self.folder, self.total, self.ranks, self.step, self.next_sample = folder, total, ranks, 0, 0
        raw = json.loads((model / "config.json").read_text(encoding="utf-8"))
        (noise,) = Tokenizer(model, vision=True).encode_raw(NOISE)
        self.config = parse_model_config(with_draft_fields(raw, noise))
        ops = training_ops(Recorder(dense=False))
        self.network = load_model(model, dtype=torch.float32, ops=ops).network
        self._attention = BlockAttention(self.config.sliding_window)
        self.drafter = new_drafter(self.config, replace(ops, sparse_attention=self._attention.attend), seed=1)
        named = [(n, p) for n, p in self.drafter.named_parameters() if not n.endswith(("gate.bias", "gate.bias_vl"))]
        self._frozen = [p for n, p in self.drafter.named_parameters() if n.endswith(("gate.bias", "gate.bias_vl"))]
        for parameter in self._frozen:
            parameter.requires_grad_(False).zero_()
        self.muon = Muon([p for n, p in named if uses_muon(n, p) and "markov" not in n], 0.005, 0.95, 0.01)
        adam = [p for n, p in named if not (uses_muon(n, p) and "markov" not in n)]
        self.adam = torch.optim.AdamW(adam, 2e-3, (0.9, 0.95), weight_decay=0)
        self.meters: Meters = defaultdict(list)

    def train_step(self, batch: list[Example]) -> None:
        """One update of the stages."""
        loss = self._loss(batch)
        self.muon.zero_grad()
        self.adam.zero_grad()
        loss.backward()
        parameters = [p for p in self.drafter.parameters() if p.requires_grad]
        self.ranks.average_gradients(parameters)
        torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], 1.0)
        rate = min(1.0, (self.step + 1) / 40) * 0.5 * (1 + math.cos(math.pi * min(1.0, self.step / self.total)))
        for optimiser, peak in ((self.muon, 0.005), (self.adam, 2e-3)):
            for group in optimiser.param_groups:
                group["lr"] = peak * rate
            optimiser.step()
        self.step += 1

    def _loss(self, batch: list[Example]) -> Tensor:
        width = DEPTHS[int(np.random.default_rng((7, self.step)).integers(len(DEPTHS)))]
        with torch.no_grad():
            built, teacher_TV, streams = self._watch(batch)
        anchors = find_anchors(batch, width)
        rope = BatchRope(self.network.rope_tables(torch.device("cpu")), built.positions)
        context = self.drafter.context_rows(self.drafter.context(streams), rope)
        self._attention.start(context, anchors)
        base, hidden = self.drafter(slot_batch(built, anchors, self.drafter.draft.noise_token_id), self.network)
        said = built.token_ids[anchors.slots]
        logits = base.unflatten(0, anchors.slots.shape) + self.drafter.markov(said)
        teacher = teacher_TV[anchors.slots]
        # A slot is judged while the network itself would have said what stands before it.
        likeliest, count = teacher.argmax(-1), anchors.is_there
        agreed = likeliest[:, :-1] == said[:, 1:]
        count = count & torch.cat((torch.ones(len(said), 1, dtype=torch.bool), agreed.cumprod(1).bool()), dim=1)
        weights = count * torch.exp(-torch.arange(width) / SLOT_DECAY)
        distance = (logits.softmax(-1) - teacher.softmax(-1)).abs().sum(-1)
        certain = F.cross_entropy(logits.flatten(0, 1), likeliest.flatten(), reduction="none").view_as(weights)
        before = self.drafter.markov.markov_w1(said)
        sure = self.drafter.confidence(hidden.unflatten(0, anchors.slots.shape).detach(), before.detach())
        doubt = F.binary_cross_entropy_with_logits(sure, 1 - distance.detach() / 2, reduction="none")
        self._meter(logits.argmax(-1) == likeliest, count, batch)
        return ((0.1 * certain + 0.9 * distance + doubt) * weights).sum() / weights.sum()

    def _watch(self, batch: list[Example]) -> tuple[ForwardBatch, Tensor, dict[int, Tensor]]:
        """The network on whole conversations: the batch, logits fp32 [T, V] (zeros where none are wanted), streams."""
        images = [image for e in batch for image in e.images]
        rows: list[Tensor] = []
        if images:
            patches = torch.cat([torch.from_numpy(image.patches) for image in images])
            encoded = self.network.encode_images(patches, [(image.grid_rows, image.grid_cols) for image in images])
            rows = list(encoded.split([len(image.block.encoder_rows) for image in images]))
        built = network_batch(batch, rows, self.config)
        output = self.network(built, stream_taps=self.drafter.draft.target_layer_ids)
        teacher = torch.zeros(len(built.token_ids), output.logits.shape[1])
        teacher[built.logits_rows] = output.logits
        return built, teacher, output.streams

    def _meter(self, right: Tensor, count: Tensor, batch: list[Example]) -> None:
        """As an engine would count: a block ends at its first wrong guess, or where its answer ends."""
        taken = right.cumprod(1).bool() & count
        self.meters["accepted"].append(float(taken.sum() / count.sum()))
        for slot in range(min(5, count.shape[1])):
            if count[:, slot].any():
                self.meters[f"slot_{slot + 1}"].append(float(taken[:, slot].sum() / count[:, slot].sum()))

    def save(self) -> None:
        state = {
            "drafter": self.drafter.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "step": self.step,
            "next_sample": self.next_sample,
        }
        torch.save(state, self.folder / "drafts.new")
        os.replace(self.folder / "drafts.new", self.folder / "drafts.pt")

    def resume(self, start: Path | None) -> None:
        """Go on with this run, or begin with the stages of another."""
        file = self.folder / "drafts.pt"
        if file.exists():
            state = torch.load(file)
            self.drafter.load_state_dict(state["drafter"])
            self.muon.load_state_dict(state["muon"])
            self.adam.load_state_dict(state["adam"])
            self.step, self.next_sample = state["step"], state["next_sample"]
        elif start is not None:
            self.drafter.load_state_dict(torch.load(start)["drafter"])


def slot_batch(built: ForwardBatch, anchors: Anchors, noise: int) -> ForwardBatch:
    """Blocks of slots, one part each. What they see is up to `BlockAttention`."""
    count, width = anchors.slots.shape
    positions = built.positions[anchors.rows][:, None] + torch.arange(width)
    token_ids = torch.full((count, width), noise)
    token_ids[:, 0] = built.token_ids[anchors.rows]
    starts = positions[:, 0].tolist()
    parts = [
        Part(start=start, end=start + width, first=i * width, last=(i + 1) * width) for i, start in enumerate(starts)
    ]
    zeros = torch.zeros(count * width, dtype=torch.int64)
    blocks: dict[int, Sequence[QueryBlock]] = {0: ()}
    return ForwardBatch(
        token_ids=token_ids.flatten(),
        kinds=zeros,
        positions=positions.flatten(),
        parts=tuple(parts),
        has_images=False,
        image_rows=zeros[:0],
        image_features=None,
        logits_rows=torch.arange(count * width),
        attention=AttentionMetadata(row_lo=zeros, row_hi=zeros, compressed={}, blocks=blocks),
    )


def work(
    ranks: Ranks, model: Path, folder: Path, total: int, batch_tokens: int, minutes: float, start: Path | None
) -> None:
    """Train to the end of the steps or of the time."""
    trainer, started = DraftTrainer(model, folder, total, ranks), time.monotonic()
    trainer.resume(start)
    first = trainer.next_sample + ranks.rank
    batches = Batches(model, first, SKILLS, batch_tokens, TRAIN_SEED + 10, ranks.size)
    while trainer.step < total and ranks.agree(time.monotonic() - started < minutes * 60):
        after, batch = batches.next()
        trainer.next_sample = after - ranks.rank
        before = time.monotonic()
        trainer.train_step(batch)
        trainer.meters["seconds"].append(time.monotonic() - before)
        if ranks.rank == 0 and trainer.step % 20 == 0:
            line = {name: round(sum(v) / len(v), 4) for name, v in trainer.meters.items()}
            print(json.dumps({"step": trainer.step, **line}), flush=True)
            trainer.meters.clear()
        if ranks.rank == 0 and trainer.step % 100 == 0:
            trainer.save()
    if ranks.rank == 0:
        trainer.save()
    batches.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="trained checkpoint")
    parser.add_argument("out", type=Path, help="folder of the run")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-tokens", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop (and save) after this long")
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the work")
    parser.add_argument("--start", type=Path, help="state of a run on another checkpoint to begin with")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    launch(given.ranks, work, given.model, given.out, given.steps, given.batch_tokens, given.minutes, given.start)


if __name__ == "__main__":
    main()
