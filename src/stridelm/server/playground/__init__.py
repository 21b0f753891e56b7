"""GET /: a page to try the model, and to see which of its tokens were guessed.

The page is one file. Its content security policy allows only the script and the style in that file, and requests only
to this server: a model's output cannot become part of the page.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from stridelm.server.replies import json_reply
from stridelm.server.service import Service
from stridelm.verify import RULES

router = APIRouter()

LOSSY = ("trust",)
"""Rules offered in addition to the lossless ones."""
PAGE = (Path(__file__).parent / "index.html").read_bytes()


def _hashes(element: str) -> str:
    """The hash of each such element's content (https://www.w3.org/TR/CSP3/#grammardef-hash-source)."""
    contents = re.findall(rf"<{element}>(.*?)</{element}>".encode(), PAGE, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(content).digest()).decode() for content in contents]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@router.get("/", response_model=None)
async def page() -> Response:
    """The page itself, which contains nothing about the model."""
    return Response(PAGE, headers=HEADERS, media_type="text/html")


@router.get("/playground/facts", response_model=None)
async def facts(request: Request) -> Response:
    """What the page shows: the model, its default drafter, and the drafters and rules to choose from."""
    service: Service = request.app.state.service
    ready = service.ready
    rules = [_rule(name) for name in RULES if RULES.get(name).lossless or name in {*LOSSY, ready.acceptance}]
    return json_reply(
        {
            "model": service.names[0],
            "drafter": ready.drafter,
            "depth": ready.depth,
            "acceptance": ready.acceptance,
            "context": ready.context,
            "device": ready.device,
            "dtype": ready.dtype,
            "drafters": [name for name in ready.drafters if name != "none"],
            "rules": rules,
        }
    )


def _rule(name: str) -> dict[str, Any]:
    """coupled: the text is the same as without speculation. own_first: of a step's tokens the first is the model's own,
    not the last."""
    rule = RULES.get(name)
    return {"name": name, "lossless": rule.lossless, "coupled": rule.coupled, "own_first": rule.trusts_probes}
