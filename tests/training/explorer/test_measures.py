"""Each number of the explorer equals a plain computation, one row after another in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_nlq.training.explorer import measures


def random_weights(seed, heads=2, length=7, signed=False):
    weights = np.tril(np.random.default_rng(seed).normal(size=(heads, length, length)) ** (1 if signed else 2))
    weights[0, 3] = 0.0  # a row of zeros
    return weights


def by_rows(weights, function):
    return [[function(i, row[: i + 1]) for i, row in enumerate(head)] for head in weights]


def close(found, expected):
    np.testing.assert_allclose(found.numpy(), np.array(expected), rtol=1e-12, atol=1e-14)


def entropy(_, row):
    total = sum(map(abs, row))
    return math.nan if total == 0 else -sum(abs(w) / total * math.log(abs(w) / total) for w in row if w)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), signed=st.booleans())
def test_measures_are_those_of_each_row(seed, signed):
    weights = random_weights(seed, signed=signed)
    tensor = torch.from_numpy(weights)
    close(measures.entropies(tensor), by_rows(weights, entropy))
    first = by_rows(weights, lambda _, row: abs(row[0]) / sum(map(abs, row)) if any(row) else math.nan)
    close(measures.shares(tensor)[..., 0], first)


def test_effective_ranks():
    # Three orthogonal directions of equal size, two of them, and one
    states = torch.stack(
        [torch.diag(torch.tensor([2.0, 2.0, 2.0])), torch.diag(torch.tensor([1.0, 1.0, 0.0])), torch.ones(3, 3)]
    )
    torch.testing.assert_close(measures.effective_ranks(states), torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    sizes = np.linalg.svd(matrix := np.random.default_rng(0).normal(size=(9, 4)), compute_uv=False)
    shares = sizes / sizes.sum()
    close(measures.effective_ranks(torch.from_numpy(matrix)[None]), [math.exp(-(shares * np.log(shares)).sum())])


def test_repeated_tokens():
    tokens = measures.repeated_tokens(20, [0, 3], 50)[0].tolist()
    assert tokens[:50] == tokens[50:]
    assert not {0, 3} & set(tokens)
    assert tokens == measures.repeated_tokens(20, [0, 3], 50)[0].tolist()


@pytest.mark.parametrize("switches", [{"attention_activation": "linear_attention"}, {"attention_gate": "elementwise"}])
def test_ablations_are_those_of_zeroed_heads(make_model, monkeypatch, switches):
    model, ids = make_model(**switches), torch.randint(13, (1, 12))
    monkeypatch.setattr(measures, "_TOKENS_AT_ONCE", 3 * 12)
    found = measures.ablations(model, ids, [4, 4])
    whole = measures.losses_of_tokens(model, ids).mean()
    for layer in range(2):
        weight = model.model.layers[layer].self_attn.o_proj.weight
        for head in range(4):
            kept = weight.detach().clone()
            with torch.no_grad():
                weight[:, 4 * head : 4 * head + 4] = 0.0
            expected = measures.losses_of_tokens(model, ids).mean() - whole
            with torch.no_grad():
                weight.copy_(kept)
            assert found[layer][head].item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(measures.losses_of_tokens(model, ids).mean(), whole, atol=0, rtol=0)
