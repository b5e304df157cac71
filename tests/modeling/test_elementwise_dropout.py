"""Dropout of attention weights in `eager` and `nlq_tiled`."""

import math

import pytest
import torch
from support.attention_cases import LAYOUTS, check, chunk, expected_of, layer, results
from support.elementwise_backends import EAGER, TILED, parametrize_backends
from support.grids import slow_except
from torch import nn


pytestmark = pytest.mark.usefixtures("small_tiles")
both = parametrize_backends(EAGER, TILED)


def attend(backend, states, normalization="sum", dropout=0.25, seed=0, training=True):
    torch.manual_seed(seed)
    heads, key_value_heads = states[0].shape[1], states[1].shape[1]
    module = layer("softplus", normalization, heads=heads, key_value_heads=key_value_heads, training=training)
    return backend(module, *states, dropout=dropout)


def dropped_weights(backend, states, **options):
    """With one-hot values the outputs are the weights; `(batch, heads, query, key)`."""
    batch, heads, length, _ = states[1].shape
    one_hot = torch.eye(length, dtype=states[0].dtype).expand(batch, heads, -1, -1)
    query, key = (nn.functional.pad(tensor.detach(), (0, length - tensor.shape[-1])) for tensor in states[:2])
    return attend(backend, [query, key, one_hot], **options).transpose(1, 2)


@both
def test_seed(backend):
    states = LAYOUTS["grouped_queries"].states()
    first, second, other = (attend(backend, states, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.allclose(first, other)
    module = layer("softplus", heads=4, key_value_heads=2, training=True)
    again = backend(module, *backend.place(states), dropout=0.25)
    assert not torch.allclose(again, other)  # each call draws anew


@both
def test_evaluation_drops_nothing(backend):
    states = LAYOUTS["grouped_queries"].states()
    assert torch.equal(attend(backend, states, training=False), attend(backend, states, dropout=0.0))


@both
def test_no_dropout_draws_no_numbers(backend):
    """Else the numbers drawn after a layer would depend on its backend."""
    states = LAYOUTS["grouped_queries"].states()
    for options in ({"dropout": 0.0}, {"training": False}):
        attend(backend, states, **options)
        assert torch.equal(torch.get_rng_state(), torch.manual_seed(0).get_state())


@both
def test_which_weights_are_dropped(backend):
    """A quarter of all weights is dropped, and the others are divided by 3/4; no two tiles or heads are alike."""
    states = chunk(40, 40, 0, heads=4, key_value_heads=4).states(head_dim=4)
    kept = dropped_weights(backend, states) / dropped_weights(backend, states, dropout=0.0)
    lower = torch.ones(40, 40).tril().bool()
    kept = kept[..., lower]
    is_kept = kept != 0
    torch.testing.assert_close(kept[is_kept], torch.full_like(kept[is_kept], 1 / 0.75))
    count = is_kept.numel()
    assert abs(is_kept.float().mean() - 0.75) < 4 * math.sqrt(0.75 * 0.25 / count)
    patterns = torch.zeros(8, 40, 40).masked_scatter(lower.expand(8, -1, -1), is_kept.float())
    assert len(patterns.unique(dim=0)) == 8
    tiles = patterns.unfold(1, 4, 4).unfold(2, 4, 4)[:, *torch.tril_indices(10, 10, -1)].transpose(0, 1)
    assert len(tiles.unique(dim=0)) == len(tiles) == 45


@both
@pytest.mark.parametrize("normalization", slow_except(("sum", "length", "none"), ("sum",)))
def test_mean_over_many(backend, normalization):
    """One text stands many times in a batch. Each time other weights are dropped, and on average none."""
    layout = chunk(7, 7, 0, batch=1, heads=1, key_value_heads=1)
    states = [tensor.detach().expand(80, -1, -1, -1) for tensor in layout.states()]
    expected = attend(backend, [tensor[:1] for tensor in states], normalization, dropout=0.0)
    samples = attend(backend, states, normalization)
    deviation = samples.std(dim=0) / math.sqrt(len(samples))
    assert ((samples.mean(dim=0) - expected).abs() <= 5 * deviation + 1e-6).all()
    assert (deviation > 0).all()


@both
@pytest.mark.parametrize("normalization", slow_except(("sum", "length", "none"), ("sum",)))
def test_mean_over_seeds(backend, normalization):
    states = [tensor.detach() for tensor in LAYOUTS["grouped_queries"].states()]
    expected = attend(backend, states, normalization, dropout=0.0)
    samples = torch.stack([attend(backend, states, normalization, seed=seed) for seed in range(400)])
    deviation = samples.std(dim=0) / math.sqrt(len(samples))
    assert ((samples.mean(dim=0) - expected).abs() <= 5 * deviation + 1e-6).all()
    assert (deviation > 0).all()


@both
@pytest.mark.parametrize("normalization", ["sum", "length", "none"])
def test_backward_drops_the_same(backend, normalization):
    layout = chunk(11, 11, 0, batch=1, heads=4, key_value_heads=2)
    states = layout.states(torch.float64)
    dropped = dropped_weights(backend, states, normalization=normalization)
    full = dropped_weights(backend, states, normalization=normalization, dropout=0.0)
    kept = torch.where(full == 0, 0.0, dropped / full)
    assert 0 < (kept[layout.visible] == 0).sum() < layout.visible.sum()
    actual = results(attend(backend, states, normalization), states)
    check(actual, expected_of(layout, "softplus", normalization, states, kept=kept), 1e-9)
