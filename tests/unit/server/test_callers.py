"""Who is the same client."""

from __future__ import annotations

import pytest

from stridelm.params import SamplingParams
from stridelm.server.callers import Keys
from stridelm.server.engine_client import Prompt, _job
from stridelm.server.messages import packed


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff:ffff:ffff:ffff", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("testclient", "testclient", True),
    ],
)
def test_without_keys_an_address_is_a_client(one: str, other: str, same: bool) -> None:
    """Of IPv6 its network. Such clients take turns, but share cached state; with keys, addresses say nothing, and no
    cached state is shared."""
    first, second = (Keys([], []).caller("", address) for address in (one, other))
    assert first is not None and second is not None and first.operator
    assert (first.tenant == second.tenant) == same
    keys, prompt = Keys(["a", "b"], []), Prompt(packed([1]), SamplingParams())
    with_keys = [keys.caller(f"Bearer {key}", address) for key in "ab" for address in (one, other)]
    assert len({caller.tenant for caller in with_keys if caller is not None}) == 2
    assert "cache_salt" not in _job(prompt, ["x"], first).params
    assert len({_job(prompt, ["x"], caller).params["cache_salt"] for caller in with_keys if caller is not None}) == 2
