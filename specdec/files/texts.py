"""Files of text: JSON and YAML as other people write it, whose every fault becomes one clear error, and writing."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from specdec.errors import SpecdecError

DEEPEST = 64  # levels of lists and mappings in a document: what reads them goes down one call a level
MOST_PARTS = 100_000  # lists and mappings of a YAML document, every use of an anchor counted
MOST_KEYS = 10_000  # of one YAML mapping, merged ones included
MOST_DIGITS = 300  # of a whole number: as many as a float can hold
LONGEST_ID = 200  # characters of a model's name on the hub

# -- reading ----------------------------------------------------------------------------------------------------------


def as_path(name: Any, what: str) -> Path:
    """A path as users give it; `what` names its use. Raises SpecdecError for what cannot be the name of a file."""
    if not isinstance(name, (str, os.PathLike)) or not isinstance(text := os.fspath(name), str):
        raise SpecdecError(f"{what}: expected the path of a file, got {name!r}")
    if not text:
        raise SpecdecError(f"{what}: the name of the file is empty")
    if "\0" in text:
        raise SpecdecError(f"{what}: no file can be named {text!r}: the name holds a NUL character")
    return Path(text)


def expanded(name: str | Path) -> Path:
    """With the home folder in the place of ~; as it is where there is no such user."""
    with suppress(RuntimeError):
        return Path(name).expanduser()
    return Path(name)


def is_file(name: str | Path) -> bool:
    """Whether it is a file that is there; False also for what no file can be named."""
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def is_folder(name: str | Path) -> bool:
    """Whether it is a folder that is there."""
    try:
        return Path(name).is_dir()
    except (OSError, ValueError):
        return False


@contextmanager
def reading(name: Any, what: str) -> Iterator[Path]:
    """The path of a file that is read inside; its faults become a SpecdecError that names it."""
    path = as_path(name, what)
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):  # a device may never end
            raise SpecdecError(f"{what} not found: {path} is a {'folder' if stat.S_ISDIR(mode) else 'device'}")
        yield path
    except (FileNotFoundError, NotADirectoryError):
        raise SpecdecError(f"{what} not found: {path}") from None
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise SpecdecError(f"{what} {path} cannot be read as UTF-8 text: {where}") from None
    except OSError as error:
        raise SpecdecError(f"{what} {path} cannot be read: {error.strerror or error}") from None


def model_path(name: str) -> Path:
    """The path of a model's name, which need not be one. Raises SpecdecError for a local path that is not there."""
    path = expanded(as_path(name, "the model"))
    if name.endswith(".gguf"):
        if not is_file(path):
            raise SpecdecError(f"GGUF file not found: {name}")
    elif is_file(path):
        raise SpecdecError(f"not a GGUF file: {name}: expected a hub id, a folder or a file that ends in .gguf")
    elif not is_folder(path) and (
        path.is_absolute() or name.startswith((".", "~")) or len(name) > LONGEST_ID or name.count("/") > 1
    ):
        raise SpecdecError(f"model folder not found: {name}")
    return path


def check_readable(*names: Any, what: str) -> None:
    """Raise SpecdecError now, and not after libraries are loaded, for files that cannot be read."""
    for name in names:
        with reading(name, what) as path:
            path.open("rb").close()


def read_text(name: Any, what: str) -> str:
    """A UTF-8 file, without a byte order mark. Raises SpecdecError."""
    with reading(name, what) as path:
        return path.read_text(encoding="utf-8-sig")


def read_bytes(name: Any, what: str) -> bytes:
    """A file as it is. Raises SpecdecError."""
    with reading(name, what) as path:
        return path.read_bytes()


def read_json(name: Any, what: str) -> Any:
    """A JSON file. Raises SpecdecError."""
    return parse_json(read_text(name, what), str(name))


def read_yaml(name: Any, what: str) -> Any:
    """A YAML file. Raises SpecdecError."""
    return parse_yaml(read_text(name, what), str(name))


