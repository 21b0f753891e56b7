"""What ends an output, where it is cut and which reason is reported: vLLM's rules, from their definitions."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stridelm import LLM, SamplingParams
from stridelm.llm import CompletionOutput
from stridelm.text.output import bad_word_ids
from stridelm.types import StepOutput
from support.checkpoints.speaking import write_speaking

PROMPT = "def f(x):\n    return"
EOS, EXTRA, OWN = 2, 70, 71
"""The tokenizer's end of text, one that generation_config adds, and a request's own stop id."""


@pytest.fixture(scope="module")
def builtin() -> LLM:
    return LLM(max_model_len=512)


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Its config does not list the tokenizer's <eos>; its generation_config lists another id."""
    path = write_speaking(tmp_path_factory.mktemp("endings"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EXTRA]}))
    return LLM(str(path), drafter="none")


def say(llm: LLM, **params: Any) -> CompletionOutput:
    return llm.generate(PROMPT, SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **params}))[0].outputs[0]


def cut(free: list[str], stops: list[str], least: int) -> tuple[int, str, str] | None:
    """(tokens, text, stop string) by the definition. A stop string counts where it ends in the text of a token after
    the first `least`; the one completed first wins, and among several the first in the list; the token that completes
    it is the last."""
    text = ""
    for count, piece in enumerate(free, start=1):
        for end in range(len(text) + 1, len(text) + len(piece) + 1):
            found = [stop for stop in stops if (text + piece)[:end].endswith(stop)]
            if found and count > least:
                return count, (text + piece)[: end - len(found[0])], found[0]
        text += piece
    return None


@pytest.mark.parametrize("drafter", ["none", "auto"])
def test_stop_strings_by_their_definition(builtin: LLM, drafter: str) -> None:
    """Any pieces of the model's output as stop strings, in any order, below and above min_tokens, plain or drafted."""
    rng = random.Random(drafter)
    base = SamplingParams(temperature=1.0, max_tokens=48, ignore_eos=True)
    cases: list[tuple[SamplingParams, list[str]]] = []
    for seed in range(6):
        gained: list[StepOutput] = []
        builtin.generate(PROMPT, replace(base, seed=seed), on_output=gained.append)
        pieces = [piece for output in gained for piece in output.pieces]
        whole = "".join(pieces)
        for _ in range(12):
            starts = [rng.randrange(len(whole) - 6) for _ in range(rng.randint(1, 4))]
            stops = [whole[start : start + rng.randint(1, 6)] for start in starts]
            stops += [stop[rng.randrange(len(stop)) :] for stop in stops[:2]]  # with the same end as another
            rng.shuffle(stops)
            params = replace(base, seed=seed, stop=stops, min_tokens=rng.choice((0, 0, 1, 7, 20, 48)))
            cases.append((replace(params, speculation={"drafter": drafter}), pieces))
    outputs = [output.outputs[0] for output in builtin.generate([PROMPT] * len(cases), [params for params, _ in cases])]
    for (params, pieces), output in zip(cases, outputs):
        wanted = cut(pieces, list(params.stops), params.min_tokens)
        if wanted is None:
            assert output.finish_reason == "length" and output.text == "".join(pieces)
        else:
            assert output.finish_reason == "stop"
            assert (len(output.token_ids), output.text, output.stop_reason) == wanted


@pytest.mark.parametrize(
    ("token", "params", "reason"),
    [
        (EOS, {}, ("stop", None)),
        (EXTRA, {}, ("stop", EXTRA)),
        (OWN, {"stop_token_ids": [OWN]}, ("stop", OWN)),
        (EOS, {"stop_token_ids": [EOS]}, ("stop", None)),
        (EOS, {"ignore_eos": True}, ("length", None)),
        (EXTRA, {"ignore_eos": True}, ("length", None)),
        (EOS, {"ignore_eos": True, "stop_token_ids": [EOS]}, ("stop", EOS)),
    ],
)
def test_ids_that_end_a_text(speaker: LLM, token: int, params: dict[str, Any], reason: tuple[str, int | None]) -> None:
    """The tokenizer's own has no stop reason, whatever the configs say; all others have their id; a request that
    ignores ends of text keeps its own stop ids."""
    output = say(speaker, logit_bias={token: 100.0}, **params)
    assert (output.finish_reason, output.stop_reason) == reason
    assert output.token_ids == [token] * (1 if reason[0] == "stop" else 8)


@pytest.mark.parametrize("token", [EOS, EXTRA, OWN])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_no_end_below_min_tokens(speaker: LLM, token: int, ignore_eos: bool) -> None:
    """That many tokens come before any that ends a text, and before an ignored end of text too."""
    params = {"min_tokens": 5, "stop_token_ids": [OWN], "ignore_eos": ignore_eos}
    output = say(speaker, logit_bias={token: 100.0}, **params)
    assert token not in output.token_ids[:5] and output.token_ids[5] == token


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_text_of_the_token_that_ends(speaker: LLM, include: bool, skip: bool) -> None:
    """Included on request, and a special token only if special tokens are shown."""
    tokenizer = speaker.engine.tokenizer
    assert tokenizer is not None
    for token, text in ((EOS, "" if skip else "<eos>"), (EXTRA, tokenizer.token_text(EXTRA))):
        output = say(speaker, logit_bias={token: 100.0}, include_stop_str_in_output=include, skip_special_tokens=skip)
        assert output.text == (text if include else "") and output.token_ids == [token]


def test_bad_words(builtin: LLM) -> None:
    """A word is forbidden without and with a preceding space, however it is given; one of spaces alone has no tokens
    once they are stripped, and is refused."""
    tokenizer = builtin.engine.tokenizer
    assert tokenizer is not None
    for word in ("self", " self", "   self"):
        forbidden = bad_word_ids(tokenizer, SamplingParams(bad_words=[word]))
        assert forbidden == [tokenizer.encode("self", False), tokenizer.encode(" self", False)]
    with pytest.raises(ValueError, match=r"bad_words: ' ' has no tokens; leave it out"):
        builtin.generate(PROMPT, SamplingParams(bad_words=[" "]))


def test_seed_of_minus_one() -> None:
    """It is treated as absent, as in vLLM."""
    assert SamplingParams(seed=-1).seed is None


def test_ranks_of_ties(speaker: LLM) -> None:
    """A token's rank is its place among all, the lowest id first among ties, however many are requested."""
    import torch

    from stridelm.sample.logprobs import as_dicts, raw_logprobs

    logits = torch.tensor([[5.0, 5.0, 3.0, 5.0]] * 4)
    for top in range(4):
        entries = as_dicts(raw_logprobs(logits, torch.arange(4), top))
        assert [entry[token].rank for token, entry in enumerate(entries)] == [1, 2, 4, 3]


def test_another_generation_config_names_the_ends(speaker: LLM, tmp_path: Path) -> None:
    """With a directory of the user's own, its ids end a text, and the checkpoint's do not; a directory without the file
    is refused, and with neutral defaults the checkpoint's ids still end a text."""
    path = str(speaker.engine.loaded.path)
    with pytest.raises(ValueError, match=r"there is no generation_config\.json"):
        LLM(path, drafter="none", generation_config=str(tmp_path))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": OWN, "temperature": 0.0}))
    for which, ends in ((str(tmp_path), (EOS, OWN)), ("vllm", (EOS, EXTRA))):
        for skip in (False, True):
            llm = LLM(path, drafter="none", generation_config=which, skip_tokenizer_init=skip)
            assert llm.engine.loaded.eos_ids == (ends[1:] if skip else ends)
