"""A trace of a Llama target and its DSpark draft from plain torch, some ten times faster on a CPU than serving them.

    python tests/pair_trace.py TARGET DRAFT PROMPTS.jsonl OUT --temperature 0 --minutes 10

The target writes its answers; then the draft is run at every position of them. A draft token counts as accepted where
the target's token t agrees: for greedy answers, where it is the draft's likeliest; for sampled ones with probability
min(1, q(t) / p(t)), which gives accepted tokens the very distribution that rejection sampling gives them
(min(p, q)). A step's block begins where the block before it ended. Later drafts of a block than the first rejected one
are not worked out: their confidences are NaN. Steps have ``--requests`` requests, which join and leave.

Of sampled answers, OUT with the suffix .oracle has the same steps with the true chance of each draft, sum(min(p, q)),
as its confidence: no confidence can rank drafts better.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiny_draft
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_adaptive.runtime.relay import StepRecord
from sglang_adaptive.runtime.trace import TraceRecorder
from sglang_adaptive.runtime.trace_features import PER_DRAFT, draft_columns

BATCH = 32
ANCHORS = 96  # blocks of one draft forward


@dataclass
class Blocks:
    """The blocks of an answer: accepted [N], confidences and true chances [N, K], trace columns [N, 3 K + 1]."""

    accepted: np.ndarray
    confidence: np.ndarray
    chance: np.ndarray
    columns: np.ndarray


class Pair:
    """The target in bfloat16; the draft in float32, but for the head that it shares."""

    def __init__(self, target: Path, draft: Path) -> None:
        config, at = json.loads((draft / "config.json").read_text()), json.loads((target / "config.json").read_text())
        tiny_draft.HIDDEN, tiny_draft.MLP = config["hidden_size"], config["intermediate_size"]
        tiny_draft.HEADS, tiny_draft.KV_HEADS = config["num_attention_heads"], config["num_key_value_heads"]
        tiny_draft.HEAD_DIM, tiny_draft.THETA = config["head_dim"], config["rope_theta"]
        tiny_draft.EPS, tiny_draft.MARKOV_RANK = config["rms_norm_eps"], config["markov_rank"]
        tiny_draft.DRAFT_LAYERS, tiny_draft.GAMMA = config["num_hidden_layers"], config["block_size"]
        tiny_draft.CAPTURED = tuple(config["dflash_config"]["target_layer_ids"])
        tiny_draft.language.VOCAB = at["vocab_size"]
        self.gamma, self.mask = config["block_size"], config["dflash_config"]["mask_token_id"]
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
        self.draft = tiny_draft.Draft().eval()
        self.draft.load_state_dict(load_file(draft / "model.safetensors"))
        self.draft.float()

    @torch.inference_mode()
    def answers(self, texts: list[str], temperature: float, tokens: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Per text: ids [N], captured and final layer outputs [N, C] and [N, H], and the prompt's length."""
        self.tokenizer.padding_side, self.tokenizer.pad_token = "left", self.tokenizer.eos_token
        packed = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        ids, mask = packed["input_ids"], packed["attention_mask"]
        width, cache, taken, captured = ids.shape[1], None, [ids], []
        final: list[torch.Tensor] = []
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        for step in range(tokens + 1):
            out = self.target(
                input_ids=taken[-1],
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                output_hidden_states=True,
                logits_to_keep=1,
            )
            captured.append(torch.cat([out.hidden_states[layer + 1] for layer in tiny_draft.CAPTURED], dim=-1))
            final.append(out.hidden_states[-1])
            if step == tokens:
                break
            cache, logits = out.past_key_values, out.logits[:, -1].float()
            if temperature == 0:
                taken.append(logits.argmax(-1, keepdim=True))
            else:
                taken.append(torch.multinomial((logits / temperature).softmax(-1), 1))
            mask = torch.cat([mask, mask.new_ones(len(texts), 1)], dim=1)
            positions = positions[:, -1:] + 1
        all_ids, layers, finals = torch.cat(taken, 1), torch.cat(captured, 1), torch.cat(final, 1)
        for row in range(len(texts)):
            first = width - int(packed["attention_mask"][row].sum())
            ends = (all_ids[row, width:] == self.tokenizer.eos_token_id).nonzero()
            last = all_ids.shape[1] if not len(ends) else width + int(ends[0]) + 1
            yield all_ids[row, first:last], layers[row, first:last], finals[row, first:last], width - first

    @torch.inference_mode()
    def blocks(self, ids: torch.Tensor, captured: torch.Tensor, final: torch.Tensor, prompt: int, temperature: float):
        """The chain of blocks over an answer, or None where it is too short for one."""
        anchors = torch.arange(prompt, len(ids) - self.gamma)
        if not len(anchors):
            return None
        parts = [self._at(part, ids, captured, final, temperature) for part in anchors.split(ANCHORS)]
        accepted, *tables = (torch.cat(column).numpy() for column in zip(*parts, strict=True))
        chain, at = [], 0
        while at < len(anchors):
            chain.append(at)
            at += int(accepted[at]) + 1
        return Blocks(accepted[chain], *(each[chain] for each in tables))

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.target.model.embed_tokens(ids).float()

    def _at(self, anchors, ids, captured, final, temperature):
        count, gamma = len(anchors), self.gamma
        block = torch.full((1, count, gamma), self.mask)
        block[0, :, 0] = ids[anchors]
        end = int(anchors[-1])
        hidden = self.draft(block, captured[None, :end].float(), anchors[None], self._embed)[0]
        accepted, alive = torch.zeros(count, dtype=torch.int64), torch.arange(count)
        confidence, chance = torch.full((2, count, gamma), torch.nan)
        columns = torch.full((count, PER_DRAFT, gamma), torch.nan)
        one = torch.ones(count)
        for j in range(gamma):
            previous, token = ids[anchors[alive] + j], ids[anchors[alive] + j + 1]
            rows = hidden[alive, j]
            logits = self.target.lm_head(rows.bfloat16()).float() + self.draft.bias(previous)
            confidence[alive, j] = self.draft.confidence(rows, previous).sigmoid()
            asked = one[: len(alive)] * (temperature or 1.0)
            columns[alive, :, j] = draft_columns(logits[:, None], asked, asked < 0)[:, :-1]
            if temperature == 0:
                agrees = logits.argmax(-1) == token
            else:
                q = (logits / temperature).softmax(-1)
                p = (self.target.lm_head(final[anchors[alive] + j]).float() / temperature).softmax(-1)
                chance[alive, j] = torch.minimum(p, q).sum(-1)
                agrees = torch.rand(len(alive)) * p.gather(1, token[:, None])[:, 0] < q.gather(1, token[:, None])[:, 0]
            alive = alive[agrees]
            accepted[alive] += 1
            if not len(alive):
                break
        asked = torch.full((count, 1), float(temperature))
        return accepted, confidence, chance, torch.cat([columns.flatten(1), asked], dim=1)


