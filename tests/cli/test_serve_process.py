"""`specdec serve` as a process, with the `openai` client: streams at once, stopping, killing, starting again."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specdec import SpeculativeDecoder

openai = pytest.importorskip("openai", reason="the package openai is not installed")
pytest.importorskip("uvicorn", reason="the extra specdec[serve] is not installed")

pytestmark = pytest.mark.full
ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ("def add(self, item):", "import os\nimport", "class Stack:\n    def", "for i in range(")
STREAMS, TOKENS = 32, 24


@contextmanager
def server(*options: str, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of the embedded pair: its process and its address."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "specdec", "serve", "--target", "demo-target", "--draft", "demo-draft"]
    command += ["--acceptance", "match", "--port", str(port), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd="/", env=environment)
    assert process.stderr is not None
    try:
        said = ""
        for line in process.stderr:
            said += line
            found = re.search(r"http://\S+", line)
            if found:
                break
        else:
            pytest.fail(said)
        yield process, found.group()
    finally:
        process.kill()
        process.wait(30)
        process.stderr.close()


def port_of(address: str) -> int:
    return int(re.findall(r":(\d+)/", address)[0])


def client_of(address: str) -> Any:
    return openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0, timeout=300)


async def streamed(client: Any, prompt: str, **options: Any) -> tuple[str, Any]:
    """The text and the usage of a stream."""
    text, usage = "", None
    options = {"max_tokens": TOKENS, **options, "stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await client.completions.create(model="demo-target", prompt=prompt, **options):
        text += "".join(choice.text for choice in chunk.choices)
        usage = chunk.usage or usage
    return text, usage


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained("demo-target", draft="demo-draft")


def requests() -> list[dict[str, Any]]:
    return [
        {"prompt": PROMPTS[i % 4] + f"  # {i}\n", "seed": i, "temperature": (0.0, 0.8)[i % 2]} for i in range(STREAMS)
    ]


async def stopped_amid(process: Any, address: str, how: int, tokens: int) -> str:
    """The text of a stream during which the server gets a signal, after the first piece."""
    text = ""
    async with client_of(address) as client:
        stream = await client.completions.create(
            model="demo-target", prompt=PROMPTS[0], max_tokens=tokens, temperature=0, stream=True
        )
        async for chunk in stream:
            if not text:
                process.send_signal(how)
            text += chunk.choices[0].text
    return text


def test_32_streams_at_once_have_the_texts_of_calls_of_their_own(decoder: SpeculativeDecoder) -> None:
    """After them SIGTERM comes in a stream, which ends before the server does; then the address is free again."""

    async def all_at_once(address: str) -> list[tuple[str, Any]]:
        async with client_of(address) as client:
            return list(await asyncio.gather(*(streamed(client, **request) for request in requests())))

    want = decoder.generate(PROMPTS[0], TOKENS).texts[0]
    with server() as (process, address):
        got = asyncio.run(all_at_once(address))
        assert asyncio.run(stopped_amid(process, address, signal.SIGTERM, TOKENS)) == want
        assert process.wait(30) == 0
    with server("--grace", "0.2", port=port_of(address)) as (process, again):
        assert again == address
        with pytest.raises(openai.APIError, match="the server is stopping"):  # it takes longer than the grace
            asyncio.run(stopped_amid(process, again, signal.SIGTERM, 1500))
        assert process.wait(30) == 0
    for request, (text, usage) in zip(requests(), got, strict=True):
        how = {name: request[name] for name in ("seed", "temperature")}
        alone = decoder.generate(request["prompt"], TOKENS, acceptance="match", **how)
        assert text == alone.texts[0]
        assert usage.completion_tokens == len(alone.token_ids[0])
    details = [usage.completion_tokens_details for _, usage in got]
    assert sum(d.accepted_prediction_tokens for d in details) > 0


def test_after_a_kill_the_server_starts_again_at_its_address(decoder: SpeculativeDecoder) -> None:
    """There Ctrl-C comes in a stream."""
    with server() as (process, address):
        with pytest.raises(Exception, match=r"(?i)peer|closed|connection|incomplete"):
            asyncio.run(stopped_amid(process, address, signal.SIGKILL, 1500))
        assert process.wait(30) == -signal.SIGKILL
    text = decoder.generate(PROMPTS[1], 12, seed=4, temperature=0.8, acceptance="match").texts[0]
    with server(port=port_of(address)) as (process, again):
        with openai.OpenAI(base_url=again, api_key="none") as client:
            made = client.completions.create(
                model="demo-target", prompt=PROMPTS[1], max_tokens=12, seed=4, temperature=0.8
            )  # fmt: skip
            assert made.choices[0].text == text
            assert client.models.retrieve("demo-target").id == "demo-target"
        want = decoder.generate(PROMPTS[0], TOKENS).texts[0]
        assert asyncio.run(stopped_amid(process, again, signal.SIGINT, TOKENS)) == want
        assert process.wait(30) == 0


def test_a_chat_its_errors_and_the_pages_example(
    tmp_path: Path, decoder: SpeculativeDecoder, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a template from a file; the embedded models have none."""
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}# {{ m.content }}\n{% endfor %}", encoding="utf-8")
    messages = [{"role": "user", "content": "a queue"}]
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(from openai.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    (call,) = re.findall(r"^(decoder\.generate.*)$", page, flags=re.MULTILINE)
    with (
        server("--chat-template", str(template)) as (_, address),
        openai.OpenAI(base_url=address, api_key="none") as client,
    ):
        made = client.chat.completions.create(model="demo-target", messages=messages, max_tokens=16, temperature=0)
        with pytest.raises(openai.BadRequestError, match="tools is not supported"):
            client.chat.completions.create(model="demo-target", messages=messages, tools=[{"type": "function"}])
        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.chat.completions.create(model="another", messages=messages)
        exec(compile(code.replace("http://127.0.0.1:8000/v1", address), "serving.md", "exec"), {})
    assert made.choices[0].message.content == decoder.generate("# a queue\n", 16).texts[0]
    want = eval(compile(call, "serving.md", "eval"), {"decoder": decoder})
    assert capsys.readouterr().out.startswith(want + "CompletionTokensDetails(")
