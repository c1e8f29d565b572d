"""Symbolic sizes: sums of products, which is as much algebra as tensor shapes need."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache


@dataclass(frozen=True, slots=True)
class Size:
    """A sum of terms. A term is a coefficient times powers of symbols, or of sums that are not expanded.

    Terms and powers are sorted, so equal sizes compare equal and print alike.
    """

    terms: tuple[Term, ...]

    def __add__(self, other: Size) -> Size:
        coefficients: dict[Powers, Fraction] = {}
        for coefficient, powers in (*self.terms, *other.terms):
            coefficients[powers] = coefficients.get(powers, Fraction(0)) + coefficient
        return Size(_sorted_terms([(c, powers) for powers, c in coefficients.items() if c]))

    def __mul__(self, other: Size) -> Size:
        if not self.terms or not other.terms:
            return ZERO
        (c1, powers1), (c2, powers2) = _as_term(self), _as_term(other)
        exponents = dict(powers1)
        for base, exponent in powers2:
            exponents[base] = exponents.get(base, 0) + exponent
        left = tuple(sorted(((b, e) for b, e in exponents.items() if e), key=lambda power: _base_order(power[0])))
        return _from_term(c1 * c2, left)

    def __truediv__(self, other: Size) -> Size:
        coefficient, powers = _as_term(other)
        return self * _from_term(1 / coefficient, tuple((base, -exponent) for base, exponent in powers))

    def __str__(self) -> str:
        return " + ".join(_term_text(term) for term in self.terms) or "0"

    def symbols(self) -> frozenset[str]:
        """Returns every symbol in the size."""
        found: set[str] = set()
        for _, powers in self.terms:
            for base, _ in powers:
                found |= {base} if isinstance(base, str) else base.symbols()
        return frozenset(found)

    def value(self, values: Mapping[str, int]) -> Fraction:
        """Returns the exact value of the size for these values of its symbols."""
        total = Fraction(0)
        for coefficient, powers in self.terms:
            product = coefficient
            for base, exponent in powers:
                product *= Fraction(values[base] if isinstance(base, str) else base.value(values)) ** exponent
            total += product
        return total

    def without(self, symbols: Collection[str]) -> Size:
        """Returns the size with each of these symbols set to 1."""
        total = ZERO
        for coefficient, powers in self.terms:
            product = number(coefficient)
            for base, exponent in powers:
                if isinstance(base, str):
                    factor = ONE if base in symbols else _from_term(Fraction(1), ((base, exponent),))
                else:
                    coefficient_, inner = _as_term(base.without(symbols))
                    factor = _from_term(coefficient_**exponent, tuple((b, e * exponent) for b, e in inner))
                product *= factor
            total += product
        return total


Base = str | Size
Powers = tuple[tuple[Base, int], ...]
Term = tuple[Fraction, Powers]


def number(value: int | Fraction) -> Size:
    """Returns a size without symbols."""
    return Size(((Fraction(value), ()),)) if value else ZERO


ZERO = Size(())
ONE = Size(((Fraction(1), ()),))


def product(sizes: tuple[Size, ...]) -> Size:
    """Returns the number of elements of a tensor of this shape."""
    total = ONE
    for size in sizes:
        total *= size
    return total


@cache
def size(text: str) -> Size:
    """Reads a size such as `Dmodel*(Head+2*KVHead)/tp`: names, whole numbers, +, *, / and brackets."""
    return _read(ast.parse(text.strip(), mode="eval").body)


def _read(node: ast.expr) -> Size:
    if isinstance(node, ast.Name):
        return Size(((Fraction(1), ((node.id, 1),)),))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return number(node.value)
    assert isinstance(node, ast.BinOp), ast.dump(node)
    left, right = _read(node.left), _read(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    return left * right if isinstance(node.op, ast.Mult) else left / right


def _as_term(size: Size) -> Term:
    return size.terms[0] if len(size.terms) == 1 else (Fraction(1), ((size, 1),))


def _from_term(coefficient: Fraction, powers: Powers) -> Size:
    if len(powers) == 1 and isinstance(powers[0][0], Size) and powers[0][1] == 1:
        return Size(tuple((coefficient * c, p) for c, p in powers[0][0].terms))
    return Size(((coefficient, powers),))


def _base_order(base: Base) -> tuple[int, str]:
    return (0, base) if isinstance(base, str) else (1, str(base))


def _sorted_terms(terms: list[Term]) -> tuple[Term, ...]:
    # Polynomials are usually printed in this order: lexicographic by exponents, highest first.
    bases = sorted({base for _, powers in terms for base, _ in powers}, key=_base_order)
    return tuple(sorted(terms, key=lambda term: [-dict(term[1]).get(base, 0) for base in bases]))


def _term_text(term: Term) -> str:
    coefficient, powers = term
    above = [_power_text(base, exponent) for base, exponent in powers if exponent > 0]
    below = [_power_text(base, -exponent) for base, exponent in powers if exponent < 0]
    if coefficient.numerator != 1:
        above.insert(0, str(coefficient.numerator))
    if coefficient.denominator != 1:
        below.insert(0, str(coefficient.denominator))
    text = "*".join(above) or "1"
    if len(below) > 1:
        return f"{text}/({'*'.join(below)})"
    return f"{text}/{below[0]}" if below else text


def _power_text(base: Base, exponent: int) -> str:
    text = base if isinstance(base, str) else f"({base})"
    return text if exponent == 1 else f"{text}**{exponent}"
