"""The oracle: the whole network a second time, in naive float64 numpy.

It owns nothing of the engine and imports nothing from it. Every function restates one formula of the model in the
plainest way: one sequence from position 0, dense boolean masks made from explicit sets, no cache, no batch, no
quantisation, no rounding. What it returns is the value the formula means, so a disagreement with the engine is a
finding about the engine (or about the formula), never about shared code.

layout.py   image blocks, spans, visible sets, masks
network.py  the text network with its taps
drafter.py  draft stages: one block of slots
vision.py   the vision tower and the aligner
tiny.py     random weights in the checkpoint's names, for tests
"""

from collections.abc import Mapping, Sequence

import numpy as np

from oracle.layout import IMAGE, find_spans
from oracle.network import forward
from oracle.vision import encode_image, grid_size, to_emission_order

__all__ = ["encode_image", "forward", "run", "to_emission_order"]


def run(
    config: dict,
    weights: Mapping[str, np.ndarray],
    ids: Sequence[int],
    kinds: Sequence[int],
    images: Sequence[tuple[np.ndarray, int, int]] = (),
) -> dict:
    """Encode every image, put its rows in emission order, find the spans, and run the text network.

    images holds (patches [Hv*Wv, patch values], Hv, Wv) in order of appearance. Returns what `network.forward`
    returns, plus "features" [num IMAGE tokens, D] (None without images) and "spans".
    """
    spans = find_spans(kinds)
    assert len(spans) == len(images), "one span per image"
    for first, last in spans:  # beyond the model's limit the reference cuts what a row sees; such a span is illegal
        assert last - first + 1 <= config["vision_max_n_token"], "span longer than the model allows"
    blocks = []
    for patches, height, width in images:
        raster = encode_image(config, weights, patches, height, width)
        blocks.append(to_emission_order(raster, *grid_size(config, height, width)))
    features = np.concatenate(blocks) if blocks else None
    assert sum(map(len, blocks)) == list(kinds).count(IMAGE), "one feature row per IMAGE token"
    return {**forward(config, weights, ids, kinds, features, spans), "features": features, "spans": spans}
