"""A made-up language whose texts differ in how well a draft can foresee them.

*Easy* text recites fixed phrases, which follow each other in a fixed order most of the time. In *hard* text each word
hangs on the two before it, through a table that a draft block cannot follow beyond its first words. *Mixed* text
alternates. The first word of a text says which kind it is, so a confidence head can tell them apart.
"""

from __future__ import annotations

import random
from pathlib import Path

SPECIAL = ["<unk>", "<s>", "</s>", "<mask>", "<user>", "<assistant>", "<easy>", "<hard>", "<mixed>"]
UNK, BOS, EOS, MASK, USER, ASSISTANT, EASY, HARD, MIXED = range(len(SPECIAL))
KINDS = (EASY, HARD, MIXED)
PHRASES, PHRASE_WORDS, HARD_WORDS = 16, 10, 20
FIRST_HARD = len(SPECIAL)
FIRST_EASY = FIRST_HARD + HARD_WORDS
VOCAB = 256
WORDS = SPECIAL + [f"h{i}" for i in range(HARD_WORDS)] + [f"e{i}" for i in range(VOCAB - FIRST_EASY)]
ORDERLY = 0.85  # share of steps that follow the order of the phrases, or the table
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<user> ' if message['role'] == 'user' else '<assistant> ' }}{{ message['content'] }}{{ ' ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def _draw_phrases(rng: random.Random) -> list[list[int]]:
    words = list(range(FIRST_EASY, VOCAB))
    rng.shuffle(words)
    starts, rest = words[:PHRASES], words[PHRASES:]
    return [[start, *rng.choices(rest, k=PHRASE_WORDS - 1)] for start in starts]


_DRAW = random.Random(7)
_PHRASES = _draw_phrases(_DRAW)
# _TABLE[last][last but one]: each row is a permutation, so the walk over pairs is one to one and its cycles are long.
_TABLE = [_DRAW.sample(range(HARD_WORDS), HARD_WORDS) for _ in range(HARD_WORDS)]


def _easy(rng: random.Random, length: int) -> list[int]:
    words: list[int] = []
    phrase = rng.randrange(PHRASES)
    while len(words) < length:
        words += _PHRASES[phrase]
        phrase = (phrase + 1) % PHRASES if rng.random() < ORDERLY else rng.randrange(PHRASES)
    return words[:length]


def _hard(rng: random.Random, length: int) -> list[int]:
    words = [rng.randrange(HARD_WORDS), rng.randrange(HARD_WORDS)]
    while len(words) < length:
        words.append(_TABLE[words[-1]][words[-2]] if rng.random() < ORDERLY else rng.randrange(HARD_WORDS))
    return [FIRST_HARD + word for word in words[:length]]


def text(rng: random.Random, kind: int, length: int) -> list[int]:
    """Token ids: the word for ``kind`` and ``length - 1`` words of it. Mixed text changes every 20 to 40 words."""
    words, easy = [kind], kind == EASY or (kind == MIXED and rng.random() < 0.5)
    while len(words) < length:
        span = rng.randint(20, 40) if kind == MIXED else length
        words += _easy(rng, span) if easy else _hard(rng, span)
        if kind == MIXED:
            easy = not easy
    return words[:length]


def training_text(rng: random.Random, length: int) -> list[int]:
    """``length`` token ids of any kind: some as a chat turn, some with an end after which the text goes on."""
    kind = rng.choice(KINDS)
    words = text(rng, kind, length)
    if rng.random() < 0.3:
        cut = rng.randint(4, 24)
        words = [USER, *words[:cut], ASSISTANT, *words[cut:]]
    if rng.random() < 0.1:
        end = rng.randint(length // 2, length - 2)
        words = [*words[:end], EOS, *text(rng, kind, length)]
    return words[:length]


def random_prompts(n: int, seed: int, kinds: tuple[int, ...] = KINDS, words: int = 24) -> list[str]:
    """``n`` prompts whose kinds are taken in turn; each has between half of ``words`` and ``words`` words."""
    rng = random.Random(seed)
    texts = (text(rng, kinds[i % len(kinds)], rng.randint(words // 2, words)) for i in range(n))
    return [" ".join(WORDS[word] for word in ids) for ids in texts]


def save_tokenizer(folder: Path) -> None:
    """One token a word, split at white space, anything else ``<unk>``; with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        additional_special_tokens=["<mask>", "<user>", "<assistant>"],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
