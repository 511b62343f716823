"""What a value of a foreign graph is, told by what it is made of: the normal form that `recognise` reads. Light: numpy.

A graph moves elements about far more than it computes: heads are split off by a Split, three Slices, a Gather or a
reshape and a transpose, tokens are joined, halves are swapped and joined again. All of that is index arithmetic. So a
value here is a **Form**: for each of its elements, of which elements of which *Base* it is a linear function,

    element = sum over terms of  gain * base[index]  +  offset

with arrays of indices, gains and offsets that the graph's own operators (`arrays.MOVES`) move about. A Base is what
really computes: the patch embedding, a norm, a linear layer, an activation, an attention. Its elements are (rows,
width), a row for each token of each image, whatever shape the graph gives it. What is read off a Form at the end does
not depend on how the exporter wrote it:

| in the graph                        | as a Form                                                               |
|-------------------------------------|-------------------------------------------------------------------------|
| a packed qkv, however it is cut     | terms of one Linear; the index tells the columns of each head           |
| class token, registers, positions   | the patch embedding with gain 0 in the prefix, and an offset            |
| rotary embedding, pairs of any kind | two terms: gain cos, and gain -+sin of the partner that the index names |
| scale of attention, LayerScale      | a gain                                                                  |
| the class token alone               | rows of a Base that is computed for all tokens                          |

Functions of one number (Gelu in any spelling) are a `Pointwise`, known by its values at some points. What a norm is
made of, if it is written out, are a `RowMean` and a `RowPower`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .nodes import Array, Node

Index = npt.NDArray[np.integer]
Pooling = Literal["avg", "max"]
NormKind = Literal["layer", "rms"]


@dataclass(frozen=True, eq=False)
class Base:
    """Something computed: (rows, width), a row for each token of each image."""

    node: Node  # that computes it
    rows: int
    width: int


@dataclass(frozen=True, eq=False)
class Input(Base):
    """The images: a row of pixels each."""


@dataclass(frozen=True, eq=False)
class Patches(Base):
    """The patch embedding, without positions."""

    weight: Array  # (E, C, ph, pw)
    bias: Array | None
    grid: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Tokens(Base):
    """The tokens that go into the first block: patches, prefix and positions."""

    form: Form


@dataclass(frozen=True, eq=False)
class Centred(Base):
    """Rows without their mean: a LayerNorm that is written out and not complete yet."""

    form: Form


@dataclass(frozen=True, eq=False)
class Norm(Base):
    """A LayerNorm or an RMSNorm over groups of columns: over all of them, or over each head."""

    x: Base
    columns: Index  # (groups, features) of x
    kind: NormKind
    eps: float
    weight: Array | None  # (features,)
    bias: Array | None


@dataclass(frozen=True, eq=False)
class Linear(Base):
    """A linear layer."""

    x: Base
    weight: Array  # [out, in]
    bias: Array | None


@dataclass(frozen=True, eq=False)
class Grouped(Base):
    """A matrix of its own for each group of columns: keys that are taken to the queries."""

    x: Base
    columns: Index  # (groups, in) of x
    weight: Array  # (groups, in, out)


@dataclass(frozen=True, eq=False)
class Activation(Base):
    """A function of one number, by its name."""

    x: Base
    kind: str


@dataclass(frozen=True, eq=False)
class Product(Base):
    """Two values times each other, element by element: a gated MLP."""

    x: Rows
    other: Rows


@dataclass(frozen=True, eq=False)
class Products(Base):
    """Queries times keys, (group, query, key)."""

    queries: Form | Array  # (groups, queries, features); an array: the same for every image
    keys: Form  # (groups, keys, features)


@dataclass(frozen=True, eq=False)
class Weights(Base):
    """Their softmax."""

    products: Products
    scale: float


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotary embedding of the features of a head: x cos + partner * turned."""

    partner: Index  # (features,)
    cos: Array  # (tokens, features)
    turned: Array  # (tokens, features): the sine with its sign
    tokens: Index  # (tokens,) which they are


@dataclass(frozen=True, eq=False)
class Heads:
    """The features of each head: columns of a base, maybe rotated, times a number."""

    x: Base
    columns: Index  # (heads, features)
    scale: float = 1.0
    rotation: Rotation | None = None


@dataclass(frozen=True, eq=False)
class Attention(Base):
    """Softmax attention: a row for each token of the queries, heads side by side."""

    query: Heads | Array  # an array: the same for every image, (heads, features)
    key: Heads
    value: Heads
    scale: float
    asked: Index  # the tokens that queries are made for
    first: int  # the keys are the tokens from this one on
    tokens: int


