"""Parser of the condition language of `datasvc models find`: conditions over the fields of version entries.

    top1 > 0.75 and data = 'imagenet@3'
    (step >= 1000 and step < 2000) or code.dirty
    config.optimizer in ('sgd', 'adamw') and not tag = 'prod'
    message like '%warm restart%' or metrics."val/top-5" is null

Text is in single quotes, a field with special characters in double quotes; a doubled quote stands for one quote.
The parser executes no code: its result is a tree of the classes below.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from datasvc.errors import ConfigError

Literal = float | str
_MAX_LENGTH: Final = 10_000
_MAX_DEPTH: Final = 50
_TOKEN = re.compile(
    r"""\s*(?:
      (?P<text>'(?:[^']|'')*')
    | (?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))
    | (?P<field>(?:[^\W\d][\w/@:-]*|"(?:[^"]|"")+")(?:\.(?:[\w/@:-]+|"(?:[^"]|"")+"))*)
    | (?P<sign><=|>=|!=|<>|==|=|<|>|\(|\)|,)
    )""",
    re.VERBOSE,
)
_QUOTED = re.compile(r'"((?:[^"]|"")+)"')
_COMPARISONS: Final = {"=": "=", "==": "=", "!=": "!=", "<>": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_WORDS: Final = frozenset({"and", "or", "not", "in", "like", "is", "null", "nan", "true", "false"})


@dataclass(frozen=True)
class Compare:
    """Comparison of a field with a value; `operator` is one of = != < <= > >= and like."""

    field: str
    operator: str
    value: Literal


@dataclass(frozen=True)
class Within:
    """Test whether a field has one of several values."""

    field: str
    values: tuple[Literal, ...]


@dataclass(frozen=True)
class Is:
    """Test whether a field is "null" (the version has no value), "nan" or "true"."""

    field: str
    what: str


@dataclass(frozen=True)
class Not:
    """Negation of a condition."""

    condition: Expression


@dataclass(frozen=True)
class And:
    """Conjunction of conditions."""

    conditions: tuple[Expression, ...]


@dataclass(frozen=True)
class Or:
    """Disjunction of conditions."""

    conditions: tuple[Expression, ...]


Expression = Compare | Within | Is | Not | And | Or


def parse_expression(text: str) -> Expression:
    """Parse a condition.

    Raises:
        ConfigError: the text is not a valid condition. The message shows the position of the error.
    """
    if len(text) > _MAX_LENGTH:
        raise ConfigError(f"the condition has {len(text)} characters; at most {_MAX_LENGTH} are allowed")
    return _Parser(text).parse()


def fields_of(expression: Expression) -> Iterator[str]:
    """Yield the fields that an expression uses; a field may occur several times."""
    if isinstance(expression, Not):
        yield from fields_of(expression.condition)
    elif isinstance(expression, And | Or):
        for condition in expression.conditions:
            yield from fields_of(condition)
    else:
        yield expression.field


@dataclass(frozen=True)
class _Token:
    kind: str  # "text", "number", "field", "word", "sign" or "end"
    text: str
    offset: int


class _Parser:
    """Recursive-descent parser with one method per level of precedence, from `or` down to a single condition."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._read())
        self._depth = 0

    def parse(self) -> Expression:
        expression = self._disjunction()
        if self._next.kind != "end":
            raise self._error("expected 'and', 'or' or the end")
        return expression

    def _disjunction(self) -> Expression:
        operands = [self._conjunction()]
        while self._take("word", "or"):
            operands.append(self._conjunction())
        return operands[0] if len(operands) == 1 else Or(tuple(operands))

    def _conjunction(self) -> Expression:
        operands = [self._negation()]
        while self._take("word", "and"):
            operands.append(self._negation())
        return operands[0] if len(operands) == 1 else And(tuple(operands))

    def _negation(self) -> Expression:
        self._depth += 1
        # The limit keeps this recursion, and that of `evaluate`, far below Python's.
        if self._depth > _MAX_DEPTH:
            raise self._error(f"conditions may be nested at most {_MAX_DEPTH} deep")
        if self._take("word", "not"):
            expression: Expression = Not(self._negation())
        elif self._take("sign", "("):
            expression = self._disjunction()
            self._expect("sign", ")")
        else:
            expression = self._condition()
        self._depth -= 1
        return expression

    def _condition(self) -> Expression:
        if self._next.kind != "field":
            raise self._error("expected a field, such as step or metrics.top1")
        field = _unquoted(self._tokens.pop(0).text)
        if self._next.kind == "sign" and self._next.text in _COMPARISONS:
            return Compare(field, _COMPARISONS[self._tokens.pop(0).text], self._literal())
        if self._take("word", "is"):
            negated = self._take("word", "not")
            what = next((word for word in ("null", "nan") if self._take("word", word)), None)
            if what is None:
                raise self._error("expected 'null' or 'nan'")
            return Not(Is(field, what)) if negated else Is(field, what)
        negated = self._take("word", "not")
        condition = self._like_or_in(field)
        if condition is not None:
            return Not(condition) if negated else condition
        if negated:
            raise self._error("expected 'like' or 'in'")
        # A field alone is a condition, such as code.dirty.
        return Is(field, "true")

    def _like_or_in(self, field: str) -> Expression | None:
        if self._take("word", "like"):
            if self._next.kind != "text":
                raise self._error("expected a text, such as 'resnet%'")
            return Compare(field, "like", self._literal())
        if not self._take("word", "in"):
            return None
        self._expect("sign", "(")
        values = [self._literal()]
        while self._take("sign", ","):
            values.append(self._literal())
        self._expect("sign", ")")
        return Within(field, tuple(values))

    def _literal(self) -> Literal:
        token = self._next
        if token.kind == "text":
            self._tokens.pop(0)
            return token.text[1:-1].replace("''", "'")
        if token.kind == "number":
            self._tokens.pop(0)
            return float(token.text)
        if token.kind == "word" and token.text in {"true", "false"}:
            self._tokens.pop(0)
            # Columns store booleans as numbers.
            return float(token.text == "true")
        if token.kind == "word" and token.text in {"null", "nan"}:
            raise self._error(f"write 'is {token.text}'")
        raise self._error("expected a number, or a text in single quotes")

    @property
    def _next(self) -> _Token:
        return self._tokens[0]

    def _take(self, kind: str, text: str) -> bool:
        is_next = (self._next.kind, self._next.text) == (kind, text)
        if is_next:
            self._tokens.pop(0)
        return is_next

    def _expect(self, kind: str, text: str) -> None:
        if not self._take(kind, text):
            raise self._error(f"expected {text!r}")

    def _read(self) -> Iterator[_Token]:
        offset, end = 0, len(self._text.rstrip())
        while offset < end:
            match = _TOKEN.match(self._text, offset)
            if not match:
                raise self._error("this is not valid in a condition", offset)
            kind = str(match.lastgroup)
            text = match[kind]
            # A keyword has the form of a field; a field in double quotes is never a keyword.
            is_word = kind == "field" and text.lower() in _WORDS
            yield (
                _Token("word", text.lower(), match.start(kind)) if is_word else _Token(kind, text, match.start(kind))
            )
            offset = match.end()
        yield _Token("end", "", end)

    def _error(self, what: str, offset: int | None = None) -> ConfigError:
        start = self._next.offset if offset is None else offset
        return ConfigError(f"condition {self._text!r}, at {self._text[start:].lstrip()[:20] or 'its end'!r}: {what}")


def _unquoted(field: str) -> str:
    return _QUOTED.sub(lambda match: match[1].replace('""', '"'), field)
