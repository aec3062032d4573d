"""The largest step that can come, run once before caches exist: what it needs is not theirs to take.

Largest is not square: the image grid with the most encoder rows is 8 x 46 in the release, 368 rows where a square one
has 324. Runs on whole dummy sequences without caches, so it leaves nothing behind; ids are 0, which is in every table.
Called by `llm` on accelerators.
"""

import numpy as np
import torch

from deepspan.config.engine import EngineConfig
from deepspan.config.model import ModelConfig
from deepspan.core.media import TokenKind
from deepspan.image.layout import image_block, num_lead_pads, place
from deepspan.image.resize import worst_case_grid
from deepspan.model.network import DeepseekV4
from deepspan.runtime.batch_builder import SequenceInput, build_batch


@torch.inference_mode()
def largest_step_bytes(network: DeepseekV4, config: ModelConfig, engine: EngineConfig, device: torch.device) -> int:
    """Peak memory of the largest step beyond what is allocated now; 0 on devices that do not count it."""
    before = 0
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
    network(build_batch([_largest_sequence(network, config, engine, device)], config, device))
    return torch.accelerator.max_memory_allocated(device) - before if device.type != "cpu" else 0


def _largest_sequence(
    network: DeepseekV4, config: ModelConfig, engine: EngineConfig, device: torch.device
) -> SequenceInput:
    """As many images of the worst grid as a step holds, then text; logits of as many rows as there are requests."""
    kinds, spans, features = np.zeros(0, dtype=np.int8), [], None
    if config.vision is not None:
        rows, cols = worst_case_grid(config.vision)
        block = image_block(rows, cols)
        while len(kinds) + num_lead_pads(len(kinds)) + len(block.kinds) <= engine.max_batched_tokens:
            spans.append(place(block, len(kinds)))
            pads = np.full(num_lead_pads(len(kinds)), TokenKind.PAD, dtype=np.int8)
            kinds = np.concatenate((kinds, pads, block.kinds))
        tile = config.vision.downsample_ratio
        grid = rows * tile, cols * tile
        patch = 3 * config.vision.patch_size**2
        patches = torch.zeros(len(spans) * grid[0] * grid[1], patch, device=device)
        features = network.encode_images(patches, [grid] * len(spans))
    text = np.full(engine.max_batched_tokens - len(kinds), TokenKind.TEXT, dtype=np.int8)
    return SequenceInput(
        token_ids=np.zeros(engine.max_batched_tokens, dtype=np.int64),
        kinds=np.concatenate((kinds, text)),
        spans=tuple(spans),
        features=features,
        wanted=range(engine.max_batched_tokens - engine.max_num_seqs, engine.max_batched_tokens),
    )
