"""The server's application, without sockets: requests, answers, metrics, leaving and stopping."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from specdec import SpecdecError, SpeculativeDecoder
from specdec.cli.serve import start_worker
from specdec.demo_models import target_path
from tests.cli.test_cli import refused
from tests.helpers.grid import VOCABULARY
from tests.helpers.tiny import tiny_model

REASON = "the extra specdec[serve] is not installed"
httpx = pytest.importorskip("httpx", reason=REASON)
serving = pytest.importorskip("specdec.cli.serving.app", reason=REASON)

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PROMPT = "def add(self, item):"


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    """A random target, and a draft that often agrees with it: the same weights with noise."""
    target = tiny_model("llama", 0, VOCABULARY, num_hidden_layers=2)
    draft = copy.deepcopy(target)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.03 * torch.randn(weight.shape, generator=noise)
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    tokenizer.chat_template = TEMPLATE
    return SpeculativeDecoder(target, draft, tokenizer, strategies=["draft-model:n_max=3"], check=False)


@pytest.fixture
def worker(decoder: SpeculativeDecoder) -> Iterator[Any]:
    made = serving.Worker(
        decoder, serving.Metrics("tiny"), {"temperature": 0.0, "acceptance": "match"}, slots=4, context=256
    )
    made.start()
    yield made
    made.drain(0)
    made.join(20)
    assert not made.is_alive()


def client_of(worker: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(serving.make_app(worker, "tiny", 0)), base_url="http://here", timeout=60
    )


def post_all(worker: Any, *requests: tuple[str, dict[str, Any]]) -> list[httpx.Response]:
    """Send requests at once."""

    async def send() -> list[httpx.Response]:
        async with client_of(worker) as client:
            return list(await asyncio.gather(*(client.post(path, json=body) for path, body in requests)))

    return asyncio.run(send())


def post(worker: Any, path: str, **body: Any) -> Any:
    (answer,) = post_all(worker, (path, body))
    return answer.json() if not body.get("stream") else chunks_of(answer)


def get(worker: Any, path: str) -> httpx.Response:
    async def send() -> httpx.Response:
        async with client_of(worker) as client:
            return await client.get(path)

    return asyncio.run(send())


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end as OpenAI's do."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of a streamed choice."""
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)


# -- texts and figures -------------------------------------------------------------------------------------------------


def test_a_completion_has_the_text_and_the_figures_of_a_call(worker: Any, decoder: SpeculativeDecoder) -> None:
    got = post(worker, COMPLETIONS, model="tiny", prompt=PROMPT, max_tokens=16, temperature=0.3, seed=3)
    want = decoder.generate(PROMPT, 16, temperature=0.3, seed=3, acceptance="match")
    (choice,), figures, stats = got["choices"], got["usage"], want.stats.total
    assert got["object"] == "text_completion"
    assert choice == {"index": 0, "text": want.texts[0], "logprobs": None, "finish_reason": "length"}
    assert figures["completion_tokens"] == 16
    assert figures["total_tokens"] == 16 + figures["prompt_tokens"]
    assert figures["completion_tokens_details"] == {
        "accepted_prediction_tokens": stats.accepted_tokens,
        "rejected_prediction_tokens": stats.draft_tokens - stats.accepted_tokens,
    }
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert figures["specdec"]["acceptance_length"] == stats.acceptance_length
    assert figures["specdec"]["seed"] == 3


def test_requests_at_once_have_the_texts_of_calls_of_their_own(worker: Any, decoder: SpeculativeDecoder) -> None:
    """Six streams in four slots; seeds, lengths and prompts differ, and so do three temperatures."""
    bodies = [
        {
            "prompt": f"{PROMPT} {i}",
            "max_tokens": 5 + i,
            "seed": i,
            "temperature": (0.0, 0.7, 1.3)[i % 3],
            "stream": True,
        }
        for i in range(6)
    ]
    answers = post_all(worker, *((COMPLETIONS, body) for body in bodies))
    for body, answer in zip(bodies, answers, strict=True):
        how = {name: body[name] for name in ("seed", "temperature")}
        alone = decoder.generate(body["prompt"], body["max_tokens"], acceptance="match", **how)
        assert text_of(chunks_of(answer)) == alone.texts[0]


