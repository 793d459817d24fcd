"""The lemma graph: a problem split into lemmas, each verified by assertions that were executed."""

from sigma0.reason.lemma.asking import LemmaLimitReached, Questions
from sigma0.reason.lemma.boxed import boxed
from sigma0.reason.lemma.counting import ExhaustiveSearcher, is_counting
from sigma0.reason.lemma.gate import GateRefused, Program
from sigma0.reason.lemma.graph import FINAL, MAX_LEMMAS, Lemma, LemmaGraph, LemmaStatus, LemmaType
from sigma0.reason.lemma.picture import draw
from sigma0.reason.lemma.planning import LemmaGraphBuilder, parse_lemmas
from sigma0.reason.lemma.proving import Attempt, LemmaVerifier
from sigma0.reason.lemma.repair import RepairStrategist
from sigma0.reason.lemma.running import Runner
from sigma0.reason.lemma.settings import LemmaEfforts, LemmaSettings
from sigma0.reason.lemma.solver import ALGSolver, LemmaSolution
from sigma0.reason.lemma.traversing import GraphTraverser

__all__ = [
    "FINAL",
    "MAX_LEMMAS",
    "ALGSolver",
    "Attempt",
    "ExhaustiveSearcher",
    "GateRefused",
    "GraphTraverser",
    "Lemma",
    "LemmaEfforts",
    "LemmaGraph",
    "LemmaGraphBuilder",
    "LemmaLimitReached",
    "LemmaSettings",
    "LemmaSolution",
    "LemmaStatus",
    "LemmaType",
    "LemmaVerifier",
    "Program",
    "Questions",
    "RepairStrategist",
    "Runner",
    "boxed",
    "draw",
    "is_counting",
    "parse_lemmas",
]
