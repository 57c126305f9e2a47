"""A site's products as one autograd node, whatever the number of linears.

The node gathers once, saves once, and issues the reduction of dX before it forms the dWs. The reduction of Y is a node
of its own (runtime/reduction.py). Where W is gathered, its gather begins before that of X, and in backward before that
of dY, so that both travel together; dW's reduction is the store's, which waits for it later. The first sibling called
with a tensor computes all; the others take their result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from shardwright.linear import compiled
from shardwright.linear.compiled import Uses
from shardwright.linear.rows import RowsAgree
from shardwright.overlap.pieces import WeightGradients
from shardwright.overlap.product import Product
from shardwright.overlap.work import Backward, Biases, Forward, Weights
from shardwright.params.parameter_group import Use
from shardwright.params.stored import StoredParameter
from shardwright.reshard.conversion import Conversion
from shardwright.runtime.reduction import reduce_output

_NO_USES = (None, None)


class _SiteNode(torch.autograd.Function):
    """Anchors of the parameters come in, to join the graph: gradients go to the store, not to the engine.

    Where the product is deferred (``Resolved.deferred``) this node only saves what backward needs: its outputs are
    empty stand-ins of Y's shape, and the node behind it multiplies and reduces, so that a replay stops before both.
    """

    @staticmethod
    def forward(ctx: Any, site: SiteProduct, call: _Call, x: torch.Tensor, *anchors: Any) -> tuple[torch.Tensor, ...]:
        wanted = ctx.needs_input_grad[3:]
        keep = call.keep = any(wanted[: len(site.weights)])
        ctx.site, ctx.call, ctx.mode, ctx.deposits = site, call, site.mode, any(wanted)
        ctx.set_materialize_grads(False)
        kept: torch.Tensor | None
        if site.product.resolved.deferred:
            outputs, kept = [stand_in(x, call.rows, width) for width in site.widths], x if keep else None
        else:
            outputs, kept = site.multiply(x, call.rows, keep)
        ctx.save_for_backward(kept)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        site, call = ctx.site, ctx.call
        (kept,) = ctx.saved_tensors
        needs_x = ctx.needs_input_grad[2]
        into = site.weight_gradients() if ctx.deposits else None
        if site.product.resolved.deferred:
            grads = tuple(None if grad is None else call.shards.pop(index) for index, grad in enumerate(grads))
        dx = site.multiply_back(grads, kept, call.rows, needs_x, into, call.uses)
        return (None, None, dx) + (None,) * (len(ctx.needs_input_grad) - 3)


class _Reduced(torch.autograd.Function):
    """Multiplies and reduces what a deferring _SiteNode has saved: Y_i [S,N'_i].

    In backward the shard of dY stays with the call, and a stand-in tells the node before that it has come.
    """

    @staticmethod
    def forward(ctx: Any, site: SiteProduct, call: _Call, inputs: tuple[torch.Tensor], *stand_ins: Any) -> Any:
        (x,) = inputs
        ctx.call, ctx.widths = call, site.widths
        ctx.set_materialize_grads(False)
        return tuple(site.multiply_reduced(x, call.rows, call.keep))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        back: list[torch.Tensor | None] = []
        for index, (grad, width) in enumerate(zip(grads, ctx.widths, strict=True)):
            if grad is not None:
                ctx.call.shards[index] = grad
            back.append(None if grad is None else stand_in(grad, ctx.call.rows, width))
        return (None, None, None, *back)


class _Call:
    """One forward of a site: T, the uses that it announced to the store, whether backward wants X; then dY's shards."""

    def __init__(self, rows: int, uses: Uses):
        self.rows, self.uses, self.keep = rows, uses, False
        self.shards: dict[int, torch.Tensor] = {}


def stand_in(like: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """A tensor of shape [rows,width] that owns nothing: autograd checks shapes, nobody reads values.

    It is one element of ``like``, seen through strides of 0.
    """
    if not like.numel():
        like = like.new_empty(1)
    return like.detach().as_strided((rows, width), (0, 0))


class _AddBias(torch.autograd.Function):
    """Y [R,N] += b [N], after the reduction of Y; db [N] = Σ_rows dY goes to the store."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, anchor: Any, stored: StoredParameter, use: Use | None) -> torch.Tensor:
        ctx.stored, ctx.use = stored, use
        y.add_(stored.lease())
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        if ctx.needs_input_grad[1]:
            ctx.stored.deposit(grads[0].sum(0))
        ctx.stored.finish(ctx.use)
        return grads[0], None, None, None


class SiteProduct:
    """The products of one site, shared by its linears.

    weights, biases: the stored parameters of each linear, in order. Where k is split, a bias is added once, after the
    reduction (outer); else inside the product (inner). transposed: weights stored as [K,N].
    """

    def __init__(
        self,
        product: Product,
        weights: list[StoredParameter],
        biases: list[StoredParameter | None],
        transposed: bool = False,
    ):
        none: list[StoredParameter | None] = [None] * len(biases)
        self.product = product
        self.weights = weights
        self.transposed = transposed
        self.tokens: int | None = None  # B·S of the forward at work, where the model tells it
        self.sequences = product.runtime.group(())  # the m axes that split sequences, which a batch does not fill
        self.inner_biases, self.outer_biases = (none, biases) if product.splits_k else (biases, none)
        self.mode: Any = import_module(product.resolved.module)
        self.rows_agree = RowsAgree(product.runtime, product.layout.n + product.layout.k, product.name)
        self.number = compiled.number_of(self)
        self.anchor = torch.zeros(0, requires_grad=True)
        self.before: Conversion | None = None  # of what the site before leaves into X
        self.after: Conversion | None = None  # of Y into what the residual stream is
        self._key: object = None
        self._ready: dict[int, torch.Tensor] = {}
        self._held: dict[int, torch.Tensor] = {}

    # -- the products, in the layout's mode

    def multiply(self, x: torch.Tensor, rows: int, keep: bool) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """(Y_i, what backward keeps of X), of x [R,K''], T = ``rows``: the modes' ``forward``."""
        found: tuple[list[torch.Tensor], torch.Tensor | None] = self.mode.forward(self._begin(x, rows, keep))
        self._forward_is_over()
        return found

    def multiply_reduced(self, x: torch.Tensor, rows: int, keep: bool) -> list[torch.Tensor]:
        """Y_i, reduced, of x [R,K'']: the modes' ``reduced``. keep: backward will want X."""
        found: list[torch.Tensor] = self.mode.reduced(self._begin(x, rows, keep))
        self._forward_is_over()
        return found

    def _begin(self, x: torch.Tensor, rows: int, keep: bool) -> Forward:
        self.fetch()
        hold = self.holder(x) if torch._C._current_graph_task_id() != -1 else None
        return Forward(self.product, x, rows, self.width, self._lease, keep, hold)

    def multiply_back(
        self,
        grads: Sequence[torch.Tensor | None],
        kept: torch.Tensor | None,
        rows: int,
        needs_x: bool,
        into: WeightGradients | None,
        uses: Uses,
    ) -> torch.Tensor | None:
        """dX, or None: the modes' ``backward``. grads, kept: as the modes take them. Ends ``uses``."""
        if needs_x:
            self.fetch()
        product, held = self.product, self.take_held(kept)
        backward = self.mode.gathered_backward if product.resolved.streamed else self.mode.backward
        dx: torch.Tensor | None = backward(
            Backward(
                product,
                grads,
                kept,
                rows,
                self.width,
                lease=lambda: self.lease_weights(uses),
                release=lambda: self._let_go_of_weights(uses),
                needs_x=needs_x,
                into=into,
                held=held,
            )
        )
        self.finish(uses)
        return dx

    # -- weights

    def fetch(self) -> None:
        """Begins to gather every W, where it is gathered at all: it travels beside what comes before the products."""
        for stored in self.weights:
            stored.fetch()

    def _lease(self) -> tuple[Weights, Biases]:
        biases = [stored.lease() if stored is not None else None for stored in self.inner_biases]
        return self.lease_weights(), biases

    def lease_weights(self, uses: Uses | None = None) -> Weights:
        """Every W_i as [N',K']; in backward, for the uses that the forward announced."""
        leased = [
            stored.lease(use)
            for stored, (use, _) in zip(self.weights, uses or [_NO_USES] * len(self.weights), strict=True)
        ]
        return [weight.t() for weight in leased] if self.transposed else leased

    def _forward_is_over(self) -> None:
        """A replay's backward follows at once and reads W again; else W goes until then."""
        if torch._C._current_graph_task_id() == -1:
            self._let_go_of_weights([])

    def _let_go_of_weights(self, uses: Uses) -> None:
        """Gives the memory of W back where it was gathered for this site alone; ``uses`` read it no more."""
        if not self.product.gathers_w:
            return
        over = {use for pair in uses for use in pair}
        for param_group in dict.fromkeys(stored.param_group for stored in self.weights):
            wanted = param_group.sharding.keep and not set(param_group.uses) <= over
            if param_group.gathered and not param_group.open and not param_group.sharding.resident and not wanted:
                param_group.release()

    @property
    def width(self) -> int:
        """K'."""
        return self.weights[0].whole_shape[0 if self.transposed else 1]

    def __call__(self, key: object, x: torch.Tensor, rows: int, index: int) -> torch.Tensor:
        """Y_index of x [R,K''] (or of what ``before`` converts to it), T = ``rows``.

        key: what the caller was given; by it siblings find each other.
        """
        if self._key is not key or index not in self._ready:
            self._ready = dict(enumerate(self._compute(x, rows)))
            self._key = key
        y = self._ready.pop(index)
        if not self._ready:
            self._key = None
        return y

    def clear(self) -> None:
        """Forgets results that no sibling has taken."""
        self._key, self._ready = None, {}

    def rows_of(self, tokens: int) -> int:
        """T: of B·S = ``tokens``, those of this rank's place on the m axes."""
        start, stop = self.sequences.bounds(tokens)
        return stop - start

    def _compute(self, x: torch.Tensor, rows: int) -> list[torch.Tensor]:
        if self.before is not None:
            x = self.before(x, self.tokens or rows)
        outputs = self._products(x, rows)
        return outputs if self.after is None else [self.after(y, self.tokens or rows) for y in outputs]

    def _products(self, x: torch.Tensor, rows: int) -> list[torch.Tensor]:
        if torch.compiler.is_compiling():
            results: list[torch.Tensor] = torch.ops.shardwright.site(x, self.anchor, self.number, rows)
            return results[: len(self.weights)]
        inside = self.inner_biases
        needs_x = x.requires_grad
        uses = self._announce(needs_x)
        anchors = [stored.anchor for stored in [*self.weights, *inside] if stored is not None]
        product, call, results = self.product, _Call(rows, uses), []
        outputs = _SiteNode.apply(self, call, x, *anchors)
        if product.resolved.deferred:
            outputs = _Reduced.apply(self, call, (x.detach(),), *outputs)
        for y, bias in zip(outputs, self.outer_biases, strict=True):
            if not product.resolved.deferred:
                y = reduce_output(y, product.reduction, self.fetch if needs_x else None)
            if bias is not None:
                y = _AddBias.apply(y, bias.anchor, bias, bias.use())
            results.append(y)
        return results

    def _announce(self, needs_x: bool) -> Uses:
        """A backward to come: uses are told in the reverse of the order in which ``finish`` ends them."""
        uses: Uses = []
        for weight, bias in reversed(list(zip(self.weights, self.inner_biases, strict=True))):
            of_bias = bias.use() if bias is not None else None
            uses.insert(0, (weight.use(needs_x), of_bias))
        return uses

    @property
    def widths(self) -> list[int]:
        """N'_i of every linear."""
        return [stored.whole_shape[1 if self.transposed else 0] for stored in self.weights]

    def weight_gradients(self) -> WeightGradients | None:
        """Where the gradients of the weights and inner biases go; None where none is wanted."""
        wanted = [
            (weight.parameter.requires_grad, bias is not None and bias.parameter.requires_grad)
            for weight, bias in zip(self.weights, self.inner_biases, strict=True)
        ]
        if not any(weight or bias for weight, bias in wanted):
            return None
        return WeightGradients(wanted, self.transposed, self._deposit)

    def _deposit(self, index: int, dw: torch.Tensor | None, db: torch.Tensor | None) -> None:
        """Hands dW_i and db_i to the store."""
        weight, bias = self.weights[index], self.inner_biases[index]
        if dw is not None:
            weight.deposit(dw)
        if db is not None and bias is not None:
            bias.deposit(db)

    def finish(self, uses: Uses) -> None:
        """The backward of one forward is over: it reads no weight any more, and deposits nothing more."""
        for weight, bias, (of_weight, of_bias) in zip(self.weights, self.inner_biases, uses, strict=True):
            weight.finish(of_weight)
            if bias is not None:
                bias.finish(of_bias)

    def holder(self, x: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """For a replay: the gathered X stays leased until the backward of this site takes it, or backward ends.

        It is found by the shard that the replay saves, so it never passes through saved tensors.
        """

        def hold(gathered: torch.Tensor) -> None:
            self._held[id(x.untyped_storage())] = gathered
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._let_go)

        return hold

    def take_held(self, kept: torch.Tensor | None) -> torch.Tensor | None:
        """The gathered X that a replay left for the shard ``kept``."""
        return None if kept is None else self._held.pop(id(kept.untyped_storage()), None)

    def _let_go(self) -> None:
        for gathered in self._held.values():
            self.product.runtime.arena.end(gathered)
        self._held.clear()
