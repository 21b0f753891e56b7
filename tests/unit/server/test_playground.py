"""The page at /, in a real browser against a real server; a stand-in gives the responses that a server would not."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from stridelm.server.errors import unauthorised
from support.doubles.server import PROMPT, Served, gauges, settle

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request, Route

WAIT_MS = 120_000
TOKENS = 40
FIELDS = ("drafter", "acceptance", "depth", "temperature", "seed", "max_tokens", "order")
IDLE = "#run:not([aria-disabled])"


def need(there: bool, what: str) -> None:
    """Skip if it is not installed; fail where every test is meant to run."""
    if there:
        return
    reason = f"the page is tested with {what}, which is not installed"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    need(importlib.util.find_spec("playwright") is not None, "the Python package playwright")
    path = shutil.which("chromium")
    need(path is not None, "the browser chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Sheet:
    """The page in its own tab, and the browser's complaints about it."""

    page: Page
    served: Served
    refusals: bool = False
    """Whether a request is expected to fail: browsers complain about that too."""
    complaints: list[str] = field(default_factory=list)

    def open(self) -> Sheet:
        self.page.goto(self.served.url)
        self.page.wait_for_selector("#facts:not(:empty)")
        return self

    def fill(self, **values: object) -> Sheet:
        for name, value in values.items():
            place = self.page.locator(f"[name={name}]")
            if name in ("drafter", "acceptance", "order"):
                place.select_option(str(value))
            else:
                place.fill(str(value))
        return self

    def run(self) -> Sheet:
        self.page.click("#run")
        return self.wait()

    def wait(self) -> Sheet:
        self.page.wait_for_selector(IDLE, timeout=WAIT_MS)
        return self

    def text(self, selector: str) -> str:
        return self.page.locator(selector).text_content() or ""

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def states(self) -> list[str | None]:
        return [self.page.locator(f"#{pane}").get_attribute("data-state") for pane in ("drafted", "plain")]

    def overflow(self) -> int:
        return self.page.evaluate("document.scrollingElement.scrollWidth - innerWidth")

    def unseen(self) -> float:
        """Pixels of output below what is in view, of those that can be scrolled to; fails if all of it is in view."""
        hidden, below = self.page.eval_on_selector(
            "#drafted .output",
            "({scrollHeight: all, scrollTop: top, clientHeight: seen}) => [all - seen, all - top - seen]",
        )
        assert hidden > 0
        return below

    def answer(self, *events: dict[str, Any], at: str = "**/v1/completions") -> None:
        """Stand in for the model: every completion is these events."""
        body = "".join(f"data: {json.dumps(one)}\n\n" for one in events) + "data: [DONE]\n\n"
        self.page.route(at, lambda route: route.fulfill(body=body, content_type="text/event-stream"))


@pytest.fixture
def sheet(served: Served, browser: Browser) -> Iterator[Sheet]:
    """The browser must not have complained, and must not have sent requests elsewhere."""
    with tab(browser) as page:
        sheet = Sheet(page, served)
        others: list[str] = []
        page.on("pageerror", lambda error: sheet.complaints.append(str(error)))
        page.on("console", lambda message: sheet.complaints.append(message.text))
        page.on("request", lambda request: others.append(request.url))
        yield sheet
    refused = [text for text in sheet.complaints if text.startswith("Failed to load resource")]
    assert [text for text in sheet.complaints if text not in refused] == []
    assert sheet.refusals or not refused
    assert [url for url in others if not url.startswith((f"{served.url}/", "data:image/svg+xml,"))] == []


def tab(browser: Browser, **options: Any) -> AbstractContextManager[Page]:
    page = browser.new_page(**options)
    page.set_default_timeout(WAIT_MS)
    return page


def event(ids: list[int], texts: list[str], accepted: int = 0, last: bool = False, **more: Any) -> dict[str, Any]:
    choice: dict[str, Any] = {"text": "".join(texts), "token_ids": ids, "token_texts": texts, "accepted": accepted}
    choice["steps"] = [[len(ids), accepted]] if ids else []
    choice["finish_reason"] = "length" if last else None
    if last:
        told = {"drafter": "mtp", "depth": 3, "acceptance": "exact", "lossless": True, "simulated": False}
        counts = {"steps": 1, "drafted": 1, "accepted": 1, "accepted_at": [1], "reached_at": [1]}
        choice["speculation"] = told | counts | more
    return {"choices": [choice]}


