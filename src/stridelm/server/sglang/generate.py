"""POST /generate: SGLang's own API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from stridelm.params import SamplingParams
from stridelm.server.callers import caller_of
from stridelm.server.chunk import Chunk
from stridelm.server.engine_client import Prompt
from stridelm.server.errors import bad_request
from stridelm.server.generation import Generation
from stridelm.server.large import LargeBodies, prompts_read
from stridelm.server.openai.shared import check_model
from stridelm.server.replies import Answer, event, listed, send, to_json, while_connected
from stridelm.server.service import Service
from stridelm.server.sglang.pace import Pace
from stridelm.server.sglang.response import Mark, SampleResponse, Task
from stridelm.server.sglang.rids import Call, rids_of
from stridelm.server.sglang.schemas import GenerateRequest, NativeSampling

router = APIRouter(route_class=LargeBodies)
T = TypeVar("T")

MIB = 1 << 20
ANY_JSON = "$$ANY$$"
"""SGLang's schema for any object."""
ANY_CONFIDENCE = 1e-9
"""Every row's largest probability is above this."""


@router.post("/generate", response_model=None)
@router.put("/generate", response_model=None)
async def generate(body: GenerateRequest, request: Request) -> Response:
    """Complete one prompt or several, or score them."""
    service: Service = request.app.state.service
    check_model(service, body.model)
    tasks = await _tasks(body, request)
    many = body.is_list or len(tasks) * tasks[0].params.n > 1
    call = Call.of(body.rid, len(tasks), tasks[0].params.n, many)
    caller = caller_of(request)
    rids_of(request.app).take(call, caller.tenant)
    try:
        prompts = [Prompt(task.prompt_ids, task.params) for task in tasks]
        generation = await while_connected(request, service.generate(prompts, caller, call.given))
    except BaseException:
        call.end()
        raise
    call.start(service.engine_client, generation)
    request.state.generation = generation
    each = [task for task in tasks for _ in range(task.params.n)]
    speech = service.tokenizer, service.ready.hidden_size
    samples = [SampleResponse(rid, task, generation.began, *speech) for rid, task in zip(call.rids, each, strict=True)]
    return await send(request, generation, _Answer(service, samples, many), body.stream)


class _Answer(Answer):
    keeps = True

    def __init__(self, service: Service, samples: list[SampleResponse], many: bool) -> None:
        self._turns = service.turns
        self._samples = samples
        self._many = many
        self._pace = Pace(int(service.config.max_repeating_mib * MIB), len(samples))
        self._marks = [Mark() for _ in samples] if service.config.incremental_streaming_output else None
        self._grown: dict[int, None] = {}
        """Samples with output that no event has had yet."""

    async def whole(self, generation: Generation) -> list[bytes]:
        """An object, or a list of them."""
        await generation.read_by(_Keeper(self._samples))
        answers = []
        async with self._turns(generation.tenant) as turn:
            for sample in self._samples:
                while sample.read_some():
                    await turn.breathe()
                answers.append(to_json(sample.answer()))
                await turn.breathe()
        return listed(answers) if self._many else answers

    def events(self, arrived: Sequence[tuple[int, Chunk]]) -> bytes | None:
        """Each event has all of its sample so far, or only what is new."""
        for index, chunk in arrived:
            self._samples[index].take(chunk)
            self._grown[index] = None
        if any(self._samples[index].read_some() for index in self._grown):
            return None
        grown = sorted(self._grown)
        self._grown.clear()
        due = grown if self._marks else [i for i in grown if self._pace.due(i, self._samples[i])]
        return b"".join([self._event(index) for index in due])

    def _event(self, index: int) -> bytes:
        answer = self._samples[index].answer(self._marks[index] if self._marks else None)
        encoded = event({**answer, "index": index} if self._many else answer)
        self._pace.sent(index, self._samples[index], len(encoded))
        return encoded


class _Keeper:
    """Reads a generation for an answer that is not streamed."""

    keeps, ready = True, True

    def __init__(self, samples: Sequence[SampleResponse]) -> None:
        self._samples = samples

    def take(self, arrived: Sequence[tuple[int, Chunk]]) -> bool:
        for index, chunk in arrived:
            self._samples[index].take(chunk)
        return False


# Reading the request


