"""Makes the rows of synthetic tasks, in which a model must recall, copy, memorise or count.

The model never reads an answer, because `BLANK` stands in its place. To add a task, write a subclass of `Task` and its
row in `TASKS`. In shapes, `count` is a number of rows.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from ..files import SYNTHETIC, check_keys, is_synthetic
from ..text import check_number
from ..values import Value


# Tokens of every task, before its own words, and their ids
SPECIAL = ("<|endoftext|>", "<|pad|>", "<|blank|>")
END, PAD, BLANK = range(3)
NO_ANSWER = -100
_CHUNK = 2048  # rows that are made at a time

# Inputs and answers, each `(count, tokens)`
Rows = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Task(Value):
    """The sizes of a task; raises `ValueError` for sizes that are not allowed."""

    objective = "causal"  # that its recipes set
    kinds = ("w",)  # of words; each has `vocabulary` of them, such as `w0`, `w1`, ...
    marks = ()  # words besides
    added = 0  # tokens of a row besides `length`

    rows: int = 40_000
    """Of training, validation and test together."""
    seed: int = 0
    """Another seed makes other rows."""
    length: int = 64
    """The tokens of a row."""
    test_length: int | None = None
    """The length in the test, where it differs."""
    vocabulary: int = 32
    """The words of each kind."""

    def __post_init__(self):
        super().__post_init__()
        shortest, fewest = self.least()
        least = {"seed": 0, "length": shortest, "test_length": shortest, "vocabulary": fewest}
        for name, value in vars(self).items():
            check_number(f"task: {name}", value, least.get(name, 1))

    def least(self) -> tuple[int, int]:
        """Returns the least length and vocabulary."""
        return 2, 2

    @property
    def sample_lengths(self) -> tuple[int, ...]:
        """The tokens of a row of training, or of its source and its target."""
        return (self.length + self.added,) * (2 if self.objective == "seq2seq" else 1)

    @property
    def longest(self) -> int:
        return max(self.length, self.test_length or 0) + self.added

    @property
    def tokens(self) -> list[str]:
        """The whole vocabulary, in the order of ids."""
        words = [f"{kind}{number}" for kind in self.kinds for number in range(self.vocabulary)]
        return [*SPECIAL, *self.marks, *words]

    def word(self, kind: str, numbers: np.ndarray | int = 0) -> np.ndarray | int:
        return len(SPECIAL) + len(self.marks) + self.kinds.index(kind) * self.vocabulary + numbers

    def draw(self, generator: np.random.Generator, count: int, length: int) -> Rows:
        """Returns at most `count` rows with their answers, and where these are. Shorter rows end in `PAD`."""

    def make(self, generator: np.random.Generator, count: int, length: int) -> Rows:
        """Returns the inputs of at most `count` rows, and the answers, with `NO_ANSWER` elsewhere."""
        rows, is_answer = self.draw(generator, count, length)
        return np.where(is_answer, BLANK, rows), np.where(is_answer, rows, NO_ANSWER)


def _subsets(generator: np.random.Generator, count: int, total: int, size: int) -> np.ndarray:
    """Returns `(count, size)` numbers below `total`, different and in random order in each row."""
    return generator.random((count, total)).argsort(axis=1)[:, :size]


@dataclass(frozen=True)
class Recall(Task):
    """Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927).

    A row begins with pairs of a key and its value. Later each key is asked for its value once, at a random place.
    """

    pairs: int = 8
    """The pairs of a row."""
    kinds = ("k", "v")
    widest = 1  # the most words of a key, and of a value
    is_noisy = False

    def least(self):
        return 4 * self.widest * self.pairs, self.pairs

    def draw(self, generator, count, length):
        def cut(words: np.ndarray) -> np.ndarray:
            """Leaves one word or more of each key or value `(rows, pairs, widest)`."""
            sizes = generator.integers(1, self.widest + 1, size=(*words.shape[:2], 1))
            return np.where(np.arange(self.widest) < sizes, words, PAD)

        keys = _subsets(generator, count, self.vocabulary, self.pairs)[..., None]
        if self.widest > 1:
            keys = generator.integers(self.vocabulary, size=(count, self.pairs, self.widest))
        keys = cut(self.word("k", keys))
        codes = np.sort(keys @ len(self.tokens) ** np.arange(self.widest), axis=1)
        keys = keys[(np.diff(codes, axis=1) > 0).all(axis=1)]  # a key has one value
        values = cut(self.word("v", generator.integers(self.vocabulary, size=keys.shape)))
        count, units = len(keys), length // (2 * self.widest)  # a unit has room for a key and a value
        words = np.full((count, units, 2 * self.widest), BLANK)
        questions = self.pairs + np.sort(_subsets(generator, count, units - self.pairs, self.pairs), axis=1)
        places = np.concatenate([np.tile(np.arange(self.pairs), (count, 1)), questions], axis=1)
        if self.is_noisy:
            words = self.word("n", generator.integers(self.vocabulary, size=words.shape))
            places = np.sort(_subsets(generator, count, units, 2 * self.pairs), axis=1)
        rows, order = np.arange(count)[:, None], _subsets(generator, count, self.pairs, self.pairs)
        pairs, is_answer = np.concatenate([keys, values], axis=2), np.zeros(words.shape, dtype=bool)
        words[rows, places] = np.concatenate([pairs, pairs[rows, order]], axis=1)
        is_answer[rows, places[:, self.pairs :], self.widest :] = True
        words, is_answer = words.reshape(count, -1), is_answer.reshape(count, -1)
        order = (words == PAD).argsort(axis=1, kind="stable")
        words, is_answer = (np.take_along_axis(part, order, axis=1) for part in (words, is_answer))
        return words, is_answer & (words != PAD)


@dataclass(frozen=True)
class FuzzyRecall(Recall):
    """Fuzzy recall (Poli et al. 2024, arXiv 2403.17844): keys and values have one to three words."""

    length: int = 96
    widest = 3


class NoisyRecall(Recall):
    """Noisy recall (arXiv 2403.17844): words without meaning stand between pairs and questions."""

    kinds = ("k", "v", "n")
    is_noisy = True


@dataclass(frozen=True)
class SelectiveCopy(Task):
    """Selective copying (arXiv 2403.17844): words at random places among dots are to be written in their order."""

    copied: int = 8
    """The words to copy."""
    marks = (".", ">")

    def least(self):
        return 2 * self.copied + 1, 2

    def draw(self, generator, count, length):
        dot, write = len(SPECIAL), len(SPECIAL) + 1
        room = length - self.copied - 1
        copied = self.word("w", generator.integers(self.vocabulary, size=(count, self.copied)))
        places = np.sort(_subsets(generator, count, room, self.copied), axis=1)
        words = np.concatenate([np.full((count, room), dot), np.full((count, 1), write), copied], axis=1)
        words[np.arange(count)[:, None], places] = copied
        return words, np.arange(length) > room


@dataclass(frozen=True)
class Memorize(Task):
    """Memorisation (arXiv 2403.17844): each key has the same value in all rows, which is never an input."""

    vocabulary: int = 256
    kinds = ("k", "v")

    def draw(self, generator, count, length):
        values = np.random.default_rng(self.seed).integers(self.vocabulary, size=self.vocabulary)
        keys = generator.integers(self.vocabulary, size=(count, length // 2))
        words = np.stack([self.word("k", keys), self.word("v", values[keys])], axis=2).reshape(count, -1)
        return words, np.arange(words.shape[1]) % 2 == 1


class Induction(Task):
    """Induction (arXiv 2209.11895, 2408.14332): after a third of different words, it asks what followed each."""

    def least(self):
        return 4, self.longest - 2 * ((self.longest - 1) // 3)

    def draw(self, generator, count, length):
        asked = (length - 1) // 3
        told = self.word("w", _subsets(generator, count, self.vocabulary, length - 2 * asked))
        places, rows = _subsets(generator, count, told.shape[1] - 1, asked), np.arange(count)[:, None]
        pairs = np.stack([told[rows, places], told[rows, places + 1]], axis=2).reshape(count, -1)
        places = np.arange(length) - told.shape[1]
        return np.concatenate([told, pairs], axis=1), (places > 0) & (places % 2 == 1)


@dataclass(frozen=True)
class Parity(Task):
    """Parity (Hahn 2020, arXiv 1906.06755): the sum modulo `vocabulary` of 1 to `length` digits, or `test_length`."""

    length: int = 16
    vocabulary: int = 2
    kinds = ("",)
    marks = ("=",)
    added = 2

    def draw(self, generator, count, length):
        sizes = generator.integers(1 if length == self.length else length, length + 1, size=(count, 1))
        places = np.arange(length + 2)
        digits = np.where(places < sizes, generator.integers(self.vocabulary, size=(count, length + 2)), 0)
        digits[places == sizes + 1] = digits.sum(axis=1) % self.vocabulary
        words = np.where(places == sizes, len(SPECIAL), self.word("", digits))
        return np.where(places > sizes + 1, PAD, words), places == sizes + 1


@dataclass(frozen=True)
class Reverse(Task):
    """Reversal, for an encoder and decoder: the words of the source from the last to the first."""

    length: int = 16
    objective = "seq2seq"
    added = 1

    def make(self, generator, count, length):
        words = self.word("w", generator.integers(self.vocabulary, size=(count, length)))
        end = np.full((count, 1), END)
        return np.concatenate([words, end], axis=1), np.concatenate([words[:, ::-1], end], axis=1)


TASKS: dict[str, type[Task]] = {
    "recall": Recall,
    "fuzzy-recall": FuzzyRecall,
    "noisy-recall": NoisyRecall,
    "selective-copy": SelectiveCopy,
    "memorize": Memorize,
    "induction": Induction,
    "parity": Parity,
    "reverse": Reverse,
}


def task_of(dataset: str, sizes: dict[str, Any] | None) -> Task | None:
    """Returns the task of a recipe; `None` for text."""
    if not is_synthetic(dataset):
        if sizes is not None:
            raise ValueError(f"task={sizes!r} needs dataset: {SYNTHETIC}NAME, not {dataset!r}")
        return None
    if (kind := TASKS.get(dataset.removeprefix(SYNTHETIC))) is None:
        raise ValueError(f"dataset={dataset!r} must be {SYNTHETIC} and one of {', '.join(TASKS)}")
    check_keys("task", sizes or {}, [item.name for item in dataclasses.fields(kind)])
    return kind(**(sizes or {}))


def difficulty(tasks: Sequence[Task | None]) -> tuple[str, list[int]] | None:
    """Returns the last size in which each two tasks of one kind differ, and its values; `None` without one."""
    if len({type(task) for task in tasks}) > 1 or None in tasks:
        return None
    for item in reversed(dataclasses.fields(tasks[0])):
        name, values = item.name, [getattr(task, item.name) for task in tasks]
        if name not in ("rows", "seed") and None not in values and len(set(values)) == len(values):
            return name, values
    return None


def make_splits(task: Task, validation: float, test: float, most: int | None = None) -> dict[str, Rows]:
    """Makes the rows of each split, which a hash of the row decides, so that no row is in two splits.

    `validation` and `test` are shares, at most `most` rows each, all different; `ValueError` if there are too few.
    """
    held_out = validation + test
    bounds = {"validation": (0.0, validation), "test": (validation, held_out), "train": (held_out, 1.0)}
    splits = {}
    for index, (split, (start, end)) in enumerate(bounds.items()):
        if start == end:
            continue
        is_train, count = split == "train", max(1, round(task.rows * (end - start)))
        count = count if is_train or most is None else min(count, most)
        length = (split == "test" and task.test_length) or task.length
        generator, rows, seen = np.random.default_rng([task.seed, index]), [], set()
        for _ in range(10 + 10 * task.rows // _CHUNK):
            for row, answers in zip(*task.make(generator, _CHUNK, length)):
                key = row[row != PAD].astype(np.int32).tobytes()
                if start <= xxhash.xxh64_intdigest(key) / 2**64 < end and key not in seen:
                    rows.append((row, answers))
                    if not is_train:
                        seen.add(key)
            if len(rows) >= count:
                break
        if len(rows) < count:
            found = f"of the {count} different rows for {split} only {len(rows)} were found"
            raise ValueError(f"task: rows={task.rows}: {found}; lower rows, or set larger sizes")
        splits[split] = tuple(np.array(part, dtype=np.int32) for part in zip(*rows[:count]))
    return splits
