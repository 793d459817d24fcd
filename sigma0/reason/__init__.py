"""Outer loops: effort that rises with evidence, an agent that escalates when it is stuck, lemmas gated by code."""

from sigma0.reason.agent.agent import AgentSettings, RepoAgent
from sigma0.reason.agent.escalation import ProgressTracker, ThreeTierEscalation
from sigma0.reason.chat import (
    ChatFailed,
    ChatModel,
    Completion,
    EndpointChat,
    LadderChat,
    LocalChat,
    ScriptedChat,
    Usage,
)
from sigma0.reason.desk import Desk, LimitReached, Limits
from sigma0.reason.lemma import ALGSolver, Lemma, LemmaGraph, LemmaSettings
from sigma0.reason.progressive.critique import Critique
from sigma0.reason.progressive.effort import ProgressiveReasoningManager
from sigma0.reason.progressive.policies import PRESETS, ProgressiveConfig, named_config
from sigma0.reason.progressive.verify_loop import VerifyLoop, VerifyReport
from sigma0.reason.sandbox.sandbox import RunResult, Sandbox, SandboxUnavailable
from sigma0.reason.trail import Trail, read_lines

__all__ = [
    "PRESETS",
    "ALGSolver",
    "AgentSettings",
    "ChatFailed",
    "ChatModel",
    "Completion",
    "Critique",
    "Desk",
    "EndpointChat",
    "LadderChat",
    "Lemma",
    "LemmaGraph",
    "LemmaSettings",
    "LimitReached",
    "Limits",
    "LocalChat",
    "ProgressTracker",
    "ProgressiveConfig",
    "ProgressiveReasoningManager",
    "RepoAgent",
    "RunResult",
    "Sandbox",
    "SandboxUnavailable",
    "ScriptedChat",
    "ThreeTierEscalation",
    "Trail",
    "Usage",
    "VerifyLoop",
    "VerifyReport",
    "named_config",
    "read_lines",
]
