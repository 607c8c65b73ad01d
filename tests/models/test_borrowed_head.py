"""Heads that borrow the target's lm_head for some of its ids: its rows are copied, and nothing else is different."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch

from tandem.config import EngineConfig
from tandem.engine.build import Drafting, assemble
from tandem.errors import LoadError
from tandem.kernels import native
from tandem.llm import LLM
from tandem.models.head import Head, lm_head_rows
from tandem.models.head_formats import open_head
from tandem.models.load import load_head, load_model, model_of
from tandem.models.weights import Weights as Reader
from tandem.outputs import Completion
from tandem.sampling import SamplingParams
from tandem.text import Tokenizer
from tandem.training.export import write_tandem
from tandem.training.target import Identity
from tests.exact.oracle import Weights, tiny_config
from tests.head_toys import HeadWeights, follows_hidden
from tests.test_pairs import save
from tests.toys import byte_hf, writes
from tests.training.toys_serving import head_weights, load_target, made_for, target_in_memory, write_head

CPU = torch.device("cpu")
KNOWN = 40
IDENTITY = Identity(64, 300, 2, "5eed", "70c", "7e0")
DTYPES = [torch.float64, torch.float32, *([torch.bfloat16] if native.paths() else [])]


def borrowing(model, outputs: int = KNOWN, width: str = "bf16", kind: str = "mtp") -> Head:
    """A random head of a loaded target, from memory."""
    taps = (0, 1, 2) if kind == "eagle3" else ()
    made = made_for(model.config, IDENTITY, kind, outputs, taps)
    file = HeadWeights(made.head.layer, head_weights(made.head), made.head, made.ids)
    return Head(file, model, Reader(file, model.dtype, model.device, width), None)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["mtp", "eagle", "eagle3"])
def test_logits_are_those_of_the_target_at_its_ids(kind, dtype, tied):
    """Over the torch twin, and in bfloat16 over native kernels. States are twice as wide where what is fed back is not
    what the lm_head reads."""
    model = model_of(target_in_memory(tiny_config(tied=tied)), dtype, CPU)
    assert model.native == (dtype == torch.bfloat16)
    head = borrowing(model, kind=kind)
    states = torch.randn(21, 128 if kind == "eagle3" else 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    found, wanted = head.logits(states), model.logits(states[:, -64:])[:, head.ids]
    assert found.dtype == wanted.dtype and found.shape == (21, KNOWN)
    assert torch.equal(found, wanted)
    assert head.ids.tolist() == [2 * i + 1 for i in range(KNOWN)]
    assert not torch.equal(found, model.logits(states[:, -64:])[:, :KNOWN])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_whole_vocabulary_needs_no_map_and_no_copy(dtype):
    model = model_of(target_in_memory(tiny_config()), dtype, CPU)
    head = borrowing(model, 300)
    states = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert head.ids is None and head.outputs == 300
    assert torch.equal(head.logits(states), model.logits(states))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_the_lm_head_are_its_weights(dtype):
    """Also where a target is wider than the units that are multiplied at once, and for ids in any order."""
    weights = target_in_memory(tiny_config(hidden=160, head_dim=40))
    ids = torch.tensor([299, 0, 7, 7, 130])
    rows = lm_head_rows(model_of(weights, dtype, CPU), ids)
    assert rows.dtype == dtype
    assert torch.equal(rows.double(), weights.tensors["lm_head.weight"][ids])


@pytest.mark.parametrize("width", ["int8", "int4"])
def test_a_narrow_copy_is_near(width):
    """As wide as a draft's lm_head is elsewhere: eight bits, also where the rest has four."""
    model = target_in_memory(tiny_config()).decoder(torch.float32)
    head, states = borrowing(model, width=width), torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    found, wanted = head.logits(states), model.logits(states)[:, head.ids]
    assert not torch.equal(found, wanted)
    assert (found - wanted).norm() / wanted.norm() < 0.01


def test_a_quantised_target_lends_what_it_multiplies_with(tmp_path):
    """No float rows are in such a file."""
    save(tmp_path / "t", 0, hidden_size=64)
    target = load_model(tmp_path / "t", torch.float32, CPU, "int8")
    head, states = borrowing(target), torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(head.logits(states), target.logits(states)[:, head.ids], rtol=1e-5, atol=1e-5)
    honest = load_model(tmp_path / "t", torch.float32, CPU)
    assert not torch.equal(lm_head_rows(honest, head.ids), lm_head_rows(target, head.ids))


