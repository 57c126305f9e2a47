"""What one operator of a trace does, read off its name and the shapes of its tensors: a product, bytes, or nothing.

| operators                  | products, as (m,n,k) × how often | elements that pass through memory                   |
|----------------------------|----------------------------------|-----------------------------------------------------|
| mm, addmm                  | (m,n,k) × 1                      | operands and result, the product's own              |
| bmm, baddbmm [b,m,k][b,k,n]| (b·m,n,k) × 1                    | operands and result                                 |
| attention, q [b,h,s,d]     | (b·h·s,t,d) × 2, backward × 5;   | q, k, v and the result                              |
|   keys [b,h',t,d]          | half of it where s = t: causal   |                                                     |
| views, questions, empty    | –                                | –, no time at all                                   |
| c10d's own                 | –                                | –, priced as the collective that was logged         |
| embedding, index, gather   | –                                | what is picked, twice                               |
| reductions                 | –                                | inputs                                              |
| fused AdamW                | –                                | four tensors read, three written                    |
| anything else              | –                                | inputs, and the result as they broadcast            |

A trace does not tell element types: all elements are taken as the machine's. What grows a tensor in another way than by
broadcasting (embedding's backward, slice's) is counted by its inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """product: (m,n,k) of Y[m,n] = X[m,k] · W[n,k]ᵀ, or None; times: how often; elements: that pass through memory.

    optimizer: the elements are parameters, gradients and moments, not activations.
    """

    elements: int
    product: tuple[int, int, int] | None = None
    times: float = 1.0
    optimizer: bool = False


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NOTHING = _words(
    "view _unsafe_view reshape _reshape_alias as_strided t transpose permute numpy_T slice select narrow diagonal "
    "detach alias lift_fresh expand squeeze unsqueeze split split_with_sizes chunk unbind unfold view_as_real "
    "view_as_complex real imag resize_ set_ promote_types is_same_size sym_size item _local_scalar_dense "
    "empty empty_like empty_strided new_empty new_empty_strided wait_tensor"
)
_INDEXED = _words("embedding index_select index gather take take_along_dim index_put index_add scatter_add")
_REDUCING = _words(
    "sum mean amax amin max min argmax argmin any all norm linalg_vector_norm logsumexp var std prod count_nonzero "
    "_foreach_norm"
)
_COPYING = _words("copy _foreach_copy")
_FILLING = _words("zero fill zeros_like ones_like full_like uniform normal _foreach_zero")
PRODUCTS = _words("mm addmm bmm baddbmm")
_ATTENTION = "_scaled_dot_product_"


def work_of(name: str, shapes: tuple[Shape, ...]) -> Work | None:
    """The work of the operator ``name`` (``aten.mm.default``) on tensors of these shapes; None: no time passes."""
    namespace, _, rest = name.partition(".")
    call, _, overload = rest.partition(".")
    if namespace == "c10d" or namespace == "_c10d_functional" or call in _NOTHING:
        return None
    plain, in_place = call.rstrip("_"), call.endswith("_")
    sizes = [math.prod(shape) for shape in shapes]
    if plain in PRODUCTS:
        return _product(plain, shapes)
    if call.startswith(_ATTENTION):
        return _attention(call.endswith("_backward"), shapes)
    if plain.startswith("_fused_adam"):
        return Work(7 * sum(sizes) // 4, optimizer=True)
    if plain in _INDEXED:
        return Work(_picked(plain, in_place or overload == "out", shapes))
    if plain in _COPYING:
        return Work(sum(sizes))
    if plain in _FILLING:
        return Work(sum(sizes[:1]))
    if plain in _REDUCING or overload == "out":  # the result of the latter is among the shapes
        return Work(sum(sizes))
    if plain in ("cat", "stack") or plain.startswith("_foreach"):
        return Work(2 * sum(sizes))
    return Work(sum(sizes) + (sizes[0] if in_place and sizes else _broadcast(shapes)))


def _product(call: str, shapes: tuple[Shape, ...]) -> Work:
    """(bias or sum,) left [(b,)m,k], right [(b,)k,n] (, result)."""
    left, right = shapes[1:3] if call in ("addmm", "baddbmm") else shapes[:2]
    m, k, n = math.prod(left[:-1]), left[-1], right[-1]
    return Work(math.prod(left) + math.prod(right) + m * n, (m, n, k))


def _attention(backward: bool, shapes: tuple[Shape, ...]) -> Work:
    """Forward: q, k, v, …; backward: the gradient first. Backward forms the scores again, and four products more."""
    q, k, v = shapes[1:4] if backward else shapes[:3]
    rows, keys = math.prod(q[:-1]), k[-2]
    times = (5.0 if backward else 2.0) * (0.5 if q[-2] == keys else 1.0)
    elements = 2 * math.prod(q) + math.prod(k) + math.prod(v)
    return Work(2 * elements if backward else elements, (rows, keys, q[-1]), times)


def _picked(call: str, listed: bool, shapes: tuple[Shape, ...]) -> int:
    """Elements read and written where an index says which; listed: the result or the addend is among the shapes."""
    source, *others = shapes
    if call in ("embedding", "index_select") and not listed:
        index = math.prod(others[0]) if others else 0
        return index + 2 * index * math.prod(source[1:])
    return 2 * sum(math.prod(shape) for shape in others)


def _broadcast(shapes: tuple[Shape, ...]) -> int:
    """Elements of what these shapes broadcast to; of the largest where they do not."""
    depth = max((len(shape) for shape in shapes), default=0)
    columns = list(zip(*((1,) * (depth - len(shape)) + shape for shape in shapes), strict=True))
    if all(len(set(column) - {1}) <= 1 for column in columns):
        return math.prod(0 if 0 in column else max(column) for column in columns) if shapes else 0
    return max(math.prod(shape) for shape in shapes)
