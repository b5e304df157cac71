"""Pipelines on trained models."""

import pytest
from support.client_cases import CASES, continuation, run_script


PIPELINE = """
import sys
from transformers import pipeline

generate = pipeline("text-generation", sys.argv[1], trust_remote_code=True)
print(generate("one two three", max_new_tokens=6, do_sample=False)[0]["generated_text"])
"""


@pytest.mark.parametrize("package", [True, False], ids=["package", "remote_code"])
@pytest.mark.parametrize("activation, query", CASES)
def test_a_pipeline_generates_greedy_tokens(activation, query, package, trained):
    folder = trained(activation, query)
    done = run_script(PIPELINE, folder, package=package)
    assert done == "one two three" + continuation(folder, "one two three", 6) + "\n"
