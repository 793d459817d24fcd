"""What runs inside a sandbox: gives up all rights, then runs a program whose assertions are counted, or a command.

Its source is handed to an interpreter inside, so it may import nothing but the standard library.
"""

import ast
import builtins
import ctypes
import json
import mmap
import os
import sys
import tarfile
from types import ModuleType
from typing import Any, NoReturn

SOURCE = __file__
# A record shared with the outside: for each process how many assertions it reached, and how many held.
SLOTS = 1024
RECORD_BYTES = 16 * SLOTS
CAPABILITY_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
# of prctl and capset, whose numbers stand in the kernel's headers
_DROP_FROM_BOUNDING_SET, _NO_HUGE_PAGES = 24, 41
_CAPABILITIES_VERSION = 0x20080522
# no name that a program could have
_COUNTS = "assertions: reached, held"


def main(plan: dict[str, Any]) -> None:
    """Runs what the plan says.

    Args:
        plan: `line` (a descriptor: a byte comes of who watches, and goes to them when rights and limits are settled),
            `limits` (pairs of what `resource` calls them and a value), `identity` (the user and group to become, or
            None to stay), `record` (a descriptor), and either `program` (a path) or `command`, `archive` (a descriptor)
            and `folder`.
    """
    # nothing comes if whoever watches is gone: then nobody would end this either
    if not os.read(plan["line"], 1):
        sys.exit("nobody watches")
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    for resource_id, value in plan["limits"]:
        # on the first process, too: a program of the same user could take it over
        for process in (1, os.getpid()):
            _limit(process, resource_id, value)
    _give_up_rights(plan["identity"])
    record = memoryview(mmap.mmap(plan["record"], RECORD_BYTES)).cast("Q")
    os.close(plan["record"])
    if plan["program"] is None:
        _unpack(plan["archive"], plan["folder"])
    os.write(plan["line"], b"\0")
    os.close(plan["line"])
    if plan["program"] is None:
        _run_command(plan["command"])
    _run_program(plan["program"], record)


def _give_up_rights(identity: int | None) -> None:
    os.umask(0o022)
    libc = ctypes.CDLL(None, use_errno=True)
    # of a huge page that was mostly given back no process shows more than the rest, and the kernel holds all of it
    if libc.prctl(_NO_HUGE_PAGES, *map(ctypes.c_ulong, (1, 0, 0, 0))):
        raise OSError(ctypes.get_errno(), "huge pages could not be switched off")
    capability = 0
    while libc.prctl(_DROP_FROM_BOUNDING_SET, *map(ctypes.c_ulong, (capability, 0, 0, 0))) == 0:
        capability += 1
    if identity is not None:
        os.setgroups([])
        os.setresgid(identity, identity, identity)
        os.setresuid(identity, identity, identity)
    # effective, permitted and inheritable ones, each in two words; the ambient ones go with them
    if libc.capset((ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), "capabilities could not be given up")
    with open("/proc/self/status") as file:
        status = dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)
    kept = {name: status[name] for name in CAPABILITY_SETS if int(status[name], 16)}
    if 0 in os.getresuid() or kept or status["NoNewPrivs"] != "1":
        raise PermissionError(f"rights could not be given up: user {os.getuid()}, capabilities {kept}")


def _limit(process: int, resource_id: int, value: int) -> None:
    # not there on Windows, where this file is imported but never run
    import resource

    _, highest = resource.prlimit(process, resource_id)
    lower = value if highest == resource.RLIM_INFINITY else min(value, highest)
    resource.prlimit(process, resource_id, (lower, lower))


def _unpack(archive: int, folder: str) -> None:
    with os.fdopen(archive, "rb") as file, tarfile.open(fileobj=file) as members:
        # packed outside by sigma0 itself, unpacked here without rights
        members.extraction_filter = lambda member, path: member
        members.extractall(folder)
    os.chdir(folder)


def _run_command(command: list[str]) -> NoReturn:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201
        sys.exit(127)


def _run_program(path: str, counts: memoryview) -> None:
    """As `python path` would, with the same error messages."""
    module = ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    sys.argv[:] = [path]
    sys.path.insert(0, os.path.dirname(path))
    _count_into(counts)
    try:
        with open(path, "rb") as file:
            code = compile(counted(ast.parse(file.read(), path)), path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        sys.exit(1)
    try:
        exec(code, module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        # without this frame
        rest = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(rest), rest)
        sys.exit(1)


def _count_into(counts: memoryview) -> None:
    """Gives this process, and each that it forks, a pair of counts of its own: adding from two would lose some."""

    def choose() -> None:
        start = 2 * (os.getpid() % SLOTS)
        setattr(builtins, _COUNTS, counts[start : start + 2])

    choose()
    os.register_at_fork(after_in_child=choose)


def counted(tree: ast.Module) -> ast.Module:
    """The tree, changed so that it counts each assertion that it reaches, and again if that held.

    Assertions stay as they are, at their lines; around them stands `counts[0] += 1` and `counts[1] += 1`. Not counted
    are those whose test is a bare constant: a literal, or a tuple, list, set or dict of literals.
    """
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                waiting += block
                setattr(node, name, [counter for statement in block for counter in _around(statement)])
    return tree


def _around(node: Any) -> list[Any]:
    if not isinstance(node, ast.Assert) or _is_constant(node.test):
        return [node]
    return [_count(0, node), node, _count(1, node)]


def _is_constant(test: ast.expr) -> bool:
    if isinstance(test, ast.Name):
        return test.id == "__debug__"
    try:
        ast.literal_eval(test)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
    return True


def _count(index: int, near: ast.Assert) -> ast.stmt:
    where = ast.Subscript(ast.Name(_COUNTS, ast.Load()), ast.Constant(index), ast.Store())
    return ast.fix_missing_locations(ast.copy_location(ast.AugAssign(where, ast.Add(), ast.Constant(1)), near))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
