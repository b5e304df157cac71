"""The page holds what was computed, in little space; and the command refuses what it cannot show in one line."""

import base64
import json
import re
import zlib

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

from modeling_nlq import NLQConfig, NLQForCausalLM
from modeling_nlq.training import train
from modeling_nlq.training.explorer import page
from modeling_nlq.training.explorer.attention import Layer
from modeling_nlq.training.explorer.exploring import explore, short_names, token_texts
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
    weights = (
        scores.tril()
        if signed
        else scores.masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf).softmax(-1)
    )
    return layer_of(weights)


@pytest.mark.parametrize("signed", [False, True])
def test_maps_and_numbers_are_in_the_page(signed):
    layer = random_layer(9, signed=signed)
    layer.weights[0, 4] = 0.0
    layer = layer_of(layer.weights)
    found = content_of(page.write_page("title", [], list("abcdefghi"), [shown([layer], 9)]))["models"][0]["layers"][0]
    for head in range(2):
        largest = unpack(found["largest"][head], np.float32)
        levels = unpack(found["maps"][head], np.int8).reshape(9, 9)
        for query in range(9):
            own, expected = levels[query] / 127 * largest[query], layer.weights[head, query].numpy()
            assert np.abs(own - expected).max() <= np.abs(expected).max() / 254 * 1.001
    for name, values in layer.numbers.items():
        assert found["numbers"][name] == pytest.approx(values.tolist(), rel=1e-5)


def test_too_many_maps_are_cut(monkeypatch):
    layers = [random_layer(64, signed=True) for _ in range(3)]
    monkeypatch.setattr(page, "MAP_BYTES", 6000)
    text = page.write_page("title", [], ["x"] * 64, [shown(layers, 64)])
    found = content_of(text)
    assert found["map_tokens"] == 33  # 6 heads of n (n / 2 + 4) + 48 bytes, in base64
    assert "Maps show the first 33 of 64 tokens only" in text
    layers_found = found["models"][0]["layers"]
    assert 4000 < sum(len(head) for each in layers_found for head in (*each["maps"], *each["largest"])) <= 7000
    levels = unpack(layers_found[2]["maps"][1], np.int8).reshape(33, 33)
    assert levels.tolist() == page.quantize(layers[2].weights)[0][1, :33, :33].tolist()


def test_a_text_cannot_leave_its_place():
    tokens = ["</script>", "<script>alert(1)</script>", "&amp;", "\u2028", '"', "<!--"]
    text = page.write_page("a <b> & c", ["<i>note</i>"], tokens, [shown([random_layer(6)], 6)])
    assert content_of(text)["tokens"] == tokens
    assert text.count("<script") == 2 and "<i>" not in text and "a &lt;b&gt; &amp; c" in text
    assert "http" not in text.replace("http-equiv", "")


def test_no_numbers_are_no_number():
    layer = Layer(
        "linear_attention", 2, numbers={"effective_rank": torch.tensor([1.5, torch.nan])}, missing={"weights": "none"}
    )
    found = content_of(page.write_page("title", [], ["a"], [page.ExploredModel("m", "d", torch.empty(0), [layer])]))[
        "models"
    ][0]
    assert found["loss"] is None and found["losses"] == [None]
    assert found["layers"][0]["numbers"] == {"effective_rank": [1.5, None]}
    assert found["layers"][0]["maps"] is None and found["layers"][0]["largest"] is None


@pytest.fixture(scope="module")
def other(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "other"
    config = NLQConfig.from_pretrained(run[0], attention_activation="sigmoid", max_position_embeddings=16)
    NLQForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(run[0]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["runs/demo"], ["demo"]),
        (["runs/demo", "other/sigmoid"], ["demo", "sigmoid"]),
        (["first/runs/demo", "second/runs/demo"], ["first", "second"]),
        (["c/runs/softmax/rate-0.004-seed-0", "c/runs/relu/rate-0.008-seed-0"], ["softmax", "relu"]),
        (["relu/rate-0.004-seed-0", "relu/rate-0.004-seed-1"], ["rate-0.004-seed-0", "rate-0.004-seed-1"]),
        (["small/runs/relu/trial-1-rate-1e-05-seed-0", "large/runs/relu/rate-0.008-seed-0"], ["small", "large"]),
        (["c/runs/relu/rate-0.004-seed-0"], ["relu"]),
        (["c/runs/relu/rate-0.004-seed-0", "runs/demo"], ["relu", "demo"]),
        (["someone/model", "another/model"], ["someone", "another"]),
        (["runs/demo", "runs/demo/"], ["runs/demo", "runs/demo/"]),
    ],
)
def test_short_names_are_what_differs(names, short):
    assert short_names(names) == short


