"""Suffix decoding against counting in plain Python: matches, counts, trees, and what is forgotten when."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stridelm import SamplingParams
from stridelm.batch import CANDIDATE
from stridelm.config import EngineConfig
from stridelm.draft.base import Group, TargetInfo, TreeShape
from stridelm.draft.settle import settle
from stridelm.draft.suffix import SuffixOptions, automaton, texts
from stridelm.draft.suffix.automaton import END, Automaton
from stridelm.draft.suffix.drafter import SuffixDrafter
from stridelm.draft.suffix.texts import GENERATIONS, Corpus, Text
from stridelm.draft.suffix.tree import Tree, grow
from stridelm.params import Speculation
from stridelm.run.state import TokenTable
from stridelm.types import MAX_DRAFT_ROWS, Request, Span
from support.doubles.stand import Job, Stand, accepted, assert_same

CPU = torch.device("cpu")
LONGEST, COUNTED = 5, 9
"""Bounds so small that short texts reach them."""


@pytest.fixture
def low_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (automaton, texts):
        monkeypatch.setattr(module, "LONGEST", LONGEST)
    monkeypatch.setattr(automaton, "COUNTED", COUNTED)


def made_of(tokens: Sequence[int]) -> Automaton:
    made = Automaton()
    for token in tokens:
        made.append(token)
    return made


def random_text(rng: random.Random, most: int) -> list[int]:
    vocab = rng.randint(1, 4)
    return [rng.randrange(vocab) for _ in range(rng.randint(1, most))]


def occurrences(text: Sequence[int], part: Sequence[int]) -> int:
    return sum(list(text[at : at + len(part)]) == list(part) for at in range(len(text) - len(part) + 1))


def state_of(found: Automaton, part: Sequence[int]) -> int | None:
    state = 0
    for token in part:
        if token not in found.next[state]:
            return None
        state = found.next[state][token]
    return state


def substrings(text: Sequence[int], most: int) -> Iterator[list[int]]:
    for start in range(len(text)):
        for length in range(1, min(most, len(text) - start) + 1):
            yield list(text[start : start + length])


def longest_suffix(text: Sequence[int], others: Sequence[Sequence[int]]) -> int:
    """The number of tokens of the longest suffix of `text`, up to LONGEST, that occurs in one of the others."""
    lengths = range(min(LONGEST, len(text)), 0, -1)
    return next((n for n in lengths if any(occurrences(other, text[-n:]) for other in others)), 0)


def request_of(tokens: list[int], prompt: int = 1, speculation: Speculation | None = None) -> Request:
    return Request("r", tokens[:prompt], SamplingParams(), speculation or Speculation(), output_ids=tokens[prompt:])


# The automaton


@pytest.mark.usefixtures("low_bounds")
@pytest.mark.parametrize("seed", range(40))
def test_counts(seed: int) -> None:
    """After every token all substrings up to COUNTED tokens are found and counted, and nothing else is found."""
    rng = random.Random(seed)
    text = random_text(rng, 40)
    found = Automaton()
    for size, token in enumerate(text, 1):
        found.append(token)
        for part in substrings(text[:size], COUNTED):
            state = state_of(found, part)
            assert state is not None and found.count[state] == occurrences(text[:size], part)
    for _ in range(50):
        part = [rng.randrange(5) for _ in range(rng.randint(1, 6))]
        assert (state_of(found, part) is None) == (occurrences(text, part) == 0)
    assert len(found.next) <= 2 * len(text) + 1


@pytest.mark.parametrize("period", [1, 3])
def test_counts_reach_as_deep_as_a_draft(period: int) -> None:
    """A match of 64 tokens and 64 rows after it are counted, in a text that only repeats itself."""
    text = [i % period for i in range(300)]
    found = made_of(text)
    state, length = found.repeated()
    assert length == MAX_DRAFT_ROWS
    part = text[-length:]
    for row in range(MAX_DRAFT_ROWS):
        assert found.count[state] == occurrences(text, part)
        part.append((len(text) + row) % period)
        state = found.next[state][part[-1]]


@pytest.mark.usefixtures("low_bounds")
@pytest.mark.parametrize("seed", range(40))
def test_matches(seed: int) -> None:
    """The longest suffix that occurs earlier in the text itself, and in another."""
    rng = random.Random(seed)
    text, other = random_text(rng, 60), made_of(known := random_text(rng, 60))
    own, match = Automaton(), (0, 0)
    for size, token in enumerate(text, 1):
        own.append(token)
        state, length = own.repeated()
        assert length == longest_suffix(text[:size], [text[: size - 1]])
        assert state == state_of(own, text[size - length : size])
        match = other.follow(*match, token)
        assert match[1] == longest_suffix(text[:size], [known])
        assert match[0] == state_of(other, text[size - match[1] : size])


# What is remembered


@pytest.mark.parametrize("seed", range(20))
def test_corpus_forgets_the_oldest(seed: int) -> None:
    """What remains are the newest texts, within the bound, counted as if nothing else had ever been added; dropped
    texts are freed from memory."""
    rng = random.Random(seed)
    corpus, said = Corpus(most := 80), []
    watched: list[weakref.ref[Automaton]] = []
    for _ in range(40):
        text = random_text(rng, 30)
        corpus.add(text)
        said.append(text[-(corpus.share - 1) :])
        if not watched or watched[-1]() is not corpus.automata[-1]:
            watched.append(weakref.ref(corpus.automata[-1]))
        sizes = [found.size for found in corpus.automata]
        kept = next(k for k in range(1, len(said) + 1) if sum(len(t) + 1 for t in said[-k:]) == sum(sizes))
        assert sum(sizes) <= most and (kept == len(said) or sum(sizes) > most // 2)
        for part in [random_text(rng, 4) for _ in range(20)]:
            states = [(found, state_of(found, part)) for found in corpus.automata]
            count = sum(found.count[state] for found, state in states if state is not None)
            assert count == sum(occurrences(text, part) for text in said[-kept:])
    assert len(watched) > GENERATIONS
    assert [made() is not None for made in watched] == [age < GENERATIONS for age in reversed(range(len(watched)))]


@pytest.mark.usefixtures("low_bounds")
@pytest.mark.parametrize("seed", range(20))
def test_a_request_keeps_up(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its matches are the longest in its latest tokens and in the current corpus, however many tokens came at once and
    whatever the corpus learned or forgot meanwhile; it never holds more than its bound."""
    monkeypatch.setattr(texts, "OWN", own := 16)
    rng = random.Random(seed)
    tokens = [rng.randrange(3) for _ in range(150)]
    corpus, text, prompt = Corpus(120), Text(), rng.randint(1, 60)
    said: list[list[int]] = []
    size = prompt
    while size < len(tokens):
        if rng.random() < 0.4:
            said.append(random_text(rng, 25))
            corpus.add(said[-1])
        elif rng.random() < 0.1:
            corpus.clear()
        request = request_of(tokens[:size], min(prompt, size))
        text.catch_up(request, corpus)
        assert text.own.size < 2 * own and text.own.size >= min(own, size)
        window = tokens[:size][-text.own.size :]
        assert text.own.repeated()[1] == longest_suffix(window, [window[:-1]])
        kept = said[len(said) - sum(ends(found) for found in corpus.automata) :]
        places, length = text.longest(corpus)
        assert length == longest_suffix(tokens[:size], kept)
        for found, state in places:
            assert length == 0 or state == state_of(found, tokens[size - length : size])
        size += rng.choice((1, 1, 2, 7))


