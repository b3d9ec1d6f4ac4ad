"""Graphs: which sources reach which destinations. Immutable, pytree nodes, savable; implicit kinds store O(N)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tiga import graph_algebra, graph_build, graph_text, graph_tree, neighbours, periodic, preparation, relations
from tiga.errors import TigaError
from tiga.graph_checks import can_read, number, size


class Graph:
    """{(i, j): source j reaches destination i}, with a number for each edge.

    Made by the constructors below. Edges of implicit kinds are numbered by destination, then source; those of
    `from_edge_index` as they were given; `to_csr` and `reverse` keep the numbers, `cat` numbers part after part.
    Shapes, dtypes and devices are checked always. Values are checked when a graph is built eagerly: on the host
    always; on a device with one read, and only if that read also finds a size (or number of edges) that was not
    given. While compiling, exporting or capturing nothing is read: a row that does not exist then counts as no
    edge.

    Listed kinds on a device with kernels are made with what kernels read beside the list (`prepare`): work lists, and,
    where gradients are recorded, the list by source. Where sizes were read, one more read finds the longest rows.

    >>> import tiga as tg
    >>> tg.Graph.triangular(3).to_mask().int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """

    __slots__ = ("__weakref__", "_device", "_positions", "ints", "kind", "prepared", "reversed", "tensors")

    kind: str
    ints: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    prepared: tuple[Tensor, ...]
    reversed: bool
    _positions: tuple[Tensor, ...]
    _device: str | None

    def __init__(
        self,
        kind: str,
        ints: tuple[Any, ...],
        tensors: tuple[Tensor, ...],
        positions: tuple[Tensor, ...] = (),
        reversed: bool = False,
        device: str | None = None,
        prepared: tuple[Tensor, ...] = (),
    ) -> None:
        # Unchecked: pytree rebuilds graphs with leaves that are not sizes or tensors.
        # positions: (), one tensor for both ends, or (of destinations, of sources), in the base orientation; with
        # what images add to their difference, by the edges' numbers, as a third
        for name, value in zip(_FIELDS, (kind, ints, tensors, positions, reversed, device, prepared)):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Graph is immutable: {name} cannot be set. Build a new one.")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Graph is immutable: {name} cannot be deleted. Build a new one.")

    @property
    def num_dst(self) -> Any:
        """Number of destinations, rows of the result."""
        return self.ints[1] if self.reversed else self.ints[0]

    @property
    def num_src(self) -> Any:
        """Number of sources."""
        return self.ints[0] if self.reversed else self.ints[1]

    @property
    def num_edges(self) -> Any:
        """Number of edges, rows of an edge field. Reads a device once where it was never computed."""
        return relations.num_edges(self.kind, self.ints, self.tensors)

    @property
    def positions(self) -> tuple[Tensor, Tensor] | None:
        """(of destinations, of sources), or None; normally the same tensor twice."""
        if not self._positions:
            return None
        dst, src = self._positions[0], self._positions[:2][-1]
        return (src, dst) if self.reversed else (dst, src)

    @property
    def shift(self) -> Tensor | None:
        """What edge.displacement is beside pos_src - pos_dst, (num_edges, dim); None without periodic cells."""
        return self._positions[2] if len(self._positions) == 3 else None

    @property
    def device(self) -> torch.device | None:
        """Where its tensors are, or the device it was asked for; None runs where the fields are."""
        if self.tensors:
            return self.tensors[0].device
        return None if self._device is None else torch.device(self._device)

    @staticmethod
    def dense(num_dst: int, num_src: int | None = None, device: Any = None) -> Graph:
        """{(i, j)}: every source reaches every destination. num_src defaults to num_dst. Stores nothing.

        >>> import tiga as tg
        >>> tg.Graph.dense(2, 3).num_edges
        6
        """
        return Graph(*graph_build.dense(num_dst, num_src), device=_device_name(device))

    @staticmethod
    def triangular(num_dst: int, num_src: int | None = None, offset: int | None = None, device: Any = None) -> Graph:
        """{(i, j): j <= i + offset}: causal attention. offset is 0 for equal sizes and must be given for others.

        offset = num_src - num_dst aligns the last rows (a decoder with a cache). Stores nothing.

        >>> import tiga as tg
        >>> tg.Graph.triangular(2, 4, offset=2).to_mask().int().tolist()
        [[1, 1, 1, 0], [1, 1, 1, 1]]
        """
        return Graph(*graph_build.triangular(num_dst, num_src, offset), device=_device_name(device))

    @staticmethod
    def window(num_dst: int, left: int, right: int = 0, num_src: int | None = None, offset: int = 0) -> Graph:
        """{(i, j): i + offset - left <= j <= i + offset + right}: a sliding window of left + 1 + right sources.

        >>> import tiga as tg
        >>> tg.Graph.window(4, 1).to_mask().int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
        """
        return Graph(*graph_build.window(num_dst, left, right, num_src, offset))

    @staticmethod
    def cu_seqlens(
        boundaries: Any,
        causal: bool = True,
        src_boundaries: Any = None,
        align: str | None = None,
        num_dst: int | None = None,
        num_src: int | None = None,
    ) -> Graph:
        """{(i, j) of one segment: j <= i + offset if causal}: packed sequences of different lengths.

        boundaries: running totals of the lengths from 0, [segments + 1] integers; src_boundaries: the same for
        sources, by default equal. Causal segments of unequal lengths need align="bottom-right" (the last rows
        meet) or "top-left". Sizes are the last boundaries unless given; rows after the last boundary have no
        edges. Stores O(segments).

        >>> import tiga as tg
        >>> tg.Graph.cu_seqlens([0, 1, 3]).to_mask().int().tolist()
        [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
        """
        return Graph(*graph_build.cu_seqlens(boundaries, causal, src_boundaries, align, num_dst, num_src))

    @staticmethod
    def intervals(start: Any, stop: Any, num_src: int, start2: Any = None, stop2: Any = None) -> Graph:
        """{(i, j): start[i] <= j < stop[i] or start2[i] <= j < stop2[i]}: prefix-LM, sinks and a window, padding.

        Each [num_dst] integers in 0..num_src; stop <= start is an empty interval; intervals of a row that
        overlap raise. Stores the tensors as they are; eagerly one read checks them and counts the edges.

        >>> import tiga as tg
        >>> tg.Graph.intervals([0, 1], [2, 1], 3).to_mask().int().tolist()
        [[1, 1, 0], [0, 0, 0]]
        """
        return Graph(*graph_build.intervals(start, stop, num_src, start2, stop2))

    @staticmethod
    def from_edge_index(edge_index: Any, num_src: int | None = None, num_dst: int | None = None) -> Graph:
        """{(edge_index[1, e], edge_index[0, e])}: row 0 sources, row 1 destinations, as in PyG; edge e has number e.

        edge_index: (2, num_edges) integers, in any order, repeated pairs are separate edges; or PyG's EdgeIndex,
        Data or Batch, which bring their sizes. Sizes default to the largest row + 1. Sorted by destination, stably;
        stores num_dst + 1 + 2 num_edges integers.

        >>> import tiga as tg
        >>> tg.Graph.from_edge_index([[0, 2], [1, 0]], num_src=3, num_dst=2).to_mask().int().tolist()
        [[0, 0, 1], [1, 0, 0]]
        """
        return Graph(*graph_build.from_edge_index(edge_index, num_src, num_dst)).ready(
            num_src is None or num_dst is None
        )

    @staticmethod
    def from_csr(rowptr: Any, col: Any, num_src: int | None = None, num_dst: int | None = None) -> Graph:
        """{(i, col[e]): rowptr[i] <= e < rowptr[i + 1]}: CSR by destination; edge e has number e.

        rowptr: [num_dst + 1], from 0 to num_edges, not decreasing; col: [num_edges]. num_src defaults to the largest
        source + 1. Stores the tensors as they are.

        >>> import tiga as tg
        >>> tg.Graph.from_csr([0, 1, 3], [2, 0, 1]).to_mask().int().tolist()
        [[0, 0, 1], [1, 1, 0]]
        """
        return Graph(*graph_build.from_csr(rowptr, col, num_src, num_dst)).ready(num_src is None)

    @staticmethod
    def from_sparse(matrix: Any) -> Graph:
        """{(i, j): matrix[i, j] is stored}: rows are destinations, as in PyG's adj_t; edge e is the e-th stored entry.

        matrix: (num_dst, num_src, ...), a torch sparse tensor (CSR, CSC, COO) or a scipy sparse matrix. Its values are
        no part of the graph: give them as an edge field, which has their order (of scipy's other formats the order
        of matrix.tocsr()). Entries that are stored are edges, zeros as well.

        >>> import tiga as tg, torch
        >>> tg.Graph.from_sparse(torch.tensor([[0.0, 2.0], [0.0, 0.0]]).to_sparse_csr()).to_mask().int().tolist()
        [[0, 1], [0, 0]]
        """
        return Graph(*graph_build.from_sparse(matrix))

    @staticmethod
    def radius(
        positions: Tensor,
        cutoff: float,
        batch: Any = None,
        loop: bool = False,
        max_neighbors: int | None = None,
        cell: Any = None,
    ) -> Graph:
        """{(i, j): |x_j - x_i| <= cutoff, j != i unless loop, batch[i] == batch[j]}, ordered by (i, j).

        positions: (num_nodes, dim), floating point; batch: [num_nodes] integers, in any order. Distances are
        those of differences taken in the dtype of positions; the cutoff is included. A node with more than
        max_neighbors raises: the result is never cut. O(nodes + edges) at uniform density, any device. The
        graph keeps positions, so that edge.displacement = x_j - x_i and edge.distance are differentiable in
        them. NaN positions or cutoff raise.

        cell: (dim, dim), rows the periods a_k, zeros for none (ASE's cell, where pbc), or one for each number in
        batch. Then an edge is (i, j, n), n integers: |x_j - x_i + sum_k n_k a_k| <= cutoff, ordered by (i, j, n), and
        edge.displacement is that sum, differentiable in the cell too. Images of i itself are no loops. Nodes may
        lie outside of their box, and the cutoff reach over several.

        >>> import tiga as tg, torch
        >>> tg.Graph.radius(torch.tensor([[0.0], [1.0], [3.0]]), 1.0).to_mask().int().tolist()
        [[0, 1, 0], [1, 0, 0], [0, 0, 0]]
        """
        batch = neighbours.check_points(positions, batch, "Graph.radius")
        cutoff = neighbours.check_cutoff(cutoff)
        if max_neighbors is not None:
            max_neighbors = size(max_neighbors, "max_neighbors", "Graph.radius")
        sizes, compiling = (positions.shape[0], positions.shape[0]), torch.compiler.is_compiling()
        if cell is not None:
            cell = periodic.check_cell(cell, positions, batch)
            find = torch.ops.tiga.radius_periodic if compiling else periodic.periodic_edges
            rowptr, col, image = find(positions.detach(), cutoff, cell.detach(), batch, loop, max_neighbors)
            shift = periodic.shift(rowptr, image, cell, batch, positions.dtype)
            return Graph("csr", sizes, (rowptr, col), (positions, positions, shift)).ready(True)
        search = torch.ops.tiga.radius if compiling else neighbours.radius_edges
        rowptr, col = search(positions.detach(), cutoff, batch, loop, max_neighbors)
        return Graph("csr", sizes, (rowptr, col), (positions,)).ready(True)

    @staticmethod
    def knn(positions: Tensor, k: int, batch: Any = None) -> Graph:
        """{(i, j): j is one of the k nearest to i, other than i, of its batch}, ordered by (i, j); keeps positions.

        Of nodes equally near the lower is taken; a batch of at most k nodes gives fewer. Distances as in `radius`.

        >>> import tiga as tg, torch
        >>> tg.Graph.knn(torch.tensor([[0.0], [1.0], [3.0]]), 1).to_mask().int().tolist()
        [[0, 1, 0], [1, 0, 0], [0, 1, 0]]
        """
        batch = neighbours.check_points(positions, batch, "Graph.knn")
        k = size(k, "k", "Graph.knn")
        search = torch.ops.tiga.knn if torch.compiler.is_compiling() else neighbours.knn_edges
        rowptr, col = search(positions.detach(), k, batch)
        return Graph("csr", (positions.shape[0], positions.shape[0]), (rowptr, col), (positions,)).ready(True)

    @staticmethod
    def cat(graphs: Iterable[Graph]) -> Graph:
        """Block diagonal: rows, sources and edge numbers of the parts one after another. cat([]) has no rows.

        Implicit parts give an implicit graph of O(parts) storage (O(rows) with `intervals`); a list among them
        gives a list. Positions are kept when every part has them.

        >>> import tiga as tg
        >>> tg.Graph.cat([tg.Graph.dense(1), tg.Graph.triangular(2)]).to_mask().int().tolist()
        [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
        """
        return _cat(list(graphs))

    def __and__(self, other: Graph) -> Graph:
        """{pairs of both}. Implicit operands give at most two intervals a row where that suffices, else a list."""
        return _combined(self, other, "&", graph_algebra.intersect)

    def __or__(self, other: Graph) -> Graph:
        """{pairs of either}, each once. Implicit operands give at most two intervals a row where that suffices."""
        return _combined(self, other, "|", graph_algebra.union)

    def reverse(self) -> Graph:
        """{(j, i)}: sources and destinations change places; every edge keeps its number.

        >>> import tiga as tg
        >>> tg.Graph.triangular(2).reverse().to_mask().int().tolist()
        [[1, 1], [0, 1]]
        """
        if self.kind == "csr":
            positions, turned = _turned(self._positions), preparation.turned(self.tensors, self.prepared)
            if turned is not None:
                return Graph("csr", self.ints[::-1], turned[0], positions, prepared=turned[1])
            return Graph(*graph_algebra.transposed(self), positions).ready(False)
        return Graph(self.kind, self.ints, self.tensors, self._positions, not self.reversed, self._device)

    def to_mask(self) -> Tensor:
        """mask[i, j] = 1 if j reaches i: bool (num_dst, num_src)."""
        return graph_algebra.to_mask(self)

    def to_csr(self) -> Graph:
        """The same edges, listed by destination, with the same numbers."""
        if self.kind == "csr":
            return self
        return Graph(*graph_algebra.to_csr(self), self._used_positions()).ready(False)

    def to(self, device: Any) -> Graph:
        """The same graph with its tensors, positions and prepared lists on `device`."""
        tensors, positions = (tuple(t.to(device) for t in group) for group in (self.tensors, self._positions))
        prepared = preparation.moved(self.tensors, self.prepared, tensors)
        there = Graph(self.kind, self.ints, tensors, positions, self.reversed, _device_name(device), prepared)
        return there.ready(self.device is not None and self.device.type == "cpu")

    def prepare(self, undirected: bool | None = None) -> Graph:
        """The same edges, with the lists that kernels read: work lists by destination and by source, CSR by source.

        Of a graph that is listed (others are returned as they are). Constructors make what they can foresee: all of
        it on a device with kernels, but the lists by source where no gradient is recorded. A graph that lacks a list
        is given it at every call, so prepare a graph that was built under no_grad before it is trained. Lists made
        without reading a value, as constructors make them that are given sizes, have a static, padded length; outside
        compilation and capture one read fits them to the longest rows, and finds, where lists by source are made,
        whether the graph is undirected (every edge has its reverse, sources ascend): both directions then share their
        lists. undirected=True declares it, False keeps the directions apart.

        >>> import tiga as tg
        >>> g = tg.Graph.from_edge_index([[0, 1], [1, 0]]).prepare()
        >>> [tuple(t.shape) for t in g.prepared], g.prepare() is g
        ([(2, 4), (0, 3), (3,), (2,), (2,), (2, 4), (0, 3)], True)
        """
        if self.kind != "csr" or len(self.prepared) < preparation.BOTH or not can_read(*self.tensors):
            return self._with_lists(True, undirected, can_read(*self.tensors))
        lists = preparation.outside_inference(preparation.fitted, self.tensors, self.prepared)
        return self if lists is self.prepared else self._holding(lists)

    def ready(self, read: bool) -> Graph:
        """What kernels are about to read of this graph, prepared: nothing where none run. read: whether it may wait."""
        if self.kind != "csr" or self.tensors[0].device.type not in preparation.KERNEL_DEVICES:
            return self
        return self._with_lists(torch.is_grad_enabled(), None, read and can_read(*self.tensors))

    def _with_lists(self, by_source: bool, undirected: bool | None, read: bool) -> Graph:
        if self.kind != "csr" or len(self.prepared) >= (preparation.BOTH if by_source else preparation.ONE):
            return self
        lists = preparation.outside_inference(
            preparation.lists, self.ints, self.tensors, self.prepared, by_source, undirected, read
        )
        return self._holding(lists)

    def _holding(self, lists: tuple[Tensor, ...]) -> Graph:
        return Graph("csr", self.ints, self.tensors, self._positions, self.reversed, self._device, lists)

    def explain(self) -> str:
        """Kind, sizes, number of edges, order of numbers, storage in bytes, and what runs on it."""
        return graph_text.explain(self)

    def plot(self, form: str | None = None, ax: Any = None, positions: Any = None) -> Any:
        """Draws the relation with matplotlib and returns the axes: row i of a matrix receives from column j.

        form: "matrix", or "points" (nodes at the first two coordinates of their positions, and edges), the default
        where there are positions of two or more coordinates. positions: (num_nodes, dim), for graphs that keep none.
        Large matrices are drawn as the share of each cell's pairs that are edges. Raises TigaError where matplotlib
        is missing or nothing can be drawn.
        """
        from tiga.pictures import plot

        return plot(self, form, ax, positions)

    def _repr_html_(self) -> str:
        from tiga.pictures import html

        return html(self)

    def __repr__(self) -> str:
        return graph_text.short(self)

    def __str__(self) -> str:
        drawn = graph_text.drawn(self)
        return f"{graph_text.short(self)}\n{drawn}" if drawn else graph_text.short(self)

    def __eq__(self, other: object) -> bool:
        """Same kind, sizes, direction, and equal tensors of equal dtype on one device."""
        if not isinstance(other, Graph):
            return NotImplemented
        return self._key() == other._key() and all(
            a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)
            for a, b in zip((*self.tensors, *self._positions), (*other.tensors, *other._positions))
        )

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        # a stored number of edges is known or not, which does not make another graph
        ints = self.ints[:2] if self.kind in ("blocks", "intervals") else self.ints
        shapes = tuple(tuple(t.shape) for t in (*self.tensors, *self._positions))
        return (self.kind, self.reversed, ints, len(self.tensors), shapes)

    def _used_positions(self) -> tuple[Tensor, ...]:
        return self._positions[::-1] if self.reversed else self._positions

    def __reduce__(self) -> tuple[Any, ...]:
        return Graph, tuple([getattr(self, name) for name in _FIELDS])


_FIELDS = ("kind", "ints", "tensors", "_positions", "reversed", "_device", "prepared")


def _device_name(device: Any) -> str | None:
    # kept as text: the context of a pytree is written to JSON by export
    return None if device is None else str(torch.device(device))


def _common_device(asked: str, graphs: Sequence[Graph]) -> torch.device | None:
    devices = {graph.device for graph in graphs if graph.device is not None}
    # "cuda" asked for by one graph is wherever on CUDA the tensors of another are
    types = {device.type for device in devices if device.index is not None}
    devices = {device for device in devices if device.index is not None or device.type not in types}
    if len(devices) > 1:
        names = " and ".join(sorted(str(device) for device in devices))
        raise TigaError(f"{asked}: the graphs are on {names}. Move them to one device with graph.to(device).")
    return next(iter(devices), None)


def _cat(graphs: Sequence[Graph]) -> Graph:
    for graph in graphs:
        if not isinstance(graph, Graph):
            raise TypeError(f"Graph.cat: takes graphs, got {type(graph).__name__}. Write Graph.cat([g, h]).")
    device = _common_device("Graph.cat", graphs)
    if len(graphs) < 2:
        return graphs[0] if graphs else Graph.dense(0)
    turned = [graph.reversed for graph in graphs]
    if all(turned):
        return _cat([graph.reverse() for graph in graphs]).reverse()
    if any(turned):
        # edges keep their numbers, and only a list can number some parts by source
        graphs = [graph.to_csr() if graph.reversed else graph for graph in graphs]
    if device is not None:
        graphs = [graph if graph.tensors else graph.to(device) for graph in graphs]
    return Graph(*graph_algebra.cat(graphs, device), _joined_positions(graphs)).ready(False)


def _joined_positions(graphs: Sequence[Graph]) -> tuple[Tensor, ...]:
    pairs = [graph.positions for graph in graphs]
    given = [pair for pair in pairs if pair is not None]
    if len(given) < len(pairs):
        return ()
    destinations = torch.cat([dst for dst, _ in given])
    same = all(dst is src for dst, src in given)
    sources = destinations if same else torch.cat([src for _, src in given])
    if any(graph.shift is not None for graph in graphs):
        zeros = [destinations.new_zeros(g.num_edges if g.shift is None else 0, destinations.shape[1]) for g in graphs]
        return destinations, sources, torch.cat([z if g.shift is None else g.shift for g, z in zip(graphs, zeros)])
    return (destinations,) if same else (destinations, sources)


def _turned(positions: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (positions[1], positions[0], -positions[2]) if len(positions) == 3 else positions[::-1]


def _combined(a: Graph, b: Graph, symbol: str, operation: Callable[[Graph, Graph], graph_algebra.Payload]) -> Graph:
    if not isinstance(b, Graph):
        return NotImplemented
    if a.num_dst != b.num_dst or a.num_src != b.num_src:
        one, other = (f"{number(g.num_dst)} destinations and {number(g.num_src)} sources" for g in (a, b))
        raise TigaError(
            f"graph {symbol} graph: {one} on the left, {other} on the right. Combine graphs of equal sizes."
        )
    device = _common_device(f"graph {symbol} graph", (a, b))
    if device is not None:
        a, b = (graph if graph.tensors else graph.to(device) for graph in (a, b))
    positions = [graph._used_positions() for graph in (a, b) if graph._positions]
    # pairs are merged, so that no image of a periodic list is left to tell displacements by
    if any(len(p) == 3 for p in positions) or len(positions) == 2 and any(p is not q for p, q in zip(*positions)):
        positions = []
    return Graph(*operation(a, b), positions[0] if positions else ()).ready(True)


graph_tree.register(Graph)
torch.serialization.add_safe_globals([Graph])