def streamed(served: Served, speculation: object) -> list[dict[str, Any]]:
    """The API's own response to the page's request: a choice for each event."""
    settings = {"prompt": PROMPT, "temperature": 0.8, "seed": 7, "max_tokens": TOKENS, "speculation": speculation}
    with served.http() as client:
        lines = client.post("/v1/completions", json={**settings, "stream": True, "return_token_ids": True}).text
    return [json.loads(line[6:])["choices"][0] for line in lines.split("\n\n") if line.startswith("data: {")]


def positions(choices: list[dict[str, Any]], own_first: bool = False) -> list[int]:
    """The position in the draft of each token; 0 for the model's own."""
    found: list[int] = []
    for tokens, accepted in (step for choice in choices for step in choice["steps"]):
        own = [0] * (tokens - accepted)
        guessed = list(range(1, accepted + 1))
        found += own + guessed if own_first else guessed + own
    return found


def shown(sheet: Sheet) -> list[int]:
    """The same, as displayed."""
    classes = sheet.page.eval_on_selector_all("#drafted .token", "all => all.map((one) => one.className)")
    return [int((re.findall(r"\bp(\d)\b", one) or ["0"])[0]) for one in classes]


def columns(sheet: Sheet) -> list[str]:
    """The chart of steps, as described to a pointer."""
    return sheet.page.eval_on_selector_all("#drafted .chart li", "all => all.map((one) => one.title)")


def heights(sheet: Sheet, part: str) -> list[int]:
    """The height of each column's part, in percent of the highest."""
    found = sheet.page.eval_on_selector_all(
        f"#drafted .chart .{part}", "all => all.map((one) => parseFloat(one.style.height))"
    )
    return [round(one) for one in found]


