"""Stream-of-search traces for Countdown (after Gandhi et al., 2024), and their tokenizer.

A trace is the text of a search that a small model can continue token by token, since every line
restates what the next one needs:

    Depth first, small first: 3 7 12 25            the plan and the numbers in its order
    #1: 3+7=10 | 10 12 25                          first step number 1, and what it leaves
    1: 10 12 25 | 10+12=22 | 22 25 | 22+25=47, 25-22=3
    1: 10 12 25 | 12-10=2 | 2 25 | 2+25=27, 25-2=23, 2*25=50
    ...                                            dead ends; then back to the root, step 2
    #2: 7-3=4 | 4 12 25

Lines after `k:` extend first step `k`: state, second step, state, every third step. Depth first
opens `#k` and exhausts it before `#k+1`; breadth first lists all `#k` before it extends any. With
three numbers, depth first needs no first step and its lines begin with `0:`. The only free choices
are the two of the plan: strategy, and whether states run from small to large or from large to
small. Steps come in the order of `sparsespec_jax.countdown.moves`.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

from sparsespec_jax.countdown import (
    LARGEST_RESULT,
    TARGETS,
    Move,
    Problem,
    State,
    moves,
    reachable,
    sample_problem,
)
from sparsespec_jax.models.hub import write_json

MAX_LENGTH = 4096  # tokens of prompt and trace
UNSOLVABLE = 0.03  # share of training problems without a solution

PAD, START, END, THINK, UNTHINK = "<pad>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"
_WORDS = (
    "user assistant system Use Answer Depth Breadth small large none"
    "| each| of| the| numbers| exactly| once| to| make| with| steps| first| found| none"
)
_MARKS = ("\n", " ", ", ", ". ", ": ", " | ")
# A piece is a number, a word with the space before it, or a mark with the spaces around it.
_PIECE = r"\d+| ?[A-Za-z]+| ?[^\sA-Za-z\d] ?|\s"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a trace searches."""

    breadth_first: bool
    descending: bool

    def __str__(self) -> str:
        strategy = "Breadth" if self.breadth_first else "Depth"
        return f"{strategy} first, {'large' if self.descending else 'small'} first"


# ---------------------------------------------------------------------------------------- traces


def trace(problem: Problem, plan: Plan) -> list[str]:
    """The assistant's message as pieces, one per token: the thinking, the answer, the end."""
    root = tuple(sorted(problem.numbers, reverse=plan.descending))
    strategy, _, order, _ = str(plan).replace(",", "").split()
    pieces = [THINK, "\n", strategy, " first", ", ", order, " first", ": ", *_state(root), "\n"]
    steps = _search(pieces, root, problem.target, plan)
    if steps:
        pieces += [" found", "\n", UNTHINK, "\n", "Answer", ": "]
        for move in steps:
            pieces += [*_step(move), ", "]
        pieces[-1] = END
    else:
        pieces += [UNTHINK, "\n", "Answer", ": ", "none", END]
    return pieces


def _search(pieces: list[str], root: State, target: int, plan: Plan) -> tuple[Move, ...] | None:
    """Append the search; the steps of the first solution, None once everything is exhausted."""

    def extend(index: int, state: State) -> tuple[Move, ...] | None:
        """Every continuation of a state of two or three numbers."""
        if len(state) == 2:
            pieces.extend((str(index), ": ", *_state(state), " | "))
            last = _last_steps(pieces, state, target, plan)
            return last and (last,)
        head = (str(index), ": ", *_state(state), " | ")
        for move in moves(state, plan.descending):
            pieces.extend((*head, *_step(move), " | ", *_state(move.state), " | "))
            last = _last_steps(pieces, move.state, target, plan)
            if last:
                return move, last
        return None

    if len(root) == 3 and not plan.breadth_first:
        return extend(0, root)
    opened = list(enumerate(moves(root, plan.descending), 1))
    for index, move in opened if plan.breadth_first else ():
        _open(pieces, index, move)
    for index, move in opened:
        if not plan.breadth_first:
            _open(pieces, index, move)
        steps = extend(index, move.state)
        if steps:
            return move, *steps
    return None


def _open(pieces: list[str], index: int, move: Move) -> None:
    pieces.extend(("#", str(index), ": ", *_step(move), " | ", *_state(move.state), "\n"))


