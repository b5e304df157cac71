"""Blocks of tokens, batches and tokenizers."""

import dataclasses
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
from support.corpora import RIGHT, byte_tokenizer, write_documents
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from modeling_nlq.configuration import find
from modeling_nlq.training.run import data
from modeling_nlq.training.run.blocks import BlockCollator, make_blocks
from modeling_nlq.training.run.data import make_tokenizer, train_byte_pair_encoding
from modeling_nlq.training.run.documents import load_documents
from modeling_nlq.training.run.recipe import Recipe
from modeling_nlq.training.size import vocabulary_of
from nlq import main


class TestBlocks:
    def test_stream_is_the_documents_joined_and_cut(self, corpus):
        recipe = Recipe(model="tiny-linear", dataset=str(corpus), tokenizer="bpe:512", block_size=64)
        documents = load_documents(recipe)["train"]
        tokenizer = make_tokenizer(recipe, {"train": documents})
        blocks = make_blocks(documents, tokenizer, recipe)
        stream = []
        for text in documents["text"]:
            stream += [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        count = len(stream) // 64
        assert np.array_equal(blocks.dataset["input_ids"][:], np.array(stream[: count * 64]).reshape(count, 64))
        assert blocks.tokens == len(stream)
        total_bytes = sum(len(text.encode()) for text in documents["text"])
        assert blocks.bytes_per_token == pytest.approx(total_bytes / len(stream))

        streamed = dataclasses.replace(recipe, streaming=True)
        rows = make_blocks(load_documents(streamed)["train"], tokenizer, streamed).dataset
        assert np.array_equal([row["input_ids"] for row in rows], blocks.dataset["input_ids"][:])
        parallel = make_blocks(documents.select(range(30)), tokenizer, recipe.replace(num_proc=2)).dataset
        assert np.array_equal(parallel["input_ids"][:], blocks.dataset["input_ids"][: len(parallel)])
        assert tokenizer.decode(tokenizer("x = 'ü…'\n\tdef f(): pass")["input_ids"]) == "x = 'ü…'\n\tdef f(): pass"

    def test_packed_documents_restart(self):
        rows = [{"input_ids": [5, 6, 0, 7, 8, 9, 0, 0, 4]}]
        batch = BlockCollator(end_of_text=0, restart=True)(rows)
        assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 0]]
        assert batch["labels"].tolist() == [[5, 6, 0, -100, 8, 9, 0, -100, -100]]
        assert "position_ids" not in BlockCollator(end_of_text=0)(rows)

    @pytest.mark.parametrize("saved", [False, True], ids=["made here", "saved"])
    @pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
    def test_end_of_text_in_a_document_is_no_boundary(self, saved, streaming, tmp_path):
        texts = [f"{index} before <|endoftext|> after" for index in range(40)]
        path = str(write_documents(tmp_path / "text.jsonl", texts))
        fields = {"tokenizer": "bpe:300", "streaming": streaming, "validation_fraction": 0.3, "block_size": 2}
        recipe = Recipe(model="tiny-linear", dataset=path, **fields)
        documents = load_documents(recipe)
        tokenizer = make_tokenizer(recipe, documents)
        if saved:
            tokenizer.save_pretrained(tmp_path / "tokenizer")
            tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
        blocks = make_blocks(documents["train"], tokenizer, recipe)
        stream = [token for row in blocks.dataset for token in row["input_ids"]]
        whole = tokenizer.decode([token for token in stream if token != tokenizer.eos_token_id])
        count = sum(1 for _ in documents["train"])
        assert stream.count(tokenizer.eos_token_id) in (count - 1, count)  # the last may fill no block
        assert whole.count("before <|endoftext|> after") >= count - 1


@pytest.fixture(params=[False, True], ids=["made here", "saved"])
def trained(request, tmp_path):
    made = train_byte_pair_encoding(iter(["import os, sys\ndef import_all(words): return words\n" * 9]), 300)
    made.save_pretrained(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path) if request.param else made


class TestTrainedTokenizer:
    def test_one_text_is_plain_byte_level_encoding(self, trained):
        model = json.loads(trained.backend_tokenizer.to_str())["model"]
        plain = Tokenizer(models.BPE(model["vocab"], [tuple(merge) for merge in model["merges"]]))
        plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        rng, pieces = random.Random(0), ["import", " ", "  ", "\n", "é", "漢", "\u00a0", "words", "_", "<|mask", "x"]
        for text in ("".join(rng.choices(pieces, k=rng.randrange(12))) for _ in range(300)):
            for special in (True, False):
                assert trained(text, add_special_tokens=special)["input_ids"] == plain.encode(text).ids, text
        written = " <|endoftext|> <|mask|>"
        assert trained(written, split_special_tokens=True)["input_ids"] == plain.encode(written).ids
        assert trained(written)["input_ids"] == [*plain.encode(" ").ids, 0, 2]  # the mask takes the blank before it
        assert (len(trained), trained.all_special_ids, trained.unk_token_id) == (285, [0, 1, 2], None)

    def test_end_of_text_stands_between_pairs(self, trained):
        pair = trained("import", " words", return_token_type_ids=True)
        assert pair.tokens() == ["import", "<|endoftext|>", "Ġwords"] and pair["token_type_ids"] == [0, 0, 1]
        assert list(trained("import", " words")) == ["input_ids", "attention_mask"]
        assert trained("import", " words", add_special_tokens=False).tokens() == ["import", "Ġwords"]