def test_the_page_may_run_its_own_script_and_no_other(served: Served) -> None:
    with served.http() as client:
        reply = client.get("/")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"
    policy = dict(part.strip().partition(" ")[::2] for part in reply.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for element in ("script", "style"):
        [content] = re.findall(rf"<{element}>(.*?)</{element}>", reply.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{element}-src"] == f"'sha256-{digest}'"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|localStorage|\son\w+=", reply.text)
    assert set(re.findall(r"https?://[^\s'\"]+", reply.text)) == {"http://www.w3.org/2000/svg"}  # a name, not fetched


def test_facts(served: Served) -> None:
    with served.http() as client:
        facts = client.get("/playground/facts").json()
    assert (facts["model"], facts["drafter"], facts["acceptance"]) == ("built-in", "hybrid", "exact")
    assert facts["context"] == 512 and facts["depth"] > 0
    assert set(facts["drafters"]) == {"eagle", "frozen_kv", "hybrid", "mtp", "mask", "ngram", "suffix"}
    rules = {rule["name"]: rule for rule in facts["rules"]}
    assert set(rules) == {"exact", "rejection", "block", "trust"}
    assert [name for name, rule in rules.items() if not rule["lossless"]] == ["trust"]
    assert rules["exact"]["coupled"] and not rules["rejection"]["coupled"] and rules["trust"]["own_first"]


@pytest.mark.parametrize("order", ["apart", "together"])
def test_both_panes_say_the_same(sheet: Sheet, order: str) -> None:
    """And tokens are marked as the stream says. (What is chosen to draft depends on what was learnt before.)"""
    sheet.open().fill(
        prompt=PROMPT, drafter="mtp", depth="3", temperature=0.8, seed=7, max_tokens=TOKENS, order=order
    ).run()
    choices = streamed(sheet.served, {"drafter": "mtp", "depth": 3})
    told = choices[-1]["speculation"]
    assert sheet.states() == ["done", "done"]
    assert sheet.text("#status") == "Done, with seed 7."
    assert sheet.page.locator("#verdict").get_attribute("data-verdict") == "identical"
    assert f"Identical text: {TOKENS} tokens" in sheet.text("#verdict")
    assert re.search(r"\d\.\d\d× the speed", sheet.text("#verdict"))
    expected = "".join(choice["text"] for choice in choices)
    assert sheet.text("#drafted .output") == sheet.text("#plain .output") == expected
    assert shown(sheet) == positions(choices)
    # The last step may have accepted more than there was room for.
    assert 0 < sheet.count("#drafted .guess.token") <= told["accepted"]
    assert sheet.count("#plain .guess.token") == 0 and sheet.count("#plain .own") == TOKENS
    assert sheet.text("#drafted [data-figure=steps]") == str(told["steps"])
    assert sheet.text("#drafted [data-figure=stride]") == f"{TOKENS / told['steps']:.2f}"
    assert f"{told['accepted']} of {told['drafted']} guesses accepted" in sheet.text("#drafted .about")
    assert sheet.count("#drafted .bars li") == len(told["reached_at"])
    for i, reached in enumerate(told["reached_at"]):
        assert f"{told['accepted_at'][i]} of {reached}" in sheet.text(f"#drafted .bars li:nth-child({i + 1})")
    assert sheet.page.locator("#plain .acceptance").is_hidden() and sheet.count(".badge") == 0
    # What was drafted is not in the events, and the server was not started to tell.
    taken = [accepted for choice in choices for _, accepted in choice["steps"]]
    assert columns(sheet) == [f"step {i}: {accepted} accepted" for i, accepted in enumerate(taken, 1)]
    assert heights(sheet, "taken") == [round(100 * accepted / max(taken)) for accepted in taken]
    assert sheet.page.locator("#drafted .room:visible").count() == 0
    assert "--per-request-spec-decode-metrics detailed" in sheet.text("#drafted .charted")


def test_the_chart_shows_what_was_drafted(browser: Browser, detailed: Served) -> None:
    """If the server was started to tell, once the text is complete."""
    depth = {"drafter": "ngram", "depth": 4}
    with tab(browser) as page:
        sheet = Sheet(page, detailed).open()
        sheet.fill(prompt=PROMPT, temperature=0.8, seed=7, max_tokens=TOKENS, **depth).run()
        assert sheet.states() == ["done", "done"]
        settings = {"prompt": PROMPT, "temperature": 0.8, "seed": 7, "max_tokens": TOKENS, "speculation": depth}
        with detailed.http() as client:
            told = client.post("/v1/completions", json=settings).json()["metrics"]["speculative_decoding"]
        drafted, accepted = told["per_step_drafted"], told["per_step_accepted"]
        assert 0 < len(drafted) < int(sheet.text("#drafted [data-figure=steps]"))
        pairs = enumerate(zip(drafted, accepted, strict=True), 1)
        assert columns(sheet) == [f"step {i}: {taken} of {room} accepted" for i, (room, taken) in pairs]
        assert heights(sheet, "room") == [round(100 * room / max(drafted)) for room in drafted]
        assert heights(sheet, "taken") == [round(100 * taken / max(drafted)) for taken in accepted]
        assert any(accepted) and sheet.page.locator("#drafted .room:visible").count() == len(drafted)
        assert "A column is a step with a draft. Outlined: drafted." in sheet.text("#drafted .charted")


def test_a_long_chart_has_columns_of_several_steps(sheet: Sheet) -> None:
    """And is as wide as a short one."""
    sheet.open()
    many = [event([5], ["x"], accepted=int(i % 3 > 0)) for i in range(250)]
    sheet.answer(*many, event([], [], last=True))
    sheet.run()
    assert columns(sheet)[:2] == [
        "steps 1 to 3, on average: 0.67 accepted",
        "steps 4 to 6, on average: 0.67 accepted",
    ]
    assert columns(sheet)[-1] == "step 250: 0 accepted" and len(columns(sheet)) == 84
    assert "A column is 3 steps" in sheet.text("#drafted .charted")
    lists = {"per_step_drafted": [2] * 250, "per_step_accepted": [1] * 250}
    sheet.answer(*many, event([], [], last=True), {"choices": [], "metrics": {"speculative_decoding": lists}})
    sheet.run()
    assert columns(sheet)[:1] == ["steps 1 to 3, on average: 1 of 2 accepted"]
    assert set(heights(sheet, "room")) == {100} and set(heights(sheet, "taken")) == {50}
    sheet.answer(event([5, 6], ["x", "y"], accepted=1, last=True))
    sheet.run()
    assert columns(sheet) == ["step 1: 1 accepted"] and heights(sheet, "room") == [0]


def test_trusted_tokens_come_behind_the_models_own(sheet: Sheet) -> None:
    """And the output says aloud that it is lossy."""
    asked = {"drafter": "mask", "acceptance": "trust", "depth": 2}
    sheet.open().fill(prompt=PROMPT, temperature=0.8, seed=7, max_tokens=TOKENS, **asked).run()
    choices = streamed(sheet.served, asked)
    assert sheet.text("#drafted .badge") == "LOSSY" and sheet.count("#plain .badge") == 0
    assert shown(sheet) == positions(choices, own_first=True)
    assert shown(sheet)[0] == 0 and 2 in shown(sheet)
    if sheet.text("#drafted .output") != sheet.text("#plain .output"):
        assert sheet.page.locator("#verdict").get_attribute("data-verdict") == "differs"
        assert "does not promise the model’s own text" in sheet.text("#verdict")
        assert sheet.count("#drafted .differs") == sheet.count("#plain .differs") == 1


def test_stop_frees_the_request(sheet: Sheet) -> None:
    sheet.open().fill(prompt=PROMPT, max_tokens=450, temperature=1)
    # So low that few tokens are not all in view: those that remain must outlast this process's way to the page.
    sheet.page.evaluate("document.querySelector('#drafted .output').style.height = '3rem'")
    sheet.page.click("#run")
    sheet.page.locator("#drafted .token").nth(30).wait_for(state="attached")
    until = time.monotonic() + 20
    while gauges(sheet.served)["stride_requests_running"] != 1:
        assert time.monotonic() < until
    sheet.page.click("#stop")
    sheet.wait()
    assert settle(sheet.served)["stride_requests_running"] == 0
    assert sheet.states() == ["stopped", "idle"] and sheet.text("#status") == "Stopped."
    assert 30 < sheet.count("#drafted .token") < 450
    assert sheet.unseen() < 2
    assert sheet.page.locator("#stop").is_disabled()
    assert sheet.page.evaluate("document.activeElement.id") == "run"
    sheet.fill(max_tokens=5).run()
    assert sheet.states() == ["done", "done"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"depth": 99}, "depth 99 is over 64, the most rows a draft may have; lower it"),
        ({"drafter": "ngram", "acceptance": "trust"}, "acceptance 'trust' does not work with drafter 'ngram'"),
        ({"max_tokens": 3_000_000_000}, "max_tokens must be an integer from 1"),
    ],
    ids=str,
)
def test_refusals_are_shown_in_the_servers_words(sheet: Sheet, asked: dict[str, Any], words: str) -> None:
    sheet.refusals = True
    sheet.open().fill(prompt=PROMPT, **asked).run()
    assert sheet.states() == ["failed", "idle"]
    assert words in sheet.text("#drafted .error") and sheet.page.locator("#drafted .error").is_visible()
    assert sheet.page.locator("#plain .error").is_hidden() and sheet.page.locator("#key-field").is_hidden()


