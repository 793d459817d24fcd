import json

import pytest
import torch

import sigma0
from sigma0.bench.core.conditions import Conditions
from sigma0.bench.humaneval import sampling
from sigma0.bench.humaneval.problems import Problem
from tests.bench.core.test_ledger import CONDITIONS
from tests.reference import tiny_llama

DOUBLE = Problem(
    task_id="Test/0",
    prompt='def double(x: int) -> int:\n    """Twice x.\n    >>> double(2)\n    4\n    """\n',
    entry_point="double",
    canonical_solution="    return 2 * x\n",
    test="def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-3) == -6\n",
)
VOWELS = Problem(
    task_id="Test/1",
    prompt='from typing import List\n\n\ndef vowels(text: str) -> List[str]:\n    """The vowels of a text."""\n',
    entry_point="vowels",
    canonical_solution='    return [each for each in text if each in "aeiou"]\n',
    test=(
        'METADATA = {}\n\n\ndef check(candidate):\n    assert candidate("sigma") == ["i", "a"]\n'
        '    assert candidate("") == []\n'
    ),
)
PROBLEMS = [DOUBLE, VOWELS]


def write_problems(path, problems=PROBLEMS):
    rows = [item if isinstance(item, dict) else item.model_dump() for item in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


STORY = DOUBLE.model_copy(update={"prompt": "Mary is in the kitchen. Where is Mary?"})


def settings(model=None, **changes):
    exits = None if model is None else model.resolve_exit_config(changes.pop("exit_config", None)).to_dict()
    return sampling.SampleSettings(**({"exit_config": exits, "dtype": "float32", "max_new_tokens": 12} | changes))


@pytest.fixture(scope="module")
def plain(pocket):
    """A small random model without loops, that reads what `pocket` reads."""
    return tiny_llama(seed=0, vocab_size=len(pocket[1]), max_position_embeddings=64)


def test_each_sample_has_a_seed_of_its_own():
    seeds = {sampling.sample_seed(seed, problem, n) for seed in (0, 1) for problem in PROBLEMS for n in range(50)}
    assert len(seeds) == 200 and all(0 <= seed < 2**32 for seed in seeds)


def test_a_looped_model_continues_the_prompt_as_it_is(pocket):
    result = sampling.write_sample(*pocket, STORY, 0, settings(pocket[0]))
    written = sigma0.generate(*pocket, STORY.prompt, max_new_tokens=12, do_sample=False)
    assert result.completion == written.text and result.new_tokens == len(written.tokens)
    assert result.depths == sum(token.depth for token in written.tokens[1:])
    assert (result.passes, result.rows) == (written.loop_passes, written.loop_rows)
    assert result.finished == (written.stop_reason != "length")


def test_white_space_at_the_end_of_a_prompt_is_left_to_the_model_where_it_is_asked(pocket):
    spaced = STORY.model_copy(update={"prompt": f"{STORY.prompt}\n  \n"})
    plain, stripped = (
        sampling.write_sample(*pocket, spaced, 0, settings(pocket[0], strip_prompt=strip)) for strip in (0, 1)
    )
    bare = sampling.write_sample(*pocket, STORY, 0, settings(pocket[0]))
    assert stripped.completion == bare.completion != plain.completion


def test_stop_strings_end_a_text_and_are_cut_off(pocket):
    whole = sampling.write_sample(*pocket, STORY, 0, settings(pocket[0], stop=()))
    place = whole.completion.index(" ", 3)
    result = sampling.write_sample(*pocket, STORY, 0, settings(pocket[0], stop=(whole.completion[place : place + 3],)))
    assert result.completion == whole.completion[:place] and result.finished
    assert result.new_tokens < whole.new_tokens


@pytest.mark.parametrize("kind", ["looped", "plain"])
def test_samples_differ_by_number_and_come_back_by_it(kind, pocket, plain):
    model, tokenizer = (pocket[0] if kind == "looped" else plain), pocket[1]
    drawn = settings(model if kind == "looped" else None, temperature=1.5)
    state = torch.random.get_rng_state()
    first = [sampling.write_sample(model, tokenizer, STORY, number, drawn).completion for number in range(4)]
    again = [sampling.write_sample(model, tokenizer, STORY, number, drawn).completion for number in (3, 2, 1, 0)]
    assert first == again[::-1] and len(set(first)) > 1
    assert torch.equal(state, torch.random.get_rng_state()), "the caller's own generator moved"


def test_a_model_without_loops_tells_no_depths(pocket, plain):
    result = sampling.write_sample(plain, pocket[1], STORY, 0, settings())
    assert (result.depths, result.passes, result.rows) == (None, None, None)
    ids = pocket[1](STORY.prompt, return_tensors="pt")["input_ids"]
    new = plain.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert result.completion == sampling.truncate_at_stop(
        pocket[1].decode(new, skip_special_tokens=True), sampling.STOPS
    )
    assert result.new_tokens <= 12


def test_a_prompt_that_does_not_fit_is_named(pocket, plain):
    with pytest.raises(ValueError, match=r"Test/0: a prompt of .* exceed the model's context of 64"):
        sampling.write_sample(plain, pocket[1], DOUBLE, 0, settings(max_new_tokens=60))


def test_a_sample_knows_all_of_its_loops_or_none():
    values = {"task_id": "a", "problem_sha256": "b", "number": 0, "completion": "", "finished": True, "new_tokens": 2}
    assert sampling.Sample(**values, seconds=1.0, depths=3, passes=3, rows=4).passes == 3
    with pytest.raises(ValueError, match="all known or all unknown"):
        sampling.Sample(**values, seconds=1.0, depths=3)


def run_of(samples=1, conditions=None, **settings):
    settings = sampling.SampleSettings(**({"exit_config": None, "dtype": "float32"} | settings))
    return sampling.Run(conditions=Conditions(**(CONDITIONS | (conditions or {}))), settings=settings, samples=samples)


def sample_of(problem, number=0, **changes):
    values = {"completion": f"    return {number}\n", "finished": True, "new_tokens": 4, "seconds": 0.5}
    return sampling.Sample(task_id=problem.task_id, problem_sha256=problem.digest, number=number, **(values | changes))


def filled(path, run, problems=PROBLEMS):
    saved = sampling.SampleFile(path)
    saved.begin(run)
    for problem in problems:
        for number in range(run.samples):
            saved.add(run, sample_of(problem, number))
    return saved


def test_samples_come_back_as_they_were_written(tmp_path):
    path, run = tmp_path / "new" / "samples.jsonl", run_of(samples=2)
    written = filled(path, run).all_of(run, PROBLEMS)
    read = sampling.SampleFile(path)
    assert read.latest == [run] and read.all_of(run, PROBLEMS) == written
    content = path.read_bytes()
    read.begin(run)
    assert path.read_bytes() == content, "a run that is known is not written again"
    path.write_bytes(content + content[:50])
    assert sampling.SampleFile(path).all_of(run, PROBLEMS) == written and path.read_bytes() == content


def test_samples_of_another_model_or_setting_are_not_taken():
    saved = filled(None, run_of())
    assert saved.find(run_of(), DOUBLE, 0) is not None
    assert saved.find(run_of(), DOUBLE.model_copy(update={"test": "def check(f): ..."}), 0) is None
    for name in ("model_sha256", "settings_sha256"):
        assert saved.find(run_of(conditions={name: "9" * 64}), DOUBLE, 0) is None
    changes = {"temperature": 0.5, "seed": 1, "dtype": "bfloat16", "max_new_tokens": 7, "stop": ("x",)}
    for name, value in {**changes, "strip_prompt": True, "exit_config": {"mode": "full"}}.items():
        assert saved.find(run_of(**{name: value}), DOUBLE, 0) is None, name


def test_more_problems_and_more_samples_go_on_from_what_is_there(tmp_path):
    first = run_of(conditions={"commit": "a" * 40, "n": 1})
    filled(tmp_path / "samples.jsonl", first, [DOUBLE])
    more = run_of(samples=2, conditions={"commit": "b" * 40, "n": 2})
    saved = sampling.SampleFile(tmp_path / "samples.jsonl")
    saved.begin(more)
    missing = [(p, n) for p in PROBLEMS for n in range(2) if saved.find(more, p, n) is None]
    assert [(problem.task_id, number) for problem, number in missing] == [("Test/0", 1), ("Test/1", 0), ("Test/1", 1)]
    with pytest.raises(ValueError, match="1 of 4 samples of pocket are there"):
        saved.all_of(more, PROBLEMS)
    for problem, number in missing:
        saved.add(more, sample_of(problem, number))
    read = sampling.SampleFile(tmp_path / "samples.jsonl")
    assert read.latest == [more] and len(read.all_of(more, PROBLEMS)) == 2
    assert read.commits(more, PROBLEMS) == ("a" * 40, "b" * 40)


def test_lines_that_are_none_of_these_are_named(tmp_path):
    path, run = tmp_path / "samples.jsonl", run_of()
    filled(path, run)
    head, *rest = path.read_text().splitlines(keepends=True)
    for bad, message in (
        ("{}\n", "line 4 .*kind"),
        ("no JSON\n", "line 4 .*JSON"),
        (rest[0].replace('"number":0', '"number":-1'), "line 4 .*number"),
        (rest[0].replace('"number":0', '"colour":0'), "line 4 .*colour"),
        (rest[0].replace(run.id, "0" * 16), "line 4 .*'0000000000000000' stands nowhere"),
        (head.replace('"samples":1', '"samples":0'), "line 4 .*samples"),
    ):
        path.write_text("".join([head, *rest, bad]))
        with pytest.raises(ValueError, match=message):
            sampling.SampleFile(path)