def ends(found: Automaton) -> int:
    """The number of texts in an automaton."""
    state = state_of(found, [END])
    return 0 if state is None else found.count[state]


# Trees


@pytest.mark.usefixtures("low_bounds")
@pytest.mark.parametrize("seed", range(60))
def test_tree_is_the_likeliest(seed: int) -> None:
    """Rows are the most frequent continuations, best first; none is omitted that is likelier than one included, and
    their number is what the bounds on rows, depth and probability allow."""
    rng = random.Random(seed)
    pieces = [random_text(rng, 40) for _ in range(rng.randint(1, 3))]
    match = rng.choice([part for text in pieces for part in substrings(text[:-1], 3)])
    places = [(found, state) for found in map(made_of, pieces) if (state := state_of(found, match)) is not None]
    rows, depth, least = rng.randint(1, 20), rng.randint(1, 4), rng.choice((0.0, 0.1, 0.4))

    def share(path: list[int]) -> float:
        followed = sum(occurrences(text, [*match, token]) for text in pieces for token in range(4))
        return sum(occurrences(text, match + path) for text in pieces) / followed

    tree = grow(places, rows, depth, least)
    paths: list[list[int]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    shares = [share(path) for path in paths]
    assert shares == sorted(shares, reverse=True) and tree.score == pytest.approx(sum(shares))
    assert len(paths) <= rows and len({tuple(path) for path in paths}) == len(paths)
    assert all(len(path) <= depth for path in paths) and all(s >= least and s > 0 for s in shares)
    left = [[*path, token] for path in ([], *paths) for token in range(4) if [*path, token] not in paths]
    others = [share(path) for path in left if len(path) <= depth]
    if len(paths) == rows:
        assert all(other <= min(shares) for other in others)
    else:
        assert all(other < least or other == 0 for other in others)


def propose(drafter: SuffixDrafter, requests: list[Request], rows: list[int]) -> tuple[Group, list[Tree]]:
    """The group of spans with room for these numbers of rows, and the expected trees: one at a time."""
    spans = tuple(Span(request, request.known - 1, 1, room, room) for request, room in zip(requests, rows, strict=True))
    slots = torch.arange(len(requests))
    table = TokenTable(len(requests), 8, CPU)  # never read
    group = Group(spans, list(range(len(requests))), slots, slots, table)
    return group, [drafter._guess(span.request, span.draft, span.depth) for span in spans]


def drafter_of(vocab: int = 10) -> SuffixDrafter:
    return SuffixDrafter(TargetInfo(vocab, 999, 8, (), None, CPU), None)  # type: ignore[arg-type]  # draws nothing


@pytest.mark.parametrize("seed", range(10))
def test_drafts_are_well_formed(seed: int) -> None:
    """Ancestors, depths and `is_chain` follow from the parents; valid rows are candidates."""
    rng = random.Random(seed)
    drafter = drafter_of()
    requests = []
    for i in range(6):
        ids = [rng.randrange(rng.randint(1, 3)) for _ in range(rng.choice((1, 3, 60, 200)))]
        requests.append(request_of(ids, len(ids), Speculation("suffix", suffix_decoding_max_spec_factor=2)))
        requests[-1].id = str(i)
    rows = [rng.choice((1, 3, 10, MAX_DRAFT_ROWS)) for _ in requests]
    group, trees = propose(drafter, requests, rows)
    draft = drafter.propose(group)
    is_chain = True
    for i, tree in enumerate(trees):
        size = len(tree.tokens)
        shape = TreeShape.of(tree.parents, [CANDIDATE] * size, CPU)
        is_chain &= shape.is_chain
        assert size <= rows[i] and draft.width == max(rows)
        assert draft.valid[i].tolist() == draft.candidates[i].tolist() == [j < size for j in range(draft.width)]
        assert draft.tokens[i, :size].tolist() == tree.tokens
        assert draft.depths[i, :size].tolist() == shape.depths.tolist()
        assert draft.ancestors[i, :size].tolist() == shape.ancestors.tolist()
        siblings = list(zip(draft.parents[i, :size].tolist(), tree.tokens, strict=True))
        assert len(set(siblings)) == size and shape.max_depth <= draft.max_depth
    assert draft.is_chain == is_chain and not draft.roles.any()


def test_sixty_four_rows() -> None:
    """The deepest possible draft: the last row's bit is the sign of its mask."""
    drafter = drafter_of()
    ids = list(range(130)) + list(range(64))
    request = request_of(ids, 10, Speculation("suffix"))
    group, (tree,) = propose(drafter, [request], [MAX_DRAFT_ROWS])
    draft = drafter.propose(group)
    assert tree.tokens == list(range(64, 128)) and draft.is_chain and draft.max_depth == MAX_DRAFT_ROWS
    assert draft.ancestors[0, -1] == -1


@pytest.mark.parametrize(("factor", "deep"), [(None, 3), (2.0, 6), (1.4, 4), (0.3, 0), (100.0, 7)])
def test_longer_matches_are_trusted_further(factor: float | None, deep: int) -> None:
    """A match of three tokens gives a draft of three times the factor levels, within the span's depth."""
    ids = [1, 2, 3, *range(10, 30), 1, 2, 3]
    request = request_of(ids, 5, Speculation("suffix", suffix_decoding_max_spec_factor=factor))
    _, (tree,) = propose(drafter_of(), [request], [7])
    assert tree.tokens == list(range(10, 10 + deep))


def test_unlikely_rows_are_left_out() -> None:
    """A continuation seen once in four times is drafted if the threshold is a quarter."""
    ids = [1, 2, 1, 2, 1, 2, 1, 3, 1]
    for least, drafted in ((None, {2, 3}), (0.25, {2, 3}), (0.26, {2}), (0.76, set())):
        request = request_of(ids, 5, Speculation("suffix", suffix_decoding_min_token_prob=least))
        _, (tree,) = propose(drafter_of(), [request], [8])
        assert {t for t, parent in zip(tree.tokens, tree.parents, strict=True) if parent < 0} == drafted


def test_the_better_source_wins() -> None:
    """A request's own text, until the corpus has a longer match; and its own again once that is as long."""
    drafter = drafter_of()
    request = request_of([1, 2, 9, 9, 8, 7, 1, 2], 3, Speculation("suffix"))
    assert propose(drafter, [request], [4])[1][0].tokens == [9, 9]
    drafter.leave(request_of([6, 1, 2, 4, 4, 4], 2))
    assert propose(drafter, [request], [4])[1][0].tokens == [9, 9]
    drafter.leave(request_of([7, 1, 2, 5, 5, 5], 2))
    assert propose(drafter, [request], [4])[1][0].tokens == [5, 5, 5]
    request.output_ids += [9]
    assert propose(drafter, [request], [4])[1][0].tokens == [9, 8, 7]


# Options


@pytest.mark.parametrize("option", SuffixOptions.names())
def test_options_of_its_own(option: str) -> None:
    """They reach it from the engine's configuration, and are refused if they would have no effect."""
    given: dict[str, Any] = {option: 0.5}
    speculation = EngineConfig(drafter="suffix", **given).speculation
    assert getattr(settle(speculation, TargetInfo(9, 9, 9, (), None, CPU)), option) == 0.5
    with pytest.raises(ValueError, match=f"{option} would have no effect with drafter 'ngram'"):
        settle(Speculation("ngram", **given), TargetInfo(9, 9, 9, (), None, CPU))
    wrong: Any
    for wrong in (-0.1, "x", float("nan")):
        with pytest.raises(ValueError, match=f"{option} must be a number"):
            Speculation("suffix", **{option: wrong})


def test_too_deep() -> None:
    with pytest.raises(ValueError, match="depth 65 is over 64"):
        drafter_of().rows_by_depth(Speculation("suffix", 65))


# In an engine


@pytest.fixture(scope="module")
def stand(checkpoint: Callable[..., Path]) -> Stand:
    return Stand(checkpoint("qwen3", tie_word_embeddings=True), "float32")


SPECULATION = {"drafter": "suffix", "depth": 6}
SAMPLED = SamplingParams(temperature=1.0, max_tokens=40, seed=3, ignore_eos=True)
"""At this temperature the tiny model hardly repeats itself."""


def drafter_in(llm: object) -> SuffixDrafter:
    drafter = llm.engine.drafters.get("suffix")  # type: ignore[attr-defined]
    assert isinstance(drafter, SuffixDrafter)
    return drafter


def test_what_was_said_before_is_found(stand: Stand) -> None:
    """A request with the same output as an earlier one is drafted from that output, from the first token on; both emit
    what plain decoding emits."""
    llm = stand.llm(drafter="suffix", depth=6)
    job = Job([9, 30, 11, 52, 13], SAMPLED, SPECULATION)
    first, second = (stand.run([job], llm)[0] for _ in range(2))
    for output in (first, second):
        assert_same(output, stand.plain(job.prompt, job.params))
    assert accepted([second]) > 30 > 2 * accepted([first])


def test_what_was_said_before_is_forgotten(stand: Stand) -> None:
    """When asked to forget, the engine drafts as if it had served nothing before; the prefix cache is empty too."""
    llm = stand.llm(drafter="suffix", depth=6, page_size=4)
    job = Job([9, 30, 11, 52, 13], SAMPLED, SPECULATION)
    found = []
    for _ in range(2):
        llm.engine.forget()
        (output,) = stand.run([job], llm)
        assert output.metrics is not None and output.metrics.cached_tokens == 0
        found.append(replace(output.metrics, ttft_s=None, latency_s=None))
    assert found[0] == found[1]
    running = llm.engine.add("a", [9, 30, 11], job.request)
    while running.known < 20:
        llm.engine.step()
    llm.engine.forget()
    while llm.engine.busy:
        llm.engine.step()
    llm.check()
    assert running.output_ids == stand.tokens([9, 30, 11], SAMPLED)


def test_nothing_is_kept_of_a_request_that_left(stand: Stand) -> None:
    """Finished or aborted, it is forgotten; while it runs, and while it waits preempted, it is remembered."""
    llm = stand.llm(page_size=4, num_pages=24, max_num_seqs=4)
    engine, drafter = llm.engine, drafter_in(llm)
    for i in range(4):
        engine.add(str(i), [5 + i, 6, 7, 5 + i, 6, 7, 5 + i], Job([], SAMPLED, SPECULATION).request)
    while not engine.stats.preemptions:
        engine.step()
    waiting = {request.id for request in engine.queue.waiting if request.output_ids}
    assert waiting and waiting <= set(drafter.texts)
    assert engine.abort("0") and "0" not in drafter.texts
    while engine.busy:
        engine.step()
    assert not drafter.texts and drafter.corpora._by_salt[None].version == 4


def test_the_corpus_is_the_output_and_its_border(stand: Stand) -> None:
    """Of the prompt only the last few tokens are kept."""
    llm = stand.llm()
    prompt = list(range(3, 40))
    output = stand.run([Job(prompt, SAMPLED, SPECULATION)], llm)[0].outputs[0].token_ids
    (found,) = drafter_in(llm).corpora._by_salt[None].automata
    assert found.size == texts.BORDER + len(output) + 1
    assert state_of(found, [*prompt[-texts.BORDER :], *output, END]) is not None


def test_salts_share_nothing_and_their_memory() -> None:
    """Each salt finds only its own texts; over the bound, the least recently used ones are dropped."""
    corpora = texts.Corpora()

    def of(salt: str | None) -> Request:
        return Request("r", [1], SamplingParams(cache_salt=salt), Speculation())

    for salt in (None, "a", "b"):
        corpora.add(of(salt), [7] * (texts.CORPUS // 4 - 1))
    assert len({id(corpora.of(of(salt))) for salt in (None, "a", "b", "c")}) == 4
    corpora.add(of(None), [8] * (texts.CORPUS // 4 - 1))
    corpora.add(of("c"), [9] * (texts.CORPUS // 4 - 1))
    assert corpora.of(of("a")).size == 0 and corpora.of(of(None)).size > 0 and corpora.of(of("b")).size > 0
    corpora.clear()
    assert not any(corpora.of(of(salt)).size for salt in (None, "b", "c"))
