"""Block verification: a chain is verified as a whole, not token by token, which accepts more of it while the output
keeps its distribution (Sun et al. 2024, arXiv 2403.10444, algorithm 2).

With p and q the target's and the draft's distributions after the first i of the draft's n tokens:

    w_0 = 1,  w_i = min(w_{i-1} p(x_i) / q(x_i), 1)         how much of the target these i tokens may stand for
    S_i = sum over tokens of (w_i p - q)+                   what is left of it if the draft ends here
    h_i = S_i / (S_i + 1 - w_i) for i < n,  h_n = w_n       chance that the first i are accepted

The largest accepted i counts, and the next token is drawn from (w_i p - q)+, or from p after all n.

Legend: R spans, V vocabulary.
"""

from __future__ import annotations

import torch

from stridelm.batch import Verdict
from stridelm.verify.attempt import Weighing, candidate_rows, chances, end_at, target_at, tokens_at
from stridelm.verify.rejection import at, less
from stridelm.verify.rule import VerifyInput


class Block(Weighing):
    name = "block"
    lossless = True
    reads_probs = True
    chains_only = True

    def decide(self, inputs: VerifyInput) -> Verdict:
        draft, chance_RK = inputs.draft, chances(inputs)
        # Drafters that branch are refused when a request is settled. Where another rule's spans have such a drafter,
        # the step's draft is not a chain, and there is no flag for these spans alone.
        assert draft.is_chain or len(inputs.spans) < len(inputs.batch.spans), "block verification takes chains"
        candidates_RW = draft.valid_candidates
        last = leaf = torch.full_like(inputs.slots, -1)  # newest row looked at; newest row accepted
        w, p_RV = torch.ones_like(chance_RK[:, 0]), target_at(inputs, -1)
        weights_RV = p_RV

        for row in candidate_rows(draft):
            child = candidates_RW[:, row] & (draft.parents[:, row] == last)
            token = tokens_at(draft, row)
            q_RV = None if draft.probs is None else draft.probs[:, row]
            rest_RV = less(w.float()[:, None] * p_RV, q_RV, token)
            mass = rest_RV.sum(-1)
            # In a chain, row i hangs from node i. Where no mass is left, the draft cannot end.
            enough = child & (chance_RK[:, row] * (mass + 1 - w) < mass)
            leaf = torch.where(enough, last, leaf)
            weights_RV = torch.where(enough[:, None], rest_RV, weights_RV)
            w = torch.where(child, (w * at(p_RV, token) / at(q_RV, token)).clamp(max=1.0), w)
            p_RV = torch.where(child[:, None], target_at(inputs, row), p_RV)
            last = torch.where(child, row, last)

        accepts_all = chance_RK.gather(1, last[:, None] + 1)[:, 0] <= w
        leaf = torch.where(accepts_all, last, leaf)
        return end_at(inputs, leaf, torch.where(accepts_all[:, None], p_RV, weights_RV))
