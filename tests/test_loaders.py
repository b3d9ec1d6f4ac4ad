"""tiga.nn's layers in a model that is trained on batches of PyG's loaders: steps are those with PyG's layers."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from test_layers import assert_same, graph
from torch import nn
from torch_geometric import nn as peers
from torch_geometric import typing
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader, NeighborLoader, NodeLoader, RandomNodeLoader
from torch_geometric.sampler import BaseSampler, SamplerOutput

import tiga as tg

NODES, FANS = 40, (3, 2)


class Neighbours(BaseSampler):
    """Seeds, and at random so many edges to each at every hop: what PyG's own sampler needs compiled packages for."""

    def __init__(self, edge_index):
        self.src, self.dst = edge_index

    def sample_from_nodes(self, inputs):
        place = {n: k for k, n in enumerate(inputs.node.tolist())}
        reached, edges = list(place), []
        for fan in FANS:
            found = []
            for i in reached:
                every = (self.dst == i).nonzero().squeeze(1)
                found += every[torch.randperm(len(every))[:fan]].tolist()
            reached = [j for j in dict.fromkeys(self.src[found].tolist()) if j not in place]
            place.update({j: len(place) + k for k, j in enumerate(reached)})
            edges += found
        ends = [torch.tensor([place[n] for n in end[edges].tolist()], dtype=torch.long) for end in (self.src, self.dst)]
        edge = torch.tensor(edges, dtype=torch.long)
        return SamplerOutput(torch.tensor(list(place)), *ends, edge, metadata=(inputs.input_id, inputs.time))

    def sample_from_edges(self, inputs, neg_sampling=None):
        raise NotImplementedError


def neighbours(whole):
    """NeighborLoader, where its sampler is installed; else the loader that it is, with a sampler of torch."""
    if typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE:
        return NeighborLoader(whole, list(FANS), batch_size=12, shuffle=True)
    return NodeLoader(whole, Neighbours(whole.edge_index), batch_size=12, shuffle=True)


def graphs(whole):
    """Batches of three graphs each, of different sizes."""
    parts = [whole.subgraph(torch.arange(first, first + count)) for first, count in ((0, 9), (9, 3), (12, 20), (32, 8))]
    return DataLoader(parts, batch_size=3)


def random_nodes(whole):
    return RandomNodeLoader(whole, 3)


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.one = layers.GATv2Conv(4, 5, heads=2, edge_dim=2)
        self.two = layers.GATConv(10, 6, heads=2)
        self.three = layers.TransformerConv(12, 3, edge_dim=2)

    def forward(self, batch):
        x = self.one(batch.x, batch.edge_index, batch.edge_attr).relu()
        x = self.two(x, batch.edge_index).relu()
        return self.three(x, batch.edge_index, batch.edge_attr)


@pytest.mark.parametrize("loader", [neighbours, graphs, random_nodes], ids=lambda f: f.__name__)
def test_two_steps_on_batches_of_a_loader(loader):
    generator = torch.Generator().manual_seed(0)
    list_ = graph(NODES, NODES, 240, generator)
    real = lambda *sizes: torch.randn(*sizes, generator=generator, dtype=torch.float64)
    whole = Data(real(NODES, 4), list_, real(240, 2), y=torch.randint(3, (NODES,), generator=generator))
    theirs, ours = Model(peers).double(), Model(tg.nn).double()
    ours.load_state_dict(theirs.state_dict())
    found, sizes = [], []
    for model in (theirs, ours):
        torch.manual_seed(1)  # batches are drawn anew for each
        optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.3), []
        for batch in itertools.islice(loader(whole), 2):
            # the loss of sampled batches is that of their first nodes, whose neighbours were asked for
            seeds = batch.batch_size if hasattr(batch, "n_id") else batch.num_nodes
            loss = F.cross_entropy(model(batch)[:seeds], batch.y[:seeds])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps.append(loss.detach())
            sizes.append((batch.num_nodes, batch.num_edges, seeds))
        found.append([*steps, *model.state_dict().values()])
    assert len(sizes) == 4 and sizes[:2] == sizes[2:] and all(edges > 0 for _, edges, _ in sizes)
    assert_same(*found)
