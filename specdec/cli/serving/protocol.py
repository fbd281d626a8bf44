"""OpenAI's requests, checked, and the parts of its answers (docs/serving.md)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specdec.errors import SpecdecError, nearest
from specdec.files.habits import HINTS
from specdec.stats import RoundRecord, Tally

MOST_TEXTS = 1024  # of one request: prompts times n
MOST = 2**63 - 1


class ApiError(Exception):
    """An answer in OpenAI's form of errors.

    status: of HTTP
    param: the field of the request that is wrong
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


# -- requests ----------------------------------------------------------------------------------------------------------

# Fields without a meaning here that change no text; and those that would, with the values at which they do not.
HARMLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
     "parallel_tool_calls", "prediction")
)  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (), "best_of": (1,), "echo": (False,), "function_call": ("none",), "functions": ([],),
    "logit_bias": ({},), "modalities": (["text"],), "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},), "suffix": ("",), "tool_choice": ("none",), "tools": ([],),
    "verbosity": (), "web_search_options": (),
}  # fmt: skip


# Names of other libraries' options and of specdec's own, and what a client can do: the hints for Python name options
# that no request has.
NOT_SUPPORTED = (
    "num_beams", "num_beam_groups", "guidance_scale", "watermarking_config", "penalty_alpha",
    "encoder_repetition_penalty", "encoder_no_repeat_ngram_size",
)  # fmt: skip
DRAFTED = (
    "assistant_model", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_early_exit", "prompt_lookup_num_tokens", "max_matching_ngram_size", "strategy", "strategies", "draft",
    "num_speculative_tokens", "n_max", "acceptance",
)  # fmt: skip
FIELD_HINTS = {
    **{name: HINTS[name] for name in NOT_SUPPORTED},
    **dict.fromkeys(DRAFTED, "the server chooses it: --draft, --strategies and --acceptance of specdec serve"),
    **dict.fromkeys(("input_ids", "inputs"), "write prompt, a text or token ids"),
    **dict.fromkeys(("max_length", "max_new_tokens"), "write max_tokens, which counts without the prompt"),
    "streamer": "write stream=true",
    "output_scores": "write logprobs",
    "output_logits": "write logprobs",
    "do_sample": "temperature=0 is greedy, temperature > 0 samples",
    "stop_strings": "write stop, a text or a list of texts",
    "num_return_sequences": "write n",
}


def _unknown_field(name: str, known: Sequence[str]) -> str:
    hint = FIELD_HINTS.get(name)
    hint = f"; {hint}" if hint else nearest(name, known) or f"; known: {', '.join(known[:12])}, ..."
    return str(SpecdecError(f"unknown field {name!r}{hint}"))  # which shortens a name of thousands of characters


class StreamOptions(BaseModel):
    """include_usage: a last chunk without choices has the usage."""

    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool | None = None


class Request(BaseModel):
    """What both endpoints take. None, like a field that is missing, means the server's default.

    Fields from `top_k` on are not OpenAI's: they have the names of `specdec.GenerationSettings`.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    model: str | None = None
    n: int | None = Field(None, ge=1, le=128)
    seed: int | None = Field(None, ge=-MOST - 1, le=MOST)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=1e-30, le=1e30)
    ignore_eos: bool | None = None

    @property
    def prompts(self) -> Any:
        """The prompts, as `specdec.decoding.prompts.encode_prompts` takes them."""
        raise NotImplementedError

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of a text, if the request says."""
        return self.max_tokens

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def likely(self) -> bool | int | None:
        """What `output_logprobs` has to be; None: the request asks for no log-probabilities."""
        raise NotImplementedError

    def sampling(self) -> dict[str, Any]:
        """The settings that all rows of a call share, as far as the request has them."""
        settings = {**{name: getattr(self, name) for name in SAMPLING}, "output_logprobs": self.likely}
        return {name: value for name, value in settings.items() if value is not None}

    def check(self) -> None:
        """Raise ApiError for what the fields' types do not say."""
        for name, value in (self.model_extra or {}).items():
            neutral = any(value == v and type(value) is type(v) for v in NEUTRAL.get(name, ()))  # 0 is not False
            if name in HARMLESS or value is None or neutral:
                continue
            if name in NEUTRAL:
                raise ApiError(f"{name} is not supported: leave it out", param=name)
            raise ApiError(_unknown_field(name, [*type(self).model_fields, *NEUTRAL]), param=name)
        if len(self.stops) > 16 or not all(self.stops):
            raise ApiError("stop must be a text or up to 16 texts, none of them empty", param="stop")
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options needs stream=true", param="stream_options")


SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"
)  # fmt: skip


