"""`nlq convert`, folder to folder: it writes the whole result, or leaves everything as it was."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.conversion_cases import (
    Exploit,
    assert_same_function,
    assert_same_state,
    check_folder,
    edit_json,
    layer_switches,
    make_gpt2,
    nlq_fails,
    parametrize_cases,
    run_nlq,
    snapshot,
)
from support.corpora import byte_tokenizer
from support.grids import parametrize_grid
from support.remote_code import WITHOUT_THIS_PACKAGE
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2ForSequenceClassification,
    GPT2Model,
    PreTrainedTokenizerFast,
)

from modeling_nlq import NLQForCausalLM
from modeling_nlq.training.conversion import streaming
from modeling_nlq.training.conversion.converting import convert
from modeling_nlq.training.conversion.draft import to_nlq


@pytest.fixture(scope="module")
def gpt2_model():
    model = make_gpt2(vocab_size=512, scale_attn_by_inverse_layer_idx=True)
    model.generation_config = GenerationConfig(max_new_tokens=3, do_sample=True, temperature=0.6, eos_token_id=2)
    return model


@pytest.fixture(scope="module")
def gpt2_folder(gpt2_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources") / "gpt2"
    gpt2_model.save_pretrained(folder)
    byte_tokenizer(1).save_pretrained(folder)
    return folder


@pytest.fixture
def source(gpt2_folder, tmp_path):
    return Path(shutil.copytree(gpt2_folder, tmp_path / "source"))


@pytest.fixture
def nlq_folder(make_model, tmp_path):
    folder = tmp_path / "nlq"
    make_model(query_projection="linear", hidden_act="gelu_new").save_pretrained(folder)
    return folder


class TestConvert:
    def test_names_of_the_first_release(self, source, gpt2_model, tmp_path):
        """OpenAI's weights lack the prefix and the head, and have masks as buffers."""
        state = {name: tensor.clone() for name, tensor in gpt2_model.transformer.state_dict().items()}
        state |= {f"h.{index}.attn.bias": torch.ones(24, 24).tril().view(1, 1, 24, 24) for index in range(2)}
        save_file(state, source / "model.safetensors", metadata={"format": "pt"})
        convert(str(source), tmp_path / "target")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
        assert type(loaded) is NLQForCausalLM
        assert_same_function(loaded, gpt2_model)

    def test_upcycle_with_switches(self, gpt2_folder, gpt2_model, tmp_path):
        switches = {
            "head_projection": "true",
            "attention_output_scaling": "5e-1",
            "intermediate_size": "60",
            "value_projection": "upcycled",
            "per_layer_config": "{1: {attention_gate: headwise}}",
        }
        options = [text for name, value in switches.items() for text in ("--set", f"{name}={value}")]
        assert run_nlq("convert", gpt2_folder, tmp_path / "target", "--upcycle", *options) == 0
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
        assert loaded.config.intermediate_size == 60
        first, second = layer_switches(loaded.config)
        assert (first["attention_gate"], second["attention_gate"]) == (None, "headwise")
        for layer in (first, second):
            assert (layer["head_projection"], layer["attention_output_scaling"]) == (True, 0.5)
            assert layer["value_projection"] == "upcycled"
        assert_same_function(loaded, gpt2_model)

    def test_a_lossy_conversion_is_refused_unless_allowed(self, make_model, tmp_path, capsys):
        make_model(query_projection="linear", attention_sink="learned").save_pretrained(tmp_path / "source")
        message = nlq_fails(capsys, "convert", tmp_path / "source", tmp_path / "target", "--to", "gpt2")
        assert "attention_sink" in message
        assert "--allow-lossy" in message
        assert run_nlq("convert", tmp_path / "source", tmp_path / "target", "--to", "gpt2", "--allow-lossy") == 0
        check_folder(tmp_path / "target", is_gpt2=True)


