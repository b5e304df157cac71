"""Pooled comparisons: against formulas in float64, against one analysis of all seeds, and what is refused."""

import itertools
import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats
from support.paths import REPOSITORY
from support.properties import examples

from modeling_nlq.training.comparison import ledger as ledgers
from modeling_nlq.training.comparison.inference import ALPHA, Estimate, Verdict, analyse
from modeling_nlq.training.comparison.ledger import Ledger, RunRow, VerdictRow, write_table
from modeling_nlq.training.comparison.pooling import Pooled, combine, pool, pool_and_report, pooled_lines
from modeling_nlq.training.comparison.publication import read_ledger
from modeling_nlq.training.files import read_json, write_yaml
from modeling_nlq.training.values import from_json
from nlq import main


pytest.importorskip("statsmodels", reason="needs statsmodels: pip install 'modeling-nlq[pool]'")
BASE, NEW = {"switches": {"attention_activation": "softmax"}}, {"switches": {"attention_activation": "relu"}}


def make_ledger(
    seeds,
    gain=0.05,
    noise=0.02,
    text="a text",
    stream="",
    models=None,
    switches=None,
    places=(None,),
    model="tiny-linear",
):
    """Returns a ledger whose models gain so many nats; their noise depends on seed and stream."""
    models = models or {"base": BASE, "new": NEW}
    recipe = {"model": model, "dataset": "text.txt", "switches": switches or {}, "training": {}}
    config = {"recipe": recipe, "baseline": "base", "models": models, "learning_rates": [0.01], "seeds": [*seeds]}
    config |= {"conditions": {place: {} for place in places}} if places[0] else {}
    ledger = Ledger(comparison=config | {"name": f"of {len(seeds)} seeds"})
    for place in places:
        parts = {
            model: {seed: draw(seed, index, stream, 3 - index * gain, noise) for seed in seeds}
            for index, model in enumerate(models)
        }
        losses = {model: {seed: float(np.mean(each)) for seed, each in runs.items()} for model, runs in parts.items()}
        for model, seed in itertools.product(models, seeds):
            measured = {"test_loss": losses[model][seed], "test_loss_parts": parts[model][seed]}
            run = replace(RUN, condition=place, model=model, seed=seed, token_stream=f"{stream} {seed}", data=text)
            ledger.runs.append(replace(run, **measured))
        for model, effect in analyse(losses, "base", parts=parts).effects.items():
            tested = {"p": effect.p, "verdict": effect.verdict}
            ledger.verdicts.append(replace(VERDICT, condition=place, model=model, **tested))
    return ledger


def draw(seed, index, stream, mean, noise):
    return (mean + noise * np.random.default_rng([seed, index, *stream.encode()]).normal(size=5)).tolist()


def blank(kind, **known):
    """Returns a row of `known`, zeros, empty texts and `None`."""
    unknown = [each for each in fields(kind) if each.name not in known]
    return kind(**known, **{each.name: None if "None" in str(each.type) else each.type() for each in unknown})


RUN, VERDICT = blank(RunRow, is_reported=True), blank(VerdictRow, baseline="base", verdict=Verdict.DIVERGED)


def reference(values, errors):
    """The formulas of the papers: tau^2 by root finding in Q(tau^2) = k - 1, and the variance of Hartung and Knapp."""

    def weigh(tau2):
        weights = 1 / (errors**2 + tau2)
        mean = (weights * values).sum() / weights.sum()
        return weights, mean, (weights * (values - mean) ** 2).sum()

    freedom, q = len(values) - 1, weigh(0.0)[2]
    tau2 = 0.0 if q <= freedom else optimize.bisect(lambda t: weigh(t)[2] - freedom, 0, 1e3 * np.ptp(values) ** 2)
    weights, mean, spread = weigh(tau2)
    variance = max(1.0, spread / freedom) / weights.sum()
    half = stats.t.ppf(0.975, freedom) * math.sqrt(variance)
    reach = stats.t.ppf(0.975, freedom - 1) * math.sqrt(tau2 + variance)
    return mean, (mean - half, mean + half), math.sqrt(tau2), q, (mean - reach, mean + reach)


