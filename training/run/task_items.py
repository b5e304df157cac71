"""Items of the shipped tasks: multiple choice about held-out Python source text, made by `tokenize` and `ast` alone.

The files of configuration/tasks name `task_dataset` and `score_item`, which lm_eval calls. Whatever looks random is a hash, so
the same text gives the same items.
"""

import ast
import bisect
import functools
import hashlib
import io
import itertools
import keyword
import math
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from datasets import Dataset
from scipy.special import softmax

from .documents import load_documents
from .recipe import Recipe
from .trained_on import read_trained_on


CORPUS = "python-stdlib"
# Share of the corpus that the items are made from. The shipped recipes hold out more: a document is held out if a hash of its
# text lies below the share.
HELD_OUT = 0.018
ITEMS = 1000
CHOICES = 4
CONTEXT_LENGTH = 256  # characters at most: about 120 tokens, even of a vocabulary of 512

# Identifiers without outer underscores, which tokenizers join with the punctuation beside them
_NAME = re.compile(r"[A-Za-z](\w*[A-Za-z0-9])?", re.ASCII)
# Tokenizers cut text at white space, and between punctuation and a letter; `'s` they may keep
_ENDS_BEFORE_NAME = re.compile(r"\S\s+|[^\w\s'\"\\]")
# Closing brackets at the end of a line, after a letter or a digit, for the same reason
_CLOSING = re.compile(r"(?<=[A-Za-z0-9])[)\]}]+[:,]?(?=\n)")
_LONGEST_SPACE = 40  # characters


@dataclass(frozen=True)
class Place:
    """A place in a document where a question can be asked."""

    path: str
    offset: int  # where the choices begin in the document, in characters
    context: str  # the text before them: whole lines, and the part of a line
    answer: str  # the text that follows, without the white space around it
    before: str = ""  # white space around the answer, which every choice gets
    after: str = ""
    near: tuple[str, ...] = ()  # wrong answers that the context holds, sorted


class Source:
    """A document of Python source text and its tokens.

    Raises:
        SyntaxError, tokenize.TokenError: if the running Python does not understand it.
    """

    def __init__(self, path: str, text: str):
        self.path, self.text = path, text
        self.line_starts = [0, *itertools.accumulate(map(len, io.StringIO(text)))]
        self.tree = ast.parse(text)
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        self.tokens = [(self.line_starts[token.start[0] - 1] + token.start[1], token) for token in tokens]
        self.names = [(start, token.string) for start, token in self.tokens if token.type == tokenize.NAME]
        self.names = [(start, name) for start, name in self.names if can_be_choice(name)]

    def context(self, offset: int, head: str = "", first: int = 0) -> str:
        """The text before an offset, from a line start that is no earlier than `first`, after `head`.

        It is empty if the line alone is too long.
        """
        earliest = min(max(first, offset - CONTEXT_LENGTH + len(head)), offset)
        start = self.line_starts[bisect.bisect_left(self.line_starts, earliest)]
        return head + self.text[start:offset] if start < offset else ""

    def place_of_name(self, start: int, name: str, head: str = "", first: int = 0) -> Place | None:
        """The place of an identifier that starts there, or `None` if tokenizers might not cut the text before it."""
        before = re.search(r"\s*$", self.text[max(0, start - _LONGEST_SPACE) : start])[0]
        context = self.context(start - len(before), head, first)
        if not context or not _ENDS_BEFORE_NAME.fullmatch(context[-1] + before):
            return None
        return Place(self.path, start - len(before), context, name, before)


def can_be_choice(name: str) -> bool:
    """Tells whether an identifier can be a choice."""
    return bool(_NAME.fullmatch(name)) and not keyword.iskeyword(name) and name not in ("self", "cls")


def next_identifiers(source: Source) -> Iterator[Place]:
    """Asks for an identifier that the context holds, beside other identifiers of the context."""
    begin = 0
    for index, (start, name) in enumerate(source.names):
        while source.names[begin][0] < start - CONTEXT_LENGTH - _LONGEST_SPACE:
            begin += 1
        place = source.place_of_name(start, name)
        if place is not None:
            first = place.offset - len(place.context)
            seen = {other for other_start, other in source.names[begin:index] if other_start >= first}
            if name in seen:
                yield replace(place, near=tuple(sorted(seen - {name})))


