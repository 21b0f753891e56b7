"""What cannot be served is a ValueError that names the remedy; other requests in the batch are unaffected."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from stridelm import LLM, SamplingParams, Speculation
from stridelm.config import EngineConfig
from stridelm.llm import RequestOutput
from stridelm.models import MODELS
from stridelm.text_engine import TextEngine

OPTIONS: dict[str, Any] = {"dtype": "float32", "num_pages": 48, "max_num_seqs": 4, "strict": True}
MASK = 299
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [40, 41, 42], [9] * 30]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def refused(call: Callable[[], Any], says: str) -> None:
    """A plain ValueError, not a subclass raised by a library, with a message that a user can act on."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is looked at below)
        call()
    assert type(caught.value) is ValueError, caught.value
    assert says in str(caught.value)


@pytest.fixture(scope="module")
def llm(speaking: Path) -> LLM:
    return LLM(speaking, drafter="none", mask_token_id=MASK, **OPTIONS)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# Parameters, refused where they are made

NUMBERS = {
    "n": (0, -1, 1.5),
    "temperature": (-1, math.nan, math.inf, 101),
    "top_k": (-2, 1.5),
    "top_p": (0, 1.1, math.nan, -0.5),
    "min_p": (-0.1, 2, math.nan),
    "repetition_penalty": (0, -1, math.nan, math.inf),
    "presence_penalty": (3, -3, math.nan),
    "frequency_penalty": (3, -3, math.nan),
    "min_tokens": (-1, 1.5),
    "max_tokens": (0, -1, 1.5, math.nan),
    "seed": (1.5, 2**63),
    "logprobs": (-1, 65, 1.5),
    "prompt_logprobs": (-1, 65),
    "priority": (1.5, math.nan, 2**80),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_out_of_range_or_of_no_kind(name: str) -> None:
    strange: tuple[Any, ...] = ("1", [1], True, {})
    for value in (*NUMBERS[name], *strange):
        refused(lambda value=value: SamplingParams(**{name: value}), f"{name} must be")  # type: ignore[misc]


PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 4, "min_tokens": 5}, "raise max_tokens"),
    ({"stop": 5}, "a string or a list of strings"),
    ({"stop": [5]}, "a string or a list of strings"),
    ({"stop": b"x"}, "a string or a list of strings"),
    ({"stop": {"a": 1}}, "a string or a list of strings"),
    ({"stop": ""}, "remove it"),
    ({"stop": ["a", ""]}, "remove it"),
    ({"bad_words": 5}, "a string or a list of strings"),
    ({"bad_words": [""]}, "remove it"),
    ({"bad_words_token_ids": 5}, "a list of lists of token ids"),
    ({"bad_words_token_ids": [5]}, "must be a list of token ids"),
    ({"bad_words_token_ids": "ab"}, "a list of lists of token ids"),
    ({"bad_words_token_ids": [[]]}, "remove it"),
    ({"bad_words_token_ids": [[1.5]]}, "whole numbers"),
    ({"stop_token_ids": 5}, "must be a list of token ids"),
    ({"stop_token_ids": "12"}, "must be a list of token ids"),
    ({"stop_token_ids": [True]}, "whole numbers"),
    ({"stop_token_ids": [1.0]}, "whole numbers"),
    ({"stop_token_ids": [[1]]}, "whole numbers"),
    ({"logprobs": 0, "logprob_token_ids": 5}, "must be a list of token ids"),
    ({"logprobs": 0, "logprob_token_ids": [1.5]}, "whole numbers"),
    ({"logprobs": 0, "logprob_token_ids": list(range(1025))}, "at most 1024"),
    ({"logprob_token_ids": [5]}, "without logprobs or prompt_logprobs"),
    ({"return_hidden_states": 1}, "True or False"),
    ({"logit_bias": [1, 2]}, "a mapping from token id"),
    ({"logit_bias": {"5": 1.0}}, "whole numbers"),
    ({"logit_bias": {5: "x"}}, "from -100.0 to 100.0"),
    ({"logit_bias": {5: math.nan}}, "from -100.0 to 100.0"),
    ({"logit_bias": {5: 101}}, "from -100.0 to 100.0"),
    ({"ignore_eos": "no"}, "True or False"),
    ({"ignore_eos": None}, "True or False"),
    ({"skip_special_tokens": 1}, "True or False"),
    ({"include_stop_str_in_output": "yes"}, "True or False"),
    ({"speculation": 5}, "a mapping"),
    ({"speculation": ["ngram"]}, "a mapping"),
    ({"speculation": {"k": 2}}, "known: acceptance"),
    ({"speculation": {1: 2}}, "known: acceptance"),
    ({"speculation": {"drafter": 5}}, "a name"),
    ({"speculation": {"acceptance": ["exact"]}}, "a name"),
    ({"speculation": {"depth": -1}}, "from 0"),
    ({"speculation": {"depth": 1.5}}, "an integer"),
    ({"speculation": {"depth": True}}, "an integer"),
    ({"speculation": {"confidence": 0}}, "above 0.0"),
    ({"speculation": {"confidence": 1.1}}, "above 0.0"),
    ({"speculation": {"confidence": math.nan}}, "above 0.0"),
    ({"speculation": {"confidence": "sure"}}, "above 0.0"),
    ({"speculation": {"prompt_lookup_min": "x"}}, "an integer"),
]


