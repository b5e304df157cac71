"""sentence-transformers: the model as an encoder of texts."""

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from support.client_cases import CASES
from transformers import AutoModel, AutoTokenizer


TEXTS = ["one two three", "four five six seven eight", "nine"]


def expected(folder, pooling: str, **switches) -> np.ndarray:
    """`(texts, hidden)`, each text alone. sentence-transformers applies a chat template if the tokenizer has one."""
    model, tokenizer = AutoModel.from_pretrained(folder, **switches), AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in TEXTS:
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        rows.append(states.mean(0) if pooling == "mean" else states[-1])
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("switches", [{}, {"is_causal": False}], ids=["decoder", "encoder"])
@pytest.mark.parametrize("activation, query", CASES)
def test_embeddings_are_pooled_tokens(activation, query, switches, trained, tmp_path):
    """A padded batch, a saved copy, and the pooling that sentence-transformers chooses for a decoder."""
    folder = trained(activation, query)
    transformer = Transformer(str(folder), config_kwargs=switches)
    pooling = Pooling(transformer.get_embedding_dimension(), "mean")
    encoder = SentenceTransformer(modules=[transformer, pooling], device="cpu")
    vectors = encoder.encode(TEXTS)
    np.testing.assert_allclose(vectors, expected(folder, "mean", **switches), atol=1e-5)
    encoder.save(str(tmp_path))
    np.testing.assert_array_equal(SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS), vectors)
    if not switches:
        plain = SentenceTransformer(str(folder), device="cpu")
        np.testing.assert_allclose(plain.encode(TEXTS), expected(folder, "last"), atol=1e-5)