class Completion(Request):
    """A request to /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def prompts(self) -> Any:
        return self.prompt

    @property
    def likely(self) -> bool | int | None:
        return self.logprobs or (None if self.logprobs is None else True)


class Chat(Request):
    """A request to /v1/chat/completions; messages go through the model's chat template."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def prompts(self) -> Any:
        return self.messages

    @property
    def likely(self) -> bool | int | None:
        return (self.top_logprobs or True) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs=true", param="top_logprobs")

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


# What fields of several types may be: pydantic has a message for each type.
FORMS = {"prompt": "expected a text, token ids, or a list of these", "stop": "expected a text or a list of texts"}


def parse(kind: type[Request], body: bytes) -> Request:
    """Read a request. Raises ApiError."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        message = FORMS.get(param or "") if first["type"] != "missing" else None
        raise ApiError(": ".join(filter(None, (param, message or first["msg"]))), param=param) from None
    request.check()
    return request


# -- answers -----------------------------------------------------------------------------------------------------------

REASONS = {"eos": "stop", "stop_string": "stop", "stopping_criteria": "stop", "length": "length", "context": "length"}


@dataclass(frozen=True)
class Likely:
    """A token, its log-probability, those of the likeliest tokens in its place, and where it begins in the text."""

    text: str
    logprob: float
    others: list[tuple[str, float]]
    offset: int


@dataclass(frozen=True)
class Piece:
    """New text of a choice, perhaps its last, with its tokens if their log-probabilities are asked for."""

    text: str
    reason: str | None = None
    tokens: Sequence[Likely] = ()


class Answer:
    """The envelope of one request's answer: its objects share an id."""

    def __init__(self, request: Request, model: str, fingerprint: str):
        self.chat, self.model, self.fingerprint = isinstance(request, Chat), model, fingerprint
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def _object(self, choices: Sequence[dict[str, Any]], chunk: bool, **more: Any) -> dict[str, Any]:
        kind = "chat.completion.chunk" if chunk and self.chat else "chat.completion" if self.chat else "text_completion"
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": self.fingerprint, "choices": list(choices), **more,
        }  # fmt: skip

    def whole(self, ends: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request without a stream; ends: one piece for each text."""
        return self._object([self._choice(i, end, False) for i, end in enumerate(ends)], False, usage=usage)

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat's message."""
        return self._object([self._choice(index, None, True)], True)

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """A piece of one text, in a stream."""
        return self._object([self._choice(index, piece, True)], True)

    def last_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk without choices that has a stream's usage."""
        return self._object([], True, usage=usage)

    def _choice(self, index: int, piece: Piece | None, chunk: bool) -> dict[str, Any]:
        text = piece.text if piece else ""
        said: dict[str, Any] = {"text": text}
        if self.chat:
            opened = {"role": "assistant", "content": ""}
            delta = opened if piece is None else {"content": text} if text else {}
            said = {"delta": delta} if chunk else {"message": {**opened, "content": text, "refusal": None}}
        reason = REASONS[piece.reason] if piece and piece.reason else None
        likely = self._logprobs(piece.tokens) if piece and piece.tokens else None
        return {"index": index, **said, "logprobs": likely, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[Likely]) -> dict[str, Any]:
        """Log-probabilities as the endpoint has them."""
        if self.chat:
            content = [{**_entry(t.text, t.logprob), "top_logprobs": [_entry(*o) for o in t.others]} for t in tokens]
            return {"content": content, "refusal": None}
        return {
            "tokens": [t.text for t in tokens],
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [dict(t.others) for t in tokens] if any(t.others for t in tokens) else None,
            "text_offset": [t.offset for t in tokens],
        }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def usage(prompt_tokens: int, rounds: Sequence[RoundRecord], seed: int) -> dict[str, Any]:
    """The figures of one request: OpenAI's names, and specdec's under `specdec` (docs/metrics.md)."""
    tally = Tally.of(rounds)
    own = ("rounds", "drafted_rounds", "draft_tokens", "tested_tokens", "accepted_tokens", "tokens_per_round")
    rates = ("acceptance_length", "draft_acceptance_rate", "conditional_acceptance_rate")
    names = sorted({r.strategy for r in rounds if r.strategy is not None})
    by_strategy = {name: Tally.of(r for r in rounds if r.strategy == name) for name in names}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tally.generated_tokens,
        "total_tokens": prompt_tokens + tally.generated_tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": tally.accepted_tokens,
            "rejected_prediction_tokens": tally.draft_tokens - tally.accepted_tokens,
        },
        "specdec": {
            "seed": seed,
            **{name: getattr(tally, name) for name in (*own, *rates)},
            "strategies": {
                name: {"draft_tokens": found.draft_tokens, "accepted_tokens": found.accepted_tokens}
                for name, found in by_strategy.items()
            },
        },
    }


def as_api_error(error: Exception) -> ApiError:
    """An error of the decoder: bad input is the client's, anything else the server's."""
    if isinstance(error, ApiError):
        return error
    return ApiError(str(error)) if isinstance(error, SpecdecError) else ApiError(f"internal error: {error}", 500)