@pytest.mark.parametrize(
    "values, errors",
    [([1.0, 3.0, -2.0], [0.5, 0.4, 1.0]), ([1.0, 1.1, 0.9, 1.0], [0.5] * 4), ([4, 9, 1, 0, 2], [1, 0.1, 0.3, 2, 1])],
)
def test_random_effects_equal_the_formulas(values, errors):
    summary = combine([Estimate(*each, 4) for each in zip(values, errors)])
    mean, interval, tau, q, prediction = reference(np.array(values, float), np.array(errors, float))
    assert [summary.value, summary.tau, summary.q] == pytest.approx([mean, tau, q], rel=1e-4)
    assert summary.interval == pytest.approx(interval, rel=1e-4)
    assert summary.prediction == pytest.approx(prediction, rel=1e-4)
    assert summary.i2 == pytest.approx(max(0.0, 100 * (q - len(values) + 1) / q))
    assert summary.q_p == pytest.approx(stats.chi2.sf(q, len(values) - 1))


@examples(60)
@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(0.01, 9)), min_size=3, max_size=8))
def test_interval_is_never_narrower_than_the_plain_one(studies):
    summary = combine([Estimate(*study, 4) for study in studies])
    plain = sum(1 / (error**2 + summary.tau**2) for _, error in studies) ** -0.5
    half = stats.t.ppf(0.975, len(studies) - 1) * plain
    low, high = summary.interval
    assert low <= summary.value - half * (1 - 1e-9) and summary.value + half * (1 - 1e-9) <= high
    assert summary.prediction[0] <= low and high <= summary.prediction[1]


def test_parts_of_one_comparison_equal_the_whole():
    whole = make_ledger(range(7))
    pooled = pool({"a": make_ledger(range(3)), "b": make_ledger(range(3, 4)), "c": make_ledger(range(4, 7))})
    losses, parts = (
        {name: {run.seed: getattr(run, field) for run in whole.runs if run.model == name} for name in ("base", "new")}
        for field in ("test_loss", "test_loss_parts")
    )
    analysis = analyse(losses, "base", parts=parts)
    assert analysis.counts_text and pooled.summary is None
    assert pooled.studies[0].effect == analysis.effects["new"]
    low, high = analysis.effects["new"].loss_improvement_interval
    assert pooled.studies[0].improvement.interval(1 - ALPHA) == pytest.approx((low, high))


def test_two_studies_have_a_difference():
    pooled = pool({"a": make_ledger(range(3)), "b": make_ledger(range(5), stream="other", text="other", gain=0.2)})
    first, second = (study.improvement for study in pooled.studies)
    variances = np.array([first.standard_error, second.standard_error]) ** 2
    freedoms = np.array([first.degrees_of_freedom, second.degrees_of_freedom])
    freedom = (variances.sum() ** 2 / (variances**2 / freedoms).sum() + freedoms.min()) / 2
    half = stats.t.ppf(0.975, freedom) * math.sqrt(variances.sum())
    difference = first.value - second.value
    assert difference < 0 and pooled.summary.value == pytest.approx(difference) and pooled.summary.tau is None
    assert pooled.summary.interval == pytest.approx((difference - half, difference + half))


def heads(number):
    return {"switches": {"num_key_value_heads": number}}


