"""A hundred requests that are not quite HTTP, or not quite one request (RFC 9112), as smuggling relies on."""

from __future__ import annotations

from attacks.raw import Address

BODY = b'{"prompt":"x","max_tokens":1}'
HIDDEN = b"GET /v1/models HTTP/1.1\r\nhost: HOST\r\n\r\n"
"""The request that a smuggler wants answered as if another client had sent it."""


def post(*lines: bytes, body: bytes = b"") -> bytes:
    first = b"POST /v1/completions HTTP/1.1"
    return b"\r\n".join([first, b"host: HOST", b"content-type: application/json", *lines, b"", b""]) + body


def get(target: bytes = b"/health", *lines: bytes, version: bytes = b"HTTP/1.1", method: bytes = b"GET") -> bytes:
    return b"\r\n".join([b" ".join([method, target, version]), b"host: HOST", *lines, b"", b""])


CHUNKED = b"transfer-encoding: chunked"
LENGTH = b"content-length: %d" % len(BODY)
ONE_CHUNK = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


def _smuggled() -> dict[str, bytes]:
    both = ONE_CHUNK + HIDDEN
    found = {
        "length and chunked": post(LENGTH, CHUNKED, body=both),
        "chunked and length": post(CHUNKED, LENGTH, body=both),
        "length 0 and chunked": post(b"content-length: 0", CHUNKED, body=both),
        "two lengths": post(b"content-length: 5", LENGTH, body=BODY + HIDDEN),
        "two equal lengths": post(LENGTH, LENGTH, body=BODY),
        "a list of lengths": post(b"content-length: 29, 29", body=BODY),
        "chunked twice": post(CHUNKED, CHUNKED, body=both),
        "chunked, then identity": post(CHUNKED, b"transfer-encoding: identity", body=both),
        "identity and length": post(b"transfer-encoding: identity", LENGTH, body=BODY + HIDDEN),
    }
    for coding in (
        b"xchunked",
        b"chunked, x",
        b"x, chunked, x",
        b"chunked-x",
        b"chun ked",
        b"gzip",
        b"",
        b"chunked\x0b",
    ):
        found[f"coding {coding!r}"] = post(b"transfer-encoding: " + coding, body=both)
    for name in (
        b"transfer-encoding ",
        b" transfer-encoding",
        b"transfer_encoding\x00",
        b"transfer\tencoding",
        b"te\x7fx",
    ):
        found[f"name {name!r}"] = post(name + b": chunked", LENGTH, body=BODY)
    for length in (
        b"-1",
        b"+29",
        b"0x1d",
        b"29 ",
        b" 2 9",
        b"1e3",
        b"29,",
        b"",
        b"9" * 30,
        b"18446744073709551645",
        b"2\x009",
    ):
        found[f"length {length!r}"] = post(b"content-length: " + length, body=BODY)
    return found


def _chunks() -> dict[str, bytes]:
    sizes = (
        b"",
        b"x",
        b"-1",
        b"+1",
        b"0x1",
        b"1 ",
        b" 1",
        b"1\x00",
        b"f" * 17,
        b"1" * 40,
        b"1;" + b"e" * 70_000,
        b"1_0",
        b"g",
    )
    found = {f"size {size[:12]!r}": post(CHUNKED, body=size + b"\r\nx\r\n0\r\n\r\n") for size in sizes}
    return found | {
        "chunk without its end": post(CHUNKED, body=b"3\r\nabcX\r\n0\r\n\r\n"),
        "chunk ended by LF": post(CHUNKED, body=b"3\nabc\n0\n\n"),
        "chunk ended by CR": post(CHUNKED, body=b"3\rabc\r0\r\r"),
        "chunk shorter than announced": post(CHUNKED, body=b"9\r\nabc\r\n0\r\n\r\n"),
        "a trailer": post(CHUNKED, body=b"%x\r\n%s\r\n0\r\nx: y\r\n\r\n" % (len(BODY), BODY)),
        "a trailer that is a length": post(CHUNKED, body=b"0\r\ncontent-length: 9\r\n\r\n" + HIDDEN),
        "a trailer without end": post(CHUNKED, body=b"0\r\n" + b"x: y\r\n" * 20_000),
        "a thousand empty chunks": post(CHUNKED, body=b"0\r\n\r\n" * 1000),
    }


