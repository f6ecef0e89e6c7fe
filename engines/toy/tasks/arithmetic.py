"""Arithmetic: sums, differences and small products, worked digit by digit in thoughts, then one sentence."""

import re
import zlib
from functools import partial
from random import Random

from shoal.engines.toy.tasks.sample import Answer, Sample

QUESTIONS = (
    "What is {}?", "What is {}?", "Calculate {}.", "How much is {}?", "Please work out {}.", "{} = ?",
    "Tell me what {} is.",
)  # fmt: skip
CHAIN_SHARE = 0.2
PRODUCT_SHARE = 0.15


def generate(dice: Random, held_out: bool = False) -> Sample:
    """One exercise with numbers up to 99 (products up to 12 x 12), a few of them chains of three numbers.

    One in ten pairs to add or subtract is only drawn when `held_out`, and then no other is (in a chain, none other
    comes first). Products are a table to know by heart: the same for both.
    """
    kind = dice.random()
    if kind < PRODUCT_SHARE:
        a, b = dice.randint(2, 12), dice.randint(2, 12)
        task, thoughts, result = f"{a} * {b}", f"{a}*{b}={a * b}.", a * b
    elif kind < PRODUCT_SHARE + CHAIN_SHARE:
        task, thoughts, result = _chain(dice, held_out)
    else:
        a, sign, b = _pair(dice, (10, 99), held_out)
        task, (thoughts, result) = f"{a} {sign} {b}", worked(a, sign, b)
    return Sample(
        task="arithmetic",
        messages=({"role": "user", "content": dice.choice(QUESTIONS).format(task)},),
        wanted=Answer(f"The answer is {result}.", thoughts),
        is_right=partial(is_number, result),
        thinking=True,
    )


def is_number(wanted: int, answer: Answer) -> bool:
    """Whether the text holds this number and no other."""
    return re.findall(r"-?\d+", answer.text) == [str(wanted)]


def worked(a: int, sign: str, b: int) -> tuple[str, int]:
    """Thoughts that add or subtract digit by digit from the right, and the result.

    Each step is `digit sign digit (sign carry) = value`, what is written and what is carried. Raises ValueError for a
    difference below zero.
    """
    if sign == "-" and a < b:
        raise ValueError(f"a = {a} must be at least b = {b} to subtract: the steps borrow from a; swap them")
    result = a + b if sign == "+" else a - b
    width = len(str(max(a, b)))
    carry, steps = 0, []
    for i in range(width):
        x, y = a // 10**i % 10, b // 10**i % 10
        value = x + y + carry if sign == "+" else x - y - carry
        carried = f"{sign}{carry}" if carry else ""
        steps.append(_step(f"{x}{sign}{y}{carried}", sign, value))
        carry = int(value > 9) if sign == "+" else int(value < 0)
    return f"{a}{sign}{b}: {'; '.join(steps)}; so {result}.", result


def _step(spelled: str, sign: str, value: int) -> str:
    if sign == "+":
        return f"{spelled}={value}" + (f", write {value - 10}, carry 1" if value > 9 else f", write {value}")
    if value < 0:
        return f"{spelled}, borrow, 10+{spelled}={value + 10}, write {value + 10}, carry 1"
    return f"{spelled}={value}, write {value}"


def is_held_out(a: int, sign: str, b: int) -> bool:
    """Whether training never asks this sum or difference: one in ten, with no pattern in the digits.

    Every pair of digits must be met in training: a rule on the last digits alone would hold back facts, not exercises.
    """
    return zlib.crc32(f"{a}{sign}{b}".encode()) % 10 == 0


def _pair(dice: Random, limits: tuple[int, int], held_out: bool) -> tuple[int, str, int]:
    """Two numbers to add, or to subtract the less from the greater."""
    while True:
        a, b, sign = dice.randint(*limits), dice.randint(*limits), dice.choice("+-")
        a, b = (a, b) if sign == "+" else (max(a, b), min(a, b))
        if is_held_out(a, sign, b) == held_out:
            return a, sign, b


def _chain(dice: Random, held_out: bool) -> tuple[str, str, int]:
    """Three numbers, from the left; no intermediate result is below zero."""
    a, first, b = _pair(dice, (10, 60), held_out)
    thoughts, between = worked(a, first, b)
    while True:
        c = dice.randint(10, 60)
        second = dice.choice("+-") if between >= c else "+"
        if held_out or not is_held_out(between, second, c):
            break
    more, result = worked(between, second, c)
    return f"{a} {first} {b} {second} {c}", f"{thoughts} {more}", result