def _last_steps(pieces: list[str], state: State, target: int, plan: Plan) -> Move | None:
    """The steps that combine the last two numbers, up to the one that hits the target."""
    for move in moves(state, plan.descending):
        pieces.extend((*_step(move), ", "))
        if move.result == target:
            del pieces[-1]
            return move
    pieces[-1] = "\n"
    return None


def _state(state: State) -> list[str]:
    pieces = [" "] * (2 * len(state) - 1)
    pieces[::2] = map(str, state)
    return pieces


def _step(move: Move) -> tuple[str, ...]:
    return str(move.left), move.op, str(move.right), "=", str(move.result)


def prompt(problem: Problem) -> str:
    """The chat text before the trace, as the chat template renders it."""
    return f"{START}user\n{problem.prompt()}{END}\n{START}assistant\n"


def training_example(
    rng: random.Random, ids: Encoder, max_length: int = MAX_LENGTH, count: int | None = None
) -> tuple[list[int], int]:
    """Token ids of a prompt with its trace, at most `max_length`, and where the trace begins."""
    while True:
        problem = sample_problem(rng, count, split="train")
        if rng.random() < UNSOLVABLE:
            problem = _unsolvable(rng, problem)
        plan = Plan(breadth_first=rng.random() < 0.5, descending=rng.random() < 0.5)
        head = ids.prompt(problem)
        tokens = head + ids(trace(problem, plan))
        if len(tokens) <= max_length:
            return tokens, len(head)


def _unsolvable(rng: random.Random, problem: Problem) -> Problem:
    missing = sorted(set(TARGETS) - reachable(problem.numbers))
    return Problem(problem.numbers, missing[int(rng.random() * len(missing))])


# -------------------------------------------------------------------------------------- tokenizer


def vocabulary() -> list[str]:
    """Every token; its place is its id. Text is in the byte-level alphabet, space as U+0120."""
    alphabet = _byte_alphabet()
    numbers = [str(n) for n in range(10, LARGEST_RESULT + 1)]
    words = [word for part in _WORDS.split("|") for word in _keep_space(part)]
    texts = numbers + words + [mark for mark in _MARKS if len(mark) > 1]
    texts = ["".join(alphabet[byte] for byte in text.encode()) for text in texts]
    return [PAD, START, END, THINK, UNTHINK, *(alphabet[b] for b in range(256)), *texts]


def _keep_space(part: str) -> list[str]:
    return [part] if part.startswith(" ") else part.split()


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_in = {byte: chr(byte) for byte in printable}
    stand_in |= {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [stand_in[byte] for byte in range(256)]


class Encoder:
    """Pieces to token ids without the tokenizer, for generating traces fast."""

    def __init__(self):
        alphabet = _byte_alphabet()
        byte_of = {char: byte for byte, char in enumerate(alphabet)}
        self._ids = {}
        for index, token in enumerate(vocabulary()):
            special = index < 5
            text = token if special else bytes(byte_of[c] for c in token).decode("latin-1")
            self._ids[text] = index

    def texts(self) -> dict[int, str]:
        """The text of each token id; bytes above 127 as Latin-1."""
        return {index: text for text, index in self._ids.items()}

    def __call__(self, pieces: list[str]) -> list[int]:
        return [self._ids[piece] for piece in pieces]

    def prompt(self, problem: Problem) -> list[int]:
        """`prompt(problem)` as token ids."""
        numbers = [piece for n in problem.numbers for piece in (", ", str(n))][1:]
        before = [START, "user", "\n", "Use", " each", " of", " the", " numbers", " "]
        between = [" exactly", " once", " to", " make", " "]
        after = [
            ". ",
            "Answer",
            " with",
            " the",
            " steps",
            ".",
            END,
            "\n",
            START,
            "assistant",
            "\n",
        ]
        return self([*before, *numbers, *between, str(problem.target), *after])


def write_tokenizer(directory: Path) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json.

    Byte-level like Qwen's, but without merges: a piece is one token if it is in the vocabulary,
    else its bytes are tokens.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token in (PAD, START, END):
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    for token in (THINK, UNTHINK):
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "pad_token": PAD,
        "eos_token": END,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": (
            "{%- for message in messages %}"
            "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
            "{%- endfor %}"
            "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
        ),
    }
    generation = {
        "do_sample": True,
        "temperature": 0.65,
        "max_new_tokens": MAX_LENGTH - 64,
        "eos_token_id": vocab[END],
        "pad_token_id": vocab[PAD],
    }
    write_json(directory / "tokenizer_config.json", config)
    write_json(directory / "generation_config.json", generation)
