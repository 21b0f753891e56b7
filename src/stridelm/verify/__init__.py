"""Accepting: the one door through which tokens become output, and the rules beside it."""

from __future__ import annotations

from stridelm.registry import Registry
from stridelm.verify.rule import Rule

RULES: Registry[type[Rule]] = Registry("acceptance rule")
RULES.add("exact", "stridelm.verify.exact:Exact")
RULES.add("rejection", "stridelm.verify.rejection:Rejection")
RULES.add("block", "stridelm.verify.block:Block")
RULES.add("typical", "stridelm.verify.typical:Typical")
RULES.add("relaxed", "stridelm.verify.relaxed:Relaxed")
RULES.add("trust", "stridelm.verify.trust:Trust")
RULES.add("synthetic", "stridelm.verify.synthetic:Synthetic")
RULES.add("synthetic-trust", "stridelm.verify.synthetic:SyntheticTrust")
