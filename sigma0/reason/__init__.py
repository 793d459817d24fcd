"""Outer loops: effort that rises with evidence, an agent that escalates when it is stuck, lemmas gated by code.

The sandbox is used without a model, so torch and transformers are imported only with the names that need them.
"""

from typing import TYPE_CHECKING

from sigma0.lazy import lazy_names

if TYPE_CHECKING:
    from sigma0.reason.agent.agent import AgentSettings, RepoAgent
    from sigma0.reason.agent.escalation import ProgressTracker, ThreeTierEscalation
    from sigma0.reason.chat import (
        ChatFailed,
        ChatModel,
        ChatSettings,
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
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "ALGSolver": "sigma0.reason.lemma",
            "AgentSettings": "sigma0.reason.agent.agent",
            "ChatFailed": "sigma0.reason.chat",
            "ChatModel": "sigma0.reason.chat",
            "ChatSettings": "sigma0.reason.messages",
            "Completion": "sigma0.reason.chat",
            "Critique": "sigma0.reason.progressive.critique",
            "Desk": "sigma0.reason.desk",
            "EndpointChat": "sigma0.reason.chat",
            "LadderChat": "sigma0.reason.chat",
            "Lemma": "sigma0.reason.lemma",
            "LemmaGraph": "sigma0.reason.lemma",
            "LemmaSettings": "sigma0.reason.lemma",
            "LimitReached": "sigma0.reason.desk",
            "Limits": "sigma0.reason.desk",
            "LocalChat": "sigma0.reason.chat",
            "PRESETS": "sigma0.reason.progressive.policies",
            "ProgressTracker": "sigma0.reason.agent.escalation",
            "ProgressiveConfig": "sigma0.reason.progressive.policies",
            "ProgressiveReasoningManager": "sigma0.reason.progressive.effort",
            "RepoAgent": "sigma0.reason.agent.agent",
            "RunResult": "sigma0.reason.sandbox.sandbox",
            "Sandbox": "sigma0.reason.sandbox.sandbox",
            "SandboxUnavailable": "sigma0.reason.sandbox.sandbox",
            "ScriptedChat": "sigma0.reason.chat",
            "ThreeTierEscalation": "sigma0.reason.agent.escalation",
            "Trail": "sigma0.reason.trail",
            "Usage": "sigma0.reason.chat",
            "VerifyLoop": "sigma0.reason.progressive.verify_loop",
            "VerifyReport": "sigma0.reason.progressive.verify_loop",
            "named_config": "sigma0.reason.progressive.policies",
            "read_lines": "sigma0.reason.trail",
        },
    )

__all__ = [
    "PRESETS",
    "ALGSolver",
    "AgentSettings",
    "ChatFailed",
    "ChatModel",
    "ChatSettings",
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
