"""What `--drafters` accepts, and what it means."""

from __future__ import annotations

from typing import Any

import pytest

from stridelm.bench.variants import plain, read_variants
from stridelm.engine.engine import Engine


def labels(engine: Engine, entries: str, *depths: int) -> list[str]:
    return [v.label for v in read_variants(entries.split(",") if entries else [], depths, engine.loaded.target)]


def test_an_entry_without_a_depth_runs_at_every_depth(engine: Engine) -> None:
    assert labels(engine, "ngram,mask:trust:0.9", 1, 3) == [
        "ngram@1", "ngram@3", "mask@1:trust:0.9*", "mask@3:trust:0.9*",
    ]  # fmt: skip


def test_simulated_acceptance_shows_its_length(engine: Engine) -> None:
    entries = "ngram@4:synthetic:2.5,mask@3:synthetic:2,mask@3:synthetic-trust:2.25"
    assert labels(engine, entries) == [f"{entry}*" for entry in entries.split(",")]
    variants = read_variants([entries.split(",")[0], "mask@1:trust"], [], engine.loaded.target)
    assert [variant.simulated for variant in variants] == [True, False]


def test_depths_that_are_chosen(engine: Engine) -> None:
    """An entry of its own beside the drafter at its usual depth, which `--depth` does not change."""
    entries = ["ngram@auto", "mask@auto+draft_sample_method=greedy", "ngram@auto:synthetic:2.5"]
    found = read_variants([*entries, "ngram"], [2], engine.loaded.target)
    assert [variant.label.rstrip("*") for variant in found] == [*entries, "ngram@2"]
    assert [variant.speculation.adaptive for variant in found] == [True, True, True, False]


def test_what_rules_promise(engine: Engine) -> None:
    """Plain decoding's tokens, its distribution, or neither; at temperature 0 the first two are the same."""
    entries = ["ngram@2", "ngram@2:rejection", "ngram@2:block", "ngram@2:typical", "ngram@2:relaxed"]
    variants = read_variants(entries, [], engine.loaded.target)
    assert [variant.lossless for variant in variants] == [True, True, True, False, False]
    assert [variant.repeats(1.0) for variant in variants] == [True, False, False, False, False]
    assert [variant.repeats(0.0) for variant in variants] == [variant.lossless for variant in variants]


def test_a_depth_of_its_own_wins(engine: Engine) -> None:
    assert labels(engine, "ngram@8,mask@2", 1) == ["ngram@8", "mask@2"]


def test_without_depths_drafters_choose(engine: Engine) -> None:
    assert all("@" in label for label in labels(engine, "ngram,mask"))


def test_plain_decoding_is_not_a_variant_under_any_name(engine: Engine) -> None:
    assert labels(engine, "none,ngram@0,ngram", 2) == ["ngram@2"]
    assert plain(engine.loaded.target).label == "plain"


def test_repeated_entries_run_once(engine: Engine) -> None:
    assert labels(engine, "ngram,ngram@2", 2) == ["ngram@2"]


def test_no_entry_stands_for_all_that_the_model_can_run(engine: Engine) -> None:
    assert {label.partition("@")[0] for label in labels(engine, "", 1)} >= {"ngram", "mask"}


def test_options(engine: Engine) -> None:
    """They are reported in the order of Speculation's fields, and distinguish variants."""
    entries = [
        "ngram@4+prompt_lookup_max=6+prompt_lookup_min=2",
        "ngram@4+prompt_lookup_min=2",
        "mask@2+draft_sample_method=greedy:rejection",
        "suffix@6+suffix_decoding_min_token_prob=1e-05+suffix_decoding_max_spec_factor=2",
        "ngram@4+posterior_alpha=0.25:typical",
        "ngram@4+prompt_lookup_min=3:synthetic:2.5",
    ]
    found = read_variants(entries, [], engine.loaded.target)
    assert [variant.label for variant in found] == [
        "ngram@4+prompt_lookup_min=2+prompt_lookup_max=6",
        entries[1],
        entries[2],
        "suffix@6+suffix_decoding_max_spec_factor=2+suffix_decoding_min_token_prob=1e-05",
        entries[4] + "*",
        entries[5] + "*",
    ]
    asked: Any = found[3].speculation
    assert asked.suffix_decoding_min_token_prob == 1e-5
    assert read_variants([v.label.rstrip("*") for v in found], [], engine.loaded.target) == found