def test_other_faults_are_told_in_words(sheet: Sheet) -> None:
    sheet.refusals = True
    sheet.open()
    sheet.answer(event([5], ["x"]), {"error": {"message": "the engine stopped"}})
    assert sheet.run().text("#drafted .error") == "the engine stopped" and sheet.text("#drafted .output") == "x"
    sheet.answer(event([5], ["x"]))
    assert sheet.run().text("#drafted .error") == "The server ended the answer before the text was complete."
    sheet.page.route("**/v1/completions", lambda route: route.fulfill(status=502, body="<h1>bad gateway</h1>"))
    assert sheet.run().text("#drafted .error") == "The server answered 502."
    sheet.page.route("**/v1/completions", lambda route: route.abort())
    assert sheet.run().text("#drafted .error").startswith("The server cannot be reached")


def test_asks_for_the_key_when_the_server_does(sheet: Sheet) -> None:
    """And keeps it to itself."""
    keys: list[str | None] = []

    def guard(route: Route) -> None:
        keys.append(route.request.headers.get("authorization"))
        if keys[-1] == "Bearer sesame":
            route.continue_()
        else:
            route.fulfill(status=401, json=unauthorised().body)

    sheet.refusals = True
    for path in ("v1/**", "playground/**"):
        sheet.page.route(f"{sheet.served.url}/{path}", guard)
    sheet.page.goto(sheet.served.url)
    key = sheet.page.locator("#key")
    key.wait_for()
    sheet.fill(prompt=PROMPT, max_tokens=5).run()
    assert sheet.text("#drafted .error") == "This server requires an API key."
    assert sheet.page.evaluate("document.activeElement.id") == "key"
    key.fill("wrong")
    key.press("Enter")
    sheet.page.wait_for_selector("#drafted[data-state=failed]")
    assert sheet.wait().text("#drafted .error") == "The server does not know this API key."
    key.fill("sesame")
    key.press("Enter")
    sheet.page.wait_for_selector("#plain[data-state=done]")
    assert sheet.wait().states() == ["done", "done"]
    assert keys[0] is None and keys[-1] == "Bearer sesame"
    assert sheet.page.locator("option[value=mtp]").count() == 1
    kept = sheet.page.evaluate("JSON.stringify([sessionStorage, localStorage, document.cookie, location.href])")
    assert "sesame" not in kept


