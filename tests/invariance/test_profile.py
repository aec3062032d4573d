"""The largest step runs before caches exist, with the worst image grid, and leaves no trace."""

import torch

from deepspan.config.engine import EngineConfig
from deepspan.image.resize import worst_case_grid
from deepspan.runtime.profile import largest_step_bytes


def test_largest_step_has_images_of_the_worst_grid_and_leaves_the_network_as_it_was(tiny_models, monkeypatch):
    model = tiny_models(ratios=(0, 4, 16, 4), vision_max_n_token=64)
    grids, lengths = [], []
    encode, forward = model.network.encode_images, model.network.forward

    def spy_encode(patches, given):
        grids.extend(given)
        return encode(patches, given)

    def spy_forward(batch, *rest):
        lengths.append((len(batch.token_ids), len(batch.logits_rows), len(batch.image_rows)))
        return forward(batch, *rest)

    monkeypatch.setattr(model.network, "encode_images", spy_encode)
    monkeypatch.setattr(model.network, "forward", spy_forward)
    before = {name: value.clone() for name, value in model.network.state_dict().items()}
    engine = EngineConfig(max_num_seqs=4, max_batched_tokens=300, block_tokens=16)
    assert largest_step_bytes(model.network, model.config, engine, torch.device("cpu")) == 0
    rows, cols = worst_case_grid(model.config.vision)
    assert grids == [(3 * rows, 3 * cols)] * len(grids)
    assert lengths == [(300, 4, len(grids) * rows * cols)]
    assert len(grids) >= 4
    assert all(torch.equal(value, before[name]) for name, value in model.network.state_dict().items())