async def _tasks(body: GenerateRequest, request: Request) -> list[Task]:
    """One for each prompt. Raises ApiError for requests that cannot be served."""
    service: Service = request.app.state.service
    caller = caller_of(request)
    many = asked_prompts(body)
    count = len(many)
    sampling = _each("sampling_params", body.sampling_params, count, NativeSampling.model_validate({}))
    scored = _each("return_logprob", body.return_logprob, count, False)
    starts = _each("logprob_start_len", body.logprob_start_len, count, -1)
    tops = _each("top_logprobs_num", body.top_logprobs_num, count, 0)
    chosen = _each_chosen(body.token_ids_logprob, count)
    shown = _each("return_hidden_states", body.return_hidden_states, count, False)
    if any(shown) and not service.config.enable_return_hidden_states:
        raise bad_request(
            "return_hidden_states: this server does not allow it; leave it out, or start the server with "
            "--enable-return-hidden-states",
            "return_hidden_states",
        )
    if len({one.n or 1 for one in sampling}) > 1:
        raise bad_request("sampling_params: n must be the same for all prompts", "sampling_params")
    prompts = prompts_read(request)
    if prompts is None:
        with service.entering(count * (sampling[0].n or 1), caller):
            prompts = await while_connected(request, service.read(many, caller, param="text"))
    tasks = []
    async with service.turns(caller.tenant) as turn:
        for ids, one, wanted, start, top, picked, states in zip(
            prompts, sampling, scored, starts, tops, chosen, shown, strict=True
        ):
            told_from = _told_from(start, len(ids)) if wanted else None
            more: dict[str, Any] = {"return_hidden_states": True} if states else {}
            params = _params(body, one, service, more | _asked_scores(told_from, len(ids), top, picked))
            tasks.append(Task(ids, params, one.scores_only, told_from, top, bool(body.return_text_in_logprobs)))
            await turn.breathe()
    return tasks


def asked_prompts(body: GenerateRequest) -> list[str] | list[list[int]]:
    """The prompts, as a list whether there is one or several."""
    if (body.text is None) == (body.input_ids is None):
        raise bad_request("give either text or input_ids", "text")
    ids: Any = body.input_ids
    if ids is not None:
        return ids if isinstance(ids[0], list) else [ids]
    return [body.text] if isinstance(body.text, str) else body.text or []


def _each(name: str, value: T | list[T] | None, count: int, default: T) -> list[T]:
    """One value per prompt."""
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if len(value) != count:
        raise bad_request(
            f"{name} has {len(value)} entries for {count} prompts; give one for all, or one for each", name
        )
    return value


def _each_chosen(value: list[int] | list[list[int] | None] | None, count: int) -> list[list[int]]:
    """Per prompt, the ids whose log-probabilities are wanted. A flat list of ids is for all prompts."""
    nested: Any = value if value and not isinstance(value[0], int) else [value] * count
    return [ids or [] for ids in _each("token_ids_logprob", nested, count, [])]


def _told_from(start: int, length: int) -> int:
    if start > length:
        raise bad_request(
            f"logprob_start_len {start} exceeds the prompt's {length} tokens; lower it, or use -1 for the output only",
            "logprob_start_len",
        )
    return length if start == -1 else start


def _asked_scores(told_from: int | None, length: int, top: int, chosen: list[int]) -> dict[str, Any]:
    if told_from is None:
        return {}
    asked: dict[str, Any] = {"logprobs": top} if told_from == length else {"logprobs": top, "prompt_logprobs": top}
    return {**asked, "logprob_token_ids": chosen} if chosen else asked


def _params(body: GenerateRequest, sampling: NativeSampling, service: Service, asked: dict[str, Any]) -> SamplingParams:
    more: dict[str, Any] = {**asked, **_structure(sampling)}
    speculation = _speculation(sampling, service)
    if speculation is None:
        speculation = body.speculation
    if speculation is not None:
        more["speculation"] = speculation
    if body.priority is not None:
        more["priority"] = -body.priority
    if body.cache_salt is not None:
        more["cache_salt"] = body.cache_salt
    return sampling.sampling(service.defaults, **more)


