"""Every text of the repository with the sources of its figures: checked, and rewritten."""

import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from sigma0.bench.figures.check import Fault, Sources, code_figures, context, faults, figures, rewritten
from sigma0.bench.figures.pages import pages
from sigma0.bench.figures.printed import printed
from sigma0.bench.figures.prose import sentences
from sigma0.bench.figures.results import Results
from sigma0.bench.figures.tables import blocks

LITERAL = Path("bench/figures/literal.txt")


def texts(root: Path) -> list[str]:
    """The Markdown files of the repository, but those in folders that begin with a point."""
    found = subprocess.run(["git", "ls-files", "*.md"], cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted(found.split())


def read_literals(lines: Iterable[str]) -> dict[str, tuple[Counter[str], str]]:
    """The literal figures of each text: words and their number in prose, and the figures in code.

    Args:
        lines: "# TEXT" begins a text, "code: ..." has its figures in code, "N x WORDS" stands N times, "WORDS" once.
    """
    found: dict[str, tuple[Counter[str], str]] = {}
    name = ""
    for line in lines:
        if line.startswith("# "):
            name = line[2:].strip()
            found[name] = (Counter(), "")
        elif line.startswith("code: "):
            found[name] = (found[name][0], line[6:].strip())
        elif line.strip():
            times, cross, words = line.rstrip("\n").partition(" x ")
            is_counted = bool(cross) and times.isdigit()
            found[name][0][words if is_counted else line.rstrip("\n")] += int(times) if is_counted else 1
    return found


def write_literals(literals: dict[str, tuple[Counter[str], str]]) -> str:
    """`read_literals` backwards."""
    lines = []
    for name, (words, code) in sorted(literals.items()):
        lines += [f"# {name}", *([f"code: {code}"] if code else [])]
        lines += [each if times == 1 and " x " not in each else f"{times} x {each}" for each, times in words.items()]
    return "\n".join(lines) + "\n"


def sources(root: Path) -> dict[str, Sources | str]:
    """Of each text its sources, or the whole text where it is generated."""
    results = Results(root)
    whole, generated, told = pages(results), blocks(results), sentences(results)
    literals = read_literals((root / LITERAL).read_text().splitlines())
    found: dict[str, Sources | str] = {}
    for name in sorted({*texts(root), *whole}):
        words, code = literals.get(name, (Counter(), ""))
        ended = {title: f"{block}\n" for title, block in generated.get(name, {}).items()}
        found[name] = whole.get(name) or Sources(ended, told.get(name, ()), words, code, printed)
    return found


def read_text(root: Path, name: str) -> str:
    """A text; "" where a page was never written."""
    path = root / name
    return path.read_text() if path.exists() else ""


def check_text(text: str, source: Sources | str) -> list[Fault]:
    """The faults of one text."""
    if isinstance(source, Sources):
        return faults(text, source)
    return [] if text == source else [Fault(0, "is not as generated from the ledger")]


def check_texts(root: Path) -> list[str]:
    """The faults of every text, each as one line."""
    return [
        f"{name}:{fault.line}: {fault.text}"
        for name, source in sources(root).items()
        for fault in check_text(read_text(root, name), source)
    ]


def rewrite_texts(root: Path) -> list[str]:
    """Writes every text anew whose figures have changed; gives their names."""
    changed = []
    for name, source in sources(root).items():
        old = read_text(root, name)
        new = rewritten(old, source) if isinstance(source, Sources) else source
        if new != old:
            (root / name).write_text(new)
            changed.append(name)
    return changed


def accept_literals(root: Path) -> None:
    """Lists every figure that has no source yet as literal, and drops what no longer stands; to be read over by eye."""
    literals = {}
    for name, source in sources(root).items():
        if not isinstance(source, Sources):
            continue
        text, words = (root / name).read_text(), Counter[str]()
        bare = replace(source, literal={}, code="")
        code = code_figures(text, bare)
        # what is no literal yet stands among the faults, figure by figure
        bare_faults = set(faults(text, replace(bare, code=code)))
        taken = -1
        for match in figures(text):
            near = context(text, match)
            fault = Fault(text.count("\n", 0, match.start()) + 1, f"{match[0]} has no source: {near!r}")
            if fault in bare_faults and match.start() > taken:
                words[near] += 1
                taken = text.find(near, max(match.start() - len(near), 0)) + len(near) - 1
        if words or code:
            literals[name] = (words, code)
    (root / LITERAL).write_text(write_literals(literals))
