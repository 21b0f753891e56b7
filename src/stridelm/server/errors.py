"""The errors that clients get: an HTTP status and OpenAI's error object.

Messages say what was wrong with the request and how to fix it; they never contain a prompt, a path on the server or a
traceback.
"""

from __future__ import annotations

from typing import Any

LONGEST = 500
"""Characters of a message. It may quote input, whose end is as informative as its beginning."""
CUT = " [...] "
MESSAGES = "/v1/messages"
"""Where errors have Anthropic's form: https://docs.claude.com/en/api/errors."""
ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Its types by status; others are invalid_request_error."""


def bounded(text: str, longest: int = LONGEST) -> str:
    """The text, with its middle left out if it is too long."""
    if len(text) <= longest:
        return text
    tail = longest // 3
    return text[: longest - tail - len(CUT)] + CUT + text[-tail:]


class ApiError(Exception):
    """An answer other than 200. retry_after: seconds. closes: the connection is closed after it. longest: characters of
    the message."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        closes: bool = False,
        longest: int = LONGEST,
    ) -> None:
        message = bounded(message.encode(errors="backslashreplace").decode(), longest)  # it may quote lone surrogates
        param = None if param is None else bounded(param.encode(errors="backslashreplace").decode())
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.closes = closes
        self._error = {"message": message, "type": kind, "param": param, "code": code}

    @property
    def body(self) -> dict[str, Any]:
        """https://platform.openai.com/docs/guides/error-codes/api-errors"""
        return {"error": self._error}

    def body_at(self, path: str) -> dict[str, Any]:
        """In the form that errors have at this path."""
        if not f"{path}/".startswith(f"{MESSAGES}/"):
            return self.body
        kind = ANTHROPIC.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self._error["message"]}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return {**headers, "connection": "close"} if self.closes else headers


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def rid_taken() -> ApiError:
    return bad_request("rid: the name is in use, or given twice; choose another, or leave it out", "rid")


def engine_died() -> ApiError:
    return ApiError(
        503,
        "the engine stopped while it worked on this request and is being restarted; send the request again",
        kind="server_error",
        code="engine_restarting",
        retry_after=5,
    )


def request_failed(what: str) -> ApiError:
    return ApiError(
        500,
        f"the request failed: {what}. Nothing else was affected; the fault is the server's, and its log has details "
        "under this message",
        kind="server_error",
        code="request_failed",
    )


def unavailable(why: str, retry_after: int = 5) -> ApiError:
    return ApiError(503, why, kind="server_error", code="service_unavailable", retry_after=retry_after)


def overloaded(open_requests: int) -> ApiError:
    return ApiError(
        429,
        f"{open_requests} requests are open, the maximum of this server (max_queue); try again in a moment",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after=1,
    )


def too_many(limit: int, what: str, retry_after: int) -> ApiError:
    """what: the tasks that wait."""
    return ApiError(
        429,
        f"{limit} {what} of this client wait to be read, the maximum; try again in a moment",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after=retry_after,
    )


def no_places(limit: int) -> ApiError:
    return ApiError(
        429,
        f"{limit} requests are open with this key, the maximum per key (max_queue_per_key); try again in a moment",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after=1,
    )


def forbidden(what: str, param: str | None = None) -> ApiError:
    return ApiError(403, what, kind="permission_error", param=param, code="operator_only")


def timed_out(seconds: float) -> ApiError:
    return ApiError(
        408,
        f"the request took longer than {seconds:g} s, this server's request_timeout; ask for fewer tokens",
        kind="timeout_error",
        code="request_timeout",
    )


def too_large(limit_mib: float) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {limit_mib:g} MiB, this server's max_body_mib; send a smaller one",
        code="request_too_large",
        closes=True,
    )


def head_too_large(limit: int) -> ApiError:
    return ApiError(
        431,
        f"the request's line and headers exceed {limit} bytes (h11_max_incomplete_event_size), or there are too many "
        "headers; send fewer",
        code="request_header_fields_too_large",
        closes=True,
    )


def slow_request(part: str, seconds: float, idle: float | None = None) -> ApiError:
    or_idle = "" if idle is None else f", or stalled for {idle:g} s (timeout_body_idle)"
    return ApiError(
        408,
        f"the request's {part} took longer than {seconds:g} s (timeout_{part}){or_idle}; send it faster",
        kind="timeout_error",
        code="request_timeout",
        closes=True,
    )


def busy() -> ApiError:
    return ApiError(
        503,
        "this server's maximum of connections is open (max_connections); try again in a moment",
        kind="server_error",
        code="service_unavailable",
        retry_after=1,
        closes=True,
    )


def answer_too_large(limit: int) -> ApiError:
    return ApiError(
        400,
        f"more than {limit / (1 << 20):g} MiB of this answer had to be held at once, this server's max_unread_mib; ask "
        "for fewer tokens, samples or log-probabilities, or stream the answer and read it as it comes",
        code="answer_too_large",
    )


def unauthorised() -> ApiError:
    return ApiError(
        401,
        "this server requires an API key: send it as 'Authorization: Bearer KEY', or 'x-api-key: KEY'",
        kind="authentication_error",
        code="invalid_api_key",
    )
