"""`nlq check`: a part that is right passes, and each of the usual faults is named with its smallest case."""

import textwrap

import pytest
from support.own_parts import DISTANCE, FAULTS, IDEAS, LATE_FAULTS, RIGHT, idea

from modeling_nlq import load_attention_parts
from modeling_nlq.training import checking, ideas
from modeling_nlq.training.api import load_plan
from modeling_nlq.training.checking import INVARIANTS, describe


def write(folder, text, name="my_idea.py"):
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.thin(3)
@pytest.mark.parametrize("idea", IDEAS)
def test_an_idea_passes(two_surroundings, idea):
    text = IDEAS[idea].read_text()
    assert len(text.splitlines()) <= 30 and "arXiv" in text.splitlines()[0]
    lines, holds = describe(IDEAS[idea])
    assert holds, lines


@pytest.mark.parametrize("idea", ideas.IDEAS)
def test_a_new_file(tmp_path, idea):
    file, comparison = ideas.new_idea(tmp_path / "mine.py", idea)
    assert load_attention_parts(file)[0].name == "mine"
    assert set(load_plan(comparison).largest.variants) == {"without", "mine"}
    for name, source, message in (
        ("mine.py", idea, "mine.py exists; choose another name"),
        ("canon.py", idea, "'canon' is taken; choose another name"),
        ("my-idea.py", idea, "must have a name such as my_idea.py"),
        ("on.py", idea, "on.py True: a name must be text"),
        ("état.py", idea, "'état': a name must be made of"),
        ("class.py", idea, "must have a name such as my_idea.py"),
        ("keys.py", idea, "'keys' must be a Python identifier, and no attribute of nn.ModuleDict"),
        ("other.py", "alibi", "--from 'alibi' is unknown; there are bias, cap"),
    ):
        with pytest.raises(ValueError, match=message):
            ideas.new_idea(tmp_path / name, source)
    assert {path.name for path in tmp_path.iterdir()} == {"mine.py", "mine.yaml"}


@pytest.mark.slow
def test_the_documented_part_passes(tmp_path):
    lines, holds = describe(write(tmp_path, DISTANCE))
    assert holds and all("holds" in line for line in lines[1 : 1 + len(INVARIANTS)])
    start, changed = lines[1 + len(INVARIANTS) :]
    assert start.startswith("  changes outputs at its start              yes, by up to ")
    assert changed.startswith("  changes outputs, its parameters changed   yes, by up to ")


# By name: a part, and whether it changes outputs at its start, if it has parameters, and at all
EFFECTS = {
    "zero_at_first": (
        "return heads * (1 + self.gain)",
        {"gain": "nn.Parameter(torch.zeros(1))"},
        ["no: ", "yes, by up to "],
    ),
    "in_training": ("return torch.dropout(heads, 0.5, self.training)", {}, ["yes, by up to "]),
    "late": ("return torch.cat([heads[:, :64], 2 * heads[:, 64:]], dim=1)", {}, ["yes, by up to "]),
    "nothing": ("return heads.clone()", {}, ["NO: all models compute the same"]),
    "gradient_alone": (
        "return heads + self.gain - self.gain",
        {"gain": "nn.Parameter(torch.ones(1))"},
        ["no: ", "NO: "],
    ),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("effect", EFFECTS)
def test_whether_a_part_changes_outputs(tmp_path, two_surroundings, monkeypatch, effect):
    body, attributes, expected = EFFECTS[effect]
    monkeypatch.setattr(checking, "INVARIANTS", {})
    lines, holds = describe(write(tmp_path, idea(body, **attributes)))
    found = [line[44:] for line in lines[1:]]
    assert holds and len(found) == len(expected) and all(map(str.startswith, found, expected)), lines


@pytest.mark.thin(8)
@pytest.mark.parametrize("part", RIGHT)
def test_a_part_that_looks_like_a_fault_passes(tmp_path, two_surroundings, part):
    lines, holds = describe(write(tmp_path, RIGHT[part]))
    assert holds, lines


@pytest.mark.thin(5)
@pytest.mark.parametrize("fault", FAULTS | LATE_FAULTS)
def test_a_fault_is_named(tmp_path, request, fault):
    if fault in FAULTS:
        request.getfixturevalue("two_surroundings")
    text, invariant, case = (FAULTS | LATE_FAULTS)[fault]
    lines, holds = describe(write(tmp_path, text), seed=0)
    assert not holds and f"  {invariant}" in lines[-1] and "FAILS" in lines[-1] and case in lines[-1], lines


def test_a_seed_repeats_the_random_cases(tmp_path, two_surroundings):
    file = write(tmp_path, LATE_FAULTS["leak_of_odd_heads"][0])
    first, again, other = (describe(file, seed)[0] for seed in (7, 7, 9))
    assert first == again and "--seed 7" in first[0] and first[-1] != other[-1]


PART = "from modeling_nlq import AttentionPart\nclass A(AttentionPart):\n    name = 'not a name'"
BAD_FILES = {
    "x = 1": "defines no subclass of AttentionPart",
    "def f(:": "line 1",
    "import not_there": "cannot be run: ModuleNotFoundError",
    "import modeling_nlq": "cannot import modeling_nlq",
    "from modeling_nlq import NLQConfig": "cannot import NLQConfig",
    "from .other import x": "cannot import .other",
    PART: "must be a Python identifier",
    PART.replace("not a name", "a"): "A overrides no hook",
}


def test_bad_files(tmp_path):
    for text, message in BAD_FILES.items():
        with pytest.raises(ValueError, match=message):
            describe(write(tmp_path, text))
    with pytest.raises(ValueError, match="cannot be read"):
        describe(tmp_path / "missing.py")
    for name in ("a-b.py", "x.txt"):
        with pytest.raises(ValueError, match=r"such as my_idea\.py"):
            describe(write(tmp_path, "x = 1", name))