def argument_names(source: Source) -> Iterator[Place]:
    """Asks for an argument of a function. The context is its signature and, perhaps after a gap, the lines before the use."""
    places = {}  # by start: inner functions come after outer ones
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        given = node.args
        parts = (*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg)
        names = sorted({part.arg for part in parts if part is not None and can_be_choice(part.arg)})
        signature, body, end = (
            source.line_starts[line - 1] for line in (node.lineno, node.body[0].lineno, node.end_lineno + 1)
        )
        for start, name in source.names:
            if body <= start < end and name in names and source.text[start - 1] != ".":
                place = source.place_of_name(start, name, source.text[signature:body], body)
                if place is not None:
                    places[start] = replace(place, near=tuple(other for other in names if other != name))
    yield from places.values()


def closing_brackets(source: Source) -> Iterator[Place]:
    """Asks for the closing brackets at the end of a line, with `:` or `,` behind them. The context holds the opening ones.

    Each choice ends with the white space that follows in the text, so that `)` is not also the beginning of `))`. The last
    space is left out, which tokenizers join with the next word.
    """
    stack, opened_at = [], {}
    for start, token in source.tokens:
        if token.type == tokenize.OP and token.string in ("(", "[", "{"):
            stack.append(start)
        elif token.type == tokenize.OP and token.string in (")", "]", "}"):
            opened_at[start] = stack.pop()
    for match in _CLOSING.finditer(source.text):
        starts = range(match.start(), match.start() + len(match[0].rstrip(":,")))
        space = re.compile(r"\s*").match(source.text, match.end())[0]
        if not all(start in opened_at for start in starts) or len(space) > _LONGEST_SPACE:
            continue  # in a string or a comment, or before much white space
        context = source.context(match.start())
        if opened_at[starts[-1]] >= match.start() - len(context):
            yield Place(source.path, match.start(), context, match[0], after=space[:-1] or space)


@dataclass(frozen=True)
class Task:
    """How the items of a task are made."""

    find_places: Callable[[Source], Iterator[Place]]
    near: int  # wrong choices from the context, if there are so many; the others are answers of other items
    even: bool  # whether all answers are asked for equally often, as far as the documents allow


TASKS = {
    "nlq_argument_names": Task(argument_names, near=1, even=True),
    "nlq_brackets": Task(closing_brackets, near=0, even=True),
    "nlq_next_identifier": Task(next_identifiers, near=CHOICES - 1, even=False),
}


def make_items(task: str, documents: Iterable[dict[str, str]]) -> list[dict[str, Any]]:
    """Makes the items of a task: at most `ITEMS`, or as many as the documents give.

    Args:
        task: a key of `TASKS`.
        documents: rows `path` and `text`.

    Returns:
        Rows `context`, `choices` (`CHOICES` different texts), `answer` (the index of the choice that follows the context in the
        document), `path`, and `offset` (where the choices begin in the document, in characters).
    """
    maker = TASKS[task]
    places = []
    for document in documents:
        try:
            places += maker.find_places(Source(document["path"], document["text"]))
        except (SyntaxError, tokenize.TokenError):
            continue  # the standard library tests itself with broken files

    def by_hash(place: Place) -> float:
        return _fraction(task, place.path, place.offset)

    places.sort(key=by_hash)
    places = _evened(places) if maker.even else places
    weights = Counter(place.answer for place in places[:ITEMS])
    wrong = ((place, _choose_wrong(place, maker.near, weights)) for place in places)
    kept = list(itertools.islice((pair for pair in wrong if len(pair[1]) == CHOICES - 1), ITEMS))
    items = []
    for index, (place, others) in enumerate(sorted(kept, key=lambda pair: by_hash(pair[0]))):  # the first are like all
        answer = index % CHOICES
        choices = [place.before + choice + place.after for choice in (*others[:answer], place.answer, *others[answer:])]
        items.append(
            {"context": place.context, "choices": choices, "answer": answer, "path": place.path, "offset": place.offset}
        )
    return items