@pytest.mark.parametrize(("given", "says"), PARAMETERS, ids=repr)
def test_parameters_that_mean_nothing(given: dict[str, Any], says: str) -> None:
    refused(lambda: SamplingParams(**given), says)


def test_unknown_parameters_and_speculation_options_are_not_dropped() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="dept"):
        Speculation(dept=1)


def test_numpy_and_iterators_become_plain_values() -> None:
    """Values are converted to Python's own numbers and to sequences that can be read twice."""
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=np.int64(3),  # type: ignore[arg-type]
        seed=np.uint32(2**32 - 1),  # type: ignore[arg-type]
        stop=iter(["a", "b"]),  # type: ignore[arg-type]
        stop_token_ids=np.array([4, 5]),  # type: ignore[arg-type]
        bad_words="word",
        bad_words_token_ids=[np.array([1, 2]), torch.tensor([3])],  # type: ignore[list-item]
        logit_bias={np.int64(5): np.float32(1)},  # type: ignore[dict-item]
    )
    assert (type(params.temperature), type(params.top_k), type(params.seed)) == (float, int, int)
    assert params.stops == params.stops == ("a", "b")
    assert params.stop_token_ids == [4, 5] and type(params.stop_token_ids[0]) is int
    assert params.bad_words == ("word",)
    assert params.bad_words_token_ids == [[1, 2], [3]]
    assert params.logit_bias == {5: 1.0} and type(next(iter(params.logit_bias))) is int


# Prompts


class Opaque:
    """Not a prompt in any sense. Its repr is the same in every process, because the tests' names contain it."""

    def __repr__(self) -> str:
        return "Opaque()"


PROMPTS_REFUSED: list[tuple[Any, str]] = [
    (None, "text or lists of token ids"),
    (5, "text or lists of token ids"),
    (1.5, "text or lists of token ids"),
    (Opaque(), "text or lists of token ids"),
    (b"abc", "text or lists of token ids"),
    ({}, "neither prompt nor prompt_token_ids"),
    ({"prompt": None}, "neither prompt nor prompt_token_ids"),
    ({"prompt": [1]}, "token ids are prompt_token_ids"),
    ({"prompt_token_ids": "x"}, "prompt_token_ids must be a list of token ids"),
    ({"prompt_token_ids": []}, "at least one"),
    ({"prompt": "x", "multi_modal_data": {"image": 1}}, "no 'multi_modal_data': this model reads only text"),
    ({"prompt": "x", "cache_salt": "s"}, "no 'cache_salt': use SamplingParams.cache_salt"),
    ({"text": "x"}, "no 'text': give prompt or prompt_token_ids"),
    ({5: "x"}, "no 5: give prompt or prompt_token_ids"),
    ({1, 2}, "text or lists of token ids"),
    ([], "at least one"),
    ("", "at least one"),
    ([[]], "at least one"),
    ([None], "a list of token ids"),
    ([b"abc"], "a list of token ids"),
    ([{"prompt_token_ids": [1.5]}], "whole numbers"),
    (["a", 5], "a list of token ids"),
    ([1, "a"], "a list of token ids"),
    ([1.0, 2.0], "whole numbers"),
    ([[1.0]], "whole numbers"),
    ([[1, [2]]], "whole numbers"),
    ([[[1]]], "whole numbers"),
    ([[1, None]], "whole numbers"),
    ([True, False], "whole numbers"),
    (np.array([1.5]), "whole numbers"),
    ([[-1]], "from 0 to 299"),
    ([[300]], "from 0 to 299"),
    ([[2**70]], "from 0 to 299"),
    ([[1] * 256], "shorten the prompt"),
    ("half \udc80", "UTF-8"),
]


