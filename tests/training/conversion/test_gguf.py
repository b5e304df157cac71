"""`nlq convert model.gguf`: equal outputs and tokens, and one line for what cannot be read."""

import json

import numpy as np
import pytest
import torch
from support.conversion_cases import assert_same_function, check_folder, nlq_fails, randomize, run_nlq, snapshot
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from modeling_nlq.training.conversion import gguf_files


gguf = pytest.importorskip("gguf", reason="needs the package gguf")

from support.gguf_cases import CHAT_TEMPLATE, SENTENCES, make_tokenizer, write_gguf  # noqa: E402


pytestmark = pytest.mark.thin(4)


TOKENIZER = make_tokenizer()
SIZES = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "bos_token_id": TOKENIZER.bos_token_id,
    "eos_token_id": TOKENIZER.eos_token_id,
    "pad_token_id": TOKENIZER.pad_token_id,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **ROPE, rms_norm_eps=0.125)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **ROPE, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, **ROPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 32}, **ROPE)),
}


def make(name):
    return randomize(MODELS[name]()).eval()


def assert_same_tokens(folder, tokenizer):
    found = AutoTokenizer.from_pretrained(folder)
    for sentence in SENTENCES:
        assert found(sentence).input_ids == tokenizer(sentence).input_ids
        assert found.decode(found(sentence).input_ids, skip_special_tokens=True) == sentence


@pytest.fixture
def llama(tmp_path):
    return lambda **options: write_gguf(tmp_path / "model.gguf", make("llama"), **{"tokenizer": TOKENIZER, **options})


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_tokens_are_those_of_the_family(name, tmp_path):
    model, cut = make(name), "qwen2" if name.startswith("qwen") else "smollm"
    tokenizer = make_tokenizer(cut)
    assert {each.split("-")[0] for each in MODELS} == {*gguf_files.ARCHITECTURES}
    file = write_gguf(tmp_path / "model.gguf", model, tokenizer=tokenizer, pre_tokenizer=cut)
    assert run_nlq("convert", file, tmp_path / "nlq") == 0
    check_folder(tmp_path / "nlq")
    assert_same_function(AutoModelForCausalLM.from_pretrained(tmp_path / "nlq"), model)
    assert_same_tokens(tmp_path / "nlq", tokenizer)
    assert run_nlq("convert", tmp_path / "nlq", tmp_path / "back", "--to", name.split("-")[0]) == 0
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back) is type(model)
    for parameter, value in model.state_dict().items():
        assert torch.equal(back.state_dict()[parameter], value), parameter


@pytest.mark.parametrize("quantisation", ["Q8_0", "BF16"])
def test_quantised_weights_are_those_of_llama_cpp(quantisation, llama, tmp_path, capsys):
    file = llama(quantisation=quantisation, types={"blk.0.attn_q.weight": "F32"})  # told even if some are not
    assert run_nlq("convert", file, tmp_path / "nlq") == 0
    told = "no longer quantised" in capsys.readouterr().out
    record = json.loads((tmp_path / "nlq" / "conversion.json").read_text())
    assert (told, record["dequantised"]) == ((True, quantisation) if quantisation.startswith("Q") else (False, None))
    assert record["difference"] == 0
    assert (f"weights of type `{quantisation}`" in (tmp_path / "nlq" / "README.md").read_text()) == told
    config = json.loads((tmp_path / "nlq" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "float32"
    reader = gguf.GGUFReader(file)
    written = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nlq")
    for ours, theirs in {
        "model.embed_tokens": "token_embd",
        "model.layers.1.self_attn.v_proj": "blk.1.attn_v",
    }.items():
        assert np.array_equal(model.get_submodule(ours).weight.detach().numpy(), written[f"{theirs}.weight"])


def test_the_tokenizer_of_the_file_is_kept(llama, tmp_path):
    assert run_nlq("convert", llama(), tmp_path / "nlq") == 0
    assert_same_tokens(tmp_path / "nlq", TOKENIZER)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "nlq")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    settings = AutoModelForCausalLM.from_pretrained(tmp_path / "nlq").generation_config
    for kind in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(settings, kind) == getattr(tokenizer, kind) == getattr(TOKENIZER, kind)


def test_only_the_named_file_is_read(llama, tmp_path, monkeypatch):
    """Not a file of the same name in the current directory."""
    file, other = llama(), tmp_path / "other"
    other.mkdir()
    write_gguf(other / "model.gguf", make("llama-tied"), tokenizer=make_tokenizer("qwen2"), pre_tokenizer="qwen2")
    monkeypatch.chdir(other)
    assert run_nlq("convert", file, tmp_path / "nlq") == 0
    assert_same_function(AutoModelForCausalLM.from_pretrained(tmp_path / "nlq"), make("llama"))
    assert_same_tokens(tmp_path / "nlq", TOKENIZER)


class TestRefused:
    @pytest.fixture
    def fails(self, tmp_path, capsys):
        def run(file, *options):
            before = snapshot(tmp_path)
            line = nlq_fails(capsys, "convert", file, tmp_path / "target", *options)
            assert snapshot(tmp_path) == before
            return line

        return run

    @pytest.mark.parametrize("share", [0, 0.999])
    def test_a_truncated_file_is_refused(self, share, llama, fails):
        file = llama()
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * share)])
        assert f"{file} is truncated or damaged; fetch it again" in fails(file)

    def test_without_the_package(self, llama, fails, monkeypatch):
        monkeypatch.setattr(gguf_files, "is_gguf_available", lambda: False)
        assert 'needs the package gguf: pip install "modeling-nlq[gguf]"' in fails(llama())

    @pytest.mark.parametrize(
        "options, words",
        [
            (
                {"fields": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}},
                "llama.rope.scaling.factor=4.0",
            ),
            ({"fields": {"llama.attention.causal": False}}, "llama.attention.causal=False"),
            ({"tensors": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, "blk.0.attn_q.bias"),
        ],
        ids=["scaling", "causal", "bias"],
    )
    def test_not_read(self, options, words, llama, fails, tmp_path):
        """The model would compute something else; whoever wants that can have it."""
        line = fails(llama(**options))
        assert f"{words}: Transformers does not read it from GGUF files" in line and "--allow-lossy" in line
        assert run_nlq("convert", tmp_path / "model.gguf", tmp_path / "target", "--allow-lossy") == 0
        assert any(words in text for text in json.loads((tmp_path / "target" / "conversion.json").read_text())["lost"])

    @pytest.mark.parametrize(
        "options, words",
        [
            ({"architecture": "mamba"}, "general.architecture='mamba' must be one of llama, qwen2, qwen3"),
            ({"without": ("blk.1.ffn_up.weight",)}, "model.layers.1.mlp.up_proj.weight"),
            ({"tokenizer": None}, "the tokenizer cannot be rebuilt ("),
        ],
    )
    def test_wrong_fields_are_refused_by_name(self, options, words, llama, fails):
        assert words in fails(llama(**options))

    @pytest.mark.parametrize("pre_tokenizer", ["own", None])
    def test_unknown_cut(self, pre_tokenizer, llama, fails, tmp_path):
        assert f"tokenizer.ggml.pre={pre_tokenizer!r}" in fails(llama(pre_tokenizer=pre_tokenizer))
        TOKENIZER.save_pretrained(tmp_path / "tokenizer")
        options = ("--tokenizer", tmp_path / "tokenizer")
        assert run_nlq("convert", tmp_path / "model.gguf", tmp_path / "target", *options) == 0
