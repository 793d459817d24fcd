"""K/V in few bits: every decoder reads what a run of all loops over the same codec reads."""

import copy
from dataclasses import replace
from itertools import product

import pytest
import torch

import sigma0
from sigma0 import DepthCache, ExitConfig
from sigma0.config import KVConfig
from tests.decode.captures import called_by
from tests.marks import fast_if

NEW = 40
WAYS = ("eager", "torch", "python")
CODECS = (
    KVConfig(codec="residual", segment=16),
    KVConfig(codec="int4", group=32, segment=32),
    KVConfig(codec="residual", bits=(1, 2, 4, 8, 2, 4), group=8, segment=16),
)
CONFIGS = (
    ExitConfig(mode="full"),
    ExitConfig(mode="fixed", depth=3),
    ExitConfig(mode="margin", theta=0.5),
    ExitConfig(mode="qexit", q=0.4),
    ExitConfig(mode="margin", theta=0.2, after_exit="verify"),
    ExitConfig(mode="margin", theta=0.2, after_exit="verify", redraft=False),
    ExitConfig(mode="margin", theta=0.3, after_exit="drop"),
)


@pytest.fixture(scope="module")
def loaded():
    result = sigma0.load("pocket", dtype="float32")
    result[0].generation_config.eos_token_id = None
    return result


@pytest.fixture
def model(loaded, monkeypatch):
    monkeypatch.setattr(loaded[0].generation_config, "kv_config", CODECS[0], raising=False)
    return loaded[0]


@pytest.fixture(scope="module")
def ids(loaded):
    story = "Mary went to the park. Leo took the book. The book is in the box. Tom went to the office. Where is Mary?"
    return torch.tensor([loaded[1](story)["input_ids"]])


def written(model, ids, config, new=NEW, **asked):
    return model.generate(
        ids, max_new_tokens=new, do_sample=False, exit_config=config, return_dict_in_generate=True, **asked
    )


def cell(way, number, codec):
    fast = codec == number % 3 and (way == "eager" or number in (2, 6))
    return fast_if(fast, way, CONFIGS[number], CODECS[codec], id=f"{way}-{number}-{codec}")


@pytest.mark.parametrize(("way", "config", "kv"), [cell(*item) for item in product(WAYS, range(7), range(3))])
def test_every_way_reads_what_a_run_of_all_loops_over_the_same_codec_reads(model, ids, way, config, kv):
    model.generation_config.kv_config = kv
    # segments begin at cache positions, and pads move them: the second row has nine ids after pads
    short = torch.cat([torch.zeros(1, ids.shape[1] - 9, dtype=torch.int64), ids[:, :9]], dim=1)
    rows = torch.cat([ids, short])
    mask = (rows != 0).long()
    with called_by(way, model) as (asked, _):
        out = written(model, rows, config, attention_mask=mask, **asked)
    seen = torch.cat([mask, torch.ones(2, NEW - 1, dtype=torch.int64)], dim=1)
    for row in range(2):
        mine, output = out.sequences[row : row + 1], seen[row : row + 1]
        if config.after_exit == "drop":
            alone = written(model, rows[row : row + 1], config, attention_mask=mask[row : row + 1])
            assert mine.equal(alone.sequences) and out.exit_depths[row].equal(alone.exit_depths[0])
            continue
        # nothing of this is decoded: whole segments run through all loops at once
        rule = CONFIGS[0] if config.after_exit == "verify" else config
        read = model(mine[:, :-1], attention_mask=output, exit_config=rule, logits_to_keep=NEW)
        assert mine[0, -NEW:].equal(read.logits[0].argmax(-1))
        assert config.after_exit == "verify" or out.exit_depths[row].equal(read.exit_depths[0])
    if config.after_exit == "verify" and out.runner is not None:
        assert out.loop_passes < 6 * (NEW - 1)


@pytest.fixture(scope="module")
def raven():
    result = sigma0.load("pocket-raven", dtype="float32", recurrence=6)
    result[0].generation_config.eos_token_id = None
    return result


RAVEN_CONFIGS = (CONFIGS[4], *CONFIGS[:3], ExitConfig(mode="converge", eps=0.5), CONFIGS[6])