@pytest.mark.parametrize(("prompt", "says"), PROMPTS_REFUSED, ids=lambda value: repr(value)[:40])
def test_prompts_that_are_none(prompt: Any, says: str, llm: LLM) -> None:
    refused(lambda: llm.generate(prompt, GREEDY), says)
    refused(lambda: llm.generate([*PROMPTS, prompt], GREEDY), "")
    assert not llm.engine.busy


@pytest.mark.parametrize(
    "prompt",
    [
        list(np.array(PROMPTS[0])),
        np.array(PROMPTS[0]),
        np.array([PROMPTS[0]], dtype=np.int32),
        torch.tensor(PROMPTS[0]),
        [torch.tensor(PROMPTS[0])],
        tuple(PROMPTS[0]),
        (tuple(PROMPTS[0]),),
        iter(PROMPTS[0]),
        {"prompt_token_ids": PROMPTS[0]},
        [{"prompt_token_ids": np.array(PROMPTS[0]), "multi_modal_data": None}],
    ],
    ids=lambda value: type(value).__name__,
)
def test_ids_in_other_clothes_are_ids(prompt: Any, llm: LLM, expected: list[list[int]]) -> None:
    output = llm.generate(prompt, GREEDY)[0]
    assert output.outputs[0].token_ids == expected[0]
    assert output.prompt_token_ids == PROMPTS[0]
    assert all(type(token) is int for token in output.prompt_token_ids)


@pytest.mark.parametrize("params", [{"temperature": 0}, [{}], "x", 5, [GREEDY, None], [GREEDY] * 2, []])
def test_params_that_are_none(params: Any, llm: LLM) -> None:
    refused(lambda: llm.generate([[1], [2], [3]], params), "one for all or one each")
    if not isinstance(params, list):
        refused(lambda: llm.stream([1], params), "one for all or one each")


# Requests that one engine cannot serve, beside others that it can

REQUESTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty": ([], {}, "at least one token"),
    "none": (None, {}, "a list of token ids"),
    "text": ("abc", {}, "a list of token ids"),
    "too long": ([1] * 256, {}, "shorten the prompt"),
    "token outside": ([1, 300], {}, "from 0 to 299"),
    "negative token": ([1, -1], {}, "from 0 to 299"),
    "token of another kind": ([1, 2.0], {}, "whole numbers"),
    "stop token outside": ([1], {"stop_token_ids": [300]}, "from 0 to 299"),
    "chosen token outside": ([1], {"logprobs": 0, "logprob_token_ids": [300]}, "from 0 to 299"),
    "bias outside": ([1], {"logit_bias": {300: 1.0}}, "from 0 to 299"),
    "bad word outside": ([1], {"bad_words_token_ids": [[1, 300]]}, "from 0 to 299"),
    "bad word that is no text": ([1], {"bad_words": ["\udc80"]}, "UTF-8"),
    "never fits": ([1] * 200, {"max_tokens": 55}, "raise num_pages"),
    "never fits without an end": ([1], {"max_tokens": None}, "raise num_pages"),
    "unknown drafter": ([1], {"speculation": "crystal"}, "unknown drafter 'crystal'; choose one of: "),
    "unknown rule": ([1], {"speculation": {"acceptance": "hope"}}, "choose one of: block, exact, rejection"),
    "trust with ngram": ([1], {"speculation": {"drafter": "ngram", "acceptance": "trust"}}, "mask"),
    "confidence with exact": ([1], {"speculation": {"drafter": "mask", "confidence": 0.5}}, "leave it out"),
    "confidence with ngram": ([1], {"speculation": {"drafter": "ngram", "confidence": 0.5}}, "leave it out"),
    "lookup with mask": ([1], {"speculation": {"drafter": "mask", "prompt_lookup_min": 2}}, "leave it out"),
    "lookup upside down": (
        [1],
        {"speculation": {"drafter": "ngram", "prompt_lookup_min": 9, "prompt_lookup_max": 3}},
        "at most prompt_lookup_max 3",
    ),
    "depth of nothing": ([1], {"speculation": {"drafter": "none", "depth": 2}}, "leave it out"),
    "ngram too deep": ([1], {"speculation": {"drafter": "ngram", "depth": 65}}, "lower it"),
    "mask too deep": ([1], {"speculation": {"drafter": "mask", "depth": 8}}, "deepest"),
    "window over the budget": (
        [1],
        {"speculation": {"drafter": "mask", "acceptance": "trust", "depth": 20}},
        "lower depth",
    ),
    "id in use": ([1], {}, "choose another"),
}


@pytest.mark.parametrize("what", REQUESTS)
def test_nothing_is_lost_beside_it(what: str, speaking: Path, expected: list[list[int]]) -> None:
    """Refused in the middle of a run: the others emit the same as without it, and no page is lost."""
    llm = LLM(
        speaking,
        drafter="none",
        mask_token_id=MASK,
        **{**OPTIONS, "num_pages": 12, "max_num_batched_tokens": 16},
    )
    engine, text = llm.engine, TextEngine(llm.engine)
    prompt, changes, says = REQUESTS[what]
    requests = [text.add(f"good {i}", ids, GREEDY) for i, ids in enumerate(PROMPTS)]
    for _ in range(3):
        text.step()
    before = (engine.ledger.counts(), len(engine.queue), asdict(engine.stats))
    name = "good 2" if what == "id in use" else "bad"
    refused(lambda: text.add(name, prompt, SamplingParams(**{"max_tokens": 4, **changes})), says)
    assert before == (engine.ledger.counts(), len(engine.queue), asdict(engine.stats))
    while engine.busy:
        text.step()
    assert [request.output_ids for request in requests] == expected
    engine.check()
    assert all(group["held"] == 0 for group in engine.ledger.counts().values())


def test_one_bad_prompt_takes_the_batch_back(llm: LLM, expected: list[list[int]]) -> None:
    """generate() refuses the whole call before anything runs; the next call is unaffected."""
    steps = llm.engine.stats.steps
    refused(lambda: llm.generate([*PROMPTS, [300]], GREEDY), "from 0 to 299")
    assert llm.engine.stats.steps == steps
    assert not llm.engine.busy
    llm.check()
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected


def test_a_bad_call_leaves_a_stream_alone(llm: LLM, expected: list[list[int]]) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    refused(lambda: llm.stream([300], GREEDY), "from 0 to 299")
    refused(lambda: llm.generate([PROMPTS[1], []], GREEDY), "at least one token")
    *_, last = stream
    assert last.outputs[0].token_ids == expected[0]
    llm.check()


def test_text_needs_a_tokenizer(speaking: Path) -> None:
    mute = LLM(speaking, drafter="none", skip_tokenizer_init=True, **OPTIONS)
    refused(lambda: mute.generate("text"), "give prompts as token ids")
    refused(lambda: mute.chat([{"role": "user", "content": "text"}]), "skip_tokenizer_init")
    refused(mute.get_tokenizer, "skip_tokenizer_init")
    refused(lambda: mute.generate([[1]], SamplingParams(stop="x")), "use stop_token_ids")
    refused(lambda: mute.generate([[1]], SamplingParams(bad_words=["x"])), "bad_words_token_ids")


