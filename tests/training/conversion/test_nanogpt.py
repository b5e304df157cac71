"""Checkpoints of the paper's code and of nanoGPT, against an independent restatement of its forward pass."""

import copy
import re

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
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
    parametrize_cases,
    snapshot,
)
from support.grids import parametrize_grid
from transformers import AutoModelForCausalLM

from modeling_nlq import NLQForCausalLM
from modeling_nlq.training.conversion.converting import convert
from modeling_nlq.training.conversion.nanogpt import from_paper


pytestmark = pytest.mark.thin(2)


NANOGPT = {"n_layer": 2, "n_head": 3, "n_embd": 12, "block_size": 11, "vocab_size": 17, "dropout": 0.0}


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
    def test_logits_are_those_of_the_paper(self, mode, tied, use_bias, prefix, n_embd, num_heads):
        options = {"query_mode": mode, "tie_weights": tied, "bias": use_bias, "n_embd": n_embd, "num_heads": num_heads}
        checkpoint = make_checkpoint(prefix, **options)
        original = copy.deepcopy(checkpoint)
        model = from_paper(checkpoint)
        assert_same_state(checkpoint["model"], original["model"])
        assert checkpoint["model_args"] == original["model_args"]
        assert type(model) is NLQForCausalLM and model.config.query_projection == KINDS[mode]
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert_same_as_paper(model, checkpoint)

    # A missing scale is 1/8; `None` is 1/sqrt(head size), which differs for heads of 4
    @pytest.mark.parametrize("scale", [None, 0.31, 1, 0.0, "missing"], ids=str)
    @pytest.mark.parametrize("mode", KINDS)
    def test_the_scale_is_that_of_the_checkpoint(self, mode, scale):
        checkpoint = make_checkpoint(query_mode=mode, scale=scale, without=["scale"] if scale == "missing" else [])
        assert_same_as_paper(from_paper(checkpoint), checkpoint)

    @pytest.mark.parametrize("name", [name for name in PAPER if name in paper_reference.DEFAULTS and name != "scale"])
    def test_missing_arguments_have_the_defaults(self, name):
        others = {"n_layer": 1} if name in ("n_embd", "mlp_hidden_size") else {}  # kept small
        checkpoint = make_checkpoint(**others, without=[name])
        model = from_paper(checkpoint)
        assert_same_as_paper(model, checkpoint)
        dropouts = {getattr(model.config, f"{place}_dropout") for place in ("embedding", "residual", "attention")}
        assert dropouts == {0.0 if name == "dropout" else 0.15}

    @pytest.mark.parametrize("use_bias", [False, True])
    def test_checkpoints_of_nanogpt_are_converted(self, use_bias):
        """nanoGPT's own: other names, no scale, queries as in GPT-2."""
        checkpoint = paper_reference.random_checkpoint({**NANOGPT, "bias": use_bias}, "_orig_mod.")
        mask = torch.ones(11, 11).tril().view(1, 1, 11, 11)  # which its slow attention keeps in the state dict
        checkpoint["model"] |= {f"_orig_mod.transformer.h.{index}.attn.bias": mask for index in range(2)}
        model = from_paper(checkpoint)
        assert model.config.query_projection == "linear"
        assert model.config.intermediate_size == 48
        assert_same_as_paper(model, checkpoint)


@pytest.mark.parametrize(
    "name, value", [("rotary", True), ("query_mode", "residual_relu"), ("num_heads", 5), ("dropout", 1.5)]
)
def test_wrong_arguments_are_refused_by_name(name, value):
    checkpoint = make_checkpoint()
    if name == "rotary":  # of a fork of nanoGPT
        checkpoint = paper_reference.random_checkpoint({**NANOGPT, "bias": True})
    checkpoint["model_args"][name] = value
    with pytest.raises((ValueError, StrictDataclassError), match=f"{name}|attention_scaling|num_attention_heads"):
        from_paper(checkpoint)


@parametrize_cases(
    "name, shape",
    {
        "missing": ("transformer.h.0.attn.residual_in.weight", None),
        "norm_of_a_fork": ("transformer.h.1.attn.q_norm.weight", (4,)),
        "no_mask": ("transformer.h.0.attn.bias", (12,)),
        "shape": ("transformer.wte.weight", (18, 12)),
    },
)
def test_wrong_tensors_are_refused_by_name(name, shape):
    checkpoint = make_checkpoint("_orig_mod.", query_mode="residual_gelu", tie_weights=False)
    if shape is None:
        del checkpoint["model"][f"_orig_mod.{name}"]
    else:
        checkpoint["model"][f"_orig_mod.{name}"] = torch.zeros(shape)
    with pytest.raises(ValueError, match=re.escape(name.replace("transformer.wte", "embed_tokens"))):
        from_paper(checkpoint)


def test_tied_tensors_that_differ():
    checkpoint = make_checkpoint()
    checkpoint["model"]["lm_head.weight"][3, 4] += 1e-3
    with pytest.raises(ValueError, match="tie_weights=True"):
        from_paper(checkpoint)


def write_truncated(path):
    torch.save(make_checkpoint(), path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def write_exploit(path):
    torch.save({**make_checkpoint(), "extra": Exploit(path.with_name("made"))}, path)


# (what writes the file, what the error names)
BAD_FILES = {
    "text": (lambda path: path.write_text("not a checkpoint\n" * 20), "damaged, or hold code"),
    "truncated": (write_truncated, "ckpt.pt"),
    "no_model": (
        lambda path: torch.save({"state_dict": {}, "model_args": {}}, path),
        "does not hold 'model' and 'model_args'",
    ),
    "exploit": (write_exploit, "or hold code"),
}


@parametrize_cases("write, named", BAD_FILES)
def test_bad_file(tmp_path, write, named, capsys):
    write(tmp_path / "ckpt.pt")
    before = snapshot(tmp_path)
    message = nlq_fails(capsys, "convert", tmp_path / "ckpt.pt", tmp_path / "target")
    assert named in message and "weights_only=False" not in message  # PyTorch's own advice would run it
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("is_new", [True, False], ids=["zip", "old format"])
def test_a_converted_folder_loads(tmp_path, is_new):
    checkpoint = make_checkpoint("_orig_mod.", query_mode="residual_gelu", tie_weights=is_new, bias=is_new)
    torch.save(checkpoint, tmp_path / "ckpt.pt", _use_new_zipfile_serialization=is_new)
    done = convert(tmp_path / "ckpt.pt", tmp_path / "target")
    assert (done.source_class, done.difference) == ("checkpoint", None)
    check_folder(tmp_path / "target")
    assert_same_as_paper(AutoModelForCausalLM.from_pretrained(tmp_path / "target"), checkpoint)
