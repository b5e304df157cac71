"""Checkpoints of the paper's code and of nanoGPT, against an independent restatement of its forward pass."""

import argparse
import copy
import math
import pickle
import re

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from support import paper_reference
from support.conversion_cases import (
    KINDS,
    PAPER,
    Exploit,
    assert_same_as_paper,
    assert_same_state,
    check_folder,
    make_checkpoint,
    nlq_fails,
    output_of,
    parametrize_cases,
    write_text,
)
from support.grids import parametrize_grid
from support.model_cases import random_tokens
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from modeling_nlq import NLQForCausalLM
from modeling_nlq.training.conversion.converting import convert
from modeling_nlq.training.conversion.nanogpt import from_paper, read_checkpoint
from nlq import main


class TestPaper:
    @parametrize_grid(
        {
            "mode": list(KINDS),
            "tied": [True, False],
            "use_bias": [True, False],
            "prefix": {"plain": "", "compiled": "_orig_mod."},
            # Odd widths too, whose bottleneck is rounded down
            "n_embd, num_heads": [(12, 3), (12, 1), (15, 3), (6, 6), (7, 1)],
        }
    )
    def test_logits(self, mode, tied, use_bias, prefix, n_embd, num_heads):
        options = {"query_mode": mode, "tie_weights": tied, "bias": use_bias, "n_embd": n_embd, "num_heads": num_heads}
        checkpoint = make_checkpoint(prefix, **options)
        original = copy.deepcopy(checkpoint)
        model = from_paper(checkpoint)
        assert_same_state(checkpoint["model"], original["model"])
        assert checkpoint["model_args"] == original["model_args"]
        assert type(model) is NLQForCausalLM and model.config.query_projection == KINDS[mode]
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert_same_as_paper(model, checkpoint)

    def test_other_bottleneck(self):
        """The format knows half the width only."""
        with pytest.raises(ValueError, match="residual_in"):
            from_paper(make_checkpoint(query_mode="residual_gelu", bottleneck_size=5))

    # With heads of 4, 1/8 is not 1/sqrt(head size): a scale that is not there is not the one that is None.
    @pytest.mark.parametrize("scale", [None, 0.31, 1, 0.0, "missing"], ids=str)
    @pytest.mark.parametrize("mode", KINDS)
    def test_scale(self, mode, scale):
        checkpoint = make_checkpoint(query_mode=mode, scale=scale, without=["scale"] if scale == "missing" else [])
        assert_same_as_paper(from_paper(checkpoint), checkpoint)

    @pytest.mark.parametrize("name", [name for name in PAPER if name in paper_reference.DEFAULTS and name != "scale"])
    def test_defaults(self, name):
        others = {"n_layer": 1} if name in ("n_embd", "mlp_hidden_size") else {}  # kept small
        checkpoint = make_checkpoint(**others, without=[name])
        model = from_paper(checkpoint)
        assert_same_as_paper(model, checkpoint)
        assert model.config.residual_dropout == (0.0 if name == "dropout" else 0.15)

    def test_model_and_arguments_are_enough(self):
        checkpoint = make_checkpoint(without=[*paper_reference.TRAINING_ARGUMENTS, "head_size"])
        checkpoint = {name: checkpoint[name] for name in ("model", "model_args")}
        assert_same_as_paper(from_paper(checkpoint), checkpoint)

    def test_configuration(self):
        config = from_paper(make_checkpoint(query_mode="residual_gelu")).config
        assert (config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (17, 12, 2, 3)
        assert (config.max_position_embeddings, config.intermediate_size, config.head_dim) == (11, 20, 4)
        assert (config.projection_bottleneck_size, config.attention_scaling) == (6, 0.31)
        assert (config.embedding_dropout, config.residual_dropout, config.attention_dropout) == (0.15, 0.15, 0.15)
        assert (config.hidden_act, config.attention_activation, config.norm_position) == ("gelu", "softmax", "pre")
        assert config.tie_word_embeddings
        assert not config.use_bias

    def test_mask_buffers(self):
        """The slow attention of the code keeps its mask in the state dict."""
        checkpoint = make_checkpoint("_orig_mod.", bias=True)
        for index in range(2):
            checkpoint["model"][f"_orig_mod.transformer.h.{index}.attn.bias"] = torch.ones(11, 11).tril().view(1, 1, 11, 11)
        assert_same_as_paper(from_paper(checkpoint), checkpoint)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
    def test_dtype(self, dtype):
        checkpoint = make_checkpoint(dtype=dtype)
        model = from_paper(checkpoint)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert torch.equal(model.model.embed_tokens.weight, checkpoint["model"]["transformer.wte.weight"])

    @pytest.mark.parametrize("use_bias", [False, True])
    @pytest.mark.parametrize("prefix", ["", "_orig_mod."], ids=["plain", "compiled"])
    def test_nanogpt(self, prefix, use_bias):
        """nanoGPT's own: other names, no scale, queries as in GPT-2."""
        arguments = {"n_layer": 2, "n_head": 3, "n_embd": 12, "block_size": 11, "vocab_size": 17, "dropout": 0.0}
        checkpoint = paper_reference.random_checkpoint({**arguments, "bias": use_bias}, prefix)
        model = from_paper(checkpoint)
        assert model.config.query_projection == "linear"
        assert model.config.intermediate_size == 48
        assert_same_as_paper(model, checkpoint)


class TestBadPaperCheckpoint:
    @pytest.mark.parametrize(
        "name, value",
        [
            ("query_mode", "residual_relu"),
            ("query_mode", None),
            ("qk_norm", True),
            ("rotary", False),
            ("n_layer", "two"),
            ("n_layer", 0),
            ("num_heads", 0),
            ("n_embd", "twelve"),
            ("dropout", 1.5),
            ("bias", "no"),
            ("num_heads", 5),
            ("scale", "small"),
            ("scale", math.nan),
        ],
    )
    def test_argument(self, name, value):
        checkpoint = make_checkpoint()
        checkpoint["model_args"][name] = value
        with pytest.raises((ValueError, StrictDataclassError), match=rf"{name}|{NLQ_NAMES.get(name, name)}"):
            from_paper(checkpoint)

    @pytest.mark.parametrize(
        "name", ["h.1.attn.c_proj", "ln_f", "wpe", "h.0.attn.residual_in", "h.1.attn.residual_rmsnorm_input"]
    )
    @pytest.mark.parametrize("prefix", ["", "_orig_mod."], ids=["plain", "compiled"])
    def test_missing_tensor(self, name, prefix):
        checkpoint = make_checkpoint(prefix, query_mode="residual_gelu")
        del checkpoint["model"][f"{prefix}transformer.{name}.weight"]
        with pytest.raises(ValueError, match=re.escape(f"missing: transformer.{name}.weight")):
            from_paper(checkpoint)

    @parametrize_cases(
        "name, shape",
        {
            "norm_of_a_fork": ("transformer.h.1.attn.q_norm.weight", (4,)),
            "third_layer": ("transformer.h.2.ln_1.weight", (12,)),
            "bias": ("transformer.h.0.mlp.c_fc.bias", (20,)),
            "bias_of_head": ("lm_head.bias", (17,)),
            "queries_of_another_mode": ("transformer.h.0.attn.residual_in.weight", (6, 12)),
            "no_mask": ("transformer.h.0.attn.mask", (1, 1, 11, 11)),
            "no_square": ("transformer.h.0.attn.bias", (12,)),
        },
    )
    def test_extra_tensor(self, name, shape):
        checkpoint = make_checkpoint()
        checkpoint["model"][name] = torch.zeros(shape)
        with pytest.raises(ValueError, match=re.escape(name)):
            from_paper(checkpoint)

    @parametrize_cases(
        "arguments, name",
        {
            "vocab_size": ({"vocab_size": 18}, "transformer.wte.weight"),
            "block_size": ({"block_size": 12}, "transformer.wpe.weight"),
            "mlp_hidden_size": ({"mlp_hidden_size": 24}, "mlp.c_fc.weight"),
            "mode": ({"query_mode": "identity"}, "attn.c_attn.weight"),
        },
    )
    def test_shape(self, arguments, name):
        checkpoint = make_checkpoint()
        checkpoint["model_args"].update(arguments)
        with pytest.raises(ValueError, match=re.escape(name)):
            from_paper(checkpoint)

    def test_tied_tensors_that_differ(self):
        checkpoint = make_checkpoint()
        checkpoint["model"]["lm_head.weight"][3, 4] += 1e-3
        with pytest.raises(ValueError, match=r"lm_head\.weight|tie_weights"):
            from_paper(checkpoint)

    def test_not_a_tensor(self):
        checkpoint = make_checkpoint()
        checkpoint["model"]["transformer.ln_f.weight"] = [1.0] * 12
        with pytest.raises(ValueError, match=r"transformer\.ln_f\.weight"):
            from_paper(checkpoint)

    @pytest.mark.parametrize("name", ["model", "model_args"])
    @pytest.mark.parametrize("value", [None, ["a list"]], ids=["missing", "list"])
    def test_part_of_another_kind(self, name, value):
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            from_paper({**make_checkpoint(), name: value})


# By which name the model's configuration would complain of an argument of the paper's
NLQ_NAMES = {
    "n_layer": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "n_embd": "hidden_size",
    "scale": "attention_scaling",
    "bias": "use_bias",
}


def write_truncated(path):
    torch.save(make_checkpoint(), path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def write_pickle(value):
    def write(path):
        with path.open("wb") as file:
            pickle.dump(value, file)

    return write


def write_archive(change, **options):
    """`torch.save` of a checkpoint with something else in it."""

    def write(path):
        checkpoint = make_checkpoint()
        change(checkpoint, path)
        torch.save(checkpoint, path, **options)

    return write


BAD_FILES = {
    "empty": lambda path: path.touch(),
    "text": write_text,
    "truncated": write_truncated,
    "pickled_list": write_pickle([1, 2, 3]),
    "pickled_dict": write_pickle({"model": {}}),
    "saved_list": lambda path: torch.save([1, 2, 3], path),
    "saved_tensor": lambda path: torch.save(torch.zeros(3), path),
    "no_model": lambda path: torch.save({"state_dict": {}, "model_args": {}}, path),
    "a_whole_module": lambda path: torch.save(torch.nn.Linear(2, 2), path),
    "safetensors": lambda path: save_file({"weight": torch.zeros(3)}, path),
    "folder": lambda path: path.mkdir(),
    "missing": lambda path: None,
}
# (what writes the file, what it asks for when it is read)
UNSAFE_FILES = {
    "exploit": (write_archive(lambda checkpoint, path: checkpoint.update(extra=Exploit(path.with_name("made")))), "mkdir"),
    "exploit_in_the_old_format": (
        write_archive(
            lambda checkpoint, path: checkpoint.update(extra=Exploit(path.with_name("made"))),
            _use_new_zipfile_serialization=False,
        ),
        "mkdir",
    ),
    "numpy_scalar": (write_archive(lambda checkpoint, path: checkpoint.update(best_val_loss=np.float64(3.2))), "numpy"),
    "custom_class": (
        write_archive(lambda checkpoint, path: checkpoint.update(config=argparse.Namespace(dropout=0.0))),
        "Namespace",
    ),
}


class TestPaperFile:
    @pytest.mark.parametrize("old_format", [False, True], ids=["zip", "old_format"])
    def test_read(self, tmp_path, old_format):
        checkpoint = make_checkpoint("_orig_mod.", query_mode="residual_gelu")
        torch.save(checkpoint, tmp_path / "ckpt.pt", _use_new_zipfile_serialization=not old_format)
        found = read_checkpoint(tmp_path / "ckpt.pt")
        assert_same_state(found["model"], checkpoint["model"])
        assert found["model_args"] == checkpoint["model_args"]
        assert read_checkpoint(str(tmp_path / "ckpt.pt"))["iter_num"] == 100

    @parametrize_cases("write", BAD_FILES)
    def test_no_checkpoint(self, tmp_path, write, capsys):
        path = tmp_path / "ckpt.pt"
        write(path)
        with pytest.raises((ValueError, OSError), match="ckpt"):
            from_paper(read_checkpoint(path))
        assert "ckpt.pt" in nlq_fails(capsys, "convert", path, tmp_path / "target")
        assert not (tmp_path / "target").exists()

    @parametrize_cases("write, wanted", UNSAFE_FILES)
    def test_more_than_tensors(self, tmp_path, write, wanted, capsys):
        path = tmp_path / "ckpt.pt"
        write(path)
        with pytest.raises(ValueError, match=wanted):
            read_checkpoint(path)
        message = nlq_fails(capsys, "convert", path, tmp_path / "target")
        assert wanted in message
        assert "tensor" in message
        assert "weights_only=False" not in message  # PyTorch's own advice would run it
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ckpt.pt"]

    @pytest.mark.parametrize("mode", KINDS)
    def test_converted(self, tmp_path, mode, capsys):
        checkpoint = make_checkpoint("_orig_mod.", query_mode=mode, tie_weights=mode != "residual", bias=mode == "identity")
        torch.save(checkpoint, tmp_path / "ckpt.pt")
        assert main(["convert", str(tmp_path / "ckpt.pt"), str(tmp_path / "target")]) == 0
        check_folder(tmp_path / "target")
        assert_same_as_paper(AutoModelForCausalLM.from_pretrained(tmp_path / "target"), checkpoint)

    def test_to_gpt2(self, tmp_path):
        checkpoint = make_checkpoint(query_mode="residual", bias=True)
        torch.save(checkpoint, tmp_path / "ckpt.pt")
        convert(str(tmp_path / "ckpt.pt"), tmp_path / "target", to="gpt2")
        input_ids = random_tokens(2, 11, 17)
        logits = output_of(GPT2LMHeadModel.from_pretrained(tmp_path / "target"), input_ids).double()
        # The scale and the identity are now in float32 weights
        torch.testing.assert_close(logits, paper_reference.forward(checkpoint, input_ids), rtol=1e-5, atol=1e-5)

    def test_nonlinear_to_gpt2(self, tmp_path):
        torch.save(make_checkpoint(query_mode="residual_gelu"), tmp_path / "ckpt.pt")
        with pytest.raises(ValueError, match="query_projection"):
            convert(str(tmp_path / "ckpt.pt"), tmp_path / "target", to="gpt2")
        assert not (tmp_path / "target").exists()
        convert(str(tmp_path / "ckpt.pt"), tmp_path / "target", to="gpt2", allow_lossy=True)
        assert type(GPT2LMHeadModel.from_pretrained(tmp_path / "target")) is GPT2LMHeadModel