def _heads() -> dict[str, bytes]:
    found = {
        "folded": get(b"/health", b"x: a\r\n b"),
        "folded length": post(b"content-length:\r\n 29", body=BODY),
        "folded at once": b"GET /health HTTP/1.1\r\n host: HOST\r\n\r\n",
        "no colon": get(b"/health", b"x"),
        "no name": get(b"/health", b": x"),
        "NUL in a value": get(b"/health", b"x: a\x00b"),
        "NUL in a name": get(b"/health", b"x\x00: a"),
        "NUL in the target": get(b"/hea\x00lth"),
        "CR in a value": get(b"/health", b"x: a\rb"),
        "LF alone": b"GET /health HTTP/1.1\nhost: HOST\n\n",
        "CR alone": b"GET /health HTTP/1.1\rhost: HOST\r\r",
        "no host": b"GET /health HTTP/1.1\r\n\r\n",
        "two hosts": get(b"/health", b"host: HOST"),
        "another host": b"GET /health HTTP/1.1\r\nhost: attacker.example\r\n\r\n",
        "a huge value": get(b"/health", b"x: " + b"y" * 100_000),
        "a huge name": get(b"/health", b"x" * 100_000 + b": y"),
        "a huge target": get(b"/" + b"y" * 100_000),
        "many headers": get(b"/health", *(b"x%d: y" % i for i in range(2000))),
        "high bytes": get(b"/health", b"x: \xff\xfe\x80"),
        "a high byte in a name": get(b"/health", b"\xff: x"),
        "a high byte in the target": get(b"/\xff"),
        "a byte order mark": b"\xef\xbb\xbf" + get(),
        "expect something": post(LENGTH, b"expect: 200-ok", body=BODY),
        "expect and wait": post(LENGTH, b"expect: 100-continue"),
        "an upgrade": get(b"/health", b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-version: 13"),
        "an upgrade to HTTP/2": get(b"/health", b"connection: upgrade, http2-settings", b"upgrade: h2c"),
        "an upgrade with a body": post(LENGTH, b"connection: upgrade", b"upgrade: x", body=BODY + HIDDEN),
        "a bearer with line ends": get(b"/v1/models", b"authorization: Bearer a\x0bb"),
    }
    return found


def _lines() -> dict[str, bytes]:
    found = {
        f"method {m!r}": get(method=m) for m in (b"FOO", b"get", b"G\x00T", b"", b"GE T", b"CONNECT", b"TRACE", b"PRI")
    }
    targets = (
        b"",
        b"*",
        b"health",
        b"http://attacker.example/health",
        b"//",
        b"/%",
        b"/%00",
        b"/..//..",
        b"/a b",
        b"?",
        b"#",
    )
    found |= {f"target {t!r}": get(t) for t in targets}
    versions = (
        b"HTTP/0.9",
        b"HTTP/1.2",
        b"HTTP/2.0",
        b"HTTP/3",
        b"HTTP/1.1 x",
        b"HTTP/01.1",
        b"http/1.1",
        b"HTTP",
        b"",
    )
    found |= {f"version {v!r}": get(version=v) for v in versions}
    return found | {
        "HTTP/0.9": b"GET /health\r\n",
        "HTTP/2's opening": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        "line ends": b"\r\n" * 500,
        "nothing but NUL": bytes(5000),
        "an answer": b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        "two at once": get() + get(b"/v1/models"),
        "a bad one after a good one": get() + b"\x00\x01garbage\r\n\r\n",
        "a bad one after a long one": post(LENGTH, body=BODY) + b"\x00\r\n\r\n",
        "a hundred at once": get() * 100,
        "a body that nobody expects": get() + BODY,
        "a body for GET": get(b"/health", LENGTH) + BODY,
        "closed within the line": b"GET /hea",
        "closed within the head": b"GET /health HTTP/1.1\r\nhost: HO",
        "closed within the body": post(LENGTH, body=BODY[:9]),
        "closed within a chunk": post(CHUNKED, body=b"1d\r\n{"),
        "no JSON": post(b"content-length: 3", body=b"\x00\x01\x02"),
        "JSON in UTF-16": post(b"content-length: 58", body=BODY.decode().encode("utf-16-le")),
        "compressed": post(b"content-length: 5", b"content-encoding: gzip", body=b"\x1f\x8b\x08\x00\x00"),
    }


CASES: dict[str, bytes] = _smuggled() | _chunks() | _heads() | _lines()
GOOD = 200, 404, 405
"""Statuses for cases that are valid and harmless requests after all: a strict proxy in front would parse them alike."""


def data_of(data: bytes, address: Address) -> bytes:
    """The case's bytes for a server at this address."""
    return data.replace(b"HOST", f"{address[0]}:{address[1]}".encode())
