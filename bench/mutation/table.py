"""The page of mutants: scores by folder, and every survivor with the reason where there is one."""

from collections.abc import Sequence

from sigma0.bench.core.ledger import AnyRow
from sigma0.bench.core.rows_tests import MutationRow, MutationScore, Survivor
from sigma0.bench.core.tables import BenchTable

_HEADINGS = ("folder", "mutants", "killed", "of these by time", "survived", "equivalent", "not reached", "score")


def latest_mutants(rows: Sequence[AnyRow]) -> list[MutationRow]:
    """The last run of each seed, in the order of the seeds."""
    runs = sorted((row for row in rows if isinstance(row, MutationRow)), key=lambda row: row.time)
    return sorted({row.seed: row for row in runs}.values(), key=lambda row: row.seed)


def score_table(row: MutationRow) -> BenchTable:
    """The scores of one run."""
    scores = {**row.folders, "all": row.whole}
    return BenchTable(_HEADINGS, [(name, *_cells(score)) for name, score in scores.items()], f"seed {row.seed}")


def _cells(score: MutationScore) -> tuple[str, ...]:
    counts = (score.killed, score.by_time, score.survived, score.equivalent, score.not_reached)
    drawn = score.killed + score.survived + score.equivalent + score.not_reached
    return str(drawn), *map(str, counts), "-" if score.share is None else f"{score.share:.0%}"


def whole(rows: Sequence[MutationRow]) -> str:
    """The page."""
    parts = [
        "# Mutants",
        "Small faults put into the sources one at a time, and whether the fast tests notice. The score is of those "
        "that were reached and that a test can notice: killed / (killed + survived). Drawn by "
        "`python -m sigma0.bench mutants`, with operators of cosmic-ray.",
    ]
    for row in rows:
        versions = ", ".join(f"{name} {version}" for name, version in row.versions.items())
        parts += [
            f"## Seed {row.seed}",
            f"{row.time[:10]}, commit {(row.commit or 'unknown')[:7]}, {row.device}, {versions}; "
            f"{row.minutes:g} minutes, tests of {row.most_seconds:g} s at most for a mutant.",
            score_table(row).markdown(),
        ]
        known = [each for each in row.survivors if each.reason is not None]
        unknown = [each for each in row.survivors if each.reason is None]
        parts += _listed("Not killed", unknown) + _listed("Equivalent", known)
    return "\n\n".join(parts) + "\n"


def _listed(title: str, survivors: Sequence[Survivor]) -> list[str]:
    if not survivors:
        return []
    lines = [f"{title}:", ""]
    for each in survivors:
        reason = each.reason or ("" if each.tests else "no fast test runs it")
        lines.append(f"- {each.file}: `{each.before}` -> `{each.after}`{f': {reason}' if reason else ''}")
    return ["\n".join(lines)]