def parse_json_lines(text: str, where: str) -> Iterator[tuple[int, Any]]:
    """(number of the line from 1, document) of JSON lines; blank lines are passed over. Raises SpecdecError."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, parse_json(line, f"{where}, line {number}")


# -- parsing ----------------------------------------------------------------------------------------------------------


def parse_json(text: str, where: str) -> Any:
    """A JSON document; `where` names it in the SpecdecError that any text that is none raises, also one nested too
    deeply or with too long a number."""
    try:
        made = json.loads(text, parse_int=_whole)
    except json.JSONDecodeError as error:
        raise SpecdecError(f"{where}: not JSON: {error.msg}") from None
    except RecursionError:
        raise SpecdecError(f"{where}: not JSON that can be read: {_TOO_DEEP}") from None
    except ValueError as error:
        raise SpecdecError(f"{where}: not JSON that can be read: {first_line(error)}") from None
    _check_nesting(made, where)
    return made


def finite(value: Any) -> Any:
    """The value with null for NaN and infinities, which JSON lacks."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def parse_yaml(text: str, where: str) -> Any:
    """A YAML document, with the faults of `parse_json`; a duplicate key is one more."""
    try:
        made = yaml.load(text, _UniqueKeys)  # a safe loader
    except RecursionError:
        raise SpecdecError(f"{where}: not valid YAML: {_TOO_DEEP}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise SpecdecError(f"{where}: not valid YAML: {first_line(error)}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # tags over texts that do not fit them
        raise SpecdecError(f"{where}: not valid YAML: {type(error).__name__}: {first_line(error)}") from None
    _check_nesting(made, where, MOST_PARTS)
    return made


_TOO_DEEP = f"it nests more than {DEEPEST} levels deep, or refers to itself"


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits is too long")
    return int(text)


def _check_nesting(document: Any, where: str, most: int | None = None) -> None:
    """Raise SpecdecError for a document that what works on it could not walk through. A part that refers to itself
    has no last level; anchors inside anchors make a few lines a document without end."""
    level, parts = [document], 0
    for _ in range(DEEPEST + 1):
        level = [part for value in level for part in _inside(value) if isinstance(part, (list, tuple, dict, set))]
        parts += len(level)
        if not level:
            return
        if most is not None and parts > most:
            raise SpecdecError(f"{where}: its anchors stand for more than {most} lists and mappings")
    raise SpecdecError(f"{where}: {_TOO_DEEP}")


def _inside(value: Any) -> Any:
    if isinstance(value, Mapping):
        return (*value, *value.values())
    return value if isinstance(value, (list, tuple, set)) else ()


class _UniqueKeys(yaml.SafeLoader):
    """Refuses on the way what would take long to find out at the end."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.YAMLError(f"duplicate key {key.value!r} in the mapping at {_line(node)}")
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: Any) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MOST_KEYS:
            raise yaml.YAMLError(f"the mapping at {_line(node)} merges more than {MOST_KEYS} keys")

    def construct_yaml_int(self, node: Any) -> int:
        if len(node.value) <= MOST_DIGITS:
            value: int = super().construct_yaml_int(node)
            if abs(value) < 10**MOST_DIGITS:
                return value
        raise yaml.YAMLError(f"the number at {_line(node)} is too long")


_UniqueKeys.add_constructor("tag:yaml.org,2002:int", _UniqueKeys.construct_yaml_int)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that `parse_yaml` would read as numbers."""


# PyYAML reads 1e-3 as a text: YAML 1.1 wants 1.0e-3. YAML 1.2, and whoever writes a learning rate, mean the number.
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z")
for _kind in (_UniqueKeys, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def dump_yaml_text(value: Any) -> str:
    """Plain data as YAML, in the order that it has; `parse_yaml` reads it back."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def _line(node: Any) -> str:
    return f"line {node.start_mark.line + 1}"


def first_line(error: BaseException) -> str:
    """What an error says first; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def failure(error: BaseException) -> str:
    """An error's type and what it says first, in one line."""
    return f"{type(error).__name__}: {first_line(error)}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes}:{rest:02} min"


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: it holds no half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


# -- writing ----------------------------------------------------------------------------------------------------------


def check_writable(name: Any, what: str, folder: bool = False) -> Path:
    """Raise SpecdecError now, and not after hours of work, if a file could not be written, or files in a folder.

    Makes the folders that are missing, and leaves no file.
    """
    path = as_path(name, what)
    home = path if folder else path.parent
    try:
        home.mkdir(parents=True, exist_ok=True)
        mode = None if folder else _mode(path)
        if mode is not None and stat.S_ISDIR(mode):
            raise SpecdecError(f"cannot write {path}: it is a folder")
        if mode is not None and not stat.S_ISREG(mode):  # a pipe or a device, which opening could change
            if not os.access(path, os.W_OK):
                raise SpecdecError(f"cannot write {path}: Permission denied")
            return path
        with tempfile.TemporaryFile(dir=home):
            return path
    except OSError as error:
        said = f"{home} is no folder" if isinstance(error, FileExistsError) else error.strerror or error
        raise SpecdecError(f"cannot write {path}: {said}") from None


def _mode(path: Path) -> int | None:
    """Kind and permissions of a file; None: there is none yet."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


@contextmanager
def writing(path: Path, what: str) -> Iterator[None]:
    """Turn the errors of writing a file, such as a full disk, into a SpecdecError that names it. Libraries over the
    system have RuntimeErrors of their own for it, or others that carry its words."""
    try:
        yield
    except SpecdecError:
        raise
    except Exception as error:
        said = getattr(error, "strerror", None) or first_line(error)
        if isinstance(error, (OSError, RuntimeError)) or "os error" in said:
            raise SpecdecError(f"{what} {path} cannot be written: {said}") from None
        raise


@contextmanager
def unfinished(name: Any, what: str) -> Iterator[Path]:
    """Yield the path of a new file, which takes the place of `name` when the block ends. If the block fails, an old
    file stays as it was. For libraries that write to a path; raises what `writing` raises."""
    path = as_path(name, what)
    new = path.parent / f".{uuid.uuid4().hex}{path.suffix}"
    try:
        with writing(path, what):
            yield new
            new.replace(path)
    finally:
        with suppress(OSError):
            new.unlink()


def write_file(name: Any, data: str | bytes, what: str) -> Path:
    """`write_atomically`, whose faults become a SpecdecError that names the file."""
    path = as_path(name, what)
    try:
        write_atomically(path, data)
    except OSError as error:
        raise SpecdecError(f"{what} {path} cannot be written: {error.strerror or error}") from None
    return path


def write_atomically(path: Path, data: str | bytes) -> None:
    """A reader finds the old file or the new one, never half of it; a write that fails leaves the old one alone. A pipe
    or a device is written to.

    Raises OSError, with the name of `path`.
    """
    encoded = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    # The name is as short as any: one that the file system takes must not become one that it refuses.
    unfinished = path.parent / f".{uuid.uuid4().hex}"
    try:
        if path.exists() and not path.is_file():  # a new file would take its place
            path.write_bytes(encoded)
            return
        with unfinished.open("xb") as file:
            file.write(encoded)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(OSError):
            unfinished.unlink()