class TestIdsWithGaps:
    def test_ids_beyond_the_vocabulary(self, run, recipe_file, tmp_path, capsys):
        byte_tokenizer(end_of_text=600).save_pretrained(tmp_path / "tokenizer")
        options = ["--tokenizer", str(tmp_path / "tokenizer")]
        assert main(["train", str(recipe_file), *options, "--output_dir", str(tmp_path / "run")]) == 1
        assert main(["convert", str(run[0]), str(tmp_path / "converted"), *options]) == 1
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nlq: error: ")]
        assert len(errors) == 2
        assert all("ids up to 600, too large for the model's vocab_size=512" in error for error in errors)


@pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
def test_a_chat_template_joins_messages(streaming, tmp_path):
    tokenizer = byte_tokenizer(end_of_text=600)
    roles = ("user", "assistant")
    rows = [{"messages": [{"role": role, "content": f"say {row}"} for role in roles]} for row in range(20)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fields = {"text_column": "messages", "block_size": 16, "streaming": streaming, "max_validation_documents": 5}
    fields |= {"dataset": str(tmp_path / "chat.jsonl"), "validation_fraction": 0.3}
    recipe = Recipe(model="tiny-linear", **fields)
    documents = load_documents(recipe)["train"]
    with pytest.raises(ValueError, match="text_column='messages' holds messages, and tokenizer 'bpe:8192' has no"):
        make_blocks(documents, tokenizer, recipe)
    message = "<{{ m.role }}>{{ m.content }}" + tokenizer.eos_token
    tokenizer.chat_template = "{% for m in messages %}" + message + "{% endfor %}"
    stream = [token for block in make_blocks(documents, tokenizer, recipe).dataset for token in block["input_ids"]]
    expected = []
    for row in documents:
        expected += [*tokenizer.apply_chat_template(row["messages"])["input_ids"], tokenizer.eos_token_id]
    assert stream == expected[: len(stream)] and len(expected) - len(stream) < 16
    assert stream.count(tokenizer.eos_token_id) > 20


def test_stream_too_small_for_a_block(recipe_file, tmp_path, capsys):
    small = write_documents(tmp_path / "small.jsonl", RIGHT)
    arguments = ["--dataset", str(small), "--streaming", "true", "--max_validation_documents", "2"]
    assert main(["train", str(recipe_file), *arguments, "--output_dir", str(tmp_path / "run")]) == 1
    assert "small.jsonl' has too few tokens in a split: block_size=64 fits none" in capsys.readouterr().err


VOCABULARIES = [
    ({"model": "tiny-linear", "tokenizer": "bpe:300"}, 300),
    ({"model": "tiny-llama", "tokenizer": "bpe:300"}, 300),
    ({"model": "tiny-linear", "tokenizer": "bpe:9"}, 259),  # the bytes and three special tokens
    ({"model": "tiny-linear"}, 8192),
    ({"model": "tiny-linear", "tokenizer": "bpe:300", "switches": {"vocab_size": 4096}}, 4096),
    ({"model": "tiny-linear", "dataset": "synthetic:recall"}, None),
    ({"model": "tiny-seq2seq", "tokenizer": "bpe:300", "objective": "seq2seq"}, 300),
    (
        {
            "model": "tiny-seq2seq",
            "tokenizer": "bpe:300",
            "objective": "seq2seq",
            "switches": {"encoder": {"vocab_size": 512}, "decoder": {"vocab_size": 512}},
        },
        512,
    ),
    ({"model": "FILE", "tokenizer": "bpe:300"}, 8192),
]


@pytest.mark.parametrize("fields, expected", VOCABULARIES)
def test_the_vocabulary_of_a_shipped_model_is_that_of_the_tokenizer(fields, expected, tmp_path):
    """Unless it is set, in the recipe or in a configuration of the user's own."""
    (tmp_path / "own.json").write_text(find("models", "tiny-linear").read_text())
    fields = {**fields, "model": fields["model"].replace("FILE", str(tmp_path / "own.json"))}
    recipe = Recipe(**fields)
    expected = len(recipe.synthetic.tokens) if expected is None else expected
    assert vocabulary_of(recipe.config) == expected


@pytest.mark.parametrize("size, is_told", [(728, False), (729, True)])
def test_ids_that_no_text_has_are_told(size, is_told, monkeypatch):
    warnings = []
    monkeypatch.setattr(data, "logger", SimpleNamespace(warning_once=warnings.append))
    recipe = Recipe(model="tiny-linear", tokenizer="bpe:300", switches={"vocab_size": size})
    data.warn_of_spare_ids(byte_tokenizer(end_of_text=600), recipe)
    told = "vocab_size=729, and tokenizer 'bpe:300' has 601 tokens: no text has the other 128 ids"
    assert [warning[: len(told)] for warning in warnings] == [told] * is_told
