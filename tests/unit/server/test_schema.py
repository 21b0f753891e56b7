"""Requests generated from the server's own OpenAPI document."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import positive_data_acceptance

from stridelm.server.openapi import ERRORS, GENERATING
from support.doubles.server import Served, serving, settle

DRAWN = settings(
    max_examples=15,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


TOKEN = {"type": "integer", "minimum": 0}


def narrow(node: dict[str, Any]) -> dict[str, Any]:
    """A schema of the document, restricted: most mixtures of many fields contradict one another, an empty text leaves
    nothing to continue, and an integer is a token or exceeds 64 bits."""
    if node == TOKEN:
        return {"anyOf": [{**TOKEN, "maximum": 255}, {**TOKEN, "minimum": 1 << 64}]}
    if "properties" in node:
        node["maxProperties"] = len(node.get("required", ())) + 2
    if node.get("type") == "string":
        node.setdefault("minLength", 1)
    return node


def test_requests_made_from_the_document(tmp_path: Path) -> None:
    """Valid or not, whole or streamed, each gets a response that the document lists, never a server error, and nothing
    is left behind."""
    answered: dict[str, Counter[tuple[int, str]]] = defaultdict(Counter)
    # A short context and little time, because a request may ask for 128 samples of any length.
    with serving(tmp_path, "--max-model-len", "24", "--request-timeout", "2") as served, served.http() as client:

        def told() -> str:
            answer = client.post("/v1/completions", json={"prompt": "def f(", "temperature": 0})
            return answer.raise_for_status().json()["choices"][0]["text"]

        def ask(case: Any) -> int:
            answer = case.call(base_url=served.url, timeout=60)
            # What the document allows may still be refused: some fields go with others.
            case.validate_response(answer, excluded_checks=[positive_data_acceptance])
            kind = answer.headers.get("content-type", [""])[0].partition(";")[0]
            answered[case.operation.label][answer.status_code, kind] += 1
            return answer.status_code

        before = told()
        document = client.get("/openapi.json").json()
        narrowed = json.loads(json.dumps(document), object_hook=narrow)
        narrowed["components"]["schemas"]["GenerateRequest"]["oneOf"] = [
            {"required": ["text"]},
            {"required": ["input_ids"]},
        ]
        for mode, source in ((GenerationMode.POSITIVE, narrowed), (GenerationMode.NEGATIVE, document)):
            for result in schemathesis.openapi.from_dict(source).get_all_operations():
                assert isinstance(result, Ok), result
                operation = result.ok()
                if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
                    continue  # nothing of it could be wrong

                @DRAWN
                @given(operation.as_strategy(mode))
                def one(case: Any) -> None:
                    if ask(case) == 200 and case.path in GENERATING:
                        case.body["stream"] = True
                        ask(case)

                one()

        paths = document["paths"].items()
        assert set(answered) == {f"{method.upper()} {path}" for path, methods in paths for method in methods}
        for path in GENERATING:
            wanted = {(200, "application/json"), (200, "text/event-stream"), (400, "application/json")}
            assert wanted <= set(answered[f"POST {path}"])
        settle(served)
        assert client.post("/flush_cache").status_code == 200  # refused while anything is open
        assert told() == before


def test_errors_in_the_document(served: Served) -> None:
    """A route that generates knows them all, the page that of a server called by another name; what is not valid is
    400, as everywhere in OpenAI's API."""
    with served.http() as client:
        paths = client.get("/openapi.json").json()["paths"]
    assert set(paths["/v1/completions"]["post"]["responses"]) == {"200", *ERRORS}
    assert set(paths["/"]["get"]["responses"]) == {"200", "403"}
    assert not any("422" in operation["responses"] for path in paths.values() for operation in path.values())
