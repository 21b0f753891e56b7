"""/tokenize and /detokenize, as SGLang and vLLM have them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from stridelm.server.errors import bad_request
from stridelm.server.large import LargeBodies, answered
from stridelm.server.openai.conversation import conversation_text
from stridelm.server.openai.shared import check_model
from stridelm.server.prompts import PromptReader
from stridelm.server.sglang.schemas import DetokenizeRequest, Tokenize, TokenizeConversation, TokenizeRequest

router = APIRouter(route_class=LargeBodies)


@router.post("/tokenize", response_model=None)
@router.post("/v1/tokenize", response_model=None)
async def tokenize(body: Tokenize, request: Request) -> Response:
    """The token ids of a text, of several, or of a conversation rendered by the chat template."""
    check_model(request.app.state.service, body.model)
    return await answered(request, body, told_tokens)


@router.post("/detokenize", response_model=None)
@router.post("/v1/detokenize", response_model=None)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, under SGLang's name (`text`) and vLLM's (`prompt`). If the request leaves
    skip_special_tokens out, `text` has no special tokens and `prompt` has them."""
    check_model(request.app.state.service, body.model)
    return await answered(request, body, told_texts)


def told_tokens(body: TokenizeRequest | TokenizeConversation, reader: PromptReader) -> dict[str, Any]:
    """The answer to /tokenize. Raises ApiError for texts that cannot be tokenised."""
    if isinstance(body, TokenizeConversation):
        texts: str | list[str] = conversation_text(body, reader.tokenizer)
    else:
        texts = body.prompt
    single = isinstance(texts, str)
    many = [texts] if isinstance(texts, str) else texts
    ids = [one.tolist() for one in reader.without_limit().read(many, body.add_special_tokens, "prompt")]
    words: Any = [None] * len(ids)
    if body.return_token_strs:
        words = [reader.tokenizer.hf.convert_ids_to_tokens(one) for one in ids]
    return {
        "tokens": ids[0] if single else ids,
        "count": len(ids[0]) if single else [len(one) for one in ids],
        "max_model_len": reader.context,
        "token_strs": words[0] if single else words,
    }


def told_texts(body: DetokenizeRequest, reader: PromptReader) -> dict[str, Any]:
    """The answer to /detokenize. Raises ApiError for ids that the model does not have."""
    tokens: Any = body.tokens
    single = not tokens or isinstance(tokens[0], int)
    many: list[list[int]] = [tokens] if single else tokens
    size = reader.vocab_size
    if any(token >= size for ids in many for token in ids):
        raise bad_request(f"tokens: ids must be within the model's vocabulary, 0 to {size - 1}", "tokens")
    sglang_skips, vllm_skips = body.skip_special_tokens is not False, body.skip_special_tokens is True
    texts = [reader.tokenizer.decode(ids, sglang_skips) for ids in many]
    prompts = [reader.tokenizer.decode(ids, vllm_skips) for ids in many]
    return {"text": texts[0], "prompt": prompts[0]} if single else {"text": texts, "prompt": prompts}
