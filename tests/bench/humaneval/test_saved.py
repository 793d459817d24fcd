import pytest

from sigma0.bench.core.conditions import Conditions
from sigma0.bench.humaneval.sampling import Run, Sample, SampleFile, SampleSettings
from tests.bench.core.test_ledger import CONDITIONS
from tests.bench.humaneval.examples import DOUBLE, PROBLEMS


def run_of(samples=1, conditions=None, **settings):
    settings = SampleSettings(**({"exit_config": None, "dtype": "float32"} | settings))
    return Run(conditions=Conditions(**(CONDITIONS | (conditions or {}))), settings=settings, samples=samples)


def sample_of(problem, number=0, **changes):
    values = {"completion": f"    return {number}\n", "finished": True, "new_tokens": 4, "seconds": 0.5}
    return Sample(task_id=problem.task_id, problem_sha256=problem.digest, number=number, **(values | changes))


def filled(path, run, problems=PROBLEMS):
    saved = SampleFile(path)
    saved.begin(run)
    for problem in problems:
        for number in range(run.samples):
            saved.add(run, sample_of(problem, number))
    return saved


def test_samples_come_back_as_they_were_written(tmp_path):
    path, run = tmp_path / "new" / "samples.jsonl", run_of(samples=2)
    written = filled(path, run).all_of(run, PROBLEMS)
    read = SampleFile(path)
    assert read.latest == [run] and read.all_of(run, PROBLEMS) == written
    content = path.read_bytes()
    read.begin(run)
    assert path.read_bytes() == content, "a run that is known is not written again"
    path.write_bytes(content + content[:50])
    assert SampleFile(path).all_of(run, PROBLEMS) == written and path.read_bytes() == content


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
    saved = SampleFile(tmp_path / "samples.jsonl")
    saved.begin(more)
    missing = [(p, n) for p in PROBLEMS for n in range(2) if saved.find(more, p, n) is None]
    assert [(problem.task_id, number) for problem, number in missing] == [("Test/0", 1), ("Test/1", 0), ("Test/1", 1)]
    with pytest.raises(ValueError, match="1 of 4 samples of pocket are there"):
        saved.all_of(more, PROBLEMS)
    for problem, number in missing:
        saved.add(more, sample_of(problem, number))
    read = SampleFile(tmp_path / "samples.jsonl")
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
            SampleFile(path)