def test_tokens_are_written_as_they_stand_in_the_text():
    """Tokenizers of SentencePiece leave out the space of a token that is decoded alone, and bytes are parts of
    characters.
    """
    tokenizer = Tokenizer(models.WordLevel({"▁the": 0, "▁cat": 1, "s": 2, "<unk>": 3}, "<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    assert token_texts(fast, [0, 1, 2, 1]) == ["the", " cat", "s", " cat"]
    byte_level = train_byte_pair_encoding(iter(["words"]), 260)
    text = "läuft 🐶 日本語"
    ids = byte_level(text)["input_ids"]
    written = token_texts(byte_level, ids)
    assert len(written) == len(ids) and "".join(written) == text
    assert written[:3] == ["l", "ä", ""] and written[written.index("🐶") :][:5] == ["🐶", "", "", "", " "]
    cut = token_texts(byte_level, ids[:2])
    assert len(cut) == 2 and cut[0] == "l" and cut[1] not in ("", "\ufffd")
    # Bytes that are no character, before one that is
    broken = token_texts(byte_level, [*ids[2:3], *byte_level("bc")["input_ids"]])
    assert broken[-2:] == ["b", "c"] and broken[0] == byte_level.convert_ids_to_tokens(ids[2])


class TestCommand:
    def test_two_models_and_a_file(self, run, other, tmp_path, capsys):
        file = tmp_path / "text.txt"
        file.write_text("import json\nimport re\n\ndef main():\n    pass\n\nclass A:\n    x = 1\n")
        target = tmp_path / "new" / "page.html"
        assert main(["explore", str(run[0]), str(other), "--file", str(file), "--output", str(target)]) == 0
        assert f"page: {target}" in capsys.readouterr().out
        found = content_of(target.read_text())
        assert [model["name"] for model in found["models"]] == ["finished", "other"]
        assert len(found["tokens"]) == 16, "as many as the smaller model has positions for"
        assert "".join(found["tokens"]) == file.read_text()[: len("".join(found["tokens"]))]

    def test_a_text_of_one_token(self, run):
        done = explore(run[0], text="a", output=None)
        assert len(done.tokens) == 1
        assert done.models[0].layers[0].missing["ablation"] == "the text has a single token"

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["RUN", "--text", ""], "the text is empty"),
            (["RUN", "--file", "bytes.txt"], "'utf-8' codec can't decode"),
            (["RUN", "OTHER", "--text", "x", "--max_tokens", "17"], "must be between 2 and 16"),
            (["RUN", "FOREIGN", "--text", "x"], "have different tokenizers"),
            (["MAMBA", "--text", "x"], "a model of type 'mamba' is none of"),
            (["RUN", "--text", "x"], "explore.html exists and is not a page of `nlq explore`"),
        ],
    )
    def test_bad_input(self, run, other, tmp_path, monkeypatch, capsys, arguments, message):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
        (tmp_path / "explore.html").write_text("mine")
        if "MAMBA" in arguments:
            MambaForCausalLM(MambaConfig(vocab_size=512, hidden_size=8, num_hidden_layers=1)).save_pretrained("MAMBA")
            AutoTokenizer.from_pretrained(run[0]).save_pretrained("MAMBA")
        if "FOREIGN" in arguments:
            NLQForCausalLM(NLQConfig.from_pretrained(run[0])).save_pretrained("FOREIGN")
            train_byte_pair_encoding(iter(["other words"]), 300).save_pretrained("FOREIGN")
        places = {"RUN": str(run[0]), "OTHER": str(other)}
        before = sorted(tmp_path.iterdir())
        assert main(["explore", *(places.get(word, word) for word in arguments)]) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("nlq: error: ") and message in error, error
        assert sorted(tmp_path.iterdir()) == before, "nothing is written"


def test_a_run_has_a_page_if_asked(run, recipe_file, tmp_path):
    assert not (run[0] / "explore.html").exists()
    train(recipe_file, output_dir=tmp_path / "run", max_steps=1)
    train(recipe_file, output_dir=tmp_path / "run", max_steps=1, explore=True)
    found = content_of((tmp_path / "run" / "explore.html").read_text())  # of the same run, which is finished
    assert [model["name"] for model in found["models"]] == ["run"] and len(found["tokens"]) == 64
    train(recipe_file, output_dir=tmp_path / "documents", max_steps=1, packing="documents", explore=True)
    tokens = content_of((tmp_path / "documents" / "explore.html").read_text())["tokens"]
    assert 2 <= len(tokens) <= 64