def test_mask_tokens_need_an_id(speaking: Path) -> None:
    """The checkpoint names none: no drafter or rule that needs one is available, and the error says why."""
    plain = LLM(speaking, drafter="none", **OPTIONS)
    for speculation in ({"drafter": "mask", "depth": 2}, {"acceptance": "trust"}):
        params = SamplingParams(speculation={"drafter": "auto", **speculation})
        refused(lambda params=params: plain.generate([[1]], params), "give mask_token_id")  # type: ignore[misc]


# Engines that cannot be

ENGINES: list[tuple[dict[str, Any], str]] = [
    ({"drafters": "none"}, "known: acceptance"),
    ({"drafter": "crystal"}, "unknown drafter 'crystal'; choose one of: "),
    ({"drafter": ["none"]}, "a name"),
    ({"drafter": "mask"}, "give mask_token_id"),
    ({"drafter": "mask", "depth": 3}, "give mask_token_id"),
    ({"drafter": "mask", "mask_token_id": MASK, "depth": 8}, "deepest"),
    ({"drafter": "mask", "mask_token_id": [MASK, 298], "depth": 3}, "lower depth"),
    ({"drafter": "mask", "mask_token_id": MASK, "acceptance": "trust", "depth": 65}, "deepest"),
    ({"drafter": "ngram", "depth": 65}, "lower it"),
    ({"drafter": "ngram", "prompt_lookup_min": 0}, "at least 1"),
    ({"drafter": "ngram", "acceptance": "trust"}, "it works with: mask"),
    ({"drafter": "ngram", "confidence": 0.5}, "leave it out"),
    ({"drafter": "none", "depth": 1}, "leave it out"),
    ({"acceptance": "hope"}, "choose one of: block, exact, rejection"),
    ({"acceptance": "trust"}, "give mask_token_id"),
    ({"confidence": math.nan}, "above 0.0"),
    ({"depth": -1}, "from 0"),
    ({"mask_token_id": 300}, "from 0 to 299"),
    ({"mask_token_id": -1}, "from 0 to 299"),
    ({"mask_token_id": 1.5}, "a list of token ids"),
    ({"mask_token_id": "<mask>"}, "a list of token ids"),
    ({"mask_token_id": True}, "whole numbers"),
    ({"drafter_model": "x"}, "give a directory"),
    ({"dtype": "int8"}, "choose one of: auto, bfloat16"),
    ({"dtype": None}, "choose one of: auto, bfloat16"),
    ({"dtype": torch.float32}, "choose one of: auto, bfloat16"),
    ({"device": "abacus"}, "choose auto, cpu, cuda"),
    ({"device": None}, "choose auto, cpu, cuda"),
    ({"device": "mps"}, "choose auto, cpu, cuda"),
    ({"device": "cuda:63"}, "use device='cpu'"),
    ({"attention": "guess"}, "choose one of:"),
    ({"capture": "often"}, "choose startup or lazy"),
    ({"device": "cpu", "capture": "lazy"}, "so capture would have no effect"),
    ({"device": "cpu", "capture_memory": 1.0}, "so capture_memory would have no effect"),
    ({"device": "cpu", "enforce_eager": True}, "enforce_eager would have no effect"),
    ({"check_pages": True, "capture_memory": 1.0}, "with enforce_eager or check_pages nothing is captured"),
    ({"attention": ["reference"]}, "choose one of:"),
    ({"deterministic": "yes"}, "True or False"),
    ({"enable_prefix_caching": "no"}, "True or False"),
    ({"strict": 1}, "True or False"),
    ({"skip_tokenizer_init": None}, "True or False"),
    ({"page_size": 0}, "from 1"),
    ({"page_size": 1.5}, "an integer"),
    ({"num_pages": 0}, "from 1"),
    ({"num_pages": True}, "an integer"),
    ({"num_pages": 2**31 - 1}, "lower num_pages"),
    ({"page_size": 2**31 - 1}, "lower num_pages"),
    ({"num_pages": None, "kv_memory_fraction": "half"}, "above 0.0"),
    ({"num_pages": None, "kv_memory_fraction": math.nan}, "above 0.0"),
    ({"num_pages": None, "kv_memory_fraction": 1e-12}, "raise kv_memory_fraction"),
    ({"kv_memory_fraction": 0.5}, "give one of them"),
    ({"max_num_seqs": 0}, "from 1"),
    ({"max_num_batched_tokens": 0}, "from 1"),
    ({"max_model_len": 257}, "lower it"),
    ({"max_model_len": 1}, "from 2"),
    ({"max_model_len": "x"}, "an integer"),
]