WIDER = {"switches": {"attention_activation": "relu", "intermediate_size": 900}}
REFUSED = {
    "there is one study": lambda: {"a": make_ledger(range(3))},
    "a and b share runs, of the seeds 2": lambda: {"a": make_ledger(range(3)), "b": make_ledger([2, 3])},
    "share the seeds 1, 2 on the same tokens": lambda: {
        "a": make_ledger([1, 2]),
        "b": make_ledger([1, 2], noise=0.03),
    },
    "c1 and a, c2 share": lambda: {"a": make_ledger(range(3), places=("c1", "c2"))},
    r"baselines differ in switches.layer_norm_eps \('not set', 0.1\)": lambda: {
        "a": make_ledger([1, 2]),
        "b": make_ledger([3, 4], switches={"layer_norm_eps": 0.1, "hidden_size": 64}),
    },
    "the changes differ in switches.intermediate_size": lambda: {
        "a": make_ledger([1, 2]),
        "b": make_ledger([3, 4], models={"base": BASE, "new": WIDER}),
    },
    # A size that is not set is that of the model
    r"the changes differ in switches.num_key_value_heads \('smaller', 'larger'\)": lambda: {
        "a": make_ledger([1, 2], models={"base": {}, "new": heads(1)}, switches={"num_attention_heads": 2}),
        "b": make_ledger([3, 4], models={"base": heads(1), "new": heads(2)}, switches={"num_attention_heads": 2}),
    },
    r"the baselines differ in switches.encoder \('not set', None\)": lambda: {
        "a": make_ledger([1, 2], model="tiny-seq2seq"),
        "b": make_ledger([3, 4], model="tiny-seq2seq", switches={"encoder": None}),
    },
    "b: .*num_attention_heads": lambda: {
        "a": make_ledger([1, 2]),
        "b": make_ledger([3, 4], switches={"hidden_size": 30, "num_attention_heads": 4}),
    },
    "b: --model must name one of new, other": lambda: {
        "a": make_ledger([1, 2]),
        "b": make_ledger([3, 4], models={"base": BASE, "new": NEW, "other": WIDER}),
    },
    "b: stop='early': how many seeds": lambda: {
        "a": make_ledger([1, 2, 3]),
        "b": replace(early := make_ledger([4, 5, 6, 7]), comparison={**early.comparison, "stop": "early"}),
    },
    r"the changes differ in match \(None, 'parameters'\)": lambda: {
        name: replace(
            ledger := make_ledger(seeds, models=models), comparison=ledger.comparison | {"match": "parameters"}
        )
        for name, seeds, models in (
            ("a", [1, 2], {"base": BASE, "new": {**NEW, "match": None}}),
            ("b", [3, 4], {"base": BASE, "new": NEW}),
        )
    },
    r"the changes differ in switches.attention_gate \('not set', None\), switches.canon \(None": lambda: {
        name: make_ledger(seeds, models={"base": BASE, "new": {"switches": {switch: None}}}, model="runs/mine")
        for name, seeds, switch in (("a", [1, 2], "canon"), ("b", [3, 4], "attention_gate"))
    },
    "noise is unknown": lambda: {"a": make_ledger([1, 2], noise=0), "b": make_ledger([3, 4], text="b", stream="b")},
    "b: new: diverged": lambda: {
        "a": make_ledger([1, 2]),
        "b": Ledger([], [replace(VERDICT, model="new")], make_ledger([3, 4]).comparison),
    },
}


def test_a_size_that_follows_from_others_may_be_written():
    given = {"switches": {"num_attention_heads": 2}, "seeds": [3, 4], "models": {"base": heads(2), "new": heads(1)}}
    left_out = {**given, "seeds": [1, 2], "models": {"base": {}, "new": heads(1)}}
    pooled = pool({"a": make_ledger(**left_out), "b": make_ledger(**given, text="b", stream="b")})
    assert len(pooled.studies) == 2


@pytest.mark.parametrize(
    "switches",
    [
        ({"intermediate_size": 900}, {"intermediate_size": 1000}),
        ({"hidden_size": 80, "encoder": {"num_attention_heads": 5}}, {"hidden_size": 64}),
    ],
)
def test_sizes_of_both_halves_may_differ(switches):
    kind = {"models": {"base": {}, "new": {"switches": {"encoder": {"query_projection": "nonlinear"}}}}}
    kind["model"] = "tiny-seq2seq"
    ledgers = [
        make_ledger(seeds, switches=given, text=text, stream=text, **kind)
        for seeds, given, text in zip(([1, 2], [3, 4]), switches, "ab")
    ]
    assert len(pool(dict(zip("ab", ledgers))).studies) == 2


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    with pytest.raises(ValueError, match=message):
        pool(REFUSED[message]())


