"""The page holds what was computed, in little space; and the command refuses what it cannot show in one line."""

import base64
import gzip
import json
import re
import shutil
import zlib

import numpy as np
import pytest
import torch
from support.corpora import write_documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

from modeling_nlq import NLQConfig, NLQForCausalLM
from modeling_nlq.training import train
from modeling_nlq.training.explorer import page
from modeling_nlq.training.explorer.attention import Layer
from modeling_nlq.training.explorer.exploring import explore, token_texts
from modeling_nlq.training.explorer.measures import LossDifference
from modeling_nlq.training.run.data import train_byte_pair_encoding
from nlq import main


def content_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def unpack(packed, kind):
    return np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype=kind)


def shown(layers, length):
    return page.ExploredModel("model", "a model", torch.rand(length - 1), layers)


def layer_of(weights):
    layer = Layer("softmax", len(weights))
    layer.add_weights(weights, torch.arange(weights.shape[1]) > 0)
    return layer


def random_layer(length, heads=2, signed=False):
    scores = torch.randn(heads, length, length)
    weights = scores.tril() if signed else scores.masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf).softmax(-1)
    return layer_of(weights)


@pytest.mark.parametrize("signed", [False, True])
def test_maps_and_rows_are_in_the_page(signed):
    layer = random_layer(9, signed=signed)
    layer.weights[0, 4] = 0.0
    layer = layer_of(layer.weights)
    found = content_of(page.write_page("title", [], list("abcdefghi"), [shown([layer], 9)]))["models"][0]["layers"][0]
    for head in range(2):
        rows = unpack(found["rows"][head], np.float32).reshape(len(found["row_names"]), 9)
        named = dict(zip(found["row_names"], rows))
        for name, values in layer.rows.items():
            np.testing.assert_allclose(named[name], values[head], rtol=2**-11, equal_nan=True)
        levels = unpack(found["maps"][head], np.int8)
        for query in range(9):
            own = levels[query * (query + 1) // 2 :][: query + 1] / 127 * named["largest"][query]
            expected = layer.weights[head, query, : query + 1].numpy()
            assert np.abs(own - expected).max() <= np.abs(expected).max() / 254 * 1.001
    for name, values in layer.numbers.items():
        assert found["numbers"][name] == pytest.approx(values.tolist(), rel=1e-5)


def test_uniform_rows_keep_their_weights():
    """Weights of 1/n are far below 1/254 of the first row's weight 1."""
    length = 300
    weights = torch.ones(1, length, length).tril()
    levels, largest = page.quantize(weights / weights.sum(-1, keepdim=True))
    assert (levels == 127).all()
    np.testing.assert_allclose(largest[0], 1 / np.arange(1, length + 1), rtol=1e-6)


def test_too_many_maps_are_cut(monkeypatch):
    layers = [random_layer(64) for _ in range(3)]
    static = len(page.write_page("title", [], ["x"], [shown([random_layer(1)], 1)]))
    monkeypatch.setattr(page, "PAGE_LIMIT", limit := static + 20_000)
    text = page.write_page("title", [], ["x"] * 64, [shown(layers, 64)])
    found = content_of(text)["models"][0]
    assert found["map_tokens"] in (16, 32, 48)
    assert f"Maps show the first {found['map_tokens']} of 64 tokens only" in text
    assert len(text.encode()) <= limit
    assert len(unpack(found["layers"][0]["rows"][0], np.float32)) == 4 * 64, "rows have all tokens"
    levels = unpack(found["layers"][2]["maps"][1], np.int8)
    whole, _ = page.quantize(layers[2].weights)
    assert levels.tolist() == whole[1][: len(levels)].tolist()


def test_too_many_rows_are_left_out(monkeypatch):
    layers = [random_layer(64) for _ in range(3)]
    monkeypatch.setattr(page, "PAGE_LIMIT", 10_000)
    text = page.write_page("title", [], ["x"] * 64, [shown(layers, 64)])
    found = content_of(text)["models"][0]
    assert "The charts of the rows are left out" in text
    assert found["layers"][0]["row_names"] == ["largest"]


def test_a_text_cannot_leave_its_place():
    tokens = ["</script>", "<script>alert(1)</script>", "&amp;", "\u2028", '"', "<!--"]
    text = page.write_page("a <b> & c", ["<i>note</i>"], tokens, [shown([random_layer(6)], 6)])
    assert content_of(text)["tokens"] == tokens
    assert text.count("<script") == 2 and "<i>" not in text and "a &lt;b&gt; &amp; c" in text
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_no_numbers_are_no_number():
    layer = Layer(
        "linear_attention", 2, numbers={"effective_rank": torch.tensor([1.5, torch.nan])}, missing={"weights": "none"}
    )
    found = content_of(page.write_page("title", [], ["a"], [page.ExploredModel("m", "d", torch.empty(0), [layer])]))["models"][
        0
    ]
    assert found["loss"] is None and found["losses"] == [None]
    assert found["layers"][0]["numbers"] == {"effective_rank": [1.5, None]}
    assert found["layers"][0]["maps"] is None and found["layers"][0]["rows"] is None


def test_the_difference_is_said():
    assert page.describe_difference(LossDifference(-0.0132, -0.02, -0.001, 37, 5210), ["a", "b"]) == (
        "Loss of b minus loss of a: -0.0132 nats per token (95 % interval over documents: -0.0200 to -0.0010), "
        "over 5,210 tokens in 37 documents."
    )


@pytest.fixture(scope="module")
def other(run, tmp_path_factory):
    """A model with another activation, the tokenizer of the run, and 16 learned positions."""
    folder = tmp_path_factory.mktemp("models") / "other"
    config = NLQConfig.from_pretrained(run[0], attention_activation="sigmoid", max_position_embeddings=16)
    NLQForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(run[0]).save_pretrained(folder)
    return folder


def test_tokens_are_written_as_they_stand_in_the_text():
    """Tokenizers of SentencePiece leave out the space of a token that is decoded alone, and bytes are parts of characters."""
    tokenizer = Tokenizer(models.WordLevel({"▁the": 0, "▁cat": 1, "s": 2, "<unk>": 3}, "<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    assert token_texts(fast, [0, 1, 2, 1]) == ["the", " cat", "s", " cat"]
    byte_level = train_byte_pair_encoding(iter(["words"]), 260)
    ids = byte_level("aé𝄞")["input_ids"]
    written = token_texts(byte_level, ids)
    assert len(written) == len(ids) > 3 and written[0] == "a" and all(written)


class TestCommand:
    def test_two_models_and_a_file(self, run, other, tmp_path, capsys):
        file = tmp_path / "text.txt"
        file.write_text("import json\nimport re\n\ndef main():\n    pass\n\nclass A:\n    x = 1\n")
        target = tmp_path / "new" / "page.html"
        assert main(["explore", str(run[0]), str(other), "--file", str(file), "--output", str(target)]) == 0
        printed = capsys.readouterr().out
        assert "tokens in 3 documents." in printed and f"page: {target}" in printed
        found = content_of(target.read_text())
        assert [model["name"] for model in found["models"]] == ["finished", "other"]
        assert len(found["tokens"]) == 16, "as many as the smaller model has positions for"
        assert "".join(found["tokens"]) == file.read_text()[: len("".join(found["tokens"]))]

    def test_documents_of_a_jsonl(self, run, tmp_path):
        rows = write_documents(tmp_path / "rows.jsonl", ["import json\n", "import re\n"])
        done = explore(run[0], run[0], file=rows, output=None)
        assert "".join(done.tokens) == "import json\n"
        assert (done.difference.documents, done.difference.mean) == (2, 0.0)

    def test_own_file_of_code(self, run, tmp_path):
        (tmp_path / "code.py").write_text("x = 1\n")
        assert "".join(explore(run[0], file=tmp_path / "code.py", output=None).tokens) == "x = 1\n"

    def test_two_models_and_a_text_of_one_token(self, run):
        done = explore(run[0], run[0], text="a", output=None)
        assert done.difference is None and len(done.tokens) == 1
        assert done.models[0].layers[0].missing["ablation"] == "the text has a single token"

    @pytest.mark.parametrize(
        "arguments, words",
        [
            (["RUN"], ["give either --text TEXT or --file FILE"]),
            (["RUN", "--text", ""], ["the text is empty"]),
            (["RUN", "--file", "empty.txt"], ["empty.txt is empty"]),
            (["RUN", "--file", "none.txt"], ["there is no file 'none.txt'"]),
            (["RUN", "--file", "bytes.txt"], ["bytes.txt is not UTF-8 text"]),
            (["RUN", "--text", "x", "--max_tokens", "65"], ["max_tokens=65 exceeds the 64 positions of model 'finished'"]),
            (["RUN", "--text", "x", "--max_tokens", "1"], ["max_tokens=1 must be at least 2"]),
            (["RUN", "OTHER", "--text", "x", "--max_tokens", "17"], ["exceeds the 16 positions of model 'other'"]),
            (["RUN", "FOREIGN", "--text", "x"], ["have different tokenizers"]),
            (["MAMBA", "--text", "x"], ["'mamba' has no attention to show"]),
            (["none", "--text", "x"], ["'none' is not a local folder"]),
            (["RUN", "--text", "x", "--output", "."], ["is a folder; name a file"]),
            (["RUN", "--text", "x", "--output", "empty.txt/page.html"], ["cannot be written", "is not a folder, or you may"]),
            (["RUN", "--text", "x", "--output", ""], ["is a folder; name a file"]),
            (["RUN", "--text", "x", "--output", "/dev/null"], ["is no file that can be replaced"]),
            (["RUN", "--text", "\ud800"], ["the text is not valid Unicode"]),
            (["RUN", "--file", "numbers.jsonl"], ["numbers.jsonl", "3"]),
            (["RUN", "--file", "short.txt.gz"], ["short.txt.gz is not UTF-8 text"]),
            (["RUN", "OTHERMERGES", "--text", "x"], ["have different tokenizers"]),
        ],
    )
    def test_bad_input(self, run, other, tmp_path, monkeypatch, capsys, arguments, words):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "empty.txt").write_text(" \n\n ")
        (tmp_path / "numbers.jsonl").write_text('{"text": 3}\n')
        (tmp_path / "short.txt.gz").write_bytes(gzip.compress(b"text " * 99)[:15])
        (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
        places = {"RUN": str(run[0]), "OTHER": str(other), "FOREIGN": "foreign", "MAMBA": "mamba"}
        if "MAMBA" in arguments:
            MambaForCausalLM(MambaConfig(vocab_size=512, hidden_size=8, num_hidden_layers=1)).save_pretrained("mamba")
            AutoTokenizer.from_pretrained(run[0]).save_pretrained("mamba")
            places["MAMBA"] = str(tmp_path / "mamba")
        if "FOREIGN" in arguments:
            NLQForCausalLM(NLQConfig.from_pretrained(run[0])).save_pretrained("foreign")
            train_byte_pair_encoding(iter(["other words"]), 300).save_pretrained("foreign")
            places["FOREIGN"] = str(tmp_path / "foreign")
        if "OTHERMERGES" in arguments:
            places["OTHERMERGES"] = str(shutil.copytree(run[0], tmp_path / "merges"))
            content = json.loads((tmp_path / "merges" / "tokenizer.json").read_text())
            content["model"]["merges"] = content["model"]["merges"][:-5]
            (tmp_path / "merges" / "tokenizer.json").write_text(json.dumps(content))
        before = sorted(tmp_path.iterdir())
        assert main(["explore", *(places.get(word, word) for word in arguments)]) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("nlq: error: ") and all(word in error for word in words), error
        assert sorted(tmp_path.iterdir()) == before, "nothing is written"


def test_a_run_has_a_page_unless_it_wants_none(run, recipe_file, tmp_path):
    assert "eval_loss" in train(recipe_file, output_dir=tmp_path / "run", max_steps=1, explore=False)
    assert not (tmp_path / "run" / "explore.html").exists()
    train(recipe_file, output_dir=tmp_path / "run", max_steps=1)
    assert (tmp_path / "run" / "explore.html").is_file(), "the same run; it is finished"
    train(recipe_file, output_dir=tmp_path / "documents", max_steps=1, packing="documents")
    tokens = content_of((tmp_path / "documents" / "explore.html").read_text())["models"][0]["losses"]
    assert 2 <= len(tokens) <= 64
    found = content_of((run[0] / "explore.html").read_text())
    assert [model["name"] for model in found["models"]] == ["finished"]
    assert len(found["tokens"]) == 64
