"""Every Eval Ever accepts the test results of a published model."""

import json

import pytest

from modeling_nlq.training.result import Data, Evaluation, Losses, RunResult
from modeling_nlq.training.sharing.eval_results import eval_results


validate = pytest.importorskip("every_eval_ever.validate", reason="needs every-eval-ever")
MEASURED = {"loss": 4.5, "perplexity": 90.0, "pseudo_perplexity": 91.0, "bits_per_byte": 2.25}
MEASURED |= {"token_accuracy": 0.25, "chrf": 31.0}


def test_validator_accepts_every_metric_and_refuses_a_record_without_range(tmp_path):
    result = RunResult(Losses(False, test=Evaluation(**MEASURED)), Data(1, 1, "", test_tokens=1280))
    names = dict(zip(MEASURED, MEASURED))
    _, record = eval_results("anna/model", {"dataset": "bert/text"}, result, names, 1767323045.0, "+1 %")
    assert [each["metric_config"]["metric_id"] for each in record["evaluation_results"]] == list(MEASURED)
    # Where its datastore would keep the file
    options = {"repo_path": "data/text/anna/model/0d5e1c3a-7b1f-4c52-9a34-2f6d1f0e8b11.json"}
    for is_valid in (True, False):
        (file := tmp_path / "record.json").write_text(json.dumps(record))
        report = validate.validate_aggregate(file, **options, run_semantic_checks=True)
        assert report.valid == is_valid and not report.warnings, (report.errors, report.warnings)
        record["evaluation_results"][0]["metric_config"].pop("max_score", None)