def test_output_is_text_whatever_it_says(sheet: Sheet) -> None:
    """Token by token, broken up as it may be, and a long one too."""
    said = ["<img src=x ", "onerror=alert(1)>", "", "\n", "<script>alert(2)</script>", "é\U0001f600", "a\n", "&amp;"]
    many = [said[i % len(said)] for i in range(2000)]
    sheet.open()
    sheet.answer(event(list(range(2000)), many, accepted=7, last=True))
    sheet.run()
    assert sheet.text("#drafted .output") == "".join(many)
    assert sheet.count(".output img, .output script") == 0
    assert sheet.page.evaluate(COPIED) == "".join(many)
    assert sheet.count("#drafted .token") == 2000 and sheet.count("#drafted .output > div") > 5
    assert shown(sheet)[:8] == [1, 2, 3, 4, 5, 6, 6, 0]
    assert sheet.page.locator("#drafted .token").nth(6).get_attribute("title") == "draft position 7"
    assert sheet.unseen() < 2


@pytest.mark.parametrize(
    ("acceptance", "lossless", "verdict", "why"),
    [
        ("exact", True, "differs", "This is a bug"),
        ("rejection", True, "redrawn", "is expected"),
        ("trust", False, "differs", "does not promise the model’s own text"),
    ],
)
def test_says_where_texts_differ(sheet: Sheet, acceptance: str, lossless: bool, verdict: str, why: str) -> None:
    def reply(route: Route) -> None:
        asked = route.request.post_data_json or {}
        third = "c" if asked.get("speculation") == "off" else "X"
        told = event([1, 2, ord(third), 4], ["a", "bb", third, "d"], 1, True, acceptance=acceptance, lossless=lossless)
        route.fulfill(body=f"data: {json.dumps(told)}\n\n", content_type="text/event-stream")

    sheet.open()
    sheet.page.route("**/v1/completions", reply)
    sheet.run()
    assert "The texts differ from token 3, character 4, on." in sheet.text("#verdict")
    assert sheet.page.locator("#verdict").get_attribute("data-verdict") == verdict
    assert why in sheet.text("#verdict")
    assert sheet.text("#drafted .differs") == "X" and sheet.text("#plain .differs") == "c"
    assert sheet.count("#drafted .badge") == (not lossless)


def test_keyboard_alone(sheet: Sheet) -> None:
    """Tab goes through all controls in order, each with a visible focus; the arrows go through the tokens."""
    page = sheet.open().page
    focus = "(({id, name}) => name || id)(document.activeElement)"
    page.keyboard.press("Tab")
    assert page.evaluate(focus) == "prompt"
    page.keyboard.press("Control+a")
    page.keyboard.type("def add(a, b):")
    page.keyboard.press("Enter")
    for name in FIELDS:
        page.keyboard.press("Tab")
        assert page.evaluate(focus) == name
        assert page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)") >= 2
        if name == "max_tokens":
            page.keyboard.press("Control+a")
            page.keyboard.type("12")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#plain[data-state=done]")
    assert sheet.wait().page.locator("#verdict").get_attribute("data-verdict") == "identical"
    assert sheet.text("#plain [data-figure=tokens]") == "12"
    page.keyboard.press("Tab")
    assert page.evaluate(focus) == "run"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "output"
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.dataset.index") == "1"
    title = page.evaluate("document.activeElement.title")
    assert title == "the model’s own" or title.startswith("draft position ")
    assert sheet.text("#drafted .readout").startswith("token 2: ") and title in sheet.text("#drafted .readout")