def test_prompts_and_n_are_rows_of_one_call(worker: Any, decoder: SpeculativeDecoder) -> None:
    prompts = [PROMPT, "import os"]
    body = {"prompt": prompts, "n": 3, "max_tokens": 6, "temperature": 1.0, "seed": 9}
    want = decoder.generate(prompts, 6, temperature=1.0, seed=9, num_return_sequences=3, acceptance="match")
    got = post(worker, COMPLETIONS, **body)
    assert [c["text"] for c in got["choices"]] == want.texts
    assert got["usage"]["completion_tokens"] == 36
    streamed = post(worker, COMPLETIONS, **body, stream=True)
    assert [text_of(streamed, i) for i in range(6)] == want.texts


def test_a_batch_is_as_wide_as_its_texts_need(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of them together have four slots at most."""
    opened, live = [], SpeculativeDecoder.live

    def recording(self: SpeculativeDecoder, slots: int, *arguments: Any, **options: Any) -> Any:
        opened.append((slots, sum(batch.call.slots for batch in worker.batches)))
        return live(self, slots, *arguments, **options)

    monkeypatch.setattr(SpeculativeDecoder, "live", recording)
    for n, wide in ((1, 1), (3, 4), (9, 4)):
        opened.clear()
        assert len(post(worker, COMPLETIONS, prompt=PROMPT, max_tokens=4, n=n)["choices"]) == n
        assert opened == [(wide, 0)]
    opened.clear()
    post_all(worker, *((COMPLETIONS, {"prompt": PROMPT, "max_tokens": 6, "n": 3, "top_k": k}) for k in (1, 2, 3)))
    assert len(opened) >= 3
    assert all(slots + others <= 4 for slots, others in opened)


def test_a_chat_goes_through_the_template(worker: Any, decoder: SpeculativeDecoder) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    body = {"messages": messages, "max_completion_tokens": 12, "seed": 0}
    want = decoder.generate(messages, 12).texts
    got = post(worker, CHATS, **body)
    assert got["object"] == "chat.completion"
    assert got["choices"][0]["message"] == {"role": "assistant", "content": want[0], "refusal": None}
    chunks = post(worker, CHATS, **body, stream=True, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(chunks) == want[0]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], got["usage"])


def test_a_stop_string_ends_a_text_before_it(worker: Any, decoder: SpeculativeDecoder) -> None:
    whole = decoder.generate(PROMPT, 12).texts[0]
    stop = whole[8:11]
    for stream in (False, True):
        got = post(worker, COMPLETIONS, prompt=PROMPT, max_tokens=12, stop=stop, stream=stream)
        text = text_of(got) if stream else got["choices"][0]["text"]
        reason = (got[-1] if stream else got)["choices"][0]["finish_reason"]
        assert (text, reason) == (whole[: whole.index(stop)], "stop")


def test_a_chat_without_a_length_goes_on_to_the_end_of_the_context(worker: Any) -> None:
    worker.context = 48
    got = post(worker, CHATS, messages=[{"role": "user", "content": "hi"}])
    assert got["choices"][0]["finish_reason"] == "length"
    assert got["usage"]["total_tokens"] == 48


def test_log_probabilities_are_those_of_a_call(worker: Any, decoder: SpeculativeDecoder) -> None:
    want = decoder.generate(PROMPT, 8, output_logprobs=2)
    assert want.logprobs is not None
    words = [decoder.tokenizer.decode([t]) for t in want.token_ids[0]]
    found = post(worker, COMPLETIONS, prompt=PROMPT, max_tokens=8, logprobs=2)["choices"][0]["logprobs"]
    assert found["tokens"] == words
    assert found["token_logprobs"] == pytest.approx(want.logprobs[0], abs=1e-5)
    assert [len(others) for others in found["top_logprobs"]] == [2] * 8
    assert found["text_offset"] == [sum(map(len, words[:i])) for i in range(8)]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    whole = post(worker, CHATS, **chat)["choices"][0]["logprobs"]["content"]
    streamed = [c["choices"][0]["logprobs"] for c in post(worker, CHATS, **chat, stream=True)]
    assert [t for piece in streamed if piece for t in piece["content"]] == whole
    assert whole[0]["top_logprobs"][0] == {name: whole[0][name] for name in ("token", "logprob", "bytes")}  # greedy


def test_without_a_seed_texts_differ_and_the_seed_is_told(worker: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.0}
    first, second = (post(worker, COMPLETIONS, **body) for _ in range(2))
    assert first["choices"] != second["choices"]
    again = post(worker, COMPLETIONS, **body, seed=first["usage"]["specdec"]["seed"])
    assert again["choices"] == first["choices"]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        (COMPLETIONS, {"prompt": "a", "maxtokens": 3}, 400, "maxtokens", "did you mean 'max_tokens'"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "3"}, 400, "max_tokens", "valid integer"),
        (COMPLETIONS, {"prompt": "a", "num_assistant_tokens": 3}, 400, "num_assistant_tokens", "the server chooses it"),
        (COMPLETIONS, {"prompt": "a", "max_length": 3}, 400, "max_length", "write max_tokens"),
        (COMPLETIONS, {"prompt": "a", "num_beams": 3}, 400, "num_beams", "beam search is not supported"),
        (COMPLETIONS, {"prompt": ["a", 2]}, 400, "prompt", "a text, token ids"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt", "empty"),
        (COMPLETIONS, {"prompt": [99999]}, 400, None, "vocabulary"),
        (COMPLETIONS, {"prompt": ["a"] * 20, "n": 100}, 400, "n", "1024 texts"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, 400, "echo", "not supported"),
        (COMPLETIONS, {"prompt": "a", "best_of": True}, 400, "best_of", "not supported"),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, 400, "stop", "none of them empty"),
        (COMPLETIONS, {"prompt": "a", "stop": 3}, 400, "stop", "a text or a list"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, 400, "top_p", "greater than 0"),
        (COMPLETIONS, {"prompt": "a", "model": "gpt"}, 404, "model", "'tiny'"),
        (COMPLETIONS, {}, 400, "prompt", "required"),
        (CHATS, {"messages": []}, 400, "messages", "at least 1"),
        (CHATS, {"messages": [{"content": 1, "role": "user"}], "tools": [{}]}, 400, "tools", "not supported"),
        (CHATS, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, 400, "top_logprobs", "=true"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None, "image_url"),
        ("/v1/embeddings", {}, 404, None, "/v1/embeddings"),
    ],
    ids=lambda value: None,
)  # fmt: skip
def test_errors_have_openais_form_and_name_the_field(
    worker: Any, path: str, body: Any, status: int, param: str | None, message: str
) -> None:
    (answer,) = post_all(worker, (path, body))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert message in error["message"]


LONG = [5] * 700  # tokens, more than the target has room for


@pytest.mark.parametrize(
    ("path", "body", "param", "numbers"),
    [
        (COMPLETIONS, {"prompt": [5], "max_tokens": 600}, "prompt", "601: 1 in the prompt, 600 in the completion"),
        (COMPLETIONS, {"prompt": LONG}, "prompt", "716: 700 in the prompt, 16 in the completion"),
        (COMPLETIONS, {"prompt": [[5], LONG]}, "prompt", "716: 700 in the prompt 1, 16 in the completion"),
        (
            CHATS,
            {"messages": [{"role": "user", "content": "a b " * 900}]},
            "messages",
            "in the messages, at least 1 in",
        ),
    ],
    ids=["text", "prompt", "prompts", "chat"],
)
def test_a_request_that_does_not_fit_gets_openais_code_and_the_numbers(
    worker: Any, path: str, body: Any, param: str, numbers: str
) -> None:
    """The context is that which is served, and the error names nothing that only Python or another verb has."""
    for context, words in (
        (256, "256 tokens (--context of the server; the model has 512), and"),
        (512, "512 tokens, and"),
    ):
        worker.context = context
        (answer,) = post_all(worker, (path, body))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert f"maximum context length is {words}" in error["message"]
        assert numbers in error["message"]
        assert "longest" not in error["message"]


def test_a_chat_to_a_model_without_a_template_names_the_servers_option(
    worker: Any, decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder.tokenizer, "chat_template", None)
    (answer,) = post_all(worker, (CHATS, {"messages": [{"role": "user", "content": "hi"}]}))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert "--chat-template" in error["message"]
    assert "/v1/completions" in error["message"]


EDGES = st.sampled_from(
    [0, 1, -1, 0.5, 1e-300, 5e-324, 1e-38, 1e39, 1e300, 2**63, -(2**63), 10**40, "", "\ud800", "\0"]
)
ANY = st.recursive(
    EDGES | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=17) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=8,
)
NAMES = sorted({*serving.Completion.model_fields, *serving.Chat.model_fields, "logit_bias", "tools", "user", "other"})
BODIES = st.dictionaries(st.sampled_from(NAMES), EDGES | ANY, max_size=3)
ROLES = {"role": st.sampled_from(["user", "system", ""]) | ANY, "content": st.text(max_size=4) | ANY, "name": ANY}
MESSAGES = st.lists(st.fixed_dictionaries({}, optional=ROLES), max_size=3)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(BODIES, MESSAGES | st.none(), st.booleans())
@example({"repetition_penalty": 1e-300}, None, False)
@example({"repetition_penalty": 1e-300, "stream": True}, None, False)
@example({}, [{"role": "user", "content": "hi"}], True)
@example({"max_tokens": 0}, [{"role": "user"}], True)
def test_no_request_is_the_servers_fault(
    worker: Any, fields: dict[str, Any], messages: list[dict[str, Any]] | None, chat: bool
) -> None:
    """Whatever a field holds: an answer, or a line about what is wrong."""
    worker.context = 24
    said = {"messages": messages or [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
    raw = json.dumps({"max_tokens": 2, **said, **fields}).encode("utf-8", "surrogatepass")

    async def send() -> httpx.Response:
        async with client_of(worker) as client:
            return await client.post(CHATS if chat else COMPLETIONS, content=raw)

    answer = asyncio.run(send())
    if answer.status_code == 200:
        assert '"server_error"' not in answer.text
    else:
        assert answer.status_code in (400, 404)
        assert re.fullmatch(".{1,600}", answer.json()["error"]["message"])


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b'{"prompt":' + b"[" * 9999, b'{"n": 1' + b"0" * 5000]
)
def test_a_body_that_is_no_request_is_refused(worker: Any, body: bytes) -> None:
    async def send() -> httpx.Response:
        async with client_of(worker) as client:
            return await client.post(COMPLETIONS, content=body)

    answer = asyncio.run(send())
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_fields_without_a_meaning_here_are_left_alone(worker: Any) -> None:
    got = post(
        worker, COMPLETIONS, prompt=PROMPT, max_tokens=2, user="me", logit_bias={}, suffix=None, echo=False, n=None,
    )  # fmt: skip
    assert got["usage"]["completion_tokens"] == 2


def test_a_batch_that_fails_ends_its_texts_and_no_others(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server goes on."""
    from specdec.decoding.verification import Verifier

    launch = Verifier.launch

    def broken(self: Verifier, active: Any) -> Any:
        if self.sampling.temperature == 1.0:
            raise RuntimeError("out of memory")
        return launch(self, active)

    monkeypatch.setattr(Verifier, "launch", broken)
    good, bad, streamed = post_all(
        worker,
        (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 8}),
        (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 8, "temperature": 1.0}),
        (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 8, "temperature": 1.0, "stream": True}),
    )
    assert (good.status_code, bad.status_code) == (200, 500)
    assert "out of memory" in bad.json()["error"]["message"]
    assert chunks_of(streamed)[-1]["error"]["type"] == "server_error"
    monkeypatch.undo()
    assert len(post(worker, COMPLETIONS, prompt=PROMPT, max_tokens=8, temperature=1.0)["choices"]) == 1


