"""Sampling with guesses on deepspan-tiny: what comes out follows the network's own distribution (chi-square).

Its draft stages here have random weights, so the guesses are as bad as they can be; few tokens may be chosen, so that
many stand all the same. Seeds are fixed: the test has one result.
"""

import json
import shutil
from itertools import product

import numpy as np
import pytest
import torch
from engine_helpers import Service, request_of
from network_helpers import Prompt, open_model
from safetensors.torch import load_file, save_file

from deepspan.bundled import bundled_model
from deepspan.config.model import load_model_config
from deepspan.runtime.batch_builder import SequenceInput, build_batch
from deepspan.weights.table import DraftKind, draft_tensors
from deepspan.weights.tiny import random_tensors

STAGES, NUM_DRAFTS, TEMPERATURE = 2, 2, 4.0
NUM_SAMPLES, AT_ONCE = 288, 48
PROMPT = [0, 70, 71, 72, 73, 74, 75, 76]
RARE = 5  # outcomes expected less often are counted together


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The bundled checkpoint with random draft stages."""
    folder = shutil.copytree(bundled_model(), tmp_path_factory.mktemp("tiny") / "drafting")
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layers = raw["num_hidden_layers"]
    raw |= {
        "compress_ratios": [*raw["compress_ratios"][:layers], *[0] * STAGES],
        "num_nextn_predict_layers": STAGES,
        "dspark_block_size": 5,
        "dspark_noise_token_id": raw["vocab_size"] - 1,
        "dspark_target_layer_ids": [layers - 3, layers - 2, layers - 1],
        "dspark_markov_rank": 16,
    }
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    stages = random_tensors(draft_tensors(load_model_config(folder), STAGES, DraftKind.DSPARK), seed=3)
    save_file(kept | stages, folder / "model.safetensors", metadata={"format": "pt"})
    return open_model(folder)


def logits_after(model, sequences):
    """fp32 [sequences, V]: of the token behind each."""
    inputs = [
        SequenceInput(
            token_ids=np.asarray(ids, dtype=np.int64),
            kinds=np.full(len(ids), -1, dtype=np.int8),
            spans=(),
            features=None,
            wanted=(len(ids) - 1,),
        )
        for ids in sequences
    ]
    with torch.no_grad():
        return model.network(build_batch(inputs, model.config, "cpu")).logits


@pytest.fixture(scope="module")
def law(model):
    """(tokens that may be chosen, joint probabilities [3, 3, 3] of the first three)."""
    kept = sorted(logits_after(model, [PROMPT])[0].topk(12).indices.tolist()[1::4])
    contexts = [context for length in range(3) for context in product(kept, repeat=length)]
    logits = logits_after(model, [[*PROMPT, *context] for context in contexts])[:, kept].double()
    after = dict(zip(contexts, (logits / TEMPERATURE).softmax(1).numpy(), strict=True))
    joint = np.zeros((3, 3, 3))
    for places in product(range(3), repeat=3):
        tokens = [kept[place] for place in places]
        joint[places] = np.prod([after[tuple(tokens[:i])][place] for i, place in enumerate(places)])
    return kept, joint


def pooled(expected, found):
    """Both counts by outcome, rare ones as one."""
    rare = expected < RARE
    return [np.append(counts[~rare], counts[rare].sum()) for counts in (expected, found)]


def chi_square_bound(freedom):
    """Exceeded with probability 0.001 (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize(("rule", "sampling"), [("standard", "sampled"), ("block", "sampled")])
def test_sampled_texts_with_guesses_follow_the_law_of_the_network(model, law, rule, sampling):
    kept, joint = law
    limits = {"block_tokens": 128, "max_num_seqs": AT_ONCE, "max_batched_tokens": 1024, "num_blocks": 3 * AT_ONCE}
    drafting = {"draft_method": "dspark", "num_drafts": NUM_DRAFTS, "draft_rule": rule, "draft_sampling": sampling}
    service = Service(model, **limits, **drafting)
    service.runner._forbidden = torch.ones(model.config.vocab_size, dtype=torch.bool)
    service.runner._forbidden[kept] = False
    prompt = Prompt(ids=np.asarray(PROMPT), kinds=np.full(len(PROMPT), -1, dtype=np.int8), spans=(), images=())
    counts = np.zeros((3, 3, 3))
    for first in range(0, NUM_SAMPLES, AT_ONCE):
        options = {"temperature": TEMPERATURE, "max_tokens": 4}
        ids = [service.core.add(request_of(prompt, seed=first + i, **options))[0] for i in range(AT_ONCE)]
        for output in service.finish(ids):
            counts[tuple(kept.index(token) for token in output.token_ids[:3])] += 1
    stats = service.core.stats()
    assert 0.1 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9
    expected, found = pooled(NUM_SAMPLES * joint, counts)
    assert len(expected) > 10
    assert float(((found - expected) ** 2 / expected).sum()) < chi_square_bound(len(expected) - 1)