@pytest.mark.grid(fast=1, slow=5)
@pytest.mark.parametrize(("kv", "length", "config"), product(CODECS[:2], (32, 29), RAVEN_CONFIGS))
def test_a_prelude_and_a_coda_are_read_in_few_bits_too(raven, ids, monkeypatch, length, config, kv):
    """Whose last token of a prompt is read at its exit after the others: also where it ends a segment."""
    model = raven[0]
    monkeypatch.setattr(model.generation_config, "kv_config", kv, raising=False)
    rows = torch.zeros(2, length, dtype=torch.int64)
    rows[0], rows[1, -9:] = ids.repeat(1, 2)[0, :length], ids[0, :9]
    mask = (rows != 0).long()
    outs = []
    for way in WAYS:
        with called_by(way, model) as (asked, _):
            outs.append(written(model, rows, config, 20, attention_mask=mask, **asked))
    first, *others = outs
    for out in others:
        assert out.sequences.equal(first.sequences) and out.exit_depths.equal(first.exit_depths)
    if config.mode in ("full", "fixed") or config.after_exit == "verify":
        rule = config if config.mode == "fixed" else CONFIGS[0]
        seen = torch.cat([mask, torch.ones(2, 19, dtype=torch.int64)], dim=1)
        for row, mine in enumerate(first.sequences[:, None]):
            read = model(mine[:, :-1], attention_mask=seen[row : row + 1], exit_config=rule, logits_to_keep=20)
            assert mine[0, -20:].equal(read.logits[0].argmax(-1))
    else:
        assert first.exit_depths.float().mean() < 5
        with pytest.raises(ValueError, match="stored before a rule has read them"):
            model(first.sequences[:1, :-1], exit_config=config, logits_to_keep=20)
    with pytest.raises(ValueError, match="over K/V as computed alone: leave output_loop_states out"):
        model(rows[:1], exit_config=CONFIGS[0], output_loop_states=True, past_key_values=model.new_cache())
    with pytest.raises(ValueError, match="over K/V as computed alone: load the model with kv='full'"):
        model.readable(rows)
    if length == 32 and config.mode == "full":
        cache = model.new_cache()
        one = written(model, rows[:1], config, 20, past_key_values=cache)
        turn = torch.cat([one.sequences, rows[:1, :11]], dim=1)
        then = written(model, turn, CONFIGS[4], 9, past_key_values=cache)
        assert then.sequences.tolist() == written(model, turn, config, 9).sequences.tolist()


def test_the_codec_is_at_work(model, ids):
    coded = model(ids, exit_config=CONFIGS[0]).logits
    model.generation_config.kv_config = KVConfig()
    assert not torch.equal(coded, model(ids, exit_config=CONFIGS[0]).logits)


@pytest.mark.parametrize("after", ["finish", "drop", "verify"])
def test_a_second_turn_goes_on_where_the_first_ended(model, ids, after):
    config = ExitConfig(mode="margin", theta=0.4, after_exit=after)
    cache = model.new_cache()
    first = written(model, ids, config, past_key_values=cache)
    turn = torch.cat([first.sequences, ids[:, :11]], dim=1)
    second = written(model, turn, config, past_key_values=cache)
    if after != "drop":  # there the first turn's tokens have left no K/V of deeper loops
        assert second.sequences.tolist() == written(model, turn, config).sequences.tolist()
    assert cache.length == second.sequences.shape[1] - 1


def test_bytes_are_those_of_the_tensors(model, ids):
    out = written(model, ids, CONFIGS[2])
    cache, kv = out.past_key_values, CODECS[0]
    (layer,) = cache.planes
    coded = sum(tensor.nbytes for part in layer.coded for tensor in (part.codes, part.scales))
    tails = sum(part[:, :-1].nbytes for part in (layer.flat_keys, layer.flat_values))
    assert cache.bytes_allocated == coded + tails
    under_way = cache.length % kv.segment
    encoded = cache.length - under_way
    assert cache.segments.coded.tolist() == [encoded]
    assert cache.bytes_in_use == coded // layer.room * encoded + tails // kv.segment * under_way
    # 2 bits, 4 of the last loop, and a scale of 16 for 16 numbers, in place of 32
    assert coded / layer.room * 8 / (2 * 6 * 128) == pytest.approx((5 * 2 + 4) / 6 + 1)