def _fraction(*parts: object) -> float:
    """A number in (0, 1) that depends on the parts alone."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return (int.from_bytes(digest[:6], "big") + 0.5) / 2**48


def _evened(places: list[Place]) -> list[Place]:
    """Orders places so that every answer has its turn. Common answers would be known without context."""
    counts = defaultdict(itertools.count)
    turns = [next(counts[place.answer]) for place in places]
    return [place for _, place in sorted(zip(turns, places), key=lambda pair: pair[0])]


def _sampled(candidates: Sequence[str], weights: list[float], number_of: Callable[[str], float]) -> list[str]:
    """Orders candidates as by sampling without replacement (Efraimidis and Spirakis 2006, doi 10.1016/j.ipl.2005.11.003).

    `number_of` gives each a number in (0, 1) in place of a random one.
    """
    keys = {one: math.log(number_of(one)) / weight for one, weight in zip(candidates, weights)}
    return sorted(candidates, key=keys.__getitem__, reverse=True)


def _choose_wrong(place: Place, near: int, weights: Counter[str]) -> list[str]:
    """Chooses `CHOICES - 1` wrong answers, or fewer where there are no more: `near` from the context, and then answers of other
    items that the context does not hold, as often as they are right.

    No identifier is the beginning of another one, whose likelihood would contain its own.
    """
    by_hash = functools.partial(_fraction, place.path, place.offset)
    chosen = []

    def take(candidates: Iterable[str], count: int) -> None:
        for other in candidates:
            if len(chosen) == count:
                return
            taken = [place.answer, *chosen]
            is_part = any(one.startswith(other) or other.startswith(one) for one in taken)
            if other not in taken and (place.after or not is_part):  # white space behind ends a choice
                chosen.append(other)

    take(_sampled(place.near, [math.sqrt(1 + weights[other]) for other in place.near], by_hash), near)
    if near < CHOICES - 1:
        context = set(re.findall(r"\w+", place.context))
        far = [other for other in weights if other not in context]
        take(_sampled(far, [weights[other] for other in far], by_hash), CHOICES - 1)
    return sorted(chosen, key=lambda other: by_hash(other, "order"))


@functools.cache
def held_out_documents() -> tuple[dict[str, str], ...]:
    """The documents of the corpus that the items are made from: rows `path` and `text`."""
    recipe = Recipe(model="tiny-linear", dataset=CORPUS, validation_fraction=HELD_OUT)
    return tuple(load_documents(recipe)["validation"])


def check_held_out(recipe: Mapping[str, Any], who: str) -> None:
    """Raises `ValueError` if a recipe trains on documents of the items; the message begins with `who`."""
    if recipe.get("dataset", Recipe.dataset) != CORPUS:
        return
    shares = {name: recipe.get(name, getattr(Recipe, name)) for name in ("validation_fraction", "test_fraction")}
    if sum(shares.values()) < HELD_OUT - 1e-9:
        given = " and ".join(f"{name}={share}" for name, share in shares.items())
        raise ValueError(
            f"{who} on {CORPUS} with {given}, so it has seen documents of the tasks; they must add up to at least {HELD_OUT}"
        )


def task_dataset(task: str, pretrained: str | None = None, **_: Any) -> dict[str, Dataset]:
    """Makes the dataset of a task: `custom_dataset` of lm_eval.

    Args:
        task: a key of `TASKS`; `dataset_kwargs` of the task's file.
        pretrained: the model that is evaluated, as in lm_eval's `--model_args`.

    Raises:
        ValueError: if the model was trained on documents of the items.
    """
    for record in read_trained_on(str(pretrained)) if pretrained is not None else ():
        check_held_out(record, f"model {str(pretrained)!r} was trained")
    return {"test": Dataset.from_list(make_items(task, held_out_documents()))}


def score_item(item: dict[str, Any], results: list[tuple[float, bool]]) -> dict[str, float]:
    """Scores a row of `make_items`: `process_results` of lm_eval.

    Args:
        item: the row.
        results: the log-likelihood of each choice in nats, and whether it is the likeliest text.

    Returns:
        `acc`: 1 if the right choice is the likeliest, else 0; `answer_probability`: its likelihood over the sum of all choices;
        `answer_bits_per_byte`: its negative log-likelihood over its length, in UTF-8.
    """
    log_likelihoods, answer = np.array([value for value, _ in results]), item["answer"]
    length = len(item["choices"][answer].encode())
    return {
        "acc": float(log_likelihoods.argmax() == answer),
        "answer_probability": float(softmax(log_likelihoods)[answer]),
        "answer_bits_per_byte": float(-log_likelihoods[answer] / math.log(2) / length),
    }
