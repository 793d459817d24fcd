"""System calls that a sandboxed program has no business making, as a filter for bubblewrap."""

import ctypes
import errno
import mmap
import os
import socket
from functools import lru_cache

_ALLOW = 0x7FFF0000
_FAIL_WITH = 0x00050000
_NOT_EQUAL, _MASKED_EQUAL = 1, 7

# What reaches kernel code that has had holes, or looks at the machine or at other processes.
_DENIED = (
    "mount",
    "umount",
    "umount2",
    "pivot_root",
    "fsopen",
    "fsmount",
    "fsconfig",
    "fspick",
    "move_mount",
    "open_tree",
    "mount_setattr",
    "chroot",
    "unshare",
    "setns",
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "process_madvise",
    "pidfd_getfd",
    "kcmp",
    "bpf",
    "perf_event_open",
    "keyctl",
    "add_key",
    "request_key",
    "userfaultfd",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "kexec_load",
    "kexec_file_load",
    "init_module",
    "finit_module",
    "delete_module",
    "open_by_handle_at",
    "name_to_handle_at",
    "swapon",
    "swapoff",
    "reboot",
    "syslog",
    "acct",
    "quotactl",
    "quotactl_fd",
    "modify_ldt",
    "fanotify_init",
    "lookup_dcookie",
)
# Memory that belongs to no process: nothing but the end of the sandbox would show or free it.
_UNOWNED = ("memfd_create", "memfd_secret", "shmget", "msgget", "semget", "mq_open", "inotify_init", "inotify_init1")
# New namespaces: time, mount, cgroup, UTS, IPC, user, PID, network.
_NEW_NAMESPACES = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
# Typing into, and pasting into, the terminal.
_TERMINAL_REQUESTS = (0x5412, 0x541C)


class _Comparison(ctypes.Structure):
    """libseccomp's `struct scmp_arg_cmp`: argument number, operator, and one or two operands."""

    _fields_ = [
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    ]


class _Filter:
    """A libseccomp filter that allows what no rule names."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.seccomp_init.restype = ctypes.c_void_p
        self._library = library
        self._context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
        if not self._context:
            raise OSError("libseccomp could not begin a filter")

    def deny(self, name: str, *comparisons: tuple[int, int, int, int], error: int = errno.EPERM) -> None:
        """Lets a call fail where all comparisons hold; names unknown to this architecture are skipped."""
        number = self._library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            return
        rules = (_Comparison * len(comparisons))(*(_Comparison(*each) for each in comparisons))
        action = ctypes.c_uint32(_FAIL_WITH | error)
        failed = self._library.seccomp_rule_add_array(self._context, action, number, len(comparisons), rules)
        if failed:
            raise OSError(-failed, f"libseccomp refused a rule for {name}: {os.strerror(-failed)}")

    def export(self) -> bytes:
        """The program, as bubblewrap's --seccomp takes it."""
        with os.fdopen(os.memfd_create("filter"), "rb") as file:
            failed = self._library.seccomp_export_bpf(self._context, file.fileno())
            if failed:
                raise OSError(-failed, f"libseccomp could not write its filter: {os.strerror(-failed)}")
            file.seek(0)
            return file.read()

    def release(self) -> None:
        self._library.seccomp_release(self._context)


@lru_cache(maxsize=1)
def filter_program() -> bytes | None:
    """The filter as a BPF program; None where libseccomp is missing.

    Everything is allowed but: mounts, namespaces, looking into other processes, loading code into the kernel,
    io_uring, memory that belongs to no process, typing into a terminal, and sockets other than AF_UNIX, of which some
    families (vsock) lead out of a network namespace. Calls of a foreign architecture end the process.

    Raises:
        OSError: If libseccomp refuses a rule.
    """
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return None
    made = _Filter(library)
    try:
        for name in (*_DENIED, *_UNOWNED):
            made.deny(name)
        # its flags lie in memory, where a filter cannot look; libraries fall back to clone
        made.deny("clone3", error=errno.ENOSYS)
        for flag in _NEW_NAMESPACES:
            made.deny("clone", (0, _MASKED_EQUAL, flag, flag))
        for request in _TERMINAL_REQUESTS:
            made.deny("ioctl", (1, _MASKED_EQUAL, 0xFFFFFFFF, request))
        made.deny("socket", (0, _NOT_EQUAL, socket.AF_UNIX, 0))
        # pages of shared anonymous mappings outlive MADV_DONTNEED, and then no process shows them
        shared = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
        for name in ("mmap", "mmap2"):
            made.deny(name, (3, _MASKED_EQUAL, mmap.MAP_SHARED | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, shared))
        return made.export()
    finally:
        made.release()
