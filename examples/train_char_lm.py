"""Trains a small causal transformer, character by character, on the English help topics that ship with CPython.

Attention inside each packed piece of a document is one edge function over `Graph.cu_seqlens`. Every tenth topic is held
out: a run of 400 steps or more fails unless its loss there is at least 0.7 nats a character below a bigram table's, a
shorter one unless it beats a uniform guess. `--compile` compiles the model.
"""

import argparse
import math
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import trange

import tiga as tg

STEPS, BATCH, PIECE, WIDTH, HEADS, LAYERS, RATE = 400, 1024, 128, 128, 4, 3, 8e-3
device = "cuda" if torch.cuda.is_available() else "cpu"


class Attention(tg.MessagePassing):
    """Each head looks by content and at a learned distance back, with a learned sharpness."""

    reducer = tg.online_softmax()

    def __init__(self):
        super().__init__()
        self.back = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 0.0]))
        self.sharpness = nn.Parameter(torch.tensor([3.0, 3.0, 3.0, 0.1]))

    def edge(self, src, dst, edge, scale):
        distance = dst.position - src.position
        score = (src.key * dst.query).sum(dim=-1) * scale - self.sharpness * (distance - self.back).abs()
        return self.reducer(score, src.value)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = Attention(), nn.RMSNorm(WIDTH, elementwise_affine=False)
        shapes = ((1, 3), (1, 1), (1, 4), (4, 1))
        self.qkv, self.out, self.up, self.down = (nn.Linear(i * WIDTH, o * WIDTH, bias=False) for i, o in shapes)

    def forward(self, x, graph, position):
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(1)
        query, key = (F.rms_norm(x, x.shape[-1:]) for x in (query, key))
        src, dst = {"key": key, "value": value, "position": position}, {"query": query, "position": position}
        x = x + self.out(self.attention(graph=graph, src=src, dst=dst, scale=8 * (WIDTH // HEADS) ** -0.5).flatten(1))
        return x + self.down(F.relu(self.up(self.norm(x))).square())


class Model(nn.Module):
    def __init__(self, symbols: int):
        super().__init__()
        self.embed, self.head = nn.Embedding(symbols, WIDTH), nn.Linear(WIDTH, symbols)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, text, boundaries):
        graph = tg.Graph.cu_seqlens(boundaries, causal=True, num_dst=len(text), num_src=len(text))
        position = torch.arange(len(text), dtype=torch.float32, device=text.device)[:, None]
        x = self.embed(text)
        for block in self.blocks:
            x = block(x, graph, position)
        return self.head(F.rms_norm(x, x.shape[-1:]))


def loss_of(model, pieces):
    """Nats a character; pieces (count, length + 1) of a stream in which 0 starts a document."""
    text, target = pieces[:, :-1].flatten(), pieces[:, 1:].flatten()
    starts = (torch.arange(len(text), device=device) % (pieces.shape[1] - 1) == 0) | (text == 0)
    boundaries = F.pad(starts.nonzero().flatten(), (0, 1), value=len(text))
    return F.cross_entropy(model(text, boundaries), target)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    documents = ["\0" + topics[name] for name in sorted(topics)]
    code = {c: i for i, c in enumerate(sorted(set("".join(documents))))}
    numbers = [torch.tensor([code[c] for c in document], device=device) for document in documents]
    taught = torch.cat([document for i, document in enumerate(numbers) if i % 10])
    windows, held_out = taught.unfold(0, PIECE + 1, 1), torch.cat(numbers[::10]).unfold(0, 4 * PIECE + 1, 4 * PIECE)
    counts = torch.bincount(taught[:-1] * len(code) + taught[1:], minlength=len(code) ** 2).view(len(code), -1) + 0.1
    bigram = -(counts / counts.sum(1, keepdim=True)).log()[held_out[:, :-1], held_out[:, 1:]].mean().item()
    model, losses = Model(len(code)).to(device), []
    forward = tg.jit(model) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in (bar := trange(args.steps)):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 20) * (1 - step / args.steps)
        loss = loss_of(forward, windows[torch.randint(len(windows), (BATCH // PIECE,), device=device)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        bar.set_postfix(loss=losses[-1])

    with torch.no_grad():
        reached, text = loss_of(model, held_out).item(), taught[:1]
        for _ in range(200):
            scores = model(text[-PIECE:], torch.tensor([0, len(text[-PIECE:])], device=device))[-1]
            text = torch.cat([text, torch.multinomial(F.softmax(scores / 0.7, 0), 1)])
    print("".join(list(code)[i] for i in text[1:]))
    plt.plot(losses)
    plt.hlines([bigram, reached], 0, args.steps, colors=["gray", "black"])
    plt.gca().set(xlabel="step", ylabel="nats a character", title=f"held out {reached:.2f}, bigram {bigram:.2f}")
    plt.savefig("train_char_lm.png")
    print(f"held out: {reached:.3f} nats a character; bigram table {bigram:.3f}")
    assert reached < (bigram - 0.7 if args.steps >= STEPS else math.log(len(code)))


if __name__ == "__main__":
    main()
