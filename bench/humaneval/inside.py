"""What runs inside a sandbox: a completed function, its check, and a last line that says how that ended.

Its source is handed to an interpreter inside, so it may import nothing but the standard library. Function and check
share a process: a completion that looks for the nonce can forge the last line. One that merely ends the process, or
prints what it likes, cannot.
"""

import json
import os
import sys
from types import CodeType, ModuleType, TracebackType
from typing import Any

SOURCE = __file__
# under which the two sources are compiled, to tell whose assertion failed
COMPLETED = "<completed>"
TEST = "<test>"
_LONGEST_DETAIL = 200


def main(plan: dict[str, Any]) -> None:
    """Runs what the plan says, writes one line, and ends the process.

    The plan has `completed` (source of prompt and completion), `test` (of its check), `entry_point`, and `nonce`, which
    the line begins with.
    """
    # bound before the completion could replace them
    write, leave, dumps = os.write, os._exit, json.dumps
    line = os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    outcome, detail = _run(plan["completed"], plan["test"], plan["entry_point"])
    write(line, f"\n{plan['nonce']}{dumps([outcome, detail])}\n".encode())
    # at once: no thread or exit handler that the completion left behind writes after it
    leave(0)


def _run(completed: str, test: str, entry_point: str) -> tuple[str, str]:
    code = _compiled(completed)
    if not isinstance(code, CodeType):
        return "syntax", _told(code)
    # a module of its own, as classes look for theirs by name
    module = ModuleType("completed")
    sys.modules["completed"] = module
    try:
        exec(code, module.__dict__)
        exec(compile(test, TEST, "exec", dont_inherit=True), module.__dict__)
        module.__dict__["check"](module.__dict__[entry_point])
    except MemoryError as error:
        return "limits", _told(error)
    except AssertionError as error:
        # an assertion of the completion itself is an exception like any other
        return "wrong" if _raised_in(error.__traceback__) == TEST else "exception", _told(error)
    except BaseException as error:
        return "exception", _told(error)
    return "passed", ""


def _compiled(source: str) -> CodeType | BaseException:
    try:
        return compile(source, COMPLETED, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return error


def _raised_in(trace: TracebackType | None) -> str | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else trace.tb_frame.f_code.co_filename


def _told(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:_LONGEST_DETAIL]
    except BaseException as another:
        # an exception class of the completion, whose text is its own code
        return f"{type(error).__name__}: its text raised {type(another).__name__}"[:_LONGEST_DETAIL]
