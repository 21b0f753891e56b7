"""Draws the pictures of the engine: `python docs/images/architecture.py` writes architecture.svg and step.svg.

They are generated so that boxes stay aligned when a word changes, and so that a change shows as a change of this file.
Only the standard library is used, and the output is the same on every machine; tests/unit/test_docs.py compares it with
what is checked in. Colours follow the reader's scheme. The ground is drawn too, because viewers that ignore the scheme
would otherwise put dark text on a dark page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

HERE = Path(__file__).parent

STYLE = """
  text { font: 14px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .title { font-weight: 600 }
  .small { font-size: 12px; fill: #59636e }
  .mono { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
  .ground { fill: #ffffff; stroke: #d1d9e0 }
  .panel { fill: #f6f8fa; stroke: #d1d9e0 }
  .host { fill: #ddf0ff; stroke: #54a0da }
  .device { fill: #dcf5e3; stroke: #4bab68 }
  .memory { fill: #fdf2d8; stroke: #c99a2e }
  .plain { fill: #ffffff; stroke: #848d97 }
  .probe { fill: #efe4fb; stroke: #9a6dd7 }
  .refused { fill: none; stroke: #848d97; stroke-dasharray: 3 3 }
  .arrow { fill: none; stroke: #59636e; stroke-width: 1.5 }
  .next { stroke-dasharray: 5 4 }
  .tip { fill: #59636e }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .small { fill: #9198a1 }
    .ground { fill: #0d1117; stroke: #3d444d }
    .panel { fill: #151b23; stroke: #3d444d }
    .host { fill: #10304a; stroke: #4c94cc }
    .device { fill: #12361f; stroke: #4bab68 }
    .memory { fill: #3a2d0c; stroke: #b58a2a }
    .plain { fill: #212830; stroke: #656c76 }
    .probe { fill: #2f2145; stroke: #9a6dd7 }
    .refused { stroke: #656c76 }
    .arrow { stroke: #9198a1 }
    .tip { fill: #9198a1 }
  }
"""
LINE = 17
"""Height of a line of text."""


class Picture:
    """An SVG in the making. Coordinates are pixels, from the upper left corner."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-labelledby="title description">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(description)}</desc>',
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto-start-reverse"><path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>',
        ]
        self.rect(0.5, 0.5, width - 1, height - 1, "ground", 8)

    def rect(self, x: float, y: float, width: float, height: float, kind: str, radius: float = 5) -> None:
        self._parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'
        )

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        """y: the line's middle."""
        style = f' class="{kind}"' if kind else ""
        self._parts.append(f'<text{style} x="{x:g}" y="{y + 5:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, lines: Sequence[str]) -> None:
        """A title, and smaller lines below it."""
        self.rect(x, y, width, height, kind)
        top = y + height / 2 - LINE * (len(lines) - 1) / 2
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + LINE * number, line, "small" if number else "title")

    def arrow(self, points: Iterable[tuple[float, float]], kind: str = "") -> None:
        """Along straight lines, its tip at the last point."""
        path = " ".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path class="{f"arrow {kind}".strip()}" d="M{path}" marker-end="url(#tip)"/>')

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


def architecture() -> Picture:
    """Two processes, and in the engine's the parts that a step goes through, numbered in its order."""
    p = Picture(
        980,
        560,
        "Stride's processes and the parts of its engine",
        "Clients talk to the HTTP process, which tokenises prompts and watches over the engine process. There a step "
        "runs in this order: the planner picks spans, the ledger reserves pages, drafters propose rows, the model runs "
        "them, the verifier decides, the ledger commits, drafters observe, and tokens are emitted.",
    )
    p.rect(20, 20, 230, 470, "panel")
    p.text(135, 42, "HTTP process", "title")
    for y, lines in (
        (62, ("routes", "OpenAI's, SGLang's, metrics")),
        (142, ("prompts", "chat template, tokenizer")),
        (222, ("workers", "forked for large bodies", "and for grammars")),
        (318, ("engine client", "open requests, text")),
        (398, ("supervisor", "starts the engine again", "if it dies or hangs")),
    ):
        p.box(40, y, 190, 60 if len(lines) == 2 else 76, "plain", lines)

    p.rect(310, 20, 650, 470, "panel")
    p.text(635, 42, "engine process", "title")
    p.text(328, 70, "host", "small", "start")
    p.text(328, 216, "device", "small", "start")
    p.text(328, 362, "device memory", "small", "start")

    top, middle, low = 84, 230, 376
    hosts = {
        "intake": (330, ("queue", "intake refuses", "what cannot run")),
        "plan": (456, ("1  plan", "planner: spans", "of the step")),
        "reserve": (582, ("2  reserve", "ledger: pages", "to the bounds")),
        "commit": (708, ("6  commit", "ledger: keeps", "accepted rows")),
        "emit": (834, ("8  emit", "stop ids, lengths,", "finish reasons")),
    }
    for x, lines in hosts.values():
        p.box(x, top, 108, 80, "host", lines)
    devices = {
        "propose": (456, ("3  propose", "drafters: a tree", "of rows per span")),
        "forward": (582, ("4  forward", "model: all rows", "in one batch")),
        "verify": (708, ("5  verify", "verifier: logits", "become tokens")),
        "observe": (834, ("7  observe", "drafters: states", "and verdict")),
    }
    for x, lines in devices.values():
        p.box(x, middle, 108, 80, "device", lines)
    p.box(330, low, 240, 80, "memory", ("request table", "tokens, lengths, parameters,", "drafters' state, by slot"))
    p.box(582, low, 172, 80, "memory", ("target's KV", "pages: free, held, or", "cached for equal prefixes"))
    p.box(766, low, 176, 80, "memory", ("drafters' KV", "the same page ids", "in a pool of its own"))

    for left, right in (("intake", "plan"), ("plan", "reserve"), ("commit", "emit")):
        p.arrow([(hosts[left][0] + 108, top + 40), (hosts[right][0], top + 40)])
    for left, right in (("propose", "forward"), ("forward", "verify"), ("verify", "observe")):
        p.arrow([(devices[left][0] + 108, middle + 40), (devices[right][0], middle + 40)])
    p.arrow([(636, top + 80), (636, 197), (510, 197), (510, middle)])
    p.arrow([(762, middle), (762, top + 80)])
    p.arrow([(888, middle + 80), (888, 336), (510, 336), (510, middle + 80)], "next")
    p.text(699, 346, "the next step", "small")

    p.arrow([(230, 336), (280, 336), (280, 124), (330, 124)])
    p.arrow([(888, top), (888, 58), (295, 58), (295, 360), (230, 360)])
    p.arrow([(230, 436), (310, 436)])
    p.text(490, 516, "The processes exchange messages over ZeroMQ; all outputs of a step are one message.", "small")
    p.text(490, 536, "Offline, LLM runs the engine alone, in the caller's process.", "small")
    return p


def step() -> Picture:
    """The order of a step, and the rows of a batch in which four requests differ."""
    p = Picture(
        980,
        400,
        "One step of Stride",
        "A step is plan, reserve, propose, forward, verify, commit, observe, emit. Its batch holds the rows of all "
        "requests: a prompt chunk has real rows only, a plain decode one real row, a request that drafts has "
        "candidates after its real row, and a trusted mask window has probes.",
    )
    names = ("plan", "reserve", "propose", "forward", "verify", "commit", "observe", "emit")
    on_device = {"propose", "forward", "verify", "observe"}
    for number, name in enumerate(names):
        x = 24 + 118 * number
        p.box(x, 24, 100, 44, "device" if name in on_device else "host", (name,))
        if number:
            p.arrow([(x - 18, 46), (x, 46)])
    p.text(
        24, 92, "Blue runs on the host, green on the device. Nothing is read back before the verdict.", "small", "start"
    )

    p.text(24, 132, "One batch, one forward pass", "title", "start")
    p.text(560, 132, "One verdict", "title", "start")
    requests = (
        ("prompt chunk", "rrrrrrrr", "", "nothing yet: the prompt goes on in the next step"),
        ("plain decode", "r", "", "1 token"),
        ("three drafts, two accepted", "r", "aax", "3 tokens: two guessed, and the one after them"),
        ("a tree of drafts", "r", "axax", "3 tokens, along one branch"),
        ("trusted mask window", "rrr", "pp", "3 tokens, unchecked: lossy"),
    )
    kinds = {"r": "host", "a": "device", "x": "refused", "p": "probe"}
    for number, (name, real, draft, verdict) in enumerate(requests):
        y = 152 + 38 * number
        p.text(24, y + 14, name, "", "start")
        for column, row in enumerate(real + draft):
            p.rect(232 + 34 * column, y, 28, 28, kinds[row], 4)
            p.text(246 + 34 * column, y + 14, "r" if row == "r" else "p" if row == "p" else "d", "mono")
        p.text(560, y + 14, verdict, "", "start")
    for number, (kind, meaning) in enumerate(
        (
            ("host", "real row"),
            ("device", "candidate, accepted"),
            ("refused", "candidate, rejected"),
            ("probe", "probe: a mask token"),
        )
    ):
        x = 24 + 196 * number
        p.rect(x, 356, 20, 20, kind, 4)
        p.text(x + 28, 366, meaning, "small", "start")
    return p


def pictures() -> dict[str, str]:
    """File name -> content."""
    return {"architecture.svg": str(architecture()), "step.svg": str(step())}


if __name__ == "__main__":
    for name, content in pictures().items():
        (HERE / name).write_text(content, encoding="utf-8", newline="\n")
