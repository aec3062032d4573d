"""A whole engine on a tiny checkpoint, and what it must answer according to the network on whole sequences."""

import numpy as np
import torch
from network_helpers import TILE, Prompt, TinyModel, encode

from deepspan.config.engine import EngineConfig
from deepspan.core.media import PreparedImage, TokenKind
from deepspan.core.request import Request
from deepspan.core.sampling import SamplingParams
from deepspan.engine.core import EngineCore
from deepspan.image.layout import image_block
from deepspan.kv.families import cache_families
from deepspan.kv.manager import CacheManager
from deepspan.runtime.batch_builder import SequenceInput, build_batch
from deepspan.runtime.caches import Caches
from deepspan.runtime.runner import Runner
from deepspan.sched.draft_depth import DraftDepth
from deepspan.sched.scheduler import Scheduler
from deepspan.text.tokenizer import Tokenizer
from deepspan.weights.load import LoadedModel

CPU = torch.device("cpu")


def request_of(prompt: Prompt, name: str = "", **params) -> Request:
    """The prompt as a request; images are told apart by `name` and number."""
    images = [
        PreparedImage(
            patches=patches,
            grid_rows=rows,
            grid_cols=cols,
            block=image_block(-(-rows // TILE), -(-cols // TILE)),
            digest=f"{name}{number}",
        )
        for number, (patches, rows, cols) in enumerate(prompt.images)
    ]
    options = {"max_tokens": 5, "ignore_eos": True} | params
    return Request(
        token_ids=prompt.ids,
        kinds=prompt.kinds,
        spans=prompt.spans,
        images=tuple(images),
        params=SamplingParams(**options),
    )


class Service:
    """An engine whose logits are kept: `logits[request id]` holds those that each new token was chosen from.

    depth: what says how many tokens to guess; by default the model's own stages always guess `num_drafts`, if any.
    """

    def __init__(
        self,
        model: TinyModel,
        num_blocks: int = 64,
        dtype: torch.dtype = torch.float32,
        depth: DraftDepth | None = None,
        **engine,
    ) -> None:
        values = {"block_tokens": 16, "max_model_len": 400, "max_num_seqs": 8, "max_batched_tokens": 800}
        stored = "dspark" if model.drafter is not None else None
        self.config = EngineConfig(**{**values, **engine}).with_drafts(model.config, stored).checked(model.config)
        drafter = model.drafter if self.config.draft_method != "off" else None
        stages = drafter.num_stages if drafter is not None else 0
        num_drafts = self.config.num_drafts
        families = cache_families(model.config, self.config.block_tokens, dtype.itemsize, num_drafts, stages)
        counts = dict.fromkeys((family.name for family in families), num_blocks)
        caches = Caches(model.config, self.config, families, counts, dtype, CPU)
        loaded = LoadedModel(config=model.config, network=model.network, left_out={}, drafter=drafter)
        tokenizer = Tokenizer(model.folder, vision=True)
        forbidden = torch.zeros(model.config.vocab_size, dtype=torch.bool)
        self.runner = Runner(loaded, self.config, families, caches, CPU, forbidden, tokenizer.special.eos)
        self.scheduler = Scheduler(self.config, CacheManager(families, counts, self.config.prefix_caching))
        depth = depth or DraftDepth(num_drafts, is_fixed=True)
        self.core = EngineCore(self.scheduler, self.runner, tokenizer, depth)
        self.logits: dict[int, list[torch.Tensor]] = {}
        self._forward, self.runner._forward = self.runner._forward, self._spy

    def _spy(self, inputs, failed):
        found = self._forward(inputs, failed)
        for chunk, rows in found:
            if chunk.samples:
                self.logits.setdefault(chunk.request_id, []).append(rows[-1].clone())
        return found

    def preempt(self, request_id: int) -> None:
        """As if its blocks were needed by another request."""
        from deepspan.sched.scheduler import _Step

        sequence = self.scheduler.sequence(request_id)
        if sequence.row is not None:
            self.scheduler._preempt(sequence, _Step(0))

    def finish(self, ids, disturb=None):
        """Outputs of the requests. disturb: called before every step with its number."""
        step = 0
        while not all(self.core.is_finished(i) for i in ids):
            if disturb is not None:
                disturb(step)
            self.core.step()
            self.core.check()
            step += 1
            assert step < 3000, "no progress"
        return [self.core.take(i) for i in ids]


def greedy(model: TinyModel, prompt: Prompt, num_tokens: int = 5) -> tuple[list[int], np.ndarray]:
    """(ids, fp32 logits [num_tokens, V]) of the network on whole sequences, one token at a time."""
    ids, kinds, tokens, rows = prompt.ids.tolist(), prompt.kinds.tolist(), [], []
    with torch.no_grad():
        features = encode(model.network, prompt)
        for _ in range(num_tokens):
            sequence = SequenceInput(
                token_ids=np.asarray(ids),
                kinds=np.asarray(kinds, dtype=np.int8),
                spans=prompt.spans,
                features=features,
                wanted=(len(ids) - 1,),
            )
            rows.append(model.network(build_batch([sequence], model.config, "cpu")).logits[0])
            tokens.append(int(rows[-1].argmax()))
            ids.append(tokens[-1])
            kinds.append(TokenKind.TEXT)
    return tokens, torch.stack(rows).numpy()