# -- metrics, leaving, stopping ----------------------------------------------------------------------------------------


def values(worker: Any) -> dict[str, float]:
    return figures(get(worker, "/metrics").text)


def figures(page: str) -> dict[str, float]:
    """The metrics by their names and labels, without the model's."""
    lines = [line.rsplit(" ", 1) for line in page.splitlines() if line[0] != "#"]
    return {re.sub(r',?model_name="tiny",?', "", name).replace("{}", ""): float(value) for name, value in lines}


def eventually(worker: Any, name: str, value: float) -> bool:
    """Whether a metric reaches a value within a minute: answers are sent before slots are free."""
    deadline = time.monotonic() + 60
    while values(worker).get(name) != value and time.monotonic() < deadline:
        time.sleep(0.02)
    return values(worker).get(name) == value


async def served(client: httpx.AsyncClient, requests: int) -> None:
    """Wait until so many requests have slots."""
    async with asyncio.timeout(60):
        while figures((await client.get("/metrics")).text)["vllm:num_requests_running"] < requests:
            await asyncio.sleep(0.001)


def test_metrics_sum_up_what_requests_were_told(worker: Any) -> None:
    answers = [post(worker, COMPLETIONS, prompt=PROMPT, max_tokens=10, temperature=t, n=2) for t in (0.0, 0.8)]
    figures = [a["usage"] for a in answers]
    found = values(worker)
    own = [f["specdec"] for f in figures]
    assert found["vllm:generation_tokens_total"] == sum(f["completion_tokens"] for f in figures) == 40
    assert found["vllm:prompt_tokens_total"] == sum(f["prompt_tokens"] for f in figures)
    assert found["vllm:spec_decode_num_drafts_total"] == sum(f["drafted_rounds"] for f in own)
    assert found["vllm:spec_decode_num_draft_tokens_total"] == sum(f["draft_tokens"] for f in own)
    accepted = sum(f["accepted_tokens"] for f in own)
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == accepted > 0
    position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert sum(v for name, v in found.items() if name.startswith(position)) == accepted
    assert found['vllm:request_success_total{finished_reason="length"}'] == 4
    assert found["vllm:e2e_request_latency_seconds_count"] == found["vllm:time_to_first_token_seconds_count"] == 4
    assert eventually(worker, "vllm:num_requests_running", 0)
    assert eventually(worker, "vllm:num_requests_waiting", 0)