def test_options_run_at_every_depth(engine: Engine) -> None:
    assert labels(engine, "ngram+prompt_lookup_min=3,mask@1", 2, 4) == [
        "ngram@2+prompt_lookup_min=3", "ngram@4+prompt_lookup_min=3", "mask@1",
    ]  # fmt: skip


def test_trees(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """For a drafter with trees: levels are the depth, and a tree is shown in the form in which it can be written."""
    kind = "stridelm.draft.medusa.drafter.MedusaDrafter"
    monkeypatch.setattr(f"{kind}.why_not", classmethod(lambda cls, target: None))
    monkeypatch.setattr(f"{kind}.usual_depth", classmethod(lambda cls, target: 3))
    entries = ["medusa@3+draft_topk=4+num_draft_tokens=16", "medusa+token_tree=[(0,), (1,), (0, 0)]"]
    found = read_variants(entries, [], engine.loaded.target)
    assert [v.label for v in found] == [entries[0], "medusa@2+token_tree=[(0,),(1,),(0,0)]"]
    assert read_variants([v.label for v in found], [], engine.loaded.target) == found


def test_a_label_asks_for_the_same_again(engine: Engine) -> None:
    first = read_variants(["mask@3:trust:0.85", "ngram@2", "ngram@2:synthetic:1.5"], [], engine.loaded.target)
    again = read_variants([v.label.rstrip("*") for v in first], [], engine.loaded.target)
    assert again == first


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("nobody", "unknown drafter"),
        ("ngram@", "cannot be read"),
        ("ngram@x", "cannot be read"),
        ("none@auto", "depth auto would have no effect with drafter 'none'"),
        ("mask@auto:trust", "depth auto would have no effect with acceptance 'trust'"),
        ("mask:", "cannot be read"),
        ("mask:hope", "unknown acceptance rule"),
        ("mask:trust:high", "not a number"),
        ("mask:exact:0.9", "no effect"),
        ("mask:synthetic", "write synthetic:2.5"),
        ("mask:synthetic:high", "acceptance_length 'high' in 'mask:synthetic:high' is not a number"),
        ("mask@1:synthetic:2.5", "at depth 1 a step emits 2"),
        ("ngram:trust", "does not work with drafter"),
        ("mask:trust:2", "confidence must be"),
        ("ngram+hope=1", "unknown option 'hope' in 'ngram.hope=1'; known: posterior_threshold, .*prompt_lookup_min"),
        ("ngram+depth=2", "depth is not an option in 'ngram.depth=2', it has its own place; write NAME"),
        ("mask+confidence=0.9:trust", "confidence is not an option"),
        ("ngram+prompt_lookup_min", "cannot be read"),
        ("ngram+prompt_lookup_min=", "cannot be read"),
        ("ngram+prompt_lookup_min=2@3", "cannot be read"),
        ("ngram:exact+prompt_lookup_min=2", "cannot be read"),
        ("ngram+prompt_lookup_min=2+prompt_lookup_min=3", "prompt_lookup_min is given twice"),
        ("ngram+prompt_lookup_min=0.5", "prompt_lookup_min must be an integer"),
        ("mask+draft_sample_method=hot", "draft_sample_method must be greedy or probabilistic; got 'hot'"),
        ("ngram+draft_topk=4", "draft_topk would have no effect"),
    ],
)
def test_bad_entries_name_the_remedy(engine: Engine, entry: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_variants([entry], [], engine.loaded.target)
