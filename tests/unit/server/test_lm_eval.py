"""lm-evaluation-harness, run with the commands of docs/evaluation.md, gets the results of the offline API over HTTP."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from stridelm import SamplingParams
from stridelm.builtin import builtin_path
from stridelm.text.tokenizer import Tokenizer
from support.doubles.server import Served, llm, offline

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: make test EXTRAS=dev,harness")

PAGE = Path(__file__).parents[3] / "docs" / "evaluation.md"
TASKS = Path(__file__).parent / "tasks"
DOCUMENTS = [json.loads(line) for line in (TASKS / "documents.jsonl").read_text(encoding="utf-8").splitlines()]
OWN_TASKS = """
from functools import partialmethod
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager

TaskManager.__init__ = partialmethod(TaskManager.__init__, include_defaults=False)
cli_evaluate()
"""
"""The command `lm_eval` without its own 14,000 tasks, which take longer to list than everything else takes."""


def documented(model: str, url: str) -> list[str]:
    """The page's command for one of the harness's models, with our server, checkpoint and tasks."""
    ours = {
        "http://127.0.0.1:30000": url,
        "MODEL": str(builtin_path()),
        "NAME": "built-in",
        "TASK": "stride_choose,stride_complete",
    }
    lines = PAGE.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    [words] = [shlex.split(line) for line in lines if line.startswith(f"lm_eval --model {model} ")]
    for left_open, one in ours.items():
        words = [word.replace(left_open, one) for word in words]
    return words


def evaluate(command: list[str], out: Path) -> None:
    """Run it without network; its results are under `out`."""
    command = [sys.executable, "-c", OWN_TASKS, *command[1:], "--include_path", "."]
    command += ["--log_samples", "--output_path", str(out)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(out / "home")}
    done = subprocess.run(command, cwd=TASKS, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def samples(out: Path, task: str) -> list[dict[str, Any]]:
    """The harness's log of a task, document by document."""
    [log] = out.rglob(f"samples_{task}_*.jsonl")
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return sorted(lines, key=lambda line: line["doc_id"])


def figure(out: Path, task: str, metric: str) -> float:
    [report] = out.rglob("results_*.json")
    return json.loads(report.read_text(encoding="utf-8"))["results"][task][f"{metric},none"]


@cache
def scored(text: str, continuation: str) -> tuple[float, bool]:
    """A continuation's log-probability by the offline API, and whether all of its tokens are the argmax."""
    [out] = llm().generate([text + continuation], SamplingParams(max_tokens=1, prompt_logprobs=1))
    start = len(Tokenizer.load(builtin_path()).encode(text))
    assert out.prompt_logprobs is not None
    entries: list[Any] = list(zip(out.prompt_logprobs[start:], out.prompt_token_ids[start:], strict=True))
    greedy = all(entry[token].logprob == max(one.logprob for one in entry.values()) for entry, token in entries)
    return sum(entry[token].logprob for entry, token in entries), greedy


def share(said: list[str], wanted: list[str]) -> Any:
    """How often the two agree; a task in which they never or always do would show nothing."""
    found = mean(one == other for one, other in zip(said, wanted, strict=True))
    assert 0 < found < 1
    return pytest.approx(found)


@pytest.mark.parametrize("model", ["local-completions", "sglang-generate"])
def test_reads_what_offline_says(served: Served, tmp_path: Path, model: str) -> None:
    """Each choice's log-probability, each completion, and the scores computed from them."""
    evaluate(documented(model, served.url), tmp_path)
    scores = [scored(one["text"], choice) for one in DOCUMENTS for choice in one["choices"]]
    told = [pair for sample in samples(tmp_path, "stride_choose") for pair in sample["filtered_resps"]]
    assert [float(logprob) for logprob, _ in told] == pytest.approx([logprob for logprob, _ in scores], abs=1e-4)
    if model == "local-completions":  # the other reads it the wrong way round, as the page says
        assert [greedy == "True" for _, greedy in told] == [greedy for _, greedy in scores]
    texts = [one["text"] for one in DOCUMENTS]
    completions = [one.text for one in offline(texts, temperature=0, max_tokens=24, stop=["\n"], speculation="off")]
    assert [sample["filtered_resps"] for sample in samples(tmp_path, "stride_complete")] == [[c] for c in completions]
    answers = [one["choices"][one["answer"]] for one in DOCUMENTS]
    chosen = [max(one["choices"], key=lambda choice: scored(one["text"], choice)) for one in DOCUMENTS]
    assert figure(tmp_path, "stride_choose", "acc") == share(chosen, answers)
    assert figure(tmp_path, "stride_complete", "exact_match") == share(completions, answers)
