"""Conversion of folders shard by shard: every family there and back, and damaged files."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.conversion_cases import assert_same_function, assert_same_state, edit_json, nlq_fails, run_nlq, snapshot
from support.family_cases import ONE_OF_EACH, is_encoder, language_model_class, make_family_model, shared_family_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from modeling_nlq.training.conversion import converting
from modeling_nlq.training.conversion.converting import convert
from modeling_nlq.training.conversion.draft import to_nlq


pytestmark = pytest.mark.thin(6)


LENGTH = 14
one_of_each = pytest.mark.parametrize("family, name", ONE_OF_EACH.items(), ids=ONE_OF_EACH)


def stored(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}, [file.name for file in files]


@pytest.fixture(scope="module")
def tokenizer():
    words = {word: index for index, word in enumerate(["<pad>", "<bos>", "<eos>", "a", "b", "c", "d", "e"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message.content }}<eos>{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", chat_template=template
    )


@pytest.fixture(scope="module")
def sources(tokenizer, tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    for family, name in ONE_OF_EACH.items():
        model = make_family_model(name)
        model.generation_config = GenerationConfig(max_new_tokens=3, do_sample=True, top_p=0.7, eos_token_id=[2, 3])
        model.save_pretrained(root / family, max_shard_size="6KB")
        tokenizer.save_pretrained(root / family)
    return root


@pytest.fixture
def no_model_in_memory(monkeypatch):
    """Fails where a whole model would be loaded, and leaves out the comparison that loads them."""
    monkeypatch.setattr(converting, "COMPARED_BELOW", 0)
    monkeypatch.setattr(converting, "load_model", None)


@one_of_each
class TestThereAndBack:
    def test_a_folder_is_converted_without_a_model_in_memory(
        self, sources, family, name, tmp_path, no_model_in_memory
    ):
        source, theirs = sources / family, shared_family_model(name)
        before = snapshot(source)
        assert run_nlq("convert", source, tmp_path / "nlq") == 0
        assert run_nlq("convert", tmp_path / "nlq", tmp_path / "back", "--to", family) == 0
        assert snapshot(source) == before

        ours = language_model_class(name).from_pretrained(tmp_path / "nlq")
        assert_same_function(ours, theirs, length=LENGTH)
        weights, files = stored(source)
        assert len(files) > 3
        for folder in (tmp_path / "nlq", tmp_path / "back"):
            assert len(stored(folder)[1]) > 3
            if not is_encoder(name):
                chosen = GenerationConfig.from_pretrained(folder)
                assert (chosen.max_new_tokens, chosen.do_sample) == (3, True)
                assert (chosen.top_p, chosen.eos_token_id) == (0.7, [2, 3])
            tokenizer = AutoTokenizer.from_pretrained(folder)
            assert tokenizer("a c <eos> e").input_ids == AutoTokenizer.from_pretrained(source)("a c <eos> e").input_ids
            assert tokenizer.chat_template == (source / "chat_template.jinja").read_text()

        assert_same_state(stored(tmp_path / "back")[0], weights)
        config = json.loads((tmp_path / "back/config.json").read_text())
        expected = json.loads((source / "config.json").read_text())
        for values in (config, expected):
            values.pop("max_window_layers", None)  # `layer_types` says the same
            values.pop("no_rope_layer_interval", None)
            values.pop("head_dim", None)  # the same, if a class does not declare it
        assert config == expected
        assert not list((tmp_path / "back").glob("*.py"))
        assert type(language_model_class(name).from_pretrained(tmp_path / "back")) is type(theirs)

    def test_an_upcycled_folder_keeps_the_function(self, sources, family, name, tmp_path, capsys, no_model_in_memory):
        assert run_nlq("convert", sources / family, tmp_path / "target", "--upcycle") == 0
        assert "outputs were not compared: the weights take 0.0 GiB" in capsys.readouterr().out
        model = language_model_class(name).from_pretrained(tmp_path / "target")
        assert_same_function(model, shared_family_model(name), length=LENGTH)
        record = json.loads((tmp_path / "target/conversion.json").read_text())
        assert record["added"] == [name for name, _ in model.named_parameters() if ".q_bottleneck." in name]
        assert record["enlarged"] == [] and record["difference"] is None and record["not_compared"]
        bottleneck = model.model.layers[1].self_attn.q_bottleneck
        assert not bottleneck.output_norm.weight.any() and (bottleneck.input_norm.weight == 1).all()
        for matrix in (bottleneck.fc1.weight, bottleneck.fc2.weight):
            assert float(matrix.std()) == pytest.approx(model.config.initializer_range, rel=0.3)
        other = model.model.layers[2].self_attn.q_bottleneck
        assert not torch.equal(bottleneck.fc1.weight, other.fc1.weight)


def test_gpt_neox_in_other_shards(tmp_path, no_model_in_memory):
    """Query, key and value of a layer may lie in three files."""
    theirs = make_family_model("gpt_neox-partial")
    to_nlq(theirs).save_pretrained(tmp_path / "nlq", max_shard_size="4KB")
    index = json.loads((tmp_path / "nlq/model.safetensors.index.json").read_text())["weight_map"]
    assert len({index[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"}) > 1
    convert(tmp_path / "nlq", tmp_path / "back", to="gpt_neox")
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict(), theirs.state_dict())


def test_copy_of_tied_embeddings(sources, tmp_path, capsys, no_model_in_memory):
    source = shutil.copytree(sources / "llama", tmp_path / "source")
    file = next(file for file in source.glob("*.safetensors") if "model.embed_tokens.weight" in load_file(file))
    state = load_file(file)
    for head in (state["model.embed_tokens.weight"].clone(), torch.zeros(29, 16)):
        save_file({**state, "lm_head.weight": head}, file, metadata={"format": "pt"})
        if head.any():
            convert(source, tmp_path / "same")
            assert "lm_head.weight" not in stored(tmp_path / "same")[0]
    message = nlq_fails(capsys, "convert", source, tmp_path / "target")
    assert "tie_word_embeddings=True, but lm_head.weight differs from model.embed_tokens.weight" in message


def change(name, edit):
    def damage(source):
        for file in source.glob("*.safetensors"):
            state = load_file(file)
            if name in state:
                edit(state)
                save_file(state, file, metadata={"format": "pt"})

    return damage


def truncate(source):
    file = sorted(source.glob("*.safetensors"))[2]
    file.write_bytes(file.read_bytes()[:-7])


UP = "model.layers.1.mlp.up_proj.weight"
# (what damages the source, what the error names)
DAMAGES = {
    "truncated": (truncate, "/source"),
    "missing_shard": (lambda source: sorted(source.glob("*.safetensors"))[1].unlink(), "model-00002-of"),
    "shape": (
        change(UP, lambda state: state.update({UP: torch.zeros(3, 16)})),
        f"{UP} has the shape (3, 16), and (20, 16)",
    ),
    "dtype": (
        change(UP, lambda state: state.update({UP: torch.zeros(20, 16, dtype=torch.int8)})),
        f"{UP} has the type I8",
    ),
    "unknown": (
        change(UP, lambda state: state.update({UP.replace("up", "side"): state[UP] * 2})),
        "mlp.side_proj.weight",
    ),
    "index": (lambda source: (source / "model.safetensors.index.json").write_text("{broken"), "/source"),
    "field": (
        lambda source: edit_json(source / "config.json", attn_logit_softcapping=50.0),
        "attn_logit_softcapping=50.0",
    ),
    "family": (
        lambda source: edit_json(source / "config.json", model_type="mixtral", architectures=["MixtralForCausalLM"]),
        "type 'mixtral'; only arcee, cwm, diffllama, eurobert, gpt2, gpt_neox,",
    ),
}


@pytest.mark.parametrize("damage, named", DAMAGES.values(), ids=DAMAGES)
def test_damaged_files_are_refused_by_name(sources, tmp_path, capsys, damage, named):
    source = shutil.copytree(sources / "llama", tmp_path / "source")
    damage(source)
    before = snapshot(tmp_path)
    assert named in nlq_fails(capsys, "convert", source, tmp_path / "target")
    assert snapshot(tmp_path) == before