@pytest.mark.parametrize(("options", "says"), ENGINES, ids=repr)
def test_engines_that_cannot_be(options: dict[str, Any], says: str, speaking: Path) -> None:
    refused(lambda: LLM(speaking, **{**OPTIONS, **options}), says)


def test_a_mask_id_may_be_numpys() -> None:
    for value in (np.int64(3), np.array([3]), [np.int32(3)], 3):
        assert EngineConfig(mask_token_id=value).mask_token_id == (3,)  # type: ignore[arg-type]


# Checkpoints


def edited(**changes: Any) -> Callable[[Path], object]:
    """Change config.json; a value of ... removes the key."""

    def edit(path: Path) -> None:
        config = {**json.loads((path / "config.json").read_text()), **changes}
        (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))

    return edit


def file(name: str, content: bytes | str | None) -> Callable[[Path], object]:
    """Write a file, or remove it."""

    def edit(path: Path) -> None:
        if content is None:
            (path / name).unlink()
        else:
            (path / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return edit


def cut(to: int) -> Callable[[Path], object]:
    """Keep the first `to` bytes of the weights; if negative, all but that many."""
    return lambda path: (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:to])


def reweighed(**changes: torch.Tensor | None) -> Callable[[Path], object]:
    """Replace tensors (underscores for dots), or remove them."""

    def edit(path: Path) -> None:
        weights: dict[str, Any] = dict(load_file(path / WEIGHTS))
        weights |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
        save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, path / WEIGHTS)

    return edit


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (file("config.json", None), "give a Hugging Face checkpoint directory"),
    "config is no JSON": (file("config.json", "{"), "config.json cannot be read"),
    "config is empty": (file("config.json", ""), "config.json cannot be read"),
    "config is a list": (file("config.json", "[]"), "config.json cannot be read"),
    "config is a number": (file("config.json", "5"), "config.json cannot be read"),
    "config is binary": (file("config.json", b"\xff\xfe\x00"), "config.json cannot be read"),
    "no type": (edited(model_type=..., architectures=...), "unknown model type None"),
    "unknown type": (edited(model_type="crystal"), "unknown model type 'crystal'"),
    "unsupported type": (edited(model_type="gpt2"), f"choose one of: {', '.join(MODELS)}"),
    "quantised": (edited(quantization_config={"quant_method": "awq"}), "give the checkpoint that they"),
    "activation": (edited(hidden_act="relu"), "supported: silu"),
    "rope": (edited(rope_parameters={"rope_type": "spiral"}), "supported: default, linear"),
    "rope half said": (edited(rope_parameters={"rope_type": "yarn"}), "config.json"),
    "width is text": (edited(hidden_size="wide"), "config.json"),
    "width is negative": (edited(hidden_size=-1), "config.json"),
    "width is missing": (edited(hidden_size=None), "config.json"),
    "width is another": (edited(hidden_size=96), "misshapen"),
    "heads do not divide": (edited(num_key_value_heads=3), "no multiple"),
    "no heads": (edited(num_attention_heads=0, head_dim=...), "config.json"),
    "odd heads": (edited(head_dim=7), "config.json"),
    "no context": (edited(max_position_embeddings=0), "max_position_embeddings must be"),
    "no layers": (edited(num_hidden_layers=0, layer_types=...), "at least 1"),
    "vocabulary is negative": (edited(vocab_size=-3), "config.json"),
    "dtype": (edited(dtype="crystal"), "config.json"),
    "end of text": (edited(eos_token_id="x"), "config.json"),
    "mask token": (edited(mask_token_id=300), "from 0 to 299"),
    "mask token is text": (edited(mask_token_id="<mask>"), "token ids"),
    "more layers than weights": (edited(num_hidden_layers=3, layer_types=...), "missing: model.layers.2."),
    "fewer layers than weights": (
        edited(num_hidden_layers=1, layer_types=...),
        "unexpected: model.layers.1.",
    ),
    "head untied": (edited(tie_word_embeddings=False), "missing: lm_head.weight"),
    "generation config": (file("generation_config.json", "{"), "copy it from the model again"),
    "end of text again": (file("generation_config.json", '{"eos_token_id": "x"}'), "copy it from the model"),
    "no tokenizer": (file("tokenizer.json", None), "skip_tokenizer_init"),
    "broken tokenizer": (file("tokenizer.json", "{"), "copy the model's tokenizer files again"),
    "no weights": (file(WEIGHTS, None), "save_pretrained"),
    "weights are empty": (cut(0), "copy it again"),
    "weights end in the header": (cut(100), "copy it again"),
    "weights end early": (cut(-1), "copy it again"),
    "weights are rubbish": (file(WEIGHTS, bytes(range(256)) * 20), "copy it again"),
    "index is no JSON": (file(INDEX, "{"), "copy it again"),
    "index is a list": (file(INDEX, "[]"), "copy it again"),
    "index is binary": (file(INDEX, b"\xff"), "copy it again"),
    "index is nested": (file(INDEX, "[" * 100_000), "copy it again"),
    "index of numbers": (file(INDEX, '{"weight_map": {"a": 5}}'), "copy it again"),
    "shard is absent": (file(INDEX, '{"weight_map": {"a": "b.safetensors"}}'), "copy the missing shards"),
    "missing": (reweighed(model__norm__weight=None), "missing: model.norm.weight"),
    "unexpected": (reweighed(spare=torch.zeros(2)), "unexpected: spare"),
    "misshapen": (reweighed(model__norm__weight=torch.zeros(63)), "is [63], config.json says [64]"),
    "one dimension more": (reweighed(model__norm__weight=torch.zeros(64, 1)), "is [64, 1]"),
    "whole numbers": (reweighed(model__norm__weight=torch.ones(64, dtype=torch.int32)), "(torch.int32)"),
    "complex numbers": (
        reweighed(spare=torch.ones(2, dtype=torch.complex64)),
        "stores spare as C64; supported: bfloat16, float16, float32, float64, float8_e4m3fn with scales; give a check",
    ),
    "in two files": (
        lambda path: save_file({"model.norm.weight": torch.ones(64)}, path / "other.safetensors"),
        "other.safetensors both store model.norm.weight; keep the model's own",
    ),
}