def test_models_and_health(worker: Any) -> None:
    (listed,) = get(worker, "/v1/models").json()["data"]
    assert (listed["id"], listed["max_model_len"]) == ("tiny", 256)
    assert get(worker, "/v1/models/tiny").json() == listed
    assert get(worker, "/v1/models/other").status_code == 404
    assert get(worker, "/health").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_client_leaves_is_cancelled(worker: Any, stream: bool) -> None:
    """A client that closes the connection when another one's text, which is whole, has come."""
    done = asyncio.Event()
    body = {"prompt": PROMPT, "max_tokens": 240, "stream": stream}
    scope = {
        "type": "http", "method": "POST", "path": COMPLETIONS, "headers": [], "query_string": b"", "asgi": {},
    }  # fmt: skip

    async def leave() -> None:
        told: list[dict[str, Any]] = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> dict[str, Any]:
            if told:
                return told.pop()
            await done.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        await serving.make_app(worker, "tiny", 0)(scope, receive, send)

    async def both() -> Any:
        async with client_of(worker) as client:
            leaving = asyncio.ensure_future(leave())
            await served(client, 1)
            other = await client.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 20})
            done.set()
            await leaving
            return other.json()

    assert asyncio.run(both())["usage"]["completion_tokens"] == 20
    assert eventually(worker, 'vllm:request_success_total{finished_reason="abort"}', 1)
    assert values(worker)["vllm:generation_tokens_total"] < 240


