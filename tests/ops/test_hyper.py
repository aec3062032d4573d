"""Hyper-connections against loops in float64, and the laws of their mixing matrix."""

import math

import numpy as np
import pytest
import torch

from deepspan.ops.hyper import hyper_head, hyper_post, hyper_pre

NUM_TOKENS, NUM_STREAMS, HIDDEN, ITERS = 7, 4, 16, 20
NORM_EPS, HC_EPS = 1e-6, 1e-6


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def parameters(num_rows: int, num_scales: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fn = normal(num_rows, NUM_STREAMS * HIDDEN, seed=1) / math.sqrt(HIDDEN)
    return fn, normal(num_rows, seed=2), 1 + 0.3 * normal(num_scales, seed=3)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def mixes(streams: np.ndarray, fn: np.ndarray) -> np.ndarray:
    """One token: projection of the streams laid end to end, divided by their root mean square."""
    flat = np.concatenate(list(streams))
    return (fn @ flat) / math.sqrt(np.mean(flat**2) + NORM_EPS)


def naive_pre(streams, fn, base, scale) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One token, entry by entry."""
    n = NUM_STREAMS
    m = mixes(streams, fn)
    pre = [sigmoid(m[j] * scale[0] + base[j]) + HC_EPS for j in range(n)]
    post = [2 * sigmoid(m[n + k] * scale[1] + base[n + k]) for k in range(n)]
    mix = np.empty((n, n))
    for j in range(n):
        logits = [m[2 * n + n * j + k] * scale[2] + base[2 * n + n * j + k] for k in range(n)]
        total = sum(math.exp(x) for x in logits)
        mix[j] = [math.exp(x) / total + HC_EPS for x in logits]
    for step in range(2 * ITERS - 1):  # columns first, columns last
        for line in range(n):
            if step % 2 == 0:
                mix[:, line] = mix[:, line] / (mix[:, line].sum() + HC_EPS)
            else:
                mix[line] = mix[line] / (mix[line].sum() + HC_EPS)
    return sum(pre[j] * streams[j] for j in range(n)), np.array(post), mix


def pre_of(streams: torch.Tensor):
    fn, base, scale = parameters(2 * NUM_STREAMS + NUM_STREAMS**2, 3)
    return hyper_pre(streams, fn, base, scale, ITERS, NORM_EPS, HC_EPS), (fn, base, scale)


def test_hyper_pre_equals_naive_loops():
    streams = normal(NUM_TOKENS, NUM_STREAMS, HIDDEN, seed=0)
    (x, post, mix), params = pre_of(streams)
    fn, base, scale = (p.double().numpy() for p in params)
    for t in range(NUM_TOKENS):
        expected = naive_pre(streams[t].double().numpy(), fn, base, scale)
        for found, value in zip((x[t], post[t], mix[t]), expected, strict=True):
            assert np.abs(found.numpy() - value).max() < 2e-6


def test_hyper_pre_mix_columns_sum_to_one():
    (_, _, mix), _ = pre_of(normal(200, NUM_STREAMS, HIDDEN, seed=4))
    columns, rows = mix.sum(dim=1), mix.sum(dim=2)
    assert float((columns - 1).abs().max()) < 2e-6  # it ends on columns
    assert float((rows - 1).abs().max()) > float((columns - 1).abs().max())
    assert float((mix - mix.transpose(1, 2)).abs().max()) > 0.1


def test_hyper_pre_with_large_bases_reaches_its_bounds():
    """post goes up to 2 and pre up to 1 + eps; neither is normalised."""
    streams = torch.ones(1, NUM_STREAMS, HIDDEN)
    fn = torch.zeros(2 * NUM_STREAMS + NUM_STREAMS**2, NUM_STREAMS * HIDDEN)
    base, scale = torch.full((len(fn),), 50.0), torch.ones(3)
    x, post, mix = hyper_pre(streams, fn, base, scale, ITERS, NORM_EPS, HC_EPS)
    assert post.tolist() == [[2.0] * NUM_STREAMS]
    assert float(x[0, 0]) == pytest.approx(NUM_STREAMS * (1 + HC_EPS))
    assert mix[0].flatten().tolist() == pytest.approx([1 / NUM_STREAMS] * NUM_STREAMS**2, abs=1e-5)
    x, post, _ = hyper_pre(streams, fn, -base, scale, ITERS, NORM_EPS, HC_EPS)
    assert float(post.max()) < 1e-20  # no floor
    assert float(x[0, 0]) == pytest.approx(NUM_STREAMS * HC_EPS, rel=1e-3)


def test_hyper_pre_mixes_do_not_change_with_size_of_streams():
    streams = normal(NUM_TOKENS, NUM_STREAMS, HIDDEN, seed=5)
    (small_x, post, mix), _ = pre_of(streams)
    (large_x, large_post, large_mix), _ = pre_of(64 * streams)
    assert torch.allclose(large_post, post, atol=1e-5)
    assert torch.allclose(large_mix, mix, atol=1e-5)
    assert torch.allclose(large_x, 64 * small_x, rtol=1e-4, atol=1e-3)


def test_hyper_post_applies_mix_transposed():
    streams, out = normal(NUM_TOKENS, NUM_STREAMS, HIDDEN, seed=0), normal(NUM_TOKENS, HIDDEN, seed=6)
    post, mix = normal(NUM_TOKENS, NUM_STREAMS, seed=7), normal(NUM_TOKENS, NUM_STREAMS, NUM_STREAMS, seed=8)
    found = hyper_post(out, streams, post, mix).numpy()
    for t in range(NUM_TOKENS):
        for new in range(NUM_STREAMS):
            expected = post[t, new].double() * out[t].double()
            for old in range(NUM_STREAMS):
                expected = expected + mix[t, old, new].double() * streams[t, old].double()
            assert np.abs(found[t, new] - expected.numpy()).max() < 1e-5


def test_hyper_post_of_single_old_stream_moves_it_along_its_row():
    """Rows are old streams, columns new ones: stream 1 alone goes to stream 3."""
    streams = torch.zeros(1, NUM_STREAMS, HIDDEN)
    streams[0, 1] = 5.0
    mix = torch.zeros(1, NUM_STREAMS, NUM_STREAMS)
    mix[0, 1, 3] = 1.0
    found = hyper_post(torch.zeros(1, HIDDEN), streams, torch.zeros(1, NUM_STREAMS), mix)
    assert found[0, :, 0].tolist() == [0.0, 0.0, 0.0, 5.0]


def test_hyper_post_with_zero_output_keeps_sum_of_streams():
    """Rows sum to 1 up to the last column step, so mixing neither creates nor loses anything."""
    streams = normal(NUM_TOKENS, NUM_STREAMS, HIDDEN, seed=9)
    (_, post, mix), _ = pre_of(streams)
    found = hyper_post(torch.zeros(NUM_TOKENS, HIDDEN), streams, post, mix)
    rows = mix.sum(dim=2, keepdim=True)
    assert torch.allclose(found.sum(dim=1), (rows * streams).sum(dim=1), atol=1e-5)


def test_hyper_head_equals_naive_loops():
    streams = normal(NUM_TOKENS, NUM_STREAMS, HIDDEN, seed=0)
    fn, base, scale = parameters(NUM_STREAMS, 1)
    found = hyper_head(streams, fn, base, scale, NORM_EPS, HC_EPS).numpy()
    for t in range(NUM_TOKENS):
        wide = streams[t].double().numpy()
        m = mixes(wide, fn.double().numpy())
        weights = [sigmoid(m[j] * float(scale[0]) + float(base[j])) + HC_EPS for j in range(NUM_STREAMS)]
        assert np.abs(found[t] - sum(w * row for w, row in zip(weights, wide, strict=True))).max() < 5e-6


def test_hyper_ops_of_bfloat16_streams_compute_in_fp32_and_store_bfloat16():
    streams, out = normal(NUM_TOKENS, NUM_STREAMS, HIDDEN, seed=0).bfloat16(), normal(NUM_TOKENS, HIDDEN, seed=6)
    (x, post, mix), _ = pre_of(streams)
    (wide_x, wide_post, wide_mix), _ = pre_of(streams.float())
    assert (x.dtype, post.dtype, mix.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert torch.equal(post, wide_post)
    assert torch.equal(mix, wide_mix)
    assert torch.equal(x, wide_x.bfloat16())
    renewed = hyper_post(out.bfloat16(), streams, post, mix)
    assert torch.equal(renewed, hyper_post(out.bfloat16().float(), streams.float(), post, mix).bfloat16())
