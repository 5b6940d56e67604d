"""Valid input into odd input: trees (structure and values), lines, bytes, kinds of files."""

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
DIGITS = "7" * 5001
# What stands for no value of JSON or YAML while a tree is dumped, and the text it becomes.
RAW = {
    "@digits": DIGITS, "@null": "null", "@tag": "!!python/object/apply:os.system [touch CANARY]",
    "@date": "2020-01-01", "@inf": "1e999", "@nan": ".nan", "@tilde": "~", "@deep": "[" * 300,
}  # fmt: skip
TEXTS = (
    "", " ", "auto", "off", "all", "0", "-1", "1e999", "é", "\u202e", "\x1b[31m", "a" * 5000, "..",
    "../../x", "/", "~nobody/x", "/dev/null", "${a", "${a.b}", "${name}", "${oc.env:HOME}", "${}",
    "${oc.env:A_TOKEN}", "${oc.decode:[}", "${name:}", "=1+1", "<script>", "$(touch CANARY)",
    ";touch CANARY", "a\nb", "a\tb", "a,b", "\x00", "\ufeff", "\ud800", "{{7*7}}", "%s%n", "run",
    "CANARY.py:Job", "__import__('os').system('touch CANARY')", "ddp", "cpu", "lm", "*", "&x",
)  # fmt: skip
VALUES = (
    None, True, False, 0, -1, 1, 2, 7, 64, 2**31, 2**63, -(2**63), 2**64, 10**18, 10**400, 0.0,
    -0.0, 0.5, 1e-320, 1e308, float("nan"), float("inf"), [], {}, [[]], [None], {"": 0}, {"a": 1},
    [0, 0], [1, "a", None], {"a": {"b": {"c": []}}},
)  # fmt: skip
BYTES = (
    b"\xff\xfe", b"\xef\xbb\xbf", b"\x00", b"\xed\xa0\x80", b"\r\n", b"\n", b",", b'"', b"\t", b"-",
    b"nan", b"inf", b"1e999", b"[" * 3000, b"{", b"}", b": ", b"9" * 5001, b"x" * 140_000, b"#",
    b"!!python/name:os.system ''", b"cos\nsystem\n(S'touch CANARY'\ntR.", b"=cmd|'/c x'!A0",
    b"&a [*a, *a]", b"<<: {a: 1}", b"? [a]\n: 1\n", b"%YAML 1.1\n---\n", b"null: 1\n", b"...\n",
)  # fmt: skip
KEYS = ("", "null", "a.b", "_target_", "é", "schema", "name", "\x00", "@null", "@digits", "=x", "1")

Tree = Any


def odd(rng: random.Random) -> Any:
    """Return a value that is seldom right anywhere."""
    chosen = rng.random()
    if chosen < 0.45:
        return copy.deepcopy(rng.choice(VALUES))
    return rng.choice(TEXTS) if chosen < 0.85 else rng.choice(list(RAW))


def near(value: Any, rng: random.Random) -> Any:
    """Return a value of the same type, which may well be right."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice(
            (value + 1, value - 1, value * 2, -value, 0, 1, value + rng.randint(2, 99))
        )
    if isinstance(value, float):
        return rng.choice((value * rng.uniform(0.1, 9), -value, 0.0, 1e-9, value * 1e9))
    if isinstance(value, str):
        cut = rng.randint(0, len(value))
        return rng.choice((value[:cut], value + value, value.upper(), f"{value} ", value[cut:]))
    return odd(rng)


def places(tree: Tree) -> Iterator[tuple[Any, Any]]:
    """Yield every container of a tree with a key or an index in it."""
    if isinstance(tree, dict):
        pairs: Any = tree.items()
    elif isinstance(tree, list):
        pairs = enumerate(tree)
    else:
        return
    for key, value in pairs:
        yield tree, key
        yield from places(value)


def change_tree(tree: Tree, rng: random.Random) -> Tree:
    """Change one place of a tree: its value, its type, its key, or whether it is there."""
    found = list(places(tree))
    if not found:
        return odd(rng)
    inside, key = rng.choice(found)
    value, how = inside[key], rng.random()
    if how < 0.4:
        inside[key] = near(value, rng)
    elif how < 0.6:
        inside[key] = odd(rng)
    elif how < 0.7:
        del inside[key]
    elif how < 0.76:
        inside[key] = rng.choice(([value], {"a": value}, str(value), [value, value]))
    elif how < 0.84:
        other, there = rng.choice(found)
        inside[key] = copy.deepcopy(other[there]) if other is not inside else value
    elif isinstance(inside, dict):
        name = rng.choice((*KEYS, f"{key}s", str(key).upper()))
        inside[name] = inside.pop(key) if how < 0.92 else odd(rng)
    else:
        inside.insert(rng.randint(0, len(inside)), near(value, rng))
    return tree


def to_yaml(tree: Tree) -> bytes:
    return _with_raw(yaml.dump(_plain(tree), Dumper=Dumper, sort_keys=False, allow_unicode=True))


def to_json(tree: Tree) -> bytes:
    return _with_raw(json.dumps(tree, indent=2))


def _plain(tree: Tree) -> Tree:
    """Return a tree without lone surrogates, which no YAML can hold."""
    if isinstance(tree, dict):
        return {_plain(key): _plain(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_plain(value) for value in tree]
    return tree.encode(errors="replace").decode() if isinstance(tree, str) else tree


def _with_raw(text: str) -> bytes:
    for mark, raw in RAW.items():
        if mark in text:
            text = text.replace(f"'{mark}'", raw).replace(f'"{mark}"', raw)
    return text.encode(errors="surrogatepass")


def change_line(raw: bytes, rng: random.Random) -> bytes:
    """Change one line of `key: value` or `a,b,c`, or where it stands."""
    lines = raw.split(b"\n")
    at, how = rng.randrange(len(lines)), rng.random()
    line = lines[at]
    if how < 0.15:
        del lines[at]
    elif how < 0.3:
        lines.insert(rng.randint(0, len(lines)), line)
    elif how < 0.4:
        lines[at] = rng.choice((b" ", b"  ", b"\t", b"#", b"- ")) + line
    elif how < 0.7:
        mark = next((mark for mark in (b": ", b",", b"\t", b"=") if mark in line), b" ")
        cells = line.split(mark)
        cells[rng.randrange(len(cells))] = as_bytes(odd(rng))
        lines[at] = mark.join(cells)
    else:
        other = rng.randrange(len(lines))
        lines[at], lines[other] = lines[other], line
    return b"\n".join(lines)


def as_bytes(value: Any) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value)
    return RAW.get(text, text).encode(errors="surrogatepass")


def change_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Flip, cut, repeat or insert some bytes."""
    at, how = rng.randint(0, len(raw)), rng.random()
    end = min(len(raw), at + rng.choice((1, 1, 2, 8, 64)))
    if how < 0.3 and at < len(raw):
        return raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]
    if how < 0.4:
        return raw[:at]
    if how < 0.55:
        return raw[:at] + raw[end:]
    if how < 0.65:
        return raw[:end] + raw[at:]
    at = rng.choice((0, at, len(raw)))
    return raw[:at] + rng.choice(BYTES) + raw[at:]


def change_text(raw: bytes, rng: random.Random) -> bytes:
    return (change_line if rng.random() < 0.6 else change_bytes)(raw, rng)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _absent(path: Path) -> None:
    pass


# What may lie where a file should; each is made at its path.
ODD_FILES: tuple[Callable[[Path], None], ...] = (_fifo, _folder, _loop, _device, _absent)
