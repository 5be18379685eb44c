"""The rules, the findings they produce, and the recorder that raises them (stop) or lists them (keep-going)."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch

from .locate import Site, current_site
from .tensor import describe

Level = Literal["fault", "warning"]


@dataclass(frozen=True)
class Rule:
    """One thing CUDA does that the CPU does not.

    ``truth`` says how sure we are: ``src`` read in torch's source or its shipped tables, ``msg`` the message is in the
    wheel and its condition is common knowledge, ``rep`` public reports, ``doc`` documentation, ``bel`` believed.
    """

    id: str
    title: str
    fix: str
    truth: str
    level: Level = "fault"


RULES: Final[dict[str, Rule]] = {
    rule.id: rule
    for rule in (
        Rule(
            "DEV-1",
            "tensors on different devices in one operator",
            "create it with device=, register it as a buffer or in a ModuleList, or move it with .to(device)",
            "src",
        ),
        Rule(
            "DEV-2",
            "host tensor indexed with a device index",
            "move the index with .cpu() or the table to the device",
            "msg",
        ),
        Rule("DEV-3", "NumPy access to device memory", "use .detach().cpu().numpy()", "msg"),
        Rule("DEV-4", "generator of another device", "use torch.Generator(device=...) of the result's device", "msg"),
        Rule("DEV-5", "device ordinal that does not exist", "use cuda:0, or map_location= when loading", "src"),
        Rule("DEV-6", "pinning a device tensor", "pin the host tensor before moving it", "msg"),
        Rule("DEV-7", "CPU tensor type constructed from a device tensor", "use .float(), .bool(), ... instead", "msg"),
        Rule(
            "DEV-8",
            "device used in a forked child",
            "keep DataLoader workers on the CPU, or start processes with spawn",
            "src",
        ),
        Rule(
            "DEV-9",
            "parameter that is a copy: moved after requires_grad was set",
            "create it with device=..., requires_grad=True, or wrap the moved tensor: torch.nn.Parameter(x.cuda())",
            "src",
        ),
        Rule("RNN-1", "non-contiguous hidden state for a cuDNN RNN", "call .contiguous() on the hidden state", "rep"),
        Rule("RNN-2", "packed-sequence lengths on the device", "pass lengths.cpu()", "msg"),
        Rule("RNN-3", "RNN input, hidden state and weights on different devices", "move it to the device", "msg"),
        Rule(
            "RNN-4",
            "backward that cuDNN's recurrent layers cannot run",
            "call .train() on the recurrent layer, or run its forward with torch.backends.cudnn.flags(enabled=False)",
            "rep",
        ),
        Rule("KRN-1", "operator without a CUDA kernel", "use another operator, or run this one on .cpu()", "src"),
        Rule("KRN-2", "dtype without a CUDA kernel", "cast the operands first, for example with .float()", "src"),
        Rule("KRN-3", "float8 matrix product below compute capability 8.9", "use bfloat16, or another card", "bel"),
        Rule("KRN-4", "half-precision FFT that cuFFT cannot do", "call .float() before the transform, or pad", "bel"),
        Rule("LIN-1", "linalg driver that CUDA lacks", "drop driver= (CUDA has only 'gels')", "doc"),
        Rule("DTY-1", "operand dtypes that do not meet", "cast at this boundary: x.to(weight.dtype)", "src"),
        Rule("DTY-2", "norm input and weight of different dtypes", "cast the input or the norm layer", "rep"),
        Rule("DTY-3", "fill value too large for the half type", "use torch.finfo(x.dtype).min", "src"),
        Rule("AMP-1", "loss that is unsafe under CUDA autocast", "use binary_cross_entropy_with_logits", "src"),
        Rule("AMP-2", "GradScaler with bfloat16 gradients", "drop the GradScaler; bfloat16 needs none", "rep"),
        Rule("SDP-1", "attention back-end that cannot serve these inputs", "also allow MATH or EFFICIENT", "bel"),
        Rule("SDP-2", "attention mask dtype differs from the query's", "cast the mask to query.dtype", "rep"),
        Rule(
            "ASY-1",
            "host reads a non-blocking device copy before synchronising",
            "drop non_blocking=True, or call torch.cuda.synchronize() first",
            "bel",
        ),
        Rule("DET-1", "nondeterministic operator in deterministic mode", "use another operator, or warn_only", "doc"),
        Rule("OOB-1", "index out of range", "compare the ids with the size of the table", "bel"),
        Rule("MEM-1", "out of device memory", "smaller batch, accumulation, checkpointing or a larger card", "bel"),
        Rule("MP-1", "device tensor sent to another process", "send CPU tensors", "bel", "warning"),
        Rule("DST-1", "host tensor in an NCCL collective", "move it to the device first", "msg"),
        Rule("DST-2", "module on the host wrapped by DDP with device_ids", "move the module first", "src"),
    )
}


@dataclass(frozen=True)
class Finding:
    """One fault at one place: what CUDA says, where, on what, and how to mend it."""

    rule: str
    message: str
    site: Site
    op: str = ""
    arguments: tuple[str, ...] = ()
    fix: str = ""
    level: Level = "fault"

    @property
    def file(self) -> str:
        """The user's file."""
        return self.site.file

    @property
    def line(self) -> int:
        """The user's line."""
        return self.site.line

    def text(self) -> str:
        """The whole message, CUDA's own words first."""
        lines = [self.message, f"[rehearsal {self.rule}] at {self.site}"]
        if self.op:
            lines.append(f"operator: {self.op}({', '.join(self.arguments)})")
        lines.append(f"fix: {self.fix}")
        return "\n".join(lines)


