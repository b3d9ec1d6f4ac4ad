"""Hugging Face models with attn_implementation="tiga" beside the same models with "sdpa" and "eager": tiny, random."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers import masking_utils as masks

import tiga as tg
from tiga.integrations import bands
from tiga.integrations import transformers as integration

integration.register()

SIZES = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    initializer_range=0.5,  # so that attention is far from uniform
)
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, num_key_value_heads=2)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4)),
    "bert": (BertForMaskedLM, BertConfig(**SIZES)),
}
IDS = torch.arange(33).reshape(3, 11) * 7 % 47 + 3
PADDING = torch.ones(3, 11, dtype=torch.long)
PADDING[0, :4], PADDING[1, 9:] = 0, 0
GAPS = PADDING.clone()
GAPS[2, 5] = 0
PACKED = torch.cat([torch.arange(5), torch.arange(6)]).expand(3, -1)
CALLS = {
    "whole": {},
    "padded": {"attention_mask": PADDING},
    "padded with gaps": {"attention_mask": GAPS},
    "packed": {"position_ids": PACKED},
}


def models(name, *implementations):
    cls, config = MODELS[name]
    for implementation in implementations:
        torch.manual_seed(0)
        yield cls._from_config(copy.deepcopy(config), attn_implementation=implementation).double().eval()


@pytest.fixture
def seen(monkeypatch):
    """What attention was given as its mask, call by call."""
    found = []

    def attention(*args, **kwargs):
        found.append(args[4])
        return integration.attention(*args, **kwargs)

    from transformers import AttentionInterface

    AttentionInterface.register("tiga", attention)
    yield found
    AttentionInterface.register("tiga", integration.attention)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_sdpa(name, call, seen):
    results = []
    real = CALLS[call].get("attention_mask", torch.ones_like(IDS)).bool()
    given = CALLS[call] if name == "bert" else {"use_cache": False, **CALLS[call]}  # a cache rules out packing
    for model in models(name, "sdpa", "tiga"):
        logits = model(input_ids=IDS, **given).logits[real]
        logits.square().mean().backward()
        results.append([logits.detach(), *[p.grad for p in model.parameters() if p.grad is not None]])
    assert len(seen) == 2 and len(results[0]) == len(results[1]) > 20
    for plain, ours in zip(*results):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)
    kinds = {"whole": {"llama": "triangular", "mistral": "window", "bert": "dense"}[name], "padded": "intervals"}
    if call == "packed":
        kinds["packed"] = "dense" if name == "bert" else "intervals"  # BERT has no packing: positions alone
    if call in kinds:
        assert {given.graph.kind for given in seen} == {kinds[call]}
    else:
        assert {given.dtype for given in seen} == {torch.bool}


T5 = dict(vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
WIDER = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "initializer_range": 0.3}
OTHERS = {  # what they add, and are given
    "Gemma2": (dict(WIDER, attn_logit_softcapping=2.0, query_pre_attn_scalar=8), {}),
    "GptOss": (dict(WIDER, num_local_experts=2, num_experts_per_tok=1), {"attention_mask": PADDING}),
    "T5": (T5, {"attention_mask": PADDING, "decoder_input_ids": IDS[:, :6]}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_caps_sinks_and_position_biases_are_those_of_eager(name, seen):
    config, given = OTHERS[name]
    cls = getattr(transformers, name + ("ForConditionalGeneration" if name == "T5" else "ForCausalLM"))
    logits = []
    for implementation in ("eager", "tiga"):
        torch.manual_seed(0)
        made = getattr(transformers, name + "Config")(**config)
        model = cls._from_config(made, attn_implementation=implementation).eval()
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.data.copy_(torch.arange(4.0))
        logits.append(model(input_ids=IDS, **given).logits)
    real = PADDING.bool() if name == "GptOss" else slice(None)
    torch.testing.assert_close(logits[1][real], logits[0][real], rtol=1e-4, atol=1e-4)
    assert len(seen) == (6 if name == "T5" else 2)


@pytest.mark.parametrize("name, cache", [("llama", "dynamic"), ("llama", "static"), ("mistral", "static")])
def test_generates_with_a_cache(name, cache):
    given = {
        "input_ids": IDS,
        "max_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 0,
        "cache_implementation": cache,
    }
    given["attention_mask"] = torch.ones_like(IDS)
    given["attention_mask"][0, :4] = 0
    made = [model.generate(**given) for model in models(name, "sdpa", "tiga")]
    assert made[0].shape[1] > 12 and torch.equal(*made)


def test_a_decoded_token_reads_the_cache_without_a_mask(seen):
    (model,) = models("llama", "tiga")
    whole = model(input_ids=IDS).logits
    first = model(input_ids=IDS[:, :10], use_cache=True)
    seen.clear()
    last = model(input_ids=IDS[:, 10:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(last, whole[:, 10:])
    assert [given.graph for given in seen] == [tg.Graph.triangular(1, 11, offset=10, device="cpu")] * 2


def test_trains():
    losses = []
    for model in models("llama", "sdpa", "tiga"):
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
        for _ in range(3):
            loss = model(input_ids=IDS, labels=IDS, attention_mask=PADDING).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-6) and losses[2] < losses[0]


def test_compiles():
    module = SimpleNamespace()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(query, key, dropout):
        mask = integration.mask(2, 5, 5, attention_mask=PADDING[:2, 4:9].bool())
        return integration.attention(module, query, key, key, mask, dropout=dropout)[0]

    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    keep = torch.ones(5, 5, dtype=torch.bool).tril() & PADDING[:2, None, None, 4:9].bool()
    torch.testing.assert_close(attend(query, key, 0.0), plain(query, key, key, keep, scale=8**-0.5))
    assert (attend(query, key, 0.5) == 0).any()


QUERIES, KEYS = 6, 9
LEFT = torch.tensor([0, 2])
MASKS = {
    "causal": masks.causal_mask_function,
    "bidirectional": masks.bidirectional_mask_function,
    "sliding": masks.sliding_window_causal_mask_function(3),
    "sliding both": masks.sliding_window_bidirectional_mask_function(2),
    "sliding open": masks.sliding_window_overlay(2),
    "chunked": masks.chunked_causal_mask_function(4, LEFT),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("offsets", [(0, 0), (3, 0), (7, 4)])
@pytest.mark.parametrize("padded", [False, True])
def test_graphs_are_the_masks_that_transformers_makes(name, offsets, padded):
    padding = torch.ones(2, sum(offsets) + KEYS, dtype=torch.bool)
    padding[0, : offsets[1] + 2], padding[1, offsets[1] + 5 :] = False, False
    given = dict(batch_size=2, q_length=QUERIES, kv_length=KEYS, q_offset=offsets[0], kv_offset=offsets[1])
    given |= dict(mask_function=MASKS[name], attention_mask=padding if padded else None)
    wanted = masks.sdpa_mask(**given, allow_is_causal_skip=False)
    found = integration.mask(**given)
    assert isinstance(found, integration.GraphMask) and found.shape == wanted.shape == (2, 1, QUERIES, KEYS)
    assert torch.equal(expanded(found.graph), wanted.expand_as(wanted)[:, 0])
    assert found.graph.kind in ("intervals",) if padded or name == "chunked" else found.graph.num_dst == QUERIES


def expanded(graph):
    """(batch, queries, keys) of a graph of one member or of all; fails where members reach each other."""
    mask = graph.to_mask()
    if graph.num_dst == QUERIES:
        return mask.expand(2, -1, -1)
    blocks = mask.reshape(2, QUERIES, 2, KEYS)
    assert not blocks[0, :, 1].any() and not blocks[1, :, 0].any()
    return torch.stack([blocks[0, :, 0], blocks[1, :, 1]])


def test_own_mask_functions_are_made_into_masks():
    def every_other(batch, head, query, key):
        return (query - key) % 2 == 0

    own = masks.and_masks(masks.causal_mask_function, every_other)
    assert bands.pairs_of(own, bands.Shape(1, 4, 4, 0, 0, torch.device("cpu"))) is None
    found = integration.mask(1, 4, 4, mask_function=own)
    assert found.int()[0, 0].tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]
    # positions that begin anew say nothing of sequences by themselves
    alone = masks.remap_positions_for_packed_sequence(masks.causal_mask_function, PACKED)
    assert isinstance(integration.mask(3, 11, 11, mask_function=alone), torch.Tensor)


def plain(query, key, value, keep=None, bias=None, softcap=None, sink=None, scale=0.5):
    """Attention as models write it, on whole score matrices."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    score = query @ key.mT * scale
    score = score if softcap is None else softcap * (score / softcap).tanh()
    score = score if bias is None else score + bias
    score = score if keep is None else score.masked_fill(~keep, -torch.inf)
    if sink is not None:
        score = torch.cat([score, sink[:, None, None].expand(*score.shape[:3], 1)], -1)
    return (score.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


BIAS, KEEP = torch.randn(1, 4, 5, 7), torch.rand(2, 1, 5, 7) < 0.6
KEEP[..., 0] = True
TRIANGLE = torch.ones(5, 7, dtype=torch.bool).tril(2)
GRAPH = tg.Graph.triangular(5, 7, offset=2)
BOTH = tg.Graph.cat([GRAPH, tg.Graph.dense(5, 7)])
EACH = torch.stack([TRIANGLE, torch.ones_like(TRIANGLE)])[:, None]
EXTRAS = {
    "softcap": (dict(softcap=2.0), dict(softcap=2.0), None),
    "sinks": (dict(s_aux=torch.arange(4.0)), dict(sink=torch.arange(4.0)), GRAPH),
    "boolean mask": ({}, dict(keep=KEEP), KEEP),
    "mask of each head": ({}, dict(keep=KEEP.expand(2, 4, 5, 7)), KEEP.expand(2, 4, 5, 7)),
    "added mask": ({}, dict(bias=BIAS), BIAS),
    "position bias": (dict(position_bias=BIAS), dict(bias=BIAS, keep=TRIANGLE), GRAPH),
    "position bias of a batch": (dict(position_bias=BIAS), dict(bias=BIAS, keep=EACH), BOTH),
    "position bias and mask": (dict(position_bias=BIAS), dict(bias=BIAS, keep=KEEP), KEEP),
}


@pytest.mark.parametrize("name", EXTRAS)
def test_what_models_add_to_attention(name):
    given, meant, mask = EXTRAS[name]
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
    mask = integration.GraphMask(mask, (2, 1, 5, 7)) if isinstance(mask, tg.Graph) else mask
    module = SimpleNamespace(is_causal=False)
    out, weights = integration.attention(module, query, key, value, mask, scaling=0.5, **given)
    assert weights is None
    wanted = plain(query, key, value, **({"keep": TRIANGLE} if name == "sinks" else {}) | meant)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


def test_without_a_mask_modules_say_whether_they_are_causal():
    x = torch.randn(2, 2, 5, 8)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    for given, keep in (({}, causal), ({"sliding_window": 2}, causal.triu(-1)), ({"is_causal": False}, None)):
        out, _ = integration.attention(SimpleNamespace(is_causal=True), x, x, x, None, scaling=0.5, **given)
        torch.testing.assert_close(out, plain(x, x, x, keep))


def test_dropout_drops_weights_whole():
    value = torch.ones(1, 1, 1, 4)
    query = torch.ones(1, 1, 400, 4)
    out, _ = integration.attention(SimpleNamespace(is_causal=False), query, value, value, None, dropout=0.25)
    kept = out[0, :, 0, 0]
    assert torch.equal(out[0, :, 0], kept[:, None].expand(-1, 4))
    assert kept.unique().tolist() == pytest.approx([0, 4 / 3]) and 0.65 < (kept > 0).double().mean() < 0.85


def test_says_that_transformers_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(tg.TigaError, match="transformers 5 is not installed.*pip install transformers"):
        tg.integrations.transformers.register()