def rename_in_pickle(source):
    state = load_file(source / "model.safetensors")
    state["transformer.h.0.attn.c_typo.weight"] = state.pop("transformer.h.0.attn.c_attn.weight")
    torch.save(state, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()


def write_exploit(source):
    state = load_file(source / "model.safetensors")
    torch.save({**state, "extra": Exploit(source / "made")}, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()


# (what damages the source, what the error names); others in `test_streaming.py`
DAMAGES = {
    "exploit": (write_exploit, "source"),
    "renamed_in_a_pickle": (rename_in_pickle, r"(?=.*c_typo\.weight)(?=.*c_attn\.weight)"),
    "configuration_of_a_wrong_type": (lambda source: edit_json(source / "config.json", n_layer="two"), "n_layer"),
    "broken_configuration": (lambda source: (source / "config.json").write_text("{broken"), "config"),
    "generation_settings": (
        lambda source: (source / "generation_config.json").write_text("{broken"),
        "generation_config",
    ),
}


class TestConvertFaults:
    @parametrize_cases("damage, named", DAMAGES)
    def test_damaged_source(self, source, tmp_path, capsys, damage, named):
        damage(source)
        before = snapshot(tmp_path)
        message = nlq_fails(capsys, "convert", source, tmp_path / "target")
        assert re.search(named, message), message
        assert "nobody/nothing" in nlq_fails(capsys, "convert", "nobody/nothing", tmp_path / "target")
        assert snapshot(tmp_path) == before

    @pytest.mark.parametrize("options", [("--to", "gpt2"), ("--upcycle",)], ids=["gpt2", "upcycle"])
    def test_code_of_the_source_is_not_run(self, nlq_folder, tmp_path, options):
        """The code of the source is not copied either: the new folder holds the code that wrote it."""
        code = f"import os\nos.mkdir({str(tmp_path / 'made')!r})\n"
        for name in ("modeling_nlq.py", "configuration_nlq.py", "custom_generate/generate.py"):
            (nlq_folder / name).parent.mkdir(exist_ok=True)
            (nlq_folder / name).write_text(code)
        assert run_nlq("convert", nlq_folder, tmp_path / "target", *options) == 0
        assert not (tmp_path / "made").exists()
        check_folder(tmp_path / "target", is_gpt2="gpt2" in options)

    def test_target_with_content(self, gpt2_folder, tmp_path, capsys):
        (tmp_path / "target").mkdir()
        (tmp_path / "target/notes.txt").write_text("mine")
        before = snapshot(tmp_path)
        assert "replace its model by --overwrite" in nlq_fails(capsys, "convert", gpt2_folder, tmp_path / "target")
        message = nlq_fails(capsys, "convert", gpt2_folder, tmp_path / "target", "--overwrite")
        assert "does not hold a model that --overwrite could replace" in message and snapshot(tmp_path) == before

    def test_target_is_source(self, source, tmp_path, capsys):
        (tmp_path / "link").symlink_to(source)
        before = snapshot(source)
        assert "is the source itself" in nlq_fails(capsys, "convert", source, tmp_path / "link", "--overwrite")
        assert snapshot(source) == before

    def test_training_run_is_not_replaced(self, run, source, tmp_path, capsys):
        shutil.copytree(run[0], tmp_path / "run")
        before = snapshot(tmp_path / "run")
        assert "holds a training run" in nlq_fails(capsys, "convert", source, tmp_path / "run", "--overwrite")
        assert snapshot(tmp_path / "run") == before

    def test_overwritten_shards(self, source, gpt2_model, make_model, tmp_path):
        target = tmp_path / "target"
        make_model().save_pretrained(target, max_shard_size="8KB")
        (target / "pytorch_model.bin").write_bytes(b"weights in an old format")
        assert len(list(target.glob("model-*.safetensors"))) > 1
        assert run_nlq("convert", source, target, "--overwrite") == 0
        check_folder(target)
        assert [path.name for path in target.glob("*.safetensors*")] == ["model.safetensors"]
        assert_same_function(AutoModelForCausalLM.from_pretrained(target), gpt2_model)

    @pytest.mark.parametrize("has_record", [False, True])
    def test_overwriting_keeps_files_of_the_user(self, source, nlq_folder, has_record):
        """What `auto_map` names, and what somebody else wrote into the record, may be the user's."""
        names = ["recipe.yaml", "loss.png", "mine.py", "settings.py", "notes.txt", "runs/log.txt"]
        (nlq_folder / "runs").mkdir()
        for name in names:
            (nlq_folder / name).write_text("from .settings import KEY" if name == "mine.py" else "")
        settings = json.loads((nlq_folder / "config.json").read_text())
        settings["auto_map"]["AutoModelForCausalLM"] = "mine.Mine"
        (nlq_folder / "config.json").write_text(json.dumps(settings))
        (nlq_folder / ".nlq-manifest").unlink(missing_ok=True)
        if has_record:
            (nlq_folder / ".nlq-manifest").write_text("\n".join([*names, ""]))
        assert run_nlq("convert", source, nlq_folder, "--overwrite") == 0
        assert all((nlq_folder / name).exists() for name in names)

    @pytest.mark.parametrize("name", ["vocab.txt", "mine.jinja", "pytorch_model-2.bin", "README.md"])
    def test_overwriting_twice_keeps_what_nlq_did_not_write(self, source, nlq_folder, tmp_path, name):
        target = tmp_path / "target"
        assert run_nlq("convert", source, target) == 0
        (target / name).write_text("mine")
        for arguments in ([source], [nlq_folder, "--to", "llama"], [source, "--set", "nothing=1"], [source]):
            run_nlq("convert", arguments[0], target, *arguments[1:], "--overwrite")
        assert ((target / name).read_text() == "mine") == (name != "README.md")

    @pytest.mark.parametrize("name", ["chat_template.jinja", "model.safetensors"])
    def test_links_in_the_source(self, nlq_folder, tmp_path, capsys, name):
        (tmp_path / name).write_bytes((nlq_folder / name).read_bytes() if (nlq_folder / name).exists() else b"secret")
        (nlq_folder / name).unlink(missing_ok=True)
        (nlq_folder / name).symlink_to(tmp_path / name)
        for command in (["convert", nlq_folder, tmp_path / "target", "--to", "gpt2"], ["generate", nlq_folder, "a"]):
            assert f"{name} is a symbolic link" in nlq_fails(capsys, *command)
        assert not (tmp_path / "target").exists()

    @parametrize_grid(
        {
            "existing": [False, True],
            "error": {"full": OSError("No space left on device"), "interrupted": KeyboardInterrupt()},
            "writer, name": {
                "weights": (streaming, "save_file"),
                "tokenizer": (PreTrainedTokenizerFast, "save_pretrained"),
            },
        }
    )
    def test_writing_fails(self, source, nlq_folder, tmp_path, capsys, monkeypatch, existing, error, writer, name):
        target = nlq_folder if existing else tmp_path / "target"
        save = getattr(writer, name)

        def fail(*arguments, **options):
            save(*arguments, **options)
            raise error

        before = snapshot(tmp_path)
        monkeypatch.setattr(writer, name, fail)
        assert run_nlq("convert", source, target, "--overwrite") != 0
        assert "Traceback" not in capsys.readouterr().err
        assert snapshot(tmp_path) == before

    @pytest.mark.parametrize(
        "options, named",
        [
            (["--to", "gpt2", "--upcycle"], "gpt2"),
            (["--to", "bert"], "bert"),
            (["--set", "head_projection"], "head_projection"),
            (["--set", "intermediate_size=wide"], "intermediate_size"),
            (["--set", "head_projection=True", "--set", "head_projection=False"], "given twice"),
        ],
    )
    def test_bad_options(self, gpt2_folder, tmp_path, capsys, options, named):
        assert named in nlq_fails(capsys, "convert", gpt2_folder, tmp_path / "target", *options)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["nlq", "gpt2"])
def test_tokenizer_of_another_folder_beside_any_head(to, tmp_path):
    for model_class in (GPT2Model, GPT2ForSequenceClassification):
        source, target = (tmp_path / f"{model_class.__name__}-{kind}" for kind in ("source", "target"))
        make_gpt2(model_class, pad_token_id=3, vocab_size=512).save_pretrained(source)
        tokenizer = byte_tokenizer(1)
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        convert(source, target, to=to, tokenizer=str(tmp_path / "tokenizer"))
        assert AutoTokenizer.from_pretrained(target).get_vocab() == tokenizer.get_vocab()
        settings = json.loads((target / "config.json").read_text())
        assert settings["eos_token_id"] == tokenizer.eos_token_id
    assert settings["pad_token_id"] == 3, "the token that a classifier's answer is read off is another"


def test_rounding_of_low_precision_is_allowed_and_its_type_stays(tmp_path):
    to_nlq(make_gpt2()).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "target", switches={"query_projection": "residual"})
    assert {value.dtype for value in load_file(tmp_path / "target" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "target/config.json").read_text())["dtype"] == "bfloat16"


def test_converted_model_keeps_its_names_without_this_package(gpt2_folder, tmp_path):
    convert(gpt2_folder, tmp_path / "0")
    script = """
from transformers import AutoModelForCausalLM
for index in range(2):
    model = AutoModelForCausalLM.from_pretrained(str(index), trust_remote_code=True)
    model.save_pretrained(str(index + 1), save_original_format=index == 0)
"""
    words = [sys.executable, "-c", WITHOUT_THIS_PACKAGE + script]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    subprocess.run(words, cwd=tmp_path, env=environment, check=True, capture_output=True)
    first, *others = (load_file(tmp_path / str(index) / "model.safetensors") for index in range(3))
    for other in others:
        assert_same_state(other, first)