def test_a_model_that_no_source_has_is_named():
    ledgers = {"a": make_ledger([1, 2]), "b": make_ledger([3, 4])}
    assert pool(ledgers, ["new"]).summary is None
    with pytest.raises(ValueError, match=r"^--model 'gnu' is in no source; there are new$"):
        pool(ledgers, ["new", "gnu"])


def test_repetition_is_pooled_for_every_model():
    models = {"base": BASE, "new": NEW, "wider": WIDER}
    lines = pooled_lines(make_ledger(range(3), models=models), make_ledger(range(3, 6), models=models))
    assert [line.split(": ")[0] for line in lines] == ["new", "wider"]
    assert all("over 6 seeds, Holm p" in line and line.endswith(": better") for line in lines)
    other = make_ledger(range(3, 6), models=models, text="another")
    assert pooled_lines(make_ledger(range(3), models=models), other)[0].startswith("new: The two differ by")
    assert "not pooled" in pooled_lines(other, other)[0]


def publish(ledger: Ledger, folder) -> str:
    folder.mkdir()
    write_table(ledger.runs, RunRow, folder / "runs.parquet")
    write_table(ledger.verdicts, VerdictRow, folder / "verdicts.parquet")
    write_yaml(folder / "comparison.yaml", ledger.comparison)
    return str(folder)


def test_published_comparisons_are_read_and_pooled(tmp_path, capsys):
    streams = ("a", "b", "c")
    made = {name: make_ledger(range(4), stream=name, text=name) for name in streams}
    sources = [publish(ledger, tmp_path / name) for name, ledger in made.items()]
    assert [read_ledger(source) for source in sources] == [*made.values()]
    output = tmp_path / "pooled"
    assert main(["pool", *sources, "--output_dir", str(output)]) == 0
    printed, stored = capsys.readouterr().out, from_json(Pooled, read_json(output / "results.json"))
    assert stored.summary == pool(made).summary and "Pooled improvement of 3 studies" in printed
    assert (output / "figures" / "forest.png").stat().st_size > 10_000
    assert pool_and_report(sources, [], [], output)[0] == stored
    assert main(["pool", *sources, "--output_dir", sources[0]]) == 1
    assert "holds something else" in capsys.readouterr().err


def test_hostile_tables_get_one_line(tmp_path, monkeypatch):
    ledger = make_ledger(range(2))
    for name, damage, message in (
        ("columns", lambda file: write_table(ledger.verdicts, VerdictRow, file), "other columns|is missing"),
        ("bytes", lambda file: file.write_bytes(b"PAR1, but no table"), "is damaged"),
        ("link", lambda file: (file.unlink(), file.symlink_to("/etc/passwd")), "symbolic link"),
    ):
        source = publish(ledger, tmp_path / name)
        damage(tmp_path / name / "runs.parquet")
        with pytest.raises(ValueError, match=message):
            read_ledger(source)
    monkeypatch.setattr(ledgers, "_MOST_ROWS", 3)
    with pytest.raises(ValueError, match="holds 4 rows"):
        read_ledger(publish(ledger, tmp_path / "many"))
    with pytest.raises(ValueError, match="must be a folder, or a data set on the Hub"):
        read_ledger("nothing here")


def test_scales_of_a_shipped_result_are_studies():
    ledger = read_ledger(str(REPOSITORY / "docs/results/queries-mlp"))
    pooled = pool({"queries-mlp": ledger}, ["nonlinear"])
    rows = [row for row in ledger.verdicts if row.model == "nonlinear"]
    intervals = [study.improvement.interval(1 - ALPHA) for study in pooled.studies]
    assert np.array(intervals) == pytest.approx(np.array([(row.low, row.high) for row in rows]), rel=1e-3)
    assert pooled.summary.tau is not None and pooled.studies[0].label == "queries-mlp, 25k"
