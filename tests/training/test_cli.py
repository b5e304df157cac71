"""The command line: its tables, its help, and one line for each error."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import REPOSITORY
from support.runs import has_loaded, press_control_c

from nlq import main


@pytest.mark.parametrize("command", ["train", "compare"])
def test_control_c_while_libraries_are_imported(command, tmp_path):
    arguments = [command, "demo", "--output_dir", str(tmp_path / "out")]
    assert press_control_c(arguments, lambda process: has_loaded("libtorch", process)) == (130, "nlq: interrupted\n")


def test_help_imports_no_libraries():
    """It must be quick."""
    code = "import sys, nlq; nlq.make_parser().format_help(); print({'modeling_nlq', 'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_names_steer_no_terminal(tmp_path, monkeypatch, capsys):
    """What a stranger's file or folder is named is shown, and is not obeyed; a file gets it as it is."""
    config = tmp_path / "\x1b]0;title\x07\x1b[2J\x9b1m\u202eb.json"
    config.write_text(json.dumps({"model_type": "nlq", "vocab_size": 9, "hidden_size": 4, "num_attention_heads": 1}))
    shown = str(config).encode("unicode_escape").decode()
    assert main(["params", str(config)]) == 0 and str(config) in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["params", str(config)]) == 0
    assert shown in (out := capsys.readouterr().out) and not {*out} & {"\x1b", "\x9b", "\u202e"}
    config.write_text("{")
    assert main(["params", str(config)]) == 1
    assert not {*(err := capsys.readouterr().err)} & {"\x1b", "\x9b", "\u202e"} and "\\x1b[2J" in err