def suppress_pattern(entry: str) -> tuple[str, str]:
    """Split ``RULE[:path]`` into a rule and a path pattern (``*`` when none is given)."""
    rule, _, path = entry.partition(":")
    return rule.strip().upper(), path.strip() or "*"


@dataclass
class Recorder:
    """Collects findings; in ``stop`` mode the first fault raises the exception CUDA would raise."""

    stop: bool
    ignore: tuple[tuple[str, str], ...] = ()
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[tuple[str, str, int, str]] = field(default_factory=Counter)
    sink: Callable[[Finding], None] | None = None  # also told of every new finding (child processes)

    def fault(
        self,
        rule_id: str,
        message: str,
        *,
        op: str = "",
        arguments: tuple[str, ...] = (),
        fix: str | None = None,
        error: type[BaseException] = RuntimeError,
        site: Site | None = None,
    ) -> Finding | None:
        """Record a fault of ``rule_id`` at the running line, once a line; ``None`` where it is ignored.

        Raises:
            ``error``: in stop mode, with the finding as its attribute ``finding``.
        """
        rule = RULES[rule_id]
        site = site or current_site()
        if self._ignored(rule_id, site):
            return None
        finding = Finding(rule_id, message, site, op, arguments, fix or rule.fix, rule.level)
        key = (rule_id, site.file, site.line, site.via)
        self.counts[key] += 1
        if self.counts[key] == 1:
            self.findings.append(finding)
            if self.sink is not None:
                self.sink(finding)
        if self.stop and rule.level == "fault":
            exception: Any = error(finding.text())
            exception.finding = finding
            raise exception
        return finding

    def _ignored(self, rule_id: str, site: Site) -> bool:
        return any(
            (rule == rule_id or rule == "*")
            and (fnmatch.fnmatch(site.file, pattern) or site.file.endswith(pattern) or pattern in (site.via, "*"))
            for rule, pattern in self.ignore
        )


def argument_texts(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """``name: dtype shape on device`` of every tensor argument; other arguments are left out."""
    texts: list[str] = []
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if isinstance(value, torch.Tensor):
            texts.append(f"{name}: {describe(value)}")
        elif isinstance(value, list | tuple):
            texts.extend(
                f"{name}[{i}]: {describe(item)}" for i, item in enumerate(value) if isinstance(item, torch.Tensor)
            )
    return tuple(texts)