def test_status_is_announced_and_tokens_are_not(sheet: Sheet) -> None:
    page = sheet.open().page
    for selector in ("#status", "#verdict"):
        assert page.locator(selector).get_attribute("role") == "status"
    assert page.locator(".error").first.get_attribute("role") == "alert"
    assert sheet.count(".output[aria-live], [aria-live] .output, [role=status] .output") == 0
    unnamed = "all => all.filter((one) => !one.labels.length).map((one) => one.name)"
    assert page.eval_on_selector_all("form input, form select, form textarea", unnamed) == []


def test_remembers_the_form(sheet: Sheet) -> None:
    values = {"prompt": "x = [\n", "drafter": "ngram", "acceptance": "exact", "depth": "2", "temperature": "0.5"}
    values |= {"seed": "", "max_tokens": "9", "order": "together"}
    sheet.open().fill(**values)
    sheet.open()
    for name, value in values.items():
        assert sheet.page.locator(f"[name={name}]").input_value() == value


def test_draws_a_seed_for_both_where_none_is_given(sheet: Sheet) -> None:
    bodies: list[Any] = []

    def note(request: Request) -> None:
        if request.method == "POST":
            bodies.append(request.post_data_json)

    sheet.page.on("request", note)
    sheet.open().fill(prompt=PROMPT, seed="", temperature=1, max_tokens=8).run()
    assert bodies[0]["seed"] == bodies[1]["seed"]
    assert "speculation" not in bodies[0] and bodies[1]["speculation"] == "off"
    assert sheet.text("#status") == f"Done, with seed {bodies[0]['seed']}."
    sheet.run()
    assert bodies[2]["seed"] != bodies[0]["seed"]


COPIED = """() => {
  const output = document.querySelector("#drafted .output"), clipboardData = new DataTransfer();
  getSelection().selectAllChildren(output);
  output.dispatchEvent(new ClipboardEvent("copy", { clipboardData, cancelable: true }));
  return clipboardData.getData("text/plain");
}"""
CONTRAST = """all => all.map((one) => {
  const light = (colour) => colour.match(/[0-9.]+/g).slice(0, 3).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const style = getComputedStyle(one);
  const [low, high] = [light(style.color), light(style.backgroundColor)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 900, 360])
def test_fits_and_can_be_read(browser: Browser, served: Served, width: int, scheme: Any) -> None:
    with tab(browser, viewport={"width": width, "height": 780}, color_scheme=scheme) as page:
        sheet = Sheet(page, served).open()
        assert sheet.overflow() <= 0
        long = ["unbroken" * 100, " and", " then\n", " so"]
        sheet.answer(*[event([9], ["x"], accepted=1)] * 500, event([1, 2, 3, 4], long, accepted=3, last=True))
        sheet.run()
        assert sheet.count("#drafted .chart li") == 84 and page.locator("#drafted .chart").is_visible()
        assert sheet.overflow() <= 0
        found = [page.locator(f"#{pane}").bounding_box() for pane in ("drafted", "plain")]
        boxes = [box for box in found if box is not None]
        assert len(boxes) == 2 and all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
        assert (boxes[0]["y"] == boxes[1]["y"]) == (width > 768)
        ratios = page.eval_on_selector_all(".legend .guess", CONTRAST)
        assert len(ratios) == 6 and min(ratios) >= 4.5
        widths = "all => all.map((one) => parseFloat(getComputedStyle(one).borderBottomWidth))"
        lines = page.eval_on_selector_all(".legend .guess", widths)
        assert lines == [1, 2, 3, 4, 5, 6]  # positions can be told apart without their colours


SCROLL = "(out, top) => { out.scrollTop = top }"
GROW = "(out) => { out.lastChild.style.minHeight = '9000px' }"


def test_the_end_stays_in_view(sheet: Sheet) -> None:
    """Also where a block turns out higher than it was, but not for a reader who scrolled away from it."""
    sheet.open()
    sheet.answer(event(list(range(300)), ["line\n"] * 300, accepted=0, last=True))
    for top, kept in ((None, True), (100, False), (10**6, True)):
        sheet.run()
        out = sheet.page.locator("#drafted .output")
        if top is not None:
            out.evaluate(SCROLL, top)
        sheet.page.wait_for_timeout(100)  # frames, in which the page learns of it
        out.evaluate(GROW)
        sheet.page.wait_for_timeout(100)
        assert (sheet.unseen() < 2) == kept
