"""The system calls that a sandboxed program may make, as a filter for bubblewrap: an allow-list, written by libseccomp.

A call that no rule names fails with ENOSYS, so that C libraries fall back from calls that are newer than the list. What
was refused on purpose fails with EPERM. Calls of a foreign architecture end the process.

Left out is whatever reaches other processes, mounts, namespaces or the kernel itself, and whatever makes the kernel
hold memory that the watcher cannot count: files in memory, System V and POSIX queues, io_uring, rings of asynchronous
I/O, pages lent to pipes (splice), pipes of more than the usual size, descriptors in flight between sockets (sendmsg),
sockets but for the two ends of a stream pair, which event loops wake themselves with, and a thread's private table of
descriptors.

libseccomp is called through ctypes: of its bindings on PyPI one was last released in 2021, and one has no wheels for
Python 3.10 and 3.11.
"""

import ctypes
import errno
import mmap
import os
import socket
from collections.abc import Sequence
from functools import lru_cache

from sigma0.reason.sandbox.isolation import SandboxUnavailable

Comparison = tuple[int, int, int]
"""Argument number, mask and the value that the masked argument must have."""

_LIBRARY = "libseccomp.so.2"
_ALLOW = 0x7FFF0000
_FAIL_WITH = 0x00050000
_MASKED_EQUAL = 7
_INT = 0xFFFFFFFF

_FILES = """
    read readv pread64 preadv preadv2 write writev pwrite64 pwritev pwritev2 open openat openat2 creat close lseek
    stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 getdents getdents64 getcwd chdir fchdir
    mkdir mkdirat rmdir mknod mknodat unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat readlink
    readlinkat chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat umask
    truncate ftruncate fallocate fadvise64 copy_file_range fsync fdatasync sync_file_range flock
    getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
    dup dup2 dup3 pipe pipe2 poll ppoll select pselect6 eventfd eventfd2 timerfd_create timerfd_settime timerfd_gettime
    epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 signalfd signalfd4
"""
_MEMORY = "brk munmap mprotect mremap madvise msync mincore membarrier"
_PROCESSES = """
    fork vfork execve execveat exit exit_group wait4 waitid kill tkill tgkill pidfd_open pidfd_send_signal
    getpid getppid gettid getpgid setpgid getpgrp getsid setsid
    getuid geteuid getgid getegid getresuid getresgid getgroups
    setuid setgid setreuid setregid setresuid setresgid setgroups setfsuid setfsgid capget capset
    rt_sigaction rt_sigprocmask rt_sigpending rt_sigsuspend rt_sigtimedwait rt_sigqueueinfo rt_tgsigqueueinfo
    rt_sigreturn sigaltstack pause alarm getitimer setitimer restart_syscall
    timer_create timer_settime timer_gettime timer_getoverrun timer_delete
    futex futex_waitv get_robust_list set_robust_list set_tid_address rseq arch_prctl
    sched_yield sched_getaffinity sched_setaffinity sched_getparam sched_getscheduler sched_setscheduler sched_getattr
    sched_get_priority_max sched_get_priority_min sched_rr_get_interval getpriority setpriority getcpu
    getrusage getrlimit setrlimit prlimit64 uname sysinfo getrandom
    nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times
"""
# of a pair of stream sockets, whose buffers have one size
_PAIRED_SOCKETS = "sendto recvfrom shutdown getsockname getpeername getsockopt"

# Programs that try these understand "not permitted" better than "no such call".
_REFUSED = """
    mount umount2 pivot_root chroot unshare setns fsopen fsmount fsconfig fspick move_mount open_tree mount_setattr
    ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd kcmp perf_event_open bpf seccomp
    keyctl add_key request_key userfaultfd io_uring_setup io_uring_enter io_uring_register io_setup io_submit
    kexec_load kexec_file_load init_module finit_module delete_module open_by_handle_at name_to_handle_at
    swapon swapoff reboot syslog acct quotactl modify_ldt fanotify_init inotify_init inotify_init1
    memfd_create memfd_secret shmget shmat msgget semget mq_open
    splice tee vmsplice sendfile
    socket bind connect listen accept accept4 sendmsg recvmsg sendmmsg recvmmsg setsockopt
"""
# As on a file system without them, which is what copying programs go by.
_NOT_SUPPORTED = "setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr"