class TestCommandLine:
    def test_params(self, capsys):
        assert main(["params", "tiny-linear", "tiny-identity", "--match", "tiny-linear"]) == 0
        table = capsys.readouterr().out.splitlines()
        assert table[0].split()[:2] == ["model", "parameters"]
        assert table[1].split()[0] == "tiny-linear" and table[1].split()[-1] == "512"
        assert table[2].split()[0] == "tiny-identity" and table[2].split()[-1] == "576"

    def test_params_of_parts(self, tmp_path, capsys):
        """Also of one that some layers have; a forget gate has a weight for each input and head, and a bias."""
        config = {"model_type": "nlq", "vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
        config["query_projection"] = "linear"
        config["per_layer_config"] = {"1": {"forget_gate": "learned", "differential_attention": "v2"}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert main(["params", str(tmp_path / "config.json")]) == 0
        lines = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()[2:]]
        assert lines[0] == f"forget_gate adds {16 * 4 + 4} parameters (Lin et al. 2025, arXiv 2503.02130)"
        # Twice the queries, twice the forget gates, and a factor for each output
        assert lines[1].startswith(f"differential_attention adds {16 * 16 + 16 * 2 + (16 * 2 + 2)} parameters (Ye et al.")

    @pytest.mark.parametrize(
        "arguments, parts",
        [
            (["train", "domo"], ["'domo'", "'demo'"]),
            (["train", "demo", "--learning_rat", "1"], ["'learning_rat'", "'learning_rate'"]),
            (["train", "demo", "--learning_rate", "fast"], ["learning_rate", "'fast'"]),
            (["train", "demo", "--max_steps", "0"], ["max_steps=0", "num_train_epochs"]),
            (["train", "demo", "--prediction_loss_only", "true"], ["prediction_loss_only=True"]),
            (
                ["train", "demo", "--restore_callback_states_from_checkpoint", "true"],
                ["restore_callback_states_from_checkpoint"],
            ),
            (["train", "demo", "--max_validation_documents", "0"], ["max_validation_documents=0 must be at least 1"]),
            (["train", "demo", "--streaming", "true", "--save_strategy", "epoch"], ["no epochs; set save_strategy to steps"]),
            (["train", "demo", "--lr", "1e-3"], ["unknown field 'lr'; did you mean 'learning_rate' or"]),
            (["train", "demo", "--report_to", "clearml"], ["report_to=clearml", "to be installed", "report_to: none"]),
            (["params", "unknown.yaml"], ["'unknown.yaml' is a YAML file", "config.json"]),
            (["train", "demo", "--packing", "boxes"], ["packing", "'boxes'", "stream"]),
            (["train", "demo", "--set", "attention_activation=softmx"], ["attention_activation='softmx'", "sigmoid"]),
            (["train", "demo", "--set", "colour=blue"], ["'colour'"]),
            (["train", "demo", "--set", "qk_norm=l2", "--set", "qk_norm=rms"], ["--set qk_norm is given twice"]),
            (["train", "demo", "--set", "num_attention_heads=5"], ["hidden_size=128", "num_attention_heads=5"]),
            (["train", "demo", "--model", "runs/nothing-there"], ["'runs/nothing-there' is not a local folder and cannot"]),
            (["train", "demo", "--model", "tiny-nonlinaer"], ["'tiny-nonlinaer'", "'tiny-nonlinear'"]),
            (["train", "demo", "--block_size", "512"], ["block_size=512", "max_position_embeddings=256"]),
            (["train", "demo", "--tokenizer", "bpe:9000", "--block_size", "300"], ["vocab_size=8192", "block_size=300"]),
            (["train", "demo", "--tokenizer", "bpe:1024x"], ["tokenizer='bpe:1024x' must be bpe:SIZE", "259"]),
            (["train", "demo", "--tokenizer", "bpe:258"], ["tokenizer='bpe:258'", "259"]),
            (
                ["train", "demo", "--set", "attention_activaton=relu"],
                ["'attention_activaton'", "did you mean 'attention_activation'?"],
            ),
            (["train", "demo", "--dataset", "missing.jsonl"], ["'missing.jsonl'", "no such file"]),
            (["train", "demo", "--dataset", "empty.txt"], ["'empty.txt' is empty"]),
            (["train", "demo", "--dataset", "broken.jsonl"], ["'broken.jsonl'", "cannot be read"]),
            (["train", "demo", "--dataset", "fine.jsonl", "--text_column", "body"], ["'body'", "text"]),
            (["train", "demo", "--dataset", "fine.jsonl"], ["validation"]),
            (["train", "demo", "--dataset", "owner/nothing-there"], ["'owner/nothing-there'"]),
            (["train", "demo", "--attn_implementation", "sdpa", "--set", "attention_activation=relu"], ["'sdpa'", "eager"]),
            (["train", "broken.yaml"], ["broken.yaml", "cannot be read"]),
            (["train", "unknown.yaml"], ["unknown.yaml", "'learning_speed'", "training"]),
            (["generate", "no-such-folder", "x"], ["'no-such-folder'"]),
            (["generate", "runs/nothing-there", "x"], ["'runs/nothing-there'", "is not a local folder"]),
            (["generate", "model.gguf", "x"], ["'model.gguf' is a GGUF file", "nlq convert model.gguf TARGET"]),
            (["generate", "half", "x"], ["'half'", "config.json"]),
            (["generate", "truncated", "x"], [""]),
            (["generate", "finished", "x", "--max_new_tokens", "70"], ["max_new_tokens=70", "64 positions"]),
            (["generate", "finished", ""], ["prompt is empty"]),
            (
                ["generate", "finished", "x", "--max_new_tokens", "0"],
                ["max_new_tokens=0 must be at least 1"],
            ),
            (["generate", "finished", "x", "--temperature", "nan"], ["temperature=nan must be a finite number"]),
            (["generate", "finished", "x", "--temperature", "inf"], ["temperature=inf"]),
            (["generate", "finished", "x", "--top_k", "-1"], ["top_k=-1"]),
            (["generate", "finished", "x", "--seed", "-1"], ["seed=-1"]),
            (["evaluate", "finished", "--block_size", "0"], ["block_size=0 must be at least 2"]),
            (["evaluate", "finished", "--batch_size", "0"], ["batch_size=0"]),
            (
                ["evaluate", "finished", "--dataset", "fine.jsonl", "--max_validation_documents", "0"],
                ["max_validation_documents=0 must be at least 1"],
            ),
            (
                ["evaluate", "finished", "--dataset", "fine.jsonl", "--validation_fraction", "nan"],
                ["validation_fraction=nan must be between 0 and 1"],
            ),
            (
                ["evaluate", "finished", "--dataset", "fine.jsonl", "--validation_fraction", "0"],
                ["validation_fraction=0.0 must be between 0 and 1"],
            ),
            (["train", "demo", "--learning_rate", "nan"], ["learning_rate=nan must be a finite number"]),
            (["train", "demo", "--num_train_epochs", "inf"], ["num_train_epochs=inf must be a finite number"]),
            (["train", "demo", "--per_device_train_batch_size", "0"], ["per_device_train_batch_size=0 must be at least 1"]),
            (["train", "demo", "--gradient_accumulation_steps", "0"], ["gradient_accumulation_steps=0"]),
            (["train", "demo", "--label_smoothing_factor", "2"], ["label_smoothing_factor=2.0 must be between 0 and 1"]),
            (["train", "demo", "--max_grad_norm", "-1"], ["max_grad_norm=-1.0 must be at least 0"]),
            (
                ["train", "demo", "--eval_steps", "-5", "--logging_steps", "-6", "--save_steps", "-7"],
                ["eval_steps=-5.0 must be at least 0", "logging_steps=-6.0", "save_steps=-7.0"],
            ),
            (["params", "tiny-linear", "--context", "0"], ["context=0 must be at least 1"]),
            (["train", "demo", "--attn_implementation", "flash_attention_2"], ["FlashAttention2"]),
            (["train", "numbers.yaml"], ["numbers.yaml", "training"]),
            (["train", "demo", "--dataset", "numbers.jsonl"], ["'text'", "3"]),
            (["params", "tiny-liner"], ["'tiny-liner'", "'tiny-linear'"]),
            (["params", "tiny-linear", "--match", "10"], ["no MLP width"]),
        ],
        ids=lambda value: " ".join(value) if value and value[0] in ("train", "generate", "evaluate", "params") else "",
    )
    def test_bad_input_gets_one_line(self, arguments, parts, run, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        Path("empty.txt").write_text("")
        Path("broken.jsonl").write_text('{"text": "one"}\n{"text": oops\n')
        Path("fine.jsonl").write_text('{"text": "one document"}\n')
        Path("broken.yaml").write_text("model: [unclosed")
        Path("unknown.yaml").write_text("model: tiny-linear\ntraining: {learning_speed: 1}\n")
        Path("numbers.yaml").write_text("model: tiny-linear\ntraining: [1]\n")
        Path("numbers.jsonl").write_text('{"text": 3}\n')
        Path("half").mkdir()
        for name in ("finished", "truncated"):
            shutil.copytree(run[0], name, ignore=shutil.ignore_patterns("checkpoint-*", "runs"))
        weights = Path("truncated", "model.safetensors")
        weights.write_bytes(weights.read_bytes()[:1000])
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

        assert main([*arguments]) != 0
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nlq: error: ")]
        assert len(errors) == 1
        for part in parts:
            assert part in errors[0]
        assert {path: path.read_bytes() for path in before} == before

    def test_tokenizer_larger_than_the_vocabulary(self, run, recipe_file, tmp_path, capsys):
        arguments = ["train", str(recipe_file), "--tokenizer", str(run[0]), "--set", "vocab_size=400"]
        assert main([*arguments, "--output_dir", str(tmp_path / "run")]) == 1
        assert "ids up to 511, too large for the model's vocab_size=400" in capsys.readouterr().err
