"""Eleven models under several releases of Transformers, each saved by every release and loaded by every other one.

    python -m support.versions 5.21.0 5.24.0 --folder results/versions      (or `make test-versions`)

Each release gets a virtual environment, which takes all other packages from this one. One process saves the models,
and two load the folders of all releases, by the installed package and by remote code. docs/versions.md has the result.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from support.paths import REPOSITORY


SIZES = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "query_projection": "linear", "pad_token_id": 0}
SIZES["initializer_range"] = 0.3  # large weights: the greedy tokens vary, and differ by more than rounding
LINEAR = {"attention_activation": "linear_attention"}
CONFIGURATIONS = {
    "softmax": {},
    **{name: {"attention_activation": name} for name in ("sigmoid", "squared", "linear_attention", "sparsemax")},
    "decay": {**LINEAR, "linear_attention_decay": "learned", "position_embedding": "rope"},
    "window": {"sliding_window": 6, "position_embedding": "rope"},
    "nonlinear_queries": {"query_projection": "nonlinear", "num_key_value_heads": 4},
    "sink": {"attention_sink": "learned"},
    "hybrid": {**LINEAR, "per_layer_config": {1: {"attention_activation": "softmax"}}},
    "parts": {"canon": "ABCD", "forget_gate": "learned", "value_residual": "learned"},
}
PROMPTS = ([7, 21, 3, 44, 18, 9, 30, 2], [11, 5, 40])


def save_models(folder: Path) -> None:
    import torch

    from modeling_nlq import NLQConfig, NLQForCausalLM

    for name, switches in CONFIGURATIONS.items():
        torch.manual_seed(2)
        model = NLQForCausalLM(NLQConfig(**{**SIZES, **switches})).eval()
        model.save_pretrained(folder / name)
        torch.save(model(torch.tensor(PROMPTS[:1])).logits.detach(), folder / name / "logits.pt")


def check_model(folder: Path, is_own: bool) -> dict[str, bool]:
    """Loads a folder, and tells for each check whether it passed: the first two, or all if this release saved it."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    long, short = (torch.tensor([prompt]) for prompt in PROMPTS)
    padded = torch.cat([long, torch.nn.functional.pad(short, (long.shape[1] - short.shape[1], 0))])
    mask = (padded != 0).long()
    is_linear = any(layer.attention_activation == "linear_attention" for layer in model.config.per_layer_config)

    def generate(tokens, **options):
        options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(tokens), **options}
        return model.generate(tokens, **options)[:, tokens.shape[1] :].tolist()

    def logits(**inputs):
        with torch.no_grad():
            return model(use_cache=False, **inputs).logits

    plain = [generate(tokens, use_cache=False)[0] for tokens in (long, short)]
    both = torch.cat([long, short], dim=1)
    positions = torch.cat([torch.arange(tokens.shape[1]) for tokens in (long, short)])[None]
    apart = torch.cat([logits(input_ids=tokens) for tokens in (long, short)], dim=1)
    checks = {
        "logits": lambda: torch.allclose(logits(input_ids=long), torch.load(folder / "logits.pt"), atol=1e-4),
        "cached": lambda: generate(long)[0] == plain[0] and len(set(plain[0])) > 1,
        "padded": lambda: generate(padded, attention_mask=mask) == plain,
        "packed": lambda: torch.allclose(logits(input_ids=both, position_ids=positions), apart, atol=1e-4),
        "beams": lambda: generate(long, num_beams=3) == generate(long, num_beams=3, use_cache=False),
        "static": lambda: generate(padded, attention_mask=mask, cache_implementation="static") == plain,
    }
    if not is_own:
        checks = {name: checks[name] for name in ("logits", "cached")}
    elif not is_linear:  # a state cannot go back by some tokens, and is not paged
        checks["assisted"] = lambda: generate(long, prompt_lookup_num_tokens=3)[0] == plain[0]
        if model.config.canon is None:  # it refuses
            checks["continuous batching"] = lambda: _generate_batch(model) == plain
    passed = {}
    for name, check in checks.items():
        try:
            passed[name] = check()
        except Exception as error:
            print(f"{folder.name}, {name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            passed[name] = False
    return passed


def check_folders(folders: list[str], own: str) -> list[dict[str, bool]]:
    """Returns the checks of all models in each folder; `own` has all of them."""
    found = []
    for folder in folders:
        checks = {name: check_model(Path(folder, name), folder == own) for name in CONFIGURATIONS}
        found.append({f"{name}: {check}": passed for name, row in checks.items() for check, passed in row.items()})
    return found


def _generate_batch(model) -> list[list[int]]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    paged = ContinuousBatchingConfig(num_blocks=40, max_batch_tokens=16, page_size=4)
    config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(
        list(PROMPTS), generation_config=config, continuous_batching_config=paged, progress_bar=False
    )
    return [outputs[name].generated_tokens for name in sorted(outputs, key=lambda name: int(name.split("_")[-1]))]


def make_environment(version: str, folder: Path) -> Path:
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        subprocess.run([*install, f"transformers=={version}"], check=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([*install, "-e", REPOSITORY], check=True)
    return python


def run(python: Path, code: str) -> str:
    folder = python.parents[1]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "tests"), "HF_MODULES_CACHE": str(folder / "modules")}
    environment |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    command = [python, "-W", "ignore", "-c", f"from support.versions import *\n{code}"]
    return subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def table(versions: list[str], found: dict[tuple[str, str, str], dict[str, bool]]) -> str:
    """Returns a row for each release and way to load, with the number of passed checks per release's folders."""
    header = ["loaded by", "as", *(f"saved by {version}" for version in versions)]
    rows = [header, ["---"] * len(header)]
    for reader in versions:
        for way in ("package", "remote code"):
            cells = [found[reader, way, writer].values() for writer in versions]
            rows.append([reader, way, *(f"{sum(cell)} of {len(cell)}" for cell in cells)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--folder", type=Path, default=Path("results/versions"))
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    pythons = {version: make_environment(version, folder / version) for version in arguments.versions}
    saved = {version: str(folder / version / "saved") for version in arguments.versions}
    for version, python in pythons.items():
        run(python, f"save_models(Path({saved[version]!r}))")
    found = {}
    for version, python in pythons.items():
        # Importing the package registers the Auto classes
        for way, before in (("package", "import modeling_nlq"), ("remote code", "sys.modules['modeling_nlq'] = None")):
            code = f"{before}\nprint(json.dumps(check_folders({[*saved.values()]}, {saved[version]!r})))"
            output = json.loads(run(python, code).splitlines()[-1])
            for writer, checks in zip(saved, output):
                found[version, way, writer] = checks
                for check in (check for check, passed in checks.items() if not passed):
                    print(f"{version} by {way}, saved by {writer}: {check} failed", flush=True)
    print(table(arguments.versions, found))
    return sys.exit(not all(all(checks.values()) for checks in found.values()))


if __name__ == "__main__":
    main()