@dataclass(frozen=True, eq=False)
class Sublayer:
    """One attention or MLP: its facts as `model.anatomy.Block` has them, and its tensors under canonical names."""

    facts: dict[str, Any]
    biases: tuple[str, ...]
    layer_scale: Array | None
    norms: dict[str, Norm]
    tensors: dict[str, Array] = field(repr=False)
    rotation: Rotation | None = None

    @property
    def is_attention(self) -> bool:
        return "heads" in self.facts


@dataclass(frozen=True, eq=False)
class Residual(Base):
    """A stream with the output of a sub-layer added to it."""

    stream: Base
    sublayer: Sublayer
    output: str  # the value of the graph that it is


@dataclass(frozen=True, eq=False)
class Sum(Base):
    """Any other sum of two values."""

    parts: tuple[Rows, Rows]


@dataclass(frozen=True, eq=False)
class Pooled(Base):
    """A mean or a maximum over tokens: a row for each image."""

    x: Base
    kind: Pooling
    first: int  # over the tokens from this one on
    tokens: int


@dataclass(frozen=True, eq=False)
class Term:
    """Elements of a base, times a gain."""

    base: Base
    index: Index | None = None  # of the form's shape, into the flat base; None: all of it in order
    gain: Array | None = None  # of the form's shape, or of one that broadcasts to it; None: one

    def indices(self, shape: tuple[int, ...]) -> Index:
        return arange(math.prod(shape)).reshape(shape) if self.index is None else self.index


@dataclass(frozen=True, eq=False)
class Form:
    """A value as a linear function of elements of bases."""

    shape: tuple[int, ...]
    terms: tuple[Term, ...]
    offset: Array | None = None  # broadcasts to the shape

    @staticmethod
    def of(base: Base, shape: tuple[int, ...], index: Index | None = None) -> Form:
        return Form(shape, (Term(base, in_order(index, base)),))

    @property
    def term(self) -> Term | None:
        """The only term, if there is only one."""
        return self.terms[0] if len(self.terms) == 1 else None

    @property
    def base(self) -> Base | None:
        """The only base of all terms, if there is only one."""
        bases = {id(term.base): term.base for term in self.terms}
        return next(iter(bases.values())) if len(bases) == 1 else None

    @property
    def is_plain(self) -> bool:
        """True if its elements are elements of a base, unchanged."""
        return len(self.terms) == 1 and self.terms[0].gain is None and self.offset is None

    def moved(self, move: Callable[[Array], Array]) -> Form:
        """Return the form with its elements in other places."""
        terms = tuple(self._moved(term, move) for term in self.terms)
        offset = None if self.offset is None else self._spread(self.offset, move)
        shape = move(np.broadcast_to(np.zeros((), np.int8), self.shape)).shape
        return Form(shape, terms, offset)

    def _moved(self, term: Term, move: Callable[[Array], Array]) -> Term:
        index = in_order(move(term.indices(self.shape)), term.base)
        return Term(term.base, index, None if term.gain is None else self._spread(term.gain, move))

    def _spread(self, array: Array, move: Callable[[Array], Array]) -> Array:
        return array if array.ndim == 0 else move(np.broadcast_to(array, self.shape))

    def cut(self, parts: Callable[[Array], Sequence[Array]], count: int) -> list[Form]:
        """Return the pieces that `parts` cuts an array into, as forms."""

        def piece(i: int) -> Form:
            return self.moved(lambda x: parts(x)[i])

        return [piece(i) for i in range(count)]

    def reshaped(self, *shape: int) -> Form:
        if -1 in shape:
            shape = np.broadcast_to(np.zeros((), np.int8), self.shape).reshape(shape).shape
        return self if shape == self.shape else self.moved(lambda x: x.reshape(shape))

    def scaled(self, gain: Array) -> Form:
        """Return the form times a constant that broadcasts with it."""
        form = self.broadcast(gain.shape)
        terms = tuple(replace(t, gain=gain if t.gain is None else t.gain * gain) for t in form.terms)
        return Form(form.shape, terms, None if form.offset is None else form.offset * gain)

    def shifted(self, offset: Array) -> Form:
        """Return the form plus a constant that broadcasts with it."""
        form = self.broadcast(offset.shape)
        return replace(form, offset=offset if form.offset is None else form.offset + offset)

    def broadcast(self, shape: tuple[int, ...]) -> Form:
        wanted = np.broadcast_shapes(self.shape, shape)
        return self if wanted == self.shape else self.moved(lambda x: np.broadcast_to(x, wanted))