# New namespaces: time, mount, cgroup, UTS, IPC, user, PID, network.
_NAMESPACES = 0x80 | 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
_THREAD, _SHARED_DESCRIPTORS = 0x10000, 0x400
_OWN_DESCRIPTORS = 0x2
_HUGE_PAGES = 0x40000
# duplicates, flags, locks, and asking for a pipe's size; neither setting that nor leases and notices of changes
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
# whether it is a terminal, and its size; bytes that wait; closing on exec; not waiting
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# signal at the parent's end, dumpable, names, dropping and reading rights, adopting orphans; 41: see `inside`
_PRCTL = (1, 2, 3, 4, 15, 16, 21, 23, 24, 36, 37, 39, 47)
_NO_HUGE_PAGES = 41


def _allowed_with() -> list[tuple[str, list[Comparison]]]:
    """Calls that are allowed with some arguments alone; of several rules for a call one is enough."""
    rules: list[tuple[str, list[Comparison]]] = [
        ("clone", [(0, _NAMESPACES | _THREAD, 0)]),
        ("clone", [(0, _NAMESPACES | _THREAD | _SHARED_DESCRIPTORS, _THREAD | _SHARED_DESCRIPTORS)]),
        ("close_range", [(2, _OWN_DESCRIPTORS, 0)]),
        ("prctl", [(0, _INT, _NO_HUGE_PAGES), (1, _INT, 1)]),
    ]
    kind = _INT & ~(socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    rules.append(("socketpair", [(0, _INT, socket.AF_UNIX), (1, kind, socket.SOCK_STREAM)]))
    # Pages of shared anonymous mappings outlive MADV_DONTNEED, and then no process shows them; nor does one show huge
    # pages of the machine's pool.
    private, shared, anonymous = mmap.MAP_PRIVATE, mmap.MAP_SHARED, mmap.MAP_ANONYMOUS
    kinds = (private, private | anonymous, shared, private | shared)
    rules += [
        (name, [(3, private | shared | anonymous | _HUGE_PAGES, kind)]) for name in ("mmap", "mmap2") for kind in kinds
    ]
    for name, argument, values in (("fcntl", 1, _FCNTL), ("ioctl", 1, _IOCTL), ("prctl", 0, _PRCTL)):
        rules += [(name, [(argument, _INT, value)]) for value in values]
    return rules


class _Comparison(ctypes.Structure):
    """libseccomp's `struct scmp_arg_cmp`: argument number, operator, and one or two operands."""

    _fields_ = [
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    ]


class _Filter:
    """A libseccomp filter under which every call fails that no rule names."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.seccomp_init.restype = ctypes.c_void_p
        self._library = library
        self._context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_FAIL_WITH | errno.ENOSYS)))
        if not self._context:
            raise OSError("libseccomp could not begin a filter")

    def add(self, action: int, name: str, comparisons: Sequence[Comparison] = ()) -> None:
        """Adds a rule for calls of which all comparisons hold; names unknown to this architecture are skipped."""
        number = self._library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            return
        made = [_Comparison(argument, _MASKED_EQUAL, mask, value) for argument, mask, value in comparisons]
        rules = (_Comparison * len(made))(*made)
        failed = self._library.seccomp_rule_add_array(self._context, ctypes.c_uint32(action), number, len(made), rules)
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
def filter_program() -> bytes:
    """The filter as a BPF program.

    Raises:
        SandboxUnavailable: If libseccomp is missing.
        OSError: If libseccomp refuses a rule.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise SandboxUnavailable(
            f"{_LIBRARY} is missing, which writes the filter of system calls: install libseccomp 2.4 or later "
            "(apt-get install libseccomp2)"
        ) from error
    made = _Filter(library)
    try:
        for name in " ".join((_FILES, _MEMORY, _PROCESSES, _PAIRED_SOCKETS)).split():
            made.add(_ALLOW, name)
        for name, comparisons in _allowed_with():
            made.add(_ALLOW, name, comparisons)
        for names, code in ((_REFUSED, errno.EPERM), (_NOT_SUPPORTED, errno.ENOTSUP)):
            for name in names.split():
                made.add(_FAIL_WITH | code, name)
        return made.export()
    finally:
        made.release()
