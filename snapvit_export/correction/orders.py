"""Orders of a layer's structures, best first, from its weight and the statistics of its input. Light: numpy.

| symbol | meaning                                                                    | shape    |
|--------|----------------------------------------------------------------------------|----------|
| W      | weight of fc2 or proj; rows times LayerScale, where the error is meant after it | (E, d) |
| S      | covariance of the layer's input, damped                                    | (d, d)   |
| G, C   | what a sweep carries along: a Gram matrix and (outputs times it)           | (d, d), (E, d) |
| u      | a structure: `unit` neighbouring columns (1 for a neuron, head_dim for a head) |      |

`variance` takes each structure by itself: Var(x_j) |W_:j|^2. The two greedy orders use the error of the layer with
the kept columns refitted, as `cholesky.Factor` does, and so account for what structures have in common:

    pivoted    start with nothing, always take the structure that lowers the error most:       G = S,     C = W S
    backward   start with all, always give up the structure that raises the error least (OBS): G = S^-1,  C = W

Both are the same sweep. A structure u is worth tr(C_u G_uu^-1 C_u^T), and after its turn G and C lose what it explains:
C -= C_u G_uu^-1 G_u, G -= G_u^T G_uu^-1 G_u. One sweep takes the largest worth first, the other the smallest.

Nothing here depends on the scale of a column, so columns are brought to unit variance first. A structure whose inputs
never vary comes last. Equal worth is decided by index, the smaller one first in the order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError
from ..model.scores import strictly_falling
from .cholesky import columns_of
from .moments import Array, Damping, Moments

Order = npt.NDArray[np.int64]

BLOCK = 64  # columns whose updates of G are saved up, so that nearly all work is matrix products
CONSTANT = 1e-12  # of the largest variance or the squared mean: what rounding leaves of an input that never varies
RIDGE = 1e-8  # of a column's variance: columns that copy each other stay apart by more than rounding


@dataclass(frozen=True, eq=False)
class ScoredOrder:
    """An order of structures, and a score for each that falls along it.

    Scores compare structures of one layer: the variance term itself, or the error that a structure takes away or gives
    back in its turn, raised where a later one is worth more (two structures may say little alone and much together).
    """

    order: Order  # (structures,) best first
    scores: Array  # (structures,) by structure


Rule = Callable[[npt.ArrayLike, Moments, int, Damping], ScoredOrder]


def variance(weight: npt.ArrayLike, moments: Moments, unit: int, damping: Damping = Damping()) -> ScoredOrder:
    """Order by the variance of the input times the squared norm of its column, summed over each structure.

    `damping` is not used.
    """
    w = _checked(weight, moments, unit)
    spread = np.where(_varying(moments), np.diag(moments.covariance), 0.0)
    scores = (spread * np.square(w).sum(0)).reshape(-1, unit).sum(1)  # (structures,)
    return ScoredOrder(np.argsort(-scores, kind="stable"), scores)


def pivoted(weight: npt.ArrayLike, moments: Moments, unit: int, damping: Damping = Damping()) -> ScoredOrder:
    """Forward greedy: the structure that lowers the remaining error most comes next."""
    live, w, s = _scaled(weight, moments, unit, damping)
    taken, worth = _sweep(s, w @ s, unit, largest_first=True)
    return _ordered(live[taken], worth, moments.width // unit)


def backward(weight: npt.ArrayLike, moments: Moments, unit: int, damping: Damping = Damping()) -> ScoredOrder:
    """Backward greedy, as in the optimal brain surgeon: remove the structure whose loss adds least error first."""
    live, w, s = _scaled(weight, moments, unit, damping)
    taken, worth = _sweep(np.asarray(np.linalg.inv(s), np.float64), w, unit, largest_first=False)
    return _ordered(live[taken[::-1]], worth[::-1], moments.width // unit)


ORDER_RULES: dict[str, Rule] = {"variance": variance, "pivoted": pivoted, "backward": backward}


def product(ordered: ScoredOrder, others: npt.ArrayLike) -> ScoredOrder:
    """Return the order by the geometric mean of its scores and those of another criterion, such as a gradient."""
    other = np.asarray(others, np.float64)
    if other.shape != ordered.scores.shape or not (np.isfinite(other) & (other >= 0)).all():
        raise SnapvitError(f"a product of scores needs {len(ordered.scores)} finite scores that are not negative")
    scores = np.sqrt(ordered.scores) * np.sqrt(other)
    return ScoredOrder(np.argsort(-scores, kind="stable"), scores)


def _checked(weight: npt.ArrayLike, moments: Moments, unit: int) -> Array:
    w = np.asarray(weight, np.float64)
    if w.ndim != 2 or w.shape[1] != moments.width or moments.width % unit:
        raise SnapvitError(
            f"a weight of shape {w.shape} in structures of {unit} does not belong to statistics of {moments.width}"
        )
    return w


def _varying(moments: Moments) -> npt.NDArray[np.bool_]:
    spread = np.diag(moments.covariance)
    return spread > CONSTANT * np.maximum(np.square(moments.mean), max(float(spread.max()), 0.0))


def _scaled(weight: npt.ArrayLike, moments: Moments, unit: int, damping: Damping) -> tuple[Order, Array, Array]:
    """The structures that vary at all, and W and S of their columns at unit variance."""
    w = _checked(weight, moments, unit)
    varying = _varying(moments)
    live = np.flatnonzero(varying.reshape(-1, unit).any(1))
    columns = columns_of(live, unit)
    damped = damping.added_to(moments.covariance)[np.ix_(columns, columns)]
    # Rounding may leave a variance just below zero; the weight is 0 there, and only the divisor must not be.
    spread = np.sqrt(np.maximum(np.diag(damped), np.finfo(float).tiny))
    s = damped / spread[:, None] / spread
    np.fill_diagonal(s, 1.0 + RIDGE)
    return live, np.where(varying, w, 0.0)[:, columns] * spread, s


def _ordered(best_first: Order, worth: Array, structures: int) -> ScoredOrder:
    dead = np.setdiff1d(np.arange(structures), best_first)
    order = np.concatenate([best_first, dead])
    scores = np.zeros(structures)
    scores[order] = strictly_falling(np.concatenate([worth, np.zeros(len(dead))]))
    return ScoredOrder(order, scores)


def _sweep(g: Array, c: Array, unit: int, largest_first: bool) -> tuple[Order, Array]:
    """Structures in the order of their turns, and what each was worth in its turn."""
    left = np.arange(len(g) // unit)
    taken: list[Order] = []
    worth: list[Array] = []
    while len(left):
        turns = _column_turns(g, c, largest_first) if unit == 1 else _group_turn(g, c, unit, largest_first)
        picks, values, g, c = turns
        taken.append(left[picks])
        worth.append(values)
        left = np.delete(left, picks)
    return np.concatenate([np.zeros(0, np.int64), *taken]), np.concatenate([np.zeros(0), *worth])


def _pick(values: Array, largest_first: bool) -> int:
    """The next turn; of equal ones the smaller index is to stand first in the order, so it is given up last."""
    return int(np.argmax(values)) if largest_first else len(values) - 1 - int(np.argmin(values[::-1]))


def _column_turns(g: Array, c: Array, largest_first: bool) -> tuple[Order, Array, Array, Array]:
    """The next BLOCK turns of single columns: picks, worths, and G and C of the columns that are left.

    Within the block G and C stay as they are; G - V^T V and C - Q V are read where needed, and formed at the end.
    """
    n, turns = len(g), min(BLOCK, len(g))
    v, q = np.zeros((turns, n)), np.zeros((len(c), turns))
    diagonal, squares = np.diag(g).copy(), np.square(c).sum(0)  # (n,) of the matrices as they would be by now
    picks, values = np.zeros(turns, np.int64), np.zeros(turns)
    barred = np.zeros(n)
    for i in range(turns):
        worth = np.maximum(squares, 0.0) / np.maximum(diagonal, RIDGE**2)
        j = _pick(worth + barred, largest_first)
        row = g[j] - v[:i, j] @ v[:i]  # (n,)
        root = np.sqrt(max(row[j], RIDGE**2))
        v[i] = row / root
        q[:, i] = (c[:, j] - q[:, :i] @ v[:i, j]) / root  # (E,)
        along = q[:, i] @ c - (q[:, i] @ q[:, :i]) @ v[:i]  # (n,)
        squares += v[i] * (v[i] * (q[:, i] @ q[:, i]) - 2 * along)
        diagonal -= np.square(v[i])
        picks[i], values[i] = j, worth[j]
        barred[j] = -np.inf if largest_first else np.inf
    rest = np.flatnonzero(barred == 0)
    v_rest = v[:, rest]
    return picks, values, g[np.ix_(rest, rest)] - v_rest.T @ v_rest, c[:, rest] - q @ v_rest


def _group_turn(g: Array, c: Array, unit: int, largest_first: bool) -> tuple[Order, Array, Array, Array]:
    """One turn of a group of columns: pick, worth, and G and C of the columns that are left."""
    n = len(g) // unit
    each = np.arange(n)
    own = g.reshape(n, unit, n, unit)[each, :, each]  # (n, unit, unit) the diagonal blocks
    own = own + RIDGE**2 * np.eye(unit)
    outputs = c.reshape(len(c), n, unit).transpose(1, 2, 0)  # (n, unit, E)
    worth = np.maximum((outputs * np.linalg.solve(own, outputs)).sum((1, 2)), 0.0)  # (n,)
    j = _pick(worth, largest_first)
    mine, rest = columns_of([j], unit), columns_of(np.delete(each, j), unit)
    explained = np.linalg.solve(own[j], g[np.ix_(mine, rest)])  # (unit, rest)
    g_rest = g[np.ix_(rest, rest)] - g[np.ix_(rest, mine)] @ explained
    return np.array([j]), worth[[j]], g_rest, c[:, rest] - c[:, mine] @ explained