def test_a_server_that_stops_tells_those_in_flight_and_takes_no_more(worker: Any) -> None:
    long = {"prompt": PROMPT, "max_tokens": 240}

    async def both() -> list[httpx.Response]:
        async with client_of(worker) as client:
            sent = [asyncio.ensure_future(client.post(COMPLETIONS, json={**long, "stream": s})) for s in (True, False)]
            await served(client, 2)
            worker.drain(0)
            return [*(await asyncio.gather(*sent)), await client.post(COMPLETIONS, json=long)]

    streamed, whole, late = asyncio.run(both())
    assert chunks_of(streamed)[-1]["error"]["message"] == "the server is stopping"
    assert (whole.status_code, late.status_code) == (503, 503)
    assert get(worker, "/health").status_code == 503


def test_a_server_that_has_time_lets_those_in_flight_end(worker: Any) -> None:
    async def one() -> Any:
        async with client_of(worker) as client:
            sent = asyncio.ensure_future(client.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 24}))
            await served(client, 1)
            worker.drain(60)
            return (await sent).json()

    assert asyncio.run(one())["usage"]["completion_tokens"] == 24
    worker.join(20)
    assert not worker.is_alive()


# -- the verb ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--option", "keep_state=true"), "keep_state is no option of a server"),
        (("--temperature", "-1"), "temperature"),
        (("--grace", "inf"), "--grace"),
        (("--grace", "nan"), "--grace"),
        (("--chat-template", "/nowhere/at/all"), "chat template"),
        (("--host", "192.0.2.1"), "192.0.2.1"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_line(options: tuple[str, ...], message: str) -> None:
    assert message in refused("serve", "--target", "demo-target", "--port", "0", "--strategies", "none", *options)


def test_no_tokens_by_default_is_an_empty_text(decoder: SpeculativeDecoder) -> None:
    worker = start_worker(serving, decoder, {"max_new_tokens": 0}, None, None)
    got = post(worker, CHATS, model="tiny", messages=[{"role": "user", "content": "a"}])
    assert (got["choices"][0]["message"]["content"], got["usage"]["completion_tokens"]) == ("", 0)
    assert post(worker, COMPLETIONS, model="tiny", prompt=PROMPT, max_tokens=3)["usage"]["completion_tokens"] == 3
    worker.drain(0)
    worker.join(20)


def test_a_context_that_the_target_lacks_is_refused(decoder: SpeculativeDecoder) -> None:
    with pytest.raises(SpecdecError, match="the target's context is 512"):
        start_worker(serving, decoder, {}, 513, None)


def test_without_the_extra_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("specdec.cli.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install specdec[serve]" in refused("serve", "--target", "demo-target")
