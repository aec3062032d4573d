"""What training asks of the network beside answers: heads that the checkpoint does not have.

Each asks rows for something that answers need and that is slow to be found otherwise (see docs/log.md): what lies under
a cell, where in its picture, in which picture, and how many shapes are like the one it sees.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspan.config.model import ModelConfig
from deepspan.core.media import PreparedImage
from deepspan.skills.labels import CENTRE_CLASSES, CHARACTER_CLASSES, COLOUR_CLASSES, MOST_ALIKE, SHAPE_CLASSES
from training.data import Example

PLACES = 6  # parts of a picture's width and height
NUMBERS = 3  # pictures of a question
CELLS = ("shape", "colour", "left", "character", "right", "centre")
CLASSES = (len(SHAPE_CLASSES), len(COLOUR_CLASSES), *3 * (len(CHARACTER_CLASSES),), len(CENTRE_CLASSES))

Meters = dict[str, list[float]]


class Heads(nn.Module):
    """probe: of rows of the tower. places, counts: of streams of the network."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.probe = nn.Linear(hidden, sum(CLASSES))
        # The tower knows distances only: the network has to work places out from the tokens around the rows, and does
        # it when its first layers are asked. Pictures are longer than the window, so which of them a row belongs to is
        # asked behind compressed layers.
        self.places = nn.Linear(hidden, 2 * PLACES + NUMBERS)
        # Counting is looking around, which pictures can do and questions cannot: all numbers should be there before a
        # question asks for one.
        self.counts = nn.Linear(hidden, 3 * (1 + MOST_ALIKE))
        nn.init.zeros_(self.counts.weight)  # a head of random weights would shake what is learnt already

    def see(self, rows_FD: Tensor, batch: Sequence[Example], meters: Meters) -> Tensor:
        """Loss of telling what lies under each cell. rows_FD: of the tower, raster order."""
        labels = torch.cat([torch.from_numpy(label) for e in batch for label in e.labels], dim=1)[: len(CLASSES)]
        loss = torch.zeros(())
        for name, logits, wanted in zip(CELLS, self.probe(rows_FD).split(CLASSES, 1), labels, strict=True):
            weights = torch.where(wanted > 0, 1.0, 0.1)  # most cells are empty
            losses = F.cross_entropy(logits.float(), wanted, reduction="none") * weights
            loss = loss + losses.sum() / weights.sum()
            there = wanted > 0
            if there.any():
                _meter(meters, f"cell_{name}", logits[there], wanted[there])
        return loss

    def place(
        self, early_FD: Tensor, late_FD: Tensor, batch: Sequence[Example], config: ModelConfig, meters: Meters
    ) -> Tensor:
        """Loss of telling in which of `PLACES` columns and lines of its picture each IMAGE row lies, and in which
        picture. early_FD, late_FD: streams of IMAGE rows, before and behind compressed layers."""
        if not len(early_FD):
            return torch.zeros(())
        assert config.vision is not None, "there are image rows"
        tile = config.vision.downsample_ratio
        wanted = torch.from_numpy(np.concatenate([_places(image, tile) for e in batch for image in e.images], axis=1))
        numbers = [
            torch.full((len(image.block.encoder_rows),), number) for e in batch for number, image in enumerate(e.images)
        ]
        columns, lines, _ = self.places(early_FD).split((PLACES, PLACES, NUMBERS), 1)
        of_picture = self.places(late_FD)[:, 2 * PLACES :]
        loss = torch.zeros(())
        for name, logits, right in (
            ("column", columns, wanted[0]),
            ("line", lines, wanted[1]),
            ("number", of_picture, torch.cat(numbers)),
        ):
            loss = loss + F.cross_entropy(logits, right)
            _meter(meters, f"place_{name}", logits, right)
        return loss

    def count(self, rows_FD: Tensor, batch: Sequence[Example], meters: Meters) -> Tensor:
        """Loss of telling how many shapes are like the one whose centre an IMAGE row sees. rows_FD: streams."""
        wanted = [
            torch.from_numpy(label[len(CLASSES) :, image.block.encoder_rows.astype(np.int64)])
            for e in batch
            for image, label in zip(e.images, e.labels, strict=True)
        ]
        numbers = torch.cat([torch.zeros(3, 0, dtype=torch.int64), *wanted], dim=1)
        centres = numbers[0] > 0
        loss = torch.zeros(())
        if not centres.any():
            return loss
        # Streams grow along the layers; what is asked of them should not weigh more for it.
        parts = self.counts(F.rms_norm(rows_FD[centres], rows_FD.shape[1:])).chunk(3, 1)
        for name, logits, right in zip(("kind", "colour", "all"), parts, numbers[:, centres], strict=True):
            loss = loss + F.cross_entropy(logits, right)
            _meter(meters, f"alike_{name}", logits, right)
        return loss


def _meter(meters: Meters, name: str, logits: Tensor, right: Tensor) -> None:
    meters[name].append(float((logits.argmax(1) == right).float().mean()))


def _places(image: PreparedImage, tile: int) -> np.ndarray:
    """Column and line class of each IMAGE row in emission order: int64 [2, rows]. tile: patches of a cell's side."""
    columns, lines = -(-image.grid_cols // tile), -(-image.grid_rows // tile)
    raster = image.block.encoder_rows.astype(np.int64)
    return np.stack((raster % columns * PLACES // columns, raster // columns * PLACES // lines))
