"""The compiling runner: what it writes is what the eager runner writes, in the same passes."""

import warnings

import pytest
import torch

from sigma0 import ExitConfig
from sigma0.decode import compiled as programs
from sigma0.kernels import row_dot
from sigma0.models.ouro import OuroForCausalLM
from tests.decode.test_conformance import written
from tests.marks import exhaustive, needs_compiler, slow
from tests.reference import tiny_model

# a first program, which any of them may compile
pytestmark = [needs_compiler, pytest.mark.cpu(8)]
MODES = {
    "full": ExitConfig(mode="full"),
    "qexit": ExitConfig(q=0.6),
    "margin": ExitConfig(mode="margin", theta=0.3),
    "accel": ExitConfig(mode="accel", eps=0.6, patience=1),
    "drop": ExitConfig(q=0.6, after_exit="drop"),
    "verify": ExitConfig(q=0.5, after_exit="verify"),
    "verify-margin": ExitConfig(mode="margin", theta=0.3, after_exit="verify"),
}


@pytest.fixture(autouse=True)
def unknown_layers(monkeypatch):
    """No function in C++ knows the layers, as those of other families or under adapters."""
    monkeypatch.setattr(OuroForCausalLM, "plain_block", lambda *given: None)


@pytest.fixture
def model():
    return tiny_model(seed=3, num_hidden_layers=1)


def test_what_one_call_runs_is_not_compiled(model, monkeypatch):
    monkeypatch.undo()
    ran = run(model, "compile", 1, MODES["full"]).runner
    assert ran.name == "eager" and "in C++ as they are" in ran.reason


@pytest.fixture
def traced(monkeypatch):
    """Programs are traced as one graph, and the graph is run as it is: no code is generated, which takes seconds."""
    monkeypatch.setattr(programs, "generate_code", lambda graph, examples: graph)


def run(model, runner, batch, config, new=9, **settings):
    """After ragged prompts."""
    ids = torch.randint(1, 61, (batch, 9), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [part[row * 3 % 7 :] for row, part in enumerate(ids)]
    return written(model, rows, config, new, runner=runner, **settings)


def assert_same(compiled, eager):
    assert compiled.runner.name == "compile"
    assert eager.runner.name == "eager"
    assert torch.equal(compiled.sequences, eager.sequences)
    assert torch.equal(compiled.exit_depths, eager.exit_depths)
    assert compiled.exit_reasons == eager.exit_reasons
    for counted in ("loop_passes", "loop_rows", "head_rows", "prompt_rows", "tail_passes"):
        assert getattr(compiled, counted) == getattr(eager, counted), counted


def both(model, batch, mode, **settings):
    return [run(model, runner, batch, MODES[mode], **settings) for runner in ("compile", "eager")]


# Four sequences are one row in some passes and some rows in others: every program of a mode. One sequence and many have
# other shapes, whose graphs test_conformance.py traces in every mode; code is generated where the head is read in
# every pass and where it is not.
@pytest.mark.cpu(60)
@pytest.mark.parametrize(
    ("mode", "batch"),
    [
        ("margin", 1),
        *((slow if mode == "verify-margin" else exhaustive)(mode, 4) for mode in MODES),
        *(exhaustive(mode, 1) for mode in ("qexit", "verify-margin")),
        exhaustive("verify", 16),
    ],
)
def test_generated_code_writes_what_the_eager_step_writes(model, mode, batch):
    assert_same(*both(model, batch, mode))


def test_processors_of_the_caller_run_between_two_programs(model, traced):
    def no_small_ids(ids, scores):
        return scores.index_fill(1, torch.arange(20), -torch.inf)

    assert_same(*both(model, 2, "verify", logits_processor=[no_small_ids]))


def test_another_run_takes_the_programs_of_the_first_over_planes_of_another_size(model, traced):
    run(model, "compile", 2, MODES["qexit"])
    known = dict(model._compiled_programs.programs)
    assert known
    compiled, eager = both(model, 2, "qexit", new=5)
    assert_same(compiled, eager)
    assert model._compiled_programs.programs == known


def test_a_model_with_new_weights_is_compiled_anew(model, traced):
    run(model, "compile", 1, MODES["full"])
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))
    assert_same(*both(model, 1, "full"))


@pytest.mark.slow
@pytest.mark.parametrize("generated", [False, slow(True)])
def test_programs_read_weights_in_cpp_and_see_new_ones(request, generated, monkeypatch):
    # fused code rounds to bf16 elsewhere, and so decides near ties otherwise
    dtype = torch.float32 if generated else torch.bfloat16
    if not generated:
        request.getfixturevalue("traced")
    monkeypatch.setitem(row_dot.LEAST, dtype, 1)
    called, result = [], row_dot._product()
    monkeypatch.setattr(row_dot, "_product", lambda: lambda *memory: (called.append(memory), result(*memory)))
    model, other = (tiny_model(seed, num_hidden_layers=1).to(dtype) for seed in (3, 4))
    compiled, eager = both(model, 2, "margin")
    assert called
    assert_same(compiled, eager)
    with torch.no_grad():
        for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
            parameter.copy_(new)
    changed = run(model, "compile", 2, MODES["margin"])
    assert_same(changed, run(other, "eager", 2, MODES["margin"]))
    assert not torch.equal(changed.sequences, compiled.sequences)


def test_a_step_that_cannot_be_compiled_runs_eagerly_and_says_why(model, monkeypatch):
    def fails(graph, examples):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(programs, "generate_code", fails)
    with warnings.catch_warnings(record=True) as output:
        warnings.simplefilter("always")
        compiled = run(model, "compile", 2, MODES["qexit"])
    assert any("no such instruction" in str(warning.message) for warning in output)
    assert compiled.runner.name == "eager"
    assert "no such instruction" in compiled.runner.reason
    assert torch.equal(compiled.sequences, run(model, "eager", 2, MODES["qexit"]).sequences)


def test_a_direct_call_finds_its_inputs_anew_and_refuses_numbers_that_may_be_others():
    columns, weight, output = torch.arange(24).view(3, 8), torch.ones(4), []
    state = [torch.zeros(2, 4), columns[1][:2], columns[2][:2], torch.zeros(5, 97, 1, 4)]  # offsets 0, 8, 16, 0
    inputs = [state[0], 2, weight, 97, 8, state[1], 16, state[2], state[3]]
    direct = programs.Direct.of(lambda *given: output.append(given), inputs, state)
    other = torch.zeros(64)
    later = [torch.ones(3, 4), other[20:23], other[40:43], torch.zeros(5, 120, 1, 4)]
    direct(later)
    expected = [later[0], 3, weight, 120, 20, later[1], 40, later[2], later[3]]
    assert all(a is b or a == b for a, b in zip(output[0], expected, strict=True))
    # R may be an offset or the positions, and a number may be neither
    assert programs.Direct.of(print, [8], [torch.zeros(8, 4), columns[1][:2], state[3]]) is None
    assert programs.Direct.of(print, [97], [torch.zeros(97, 4), state[3]]) is None
    assert programs.Direct.of(print, [7], state) is None