def record(recorders: list[TraceRecorder], answers: Iterator[Blocks], requests: int, gamma: int) -> tuple[int, int]:
    """Write steps of ``requests`` requests, with confidences and with true chances; an answer that ends makes room for
    the next. Steps and rows written."""
    slots: list[tuple[int, Blocks, int] | None] = [None] * requests
    generation = steps = rows = 0
    answers = iter(answers)
    while True:
        for slot in range(requests):
            if slots[slot] is None and (new := next(answers, None)) is not None:
                generation += 1
                slots[slot] = (generation, new, 0)
        busy = [slot for slot in range(requests) if slots[slot] is not None]
        if len(busy) < requests:
            return steps, rows
        now = [slots[slot] for slot in busy]
        take = [(b.accepted[at], b.columns[at], b.confidence[at], b.chance[at]) for _, b, at in now]
        accepted, columns, *confidences = (np.array(part) for part in zip(*take, strict=True))
        owners = np.array(busy), np.array([owner for owner, _, _ in now])
        lens = np.full(len(busy), gamma + 1), accepted + 1
        for recorder, confidence in zip(recorders, confidences, strict=False):
            recorder.record(StepRecord(steps, *owners, 0.0, confidence, *lens, None, extra=columns), None)
        for slot, (owner, blocks, at) in zip(busy, now, strict=True):
            slots[slot] = (owner, blocks, at + 1) if at + 1 < len(blocks.accepted) else None
        steps, rows = steps + 1, rows + len(busy)
        # The recorder drops steps that come faster than it writes.
        while any(recorder.recording and recorder._waiting.qsize() > 1024 for recorder in recorders):
            time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("target", "draft", "prompts", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--half", type=int, choices=(0, 1), help="only every second prompt, from this one on")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("medium")
    pair = Pair(arguments.target, arguments.draft)
    prompts = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
    prompts = prompts[arguments.half :: 2] if arguments.half is not None else prompts
    draw, stop = random.Random(arguments.seed), time.monotonic() + 60 * arguments.minutes

    def text(prompt: dict[str, str]) -> str:
        asked = prompt["text"][-1200:]
        if prompt["source"] == "humaneval" and draw.random() < 0.5:
            return asked
        return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"

    def answers() -> Iterator[Blocks]:
        while time.monotonic() < stop:
            # Prompts of like lengths share a batch: less padding.
            drawn = sorted(draw.sample(prompts, min(4 * BATCH, len(prompts))), key=lambda prompt: len(prompt["text"]))
            begin = draw.randrange(max(1, len(drawn) - BATCH))
            found = []
            texts = [text(prompt) for prompt in drawn[begin : begin + BATCH]]
            for answer in pair.answers(texts, arguments.temperature, arguments.tokens):
                found.append(pair.blocks(*answer, arguments.temperature))
            found = [blocks for blocks in found if blocks is not None]
            draw.shuffle(found)
            rows = sum(len(blocks.accepted) for blocks in found)
            print(f"{rows} blocks, {sum(int(b.accepted.sum()) for b in found) / rows:.2f} accepted", flush=True)
            yield from found

    meta = {"origin": "plain torch", "model": arguments.target.name, "draft": arguments.draft.name}
    outs = [arguments.out, *([arguments.out.with_suffix(".oracle")] if arguments.temperature else [])]
    recorders = [TraceRecorder(out, pair.gamma, meta=meta) for out in outs]
    steps, rows = record(recorders, answers(), arguments.requests, pair.gamma)
    for recorder in recorders:
        recorder.close()
    print(f"{steps} steps, {rows} rows in {arguments.out}")


if __name__ == "__main__":
    sys.exit(main())