@pytest.mark.parametrize("what", CHECKPOINTS)
def test_checkpoints_that_are_broken(what: str, speaking: Path, tmp_path: Path) -> None:
    path = tmp_path / "copy"
    shutil.copytree(speaking, path)
    spoil, says = CHECKPOINTS[what]
    spoil(path)
    refused(lambda: LLM(path, drafter="none", **OPTIONS), says)


def test_all_that_is_wrong_with_the_weights_is_said_at_once(speaking: Path, tmp_path: Path) -> None:
    path = tmp_path / "copy"
    shutil.copytree(speaking, path)
    norm = "model__layers__0__input_layernorm__weight"
    reweighed(**{norm: torch.zeros(2), "model__norm__weight": None, "spare": torch.zeros(2)})(path)
    for says in ("missing: model.norm", "unexpected: spare", "misshapen: model.layers.0.input_layernorm"):
        refused(lambda: LLM(path, drafter="none", **OPTIONS), says)


def test_models_that_are_not_there(speaking: Path, tmp_path: Path) -> None:
    for model in (tmp_path / "nowhere", speaking / "config.json", speaking / WEIGHTS, 5, "\0"):
        refused(lambda model=model: LLM(model, **OPTIONS), "give a directory")  # type: ignore[misc]
    refused(lambda: LLM(tmp_path, **OPTIONS), "no config.json")