def answers(target: Weights, heads: list[Head], tree: str, **how) -> list[Completion]:
    """What an engine says to two prompts, greedy and with noise."""
    settings = dict(dtype="float64", max_length=200, page_size=4, kv_pages=600)
    if heads:
        settings |= dict(tree=tree) | (dict(draft_tokens=4) if tree == "none" else dict(nodes=12))
    drafting = Drafting.head(heads) if heads else Drafting.none()
    model = heads[0]._target if heads else target.decoder()
    with LLM.from_parts(assemble(model, drafting, EngineConfig(**settings), 257), Tokenizer(byte_hf())) as llm:
        params = [SamplingParams(max_tokens=40, temperature=t, seed=5, ignore_eos=True) for t in (0.0, 0.9)]
        return llm.generate(how.get("prompts", [[1, 2, 3], [77, 5]]), params)


@pytest.mark.parametrize("tree", ["none", "dynamic"])
@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_output_is_that_of_plain_decoding(kind, tree):
    weights = target_in_memory(tiny_config())
    plain = answers(weights, [], tree)
    drafted = answers(weights, [borrowing(weights.decoder(), 90, kind=kind)], tree)
    assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
    assert all(done.speculation.drafted > 20 for done in drafted)


@pytest.mark.parametrize("tree", ["none", "dynamic"])
def test_a_head_that_knows_what_follows_is_always_right(tree):
    """It is if guesses are taken for the target's ids, and if the rows that it copied are those of these ids."""
    order = list(b"the quick fx")
    order = [t for i, t in enumerate(order) if t not in order[:i]]
    target = writes(order)
    knowing = follows_hidden(target, order)
    ids = torch.tensor(sorted({*order, *range(0, 250, 25)}))
    head = replace(knowing.head, mapped=True, layer=replace(knowing.head.layer, vocab=len(ids)))
    file = HeadWeights(head.layer, knowing.tensors, head, ids)
    plain = answers(target, [], tree, prompts=[order[:2], order[3:4]])
    drafted = answers(target, [file.joined(target.decoder())], tree, prompts=[order[:2], order[3:4]])
    assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
    greedy = drafted[0].speculation
    assert greedy.emitted / greedy.steps > 4


def test_only_tandem_s_own_format_borrows_for_some_ids(tmp_path):
    """Elsewhere a map without an lm_head is a broken file."""
    made = made_for(tiny_config(), IDENTITY, "mtp", KNOWN)
    write_tandem(tmp_path, made, head_weights(made.head))
    assert open_head(tmp_path, tiny_config()).head.mapped
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    content["tandem_head"]["own_head"] = True
    file.write_text(json.dumps(content))
    with pytest.raises(LoadError, match=r"lm_head.weight \(40, 64\) is missing"):
        open_head(tmp_path, tiny_config())


def test_a_map_to_ids_that_the_target_lacks_is_refused(tmp_path):
    made = made_for(tiny_config(), IDENTITY, "mtp", KNOWN)
    made = replace(made, ids=made.ids + 230)
    write_tandem(tmp_path, made, head_weights(made.head))
    with pytest.raises(LoadError, match=r"d2t\[35\] means id 301: allowed is 0 to 299"):
        open_head(tmp_path, tiny_config())


def test_another_chat_template_is_a_warning_and_another_tokenizer_an_error(tmp_path, caplog):
    """A head has learnt to follow its own template; it stays exact with any other."""
    target = load_target(save(tmp_path / "t", 0))
    folder = write_head(tmp_path / "head", target, "mtp", KNOWN)
    caplog.set_level(logging.WARNING, "tandem")
    load_head(folder, target.model, "bf16", None, target.tokenizer.digests)
    load_head(folder, target.model, "bf16", None, None)
    assert not caplog.records
    (head,) = load_head(folder, target.model, "bf16", None, {**target.tokenizer.digests, "template": "other"})
    assert head.outputs == KNOWN
    assert "another chat template" in caplog.text and str(folder) in caplog.text
    with pytest.raises(LoadError, match=r"tandem_head.target.tokenizer"):
        load_head(folder, target.model, "bf16", None, {**target.tokenizer.digests, "tokenizer": "other"})


def test_digests_are_of_vocabulary_and_template():
    plain, other, named = byte_hf(), byte_hf(), byte_hf()
    other.chat_template = "{{ messages }}"
    named.add_tokens(["<more>"])
    first, second, third = (Tokenizer(each).digests for each in (plain, other, named))
    assert first["tokenizer"] == second["tokenizer"] != third["tokenizer"]
    assert first["template"] == third["template"] != second["template"]
    plain.chat_template = None
    assert Tokenizer(plain).digests["tokenizer"] == first["tokenizer"]