def test_a_cache_grows_and_is_selected(model, ids):
    grown = DepthCache(1, 6, kv=CODECS[0])
    both = torch.cat([ids, ids.roll(5, 1)])
    for start in range(0, ids.shape[1], 7):
        read = model(both[:, start : start + 7], past_key_values=grown, exit_config=CONFIGS[0])
    expected = model(both, exit_config=CONFIGS[0])
    torch.testing.assert_close(read.logits[:, -1], expected.logits[:, -1], rtol=1e-4, atol=1e-4)
    grown.batch_select_indices(torch.tensor([1]))
    one = model(both[1:, :5], past_key_values=grown, exit_config=CONFIGS[0])
    alone = model(torch.cat([both[1:], both[1:, :5]], dim=1), exit_config=CONFIGS[0])
    torch.testing.assert_close(one.logits[:, -1], alone.logits[:, -1], rtol=1e-4, atol=1e-4)


def test_what_is_known_in_few_bits_alone_cannot_be_cut(model, ids):
    cache, ids = model.new_cache(), ids.repeat(1, 2)
    model(ids, past_key_values=cache, exit_config=CONFIGS[0])
    length = ids.shape[1]
    assert length > 32 and length % 16
    with pytest.raises(ValueError, match="K/V in few bits can be cut to 16 tokens, where a segment of 16 begins"):
        cache.crop(-(length - 20))
    cache.crop(-(length - 16))
    again = model(ids[:, 16:], past_key_values=cache, exit_config=CONFIGS[0])
    expected = model(ids, exit_config=CONFIGS[0])
    torch.testing.assert_close(again.logits[:, -1], expected.logits[:, -1], rtol=1e-4, atol=1e-4)


def test_numbers_that_are_none_are_refused(model, ids):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.get_input_embeddings().weight[int(ids[0, 0])] = torch.inf
    with pytest.raises(ValueError, match="infinite or NaN cannot be stored in few bits"):
        broken(ids, exit_config=CONFIGS[0])


def test_what_does_not_fit_is_named(loaded, model, ids):
    with pytest.raises(ValueError, match="kv='bf16' is for models in bfloat16, this one computes in torch"):
        sigma0.load("pocket", dtype="float32", kv="bf16")
    assert not sigma0.load("pocket", dtype="bfloat16", kv="bf16")[0].kv_config.is_coded
    with pytest.raises(ValueError, match="bits for 3 loops, and the model runs 6"):
        sigma0.load("pocket", kv={"codec": "residual", "bits": [2, 2, 4]})
    with pytest.raises(ValueError, match="heads of 32 numbers are no whole number of groups of 24"):
        sigma0.load("pocket", kv={"codec": "int8", "group": 24})
    with pytest.raises(ValueError, match="belongs to the model, not to a call"):
        model.generate(ids, kv_config=CODECS[1], max_new_tokens=2)
    assert loaded[0].generate(ids, max_new_tokens=4, runner="compile", return_dict_in_generate=True).runner == (
        replace(written(model, ids, CONFIGS[0]).runner, reason="K/V in few bits are encoded between steps")
    )
    with pytest.raises(ValueError, match="of several segments of 16: call the model with its head"):
        model.model(ids, past_key_values=model.new_cache())


def test_a_checkpoint_keeps_its_codec(model, tmp_path):
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.kv_config == CODECS[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int3", "codec"),
        ('{"codec": "int4", "bits": [2]}', "bits are of the codec 'residual'"),
        ('{"codec": "residual", "bits": [3, 4]}', "must be 1, 2, 4 or 8 for each loop"),
        ('{"codec": "residual", "group": 12}', "must be a multiple of 8"),
        ('{"codec": "residual", "segment": 20}', "must be a multiple of 16"),
        ('{"codec": ', "kv is no JSON"),
        ('{"bit": 1}', "bit"),
    ],
)
def test_bad_settings_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        KVConfig.parse(text)
