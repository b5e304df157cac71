"""lm-evaluation-harness: log likelihoods and generated texts equal the model's own, and a task of one's own runs."""

import json

import pytest
import torch
import yaml
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from support.client_cases import CASES, TEXT, continuation, run_script
from transformers import AutoModelForCausalLM, AutoTokenizer


PAIRS = [("one two", " three"), ("one two three four", " five six"), ("nine", " ten eleven twelve"), ("seven", " two")]
PROMPTS = ["one two three", "nine"]


def log_likelihood(folder, context: str, continuation: str) -> float:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    start, ids = len(tokenizer(context).input_ids), tokenizer(context + continuation, return_tensors="pt").input_ids
    with torch.no_grad():
        log_probabilities = model(ids).logits[0, :-1].log_softmax(-1)
    return log_probabilities.gather(1, ids[0, 1:, None])[start - 1 :].sum().item()


@pytest.mark.parametrize("activation, query", CASES)
def test_likelihoods_and_texts_are_the_models_own(activation, query, trained):
    folder = trained(activation, query)
    client = HFLM(pretrained=str(folder), device="cpu", batch_size=2)
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(PAIRS)]
    values = [value for value, _ in client.loglikelihood(requests, disable_tqdm=True)]
    assert values == pytest.approx([log_likelihood(folder, *pair) for pair in PAIRS], abs=1e-4)

    options = {"max_gen_toks": 6, "until": [], "do_sample": False}
    requests = [Instance("generate_until", {}, (prompt, options), index) for index, prompt in enumerate(PROMPTS)]
    assert client.generate_until(requests, disable_tqdm=True) == [
        continuation(folder, prompt, 6) for prompt in PROMPTS
    ]


REMOTE = """
import sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

if __name__ == "__main__":
    results = simple_evaluate(
        model="hf",
        model_args=f"pretrained={sys.argv[1]},trust_remote_code=True",
        tasks=["numbers"],
        device="cpu",
        task_manager=TaskManager(include_path=sys.argv[2], include_defaults=False),
        bootstrap_iters=0,
    )
    print("accuracy", results["results"]["numbers"]["acc,none"])
"""


def test_a_task_of_your_own_counts_the_models_choices(trained, tmp_path):
    folder = trained("sigmoid", "nonlinear")
    words = TEXT.split()[:12]
    rows = [
        {"text": " ".join(words[: i + 1]), "choices": [" " + words[i + 1], " " + words[i - 1]]} for i in range(1, 9)
    ]
    (tmp_path / "numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "numbers",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "numbers.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "numbers.yaml").write_text(yaml.safe_dump(task))
    likelihoods = [[log_likelihood(folder, row["text"], choice) for choice in row["choices"]] for row in rows]
    accuracy = sum(first > second for first, second in likelihoods) / len(rows)
    assert accuracy > 0.5  # the model has learned to count
    done = run_script(REMOTE, folder, tmp_path, package=False)
    assert float(done.split("accuracy ")[-1]) == accuracy