def _structure(sampling: NativeSampling) -> dict[str, Any]:
    """The structure of the output. Raises ApiError if several are given."""
    structures: list[dict[str, Any]] = []
    if sampling.json_schema is not None:
        anything = sampling.json_schema == ANY_JSON
        structures.append({"json_object": True} if anything else {"json": sampling.json_schema})
    if sampling.regex is not None:
        structures.append({"regex": sampling.regex})
    if sampling.ebnf is not None:
        structures.append({"grammar": sampling.ebnf})
    if sampling.structural_tag is not None:
        structures.append({"structural_tag": sampling.structural_tag})
    if len(structures) > 1:
        raise bad_request(
            "only one of json_schema, regex, ebnf and structural_tag can apply; give one of them", "sampling_params"
        )
    return {"structured_outputs": structures[0]} if structures else {}


# Mask-token decoding, with the parameters of the method's own server


def _speculation(sampling: NativeSampling, service: Service) -> dict[str, Any] | str | None:
    """The speculation of the sampling parameters, from `speculation` or from `mtp_enabled` and its options."""
    if sampling.mtp_enabled is None:
        set_fields = sampling.model_dump(exclude_none=True)
        idle = [name for name in set_fields if name.startswith("mtp_")]
        if idle:
            raise bad_request(f"{idle[0]} would have no effect without mtp_enabled; set mtp_enabled too", idle[0])
        return sampling.speculation
    if sampling.speculation is not None:
        raise bad_request("speculation and mtp_enabled both choose a drafter; give one of them", "speculation")
    threshold = _threshold(sampling)
    if not sampling.mtp_enabled:
        return "off"
    if sampling.mtp_k is None:
        raise bad_request("mtp_enabled needs mtp_k, the maximum tokens per step; set mtp_k too", "mtp_k")
    _check_masks(sampling, service)
    _check_temperature(sampling)
    if sampling.mtp_k == 1:
        return "off"
    speculation = {"drafter": "mask", "depth": sampling.mtp_k - 1, "acceptance": "trust"}
    if threshold:
        return {**speculation, "confidence": threshold}
    # Without a threshold the client wants whole windows, but would inherit a confidence set on the server.
    inherits = "confidence" in service.engine_config.speculation.given
    return {**speculation, "confidence": ANY_CONFIDENCE} if inherits else speculation


def _threshold(sampling: NativeSampling) -> float | None:
    """Minimum confidence of an emitted token; None for windows that are emitted whole."""
    strategy, separate = sampling.mtp_strategy, sampling.mtp_conf_threshold
    name, *inline = strategy.split("+") if isinstance(strategy, str) else strategy or [""]
    if name in ("", "none"):
        if separate is not None:
            raise bad_request("mtp_conf_threshold would have no effect without mtp_strategy", "mtp_conf_threshold")
        return None
    if not sampling.mtp_enabled:
        raise bad_request("mtp_strategy would have no effect without mtp_enabled; set mtp_enabled too", "mtp_strategy")
    try:
        thresholds = {float(one) for one in [*inline, separate] if one is not None}
    except ValueError:
        thresholds = set()
    if name != "conf_adapt" or len(thresholds) != 1 or not 0.0 <= min(thresholds) <= 1.0:
        raise bad_request(
            'mtp_strategy must be ["conf_adapt", 0.9], or "conf_adapt" with the threshold, from 0 to 1, in '
            "mtp_conf_threshold",
            "mtp_strategy",
        )
    return thresholds.pop()


def _check_masks(sampling: NativeSampling, service: Service) -> None:
    """Raise ApiError for mask tokens that are not the server's."""
    masks = service.ready.mask_ids
    single = sampling.mtp_mask_id is None or masks == [sampling.mtp_mask_id]
    first = sampling.mtp_min_mask_id is None or masks[:1] == [sampling.mtp_min_mask_id]
    last = sampling.mtp_max_mask_id is None or masks[-1:] == [sampling.mtp_max_mask_id]
    if not (single and first and last):
        has = f"mask ids are {masks}" if masks else "model has no mask token"
        raise bad_request(f"mtp_mask_id: this server's {has}; leave the parameter out, or make it match", "mtp_mask_id")


def _check_temperature(sampling: NativeSampling) -> None:
    temperature = 1.0 if sampling.temperature is None else sampling.temperature
    if sampling.mtp_temperature not in (None, temperature):
        raise bad_request(
            f"mtp_temperature: all tokens of a step are drawn at the request's temperature, {temperature:g}; leave it "
            "out",
            "mtp_temperature",
        )
