"""Runs the network for a set of requests: encodes their images once, then logits for their next tokens.

Each call recomputes every sequence from its start: simple, and the meaning that cached execution has to keep. Called by
`llm`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deepspan.core.media import PreparedImage, TokenKind
from deepspan.core.request import Request
from deepspan.runtime.batch_builder import SequenceInput, build_batch
from deepspan.weights.load import LoadedModel


class Runner:
    """One model on one device."""

    def __init__(self, model: LoadedModel, device: torch.device) -> None:
        self._config, self._network, self._device = model.config, model.network, device

    @torch.inference_mode()
    def encode(self, images: Sequence[PreparedImage]) -> Tensor | None:
        """Encoder rows of a request's images in emission order: [F, D], None without images."""
        if not images:
            return None
        patches = torch.from_numpy(np.concatenate([image.patches for image in images])).to(self._device)
        rows = self._network.encode_images(patches, [(image.grid_rows, image.grid_cols) for image in images])
        return emission_order(rows, images)

    @torch.inference_mode()
    def next_logits(
        self, requests: Sequence[Request], generated: Sequence[Sequence[int]], features: Sequence[Tensor | None]
    ) -> Tensor:
        """fp32 [requests, V]: logits after each request's prompt and the tokens generated so far."""
        sequences = [
            _sequence(request, tokens, rows)
            for request, tokens, rows in zip(requests, generated, features, strict=True)
        ]
        return self._network(build_batch(sequences, self._config, self._device)).logits


def emission_order(rows: Tensor, images: Sequence[PreparedImage]) -> Tensor:
    """Encoder rows of images, raster order inside each -> the order in which their IMAGE tokens take them: [F, D]."""
    counts = [len(image.block.encoder_rows) for image in images]
    parts = [
        part[torch.from_numpy(image.block.encoder_rows.astype(np.int64)).to(rows.device)]
        for part, image in zip(rows.split(counts), images, strict=True)
    ]
    return torch.cat(parts)


def _sequence(request: Request, generated: Sequence[int], features: Tensor | None) -> SequenceInput:
    token_ids = np.concatenate((request.token_ids, np.asarray(generated, dtype=np.int64)))
    kinds = np.concatenate((request.kinds, np.full(len(generated), TokenKind.TEXT, dtype=np.int8)))
    return SequenceInput(
        token_ids=token_ids, kinds=kinds, spans=request.spans, features=features, wanted=(len(token_ids) - 1,)
    )