@dataclass(frozen=True, eq=False)
class Rows:
    """A form that takes whole rows of a base: which, in what order its columns, and each column times a gain."""

    base: Base
    rows: Index  # the form's shape without its last axis
    columns: Index | None = None  # None: all in order
    gain: Array | None = None  # (columns,)
    offset: Array | None = None  # (columns,)

    @property
    def is_plain(self) -> bool:
        return self.columns is None and self.gain is None and self.offset is None


@dataclass(frozen=True, eq=False)
class Pointwise:
    """A function of one number of every element of a form, known by its values at PROBES."""

    form: Form  # plain, or with gains that differ between elements
    values: Array


@dataclass(frozen=True, eq=False)
class RowMean:
    """The mean of every row of a form."""

    form: Form


@dataclass(frozen=True, eq=False)
class RowPower:
    """(mean of the squares of a row + eps) ** exponent."""

    form: Form
    eps: float = 0.0
    exponent: float = 1.0


Value = Array | Form | Pointwise | RowMean | RowPower
PROBES = np.linspace(-4.0, 4.0, 41)


def arange(count: int) -> Index:
    return np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)


def in_order(index: Index | None, base: Base) -> Index | None:
    """Return None for the indices of all elements of a base in their order."""
    if index is None or index.size != base.rows * base.width:
        return index
    flat = index.reshape(-1)
    if flat[0] != 0 or flat[-1] != flat.size - 1:
        return index
    return None if np.array_equal(flat, arange(flat.size)) else index


def rows_of(form: Form) -> Rows | None:
    """Return a form as rows of one base, or None if it is not that."""
    term = form.term
    if term is None or not form.shape:
        return None
    gain, offset = along_last(term.gain, form.shape), along_last(form.offset, form.shape)
    if (gain is None) != (term.gain is None) or (offset is None) != (form.offset is None):
        return None
    width = term.base.width
    if term.index is None and form.shape[-1] == width:
        return Rows(term.base, arange(term.base.rows).reshape(form.shape[:-1]), None, gain, offset)
    index = term.indices(form.shape)
    rows, columns = index // width, index % width
    first = columns.reshape(-1, form.shape[-1])[0]
    if not ((rows == rows[..., :1]).all() and (columns == first).all()):
        return None
    all_of_them = len(first) == width and np.array_equal(first, arange(width))
    return Rows(term.base, rows[..., 0], None if all_of_them else first, gain, offset)


def into_parts(rows: Rows) -> Rows:
    """Return rows of a sum with their gain in its parts."""
    if not isinstance(rows.base, Sum) or rows.gain is None or rows.columns is not None or rows.offset is not None:
        return rows
    gain = rows.gain
    first, second = (replace(p, gain=gain if p.gain is None else p.gain * gain) for p in rows.base.parts)
    return Rows(replace(rows.base, parts=(first, second)), rows.rows)


def along_last(array: Array | None, shape: tuple[int, ...]) -> Array | None:
    """Return an array that depends on the last axis alone as a vector of it; None if it does not."""
    if array is None:
        return None
    if array.ndim == 0 or math.prod(array.shape[:-1]) == 1:
        return np.broadcast_to(array.reshape(-1), shape[-1:])
    flat = np.broadcast_to(array, shape).reshape(-1, shape[-1])
    return flat[0] if (flat == flat[0]).all() else None


def uniform(array: Array | None) -> float | None:
    """Return the one number that all of an array is; None if there are several."""
    if array is None:
        return 1.0
    flat = array.reshape(-1)
    return float(flat[0]) if flat.size and (flat == flat[0]).all() else None


def same_form(a: Form, b: Form) -> bool:
    """Return True if two forms are of the same elements, in the same order."""
    if a is b:
        return True
    if a.shape != b.shape or len(a.terms) != len(b.terms) or not _same_array(a.offset, b.offset, a.shape):
        return False
    return all(_same_term(s, t, a.shape) for s, t in zip(a.terms, b.terms))


def _same_term(a: Term, b: Term, shape: tuple[int, ...]) -> bool:
    if not same_base(a.base, b.base) or (a.index is None) != (b.index is None):
        return False
    index = a.index is None or a.index is b.index or bool(np.array_equal(a.index, b.index))  # type: ignore[arg-type]
    return index and _same_array(a.gain, b.gain, shape)


def same_base(a: Base, b: Base) -> bool:
    """Return True for one base; a row without its mean may be computed twice."""
    return a is b or (isinstance(a, Centred) and isinstance(b, Centred) and same_form(a.form, b.form))


def _same_array(a: Array | None, b: Array | None, shape: tuple[int, ...]) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or bool(np.array_equal(np.broadcast_to(a, shape), np.broadcast_to(b, shape)))
