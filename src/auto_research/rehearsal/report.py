"""The report of one rehearsal: findings, synchronisations, memory, shares; as table, JSON and HTML."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

from auto_research.runtime.errors import UserError

from .memory import MIB, RESERVE, extrapolate
from .rules import RULES, Finding
from .session import Session

#: Version of the JSON layout.
SCHEMA: Final = 1
#: What no rehearsal can show, printed on every report.
LIMITS: Final = (
    "kernel numerics (TF32, order of atomic additions, cuDNN's choice of algorithm)",
    "speed",
    "allocator fragmentation beyond 512-byte rounding, and library workspaces beyond the fixed reserve",
    "strides that a CUDA kernel may return differently",
    "races between streams, NCCL and several cards",
    "CUDA graphs, Triton and C++ CUDA extensions, compiled graphs",
    "device-side assertions that the CPU kernel does not check",
)


class Report:
    """What one rehearsal saw. ``findings`` grow while the body runs; ``summary`` is filled when it ends."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.summary: dict[str, Any] = {}

    @property
    def findings(self) -> list[Finding]:
        """Distinct findings in the order they were met."""
        return self._session.recorder.findings

    @property
    def faults(self) -> list[Finding]:
        """Findings that CUDA would raise for (warnings left out)."""
        return [finding for finding in self.findings if finding.level == "fault"]

    def failing(self, fail_on: str = "fault") -> list[Finding]:
        """Findings that make a run fail: ``fault``, ``warning`` (both) or a comma-separated list of rules.

        Raises:
            UserError: ``fail_on`` names no rule.
        """
        if fail_on == "never":
            return []
        if fail_on == "warning":
            return list(self.findings)
        if fail_on == "fault":
            return self.faults
        wanted = {entry.strip().upper() for entry in fail_on.split(",")}
        unknown = wanted - RULES.keys()
        if unknown:
            raise UserError(
                f"--fail-on knows fault, warning, never or rules such as DEV-1; it does not know {sorted(unknown)}."
            )
        return [finding for finding in self.findings if finding.rule in wanted]

    def batch(self, size: int) -> None:
        """Close a measurement at batch ``size``: its peak counts for the extrapolation, and a new one starts.

        Call it after a step at batch B and again after a step at 2B; do not count the first step, whose optimiser
        states are made on the way.
        """
        meter = self._session.meter
        self._session.batch_peaks.append((size, meter.peak))
        meter.reset_peak()

    def peak_at(self, size: int) -> int:
        """Peak bytes at batch ``size``, linear in the two last :meth:`batch` measurements.

        Raises:
            UserError: fewer than two measurements, or both at the same batch size.
        """
        if len(self._session.batch_peaks) < 2:
            raise UserError("Extrapolation needs report.batch(B) and report.batch(2 * B) first.")
        (first, low), (second, high) = self._session.batch_peaks[-2:]
        return extrapolate(first, low, second, high, size)

    def largest_batch(self) -> int | None:
        """The largest batch that fits the card by the extrapolation; ``None`` without measurements."""
        peaks = self._session.batch_peaks
        if len(peaks) < 2 or peaks[-1][0] == peaks[-2][0]:
            return None
        (first, low), (second, high) = peaks[-2:]
        slope = (high - low) / (second - first)
        if slope <= 0:
            return None
        return max(int(first + (self._session.meter.budget - low) / slope), 0)

    def finish(self) -> None:
        """Freeze the counters into :attr:`summary`."""
        session = self._session
        meter = session.meter
        ops = session.device_ops + session.host_ops
        flops = session.device_flops + session.host_flops
        steps = [count for count in session.syncs_per_step if count] if session.steps else session.syncs_per_step
        per_step = session.syncs_per_step[: session.steps] or session.syncs_per_step
        self.summary = {
            "schema": SCHEMA,
            "torch": session.tables.minor,
            "card": {
                "name": session.card.name,
                "title": session.card.title,
                "memory": session.card.memory,
                "capability": ".".join(map(str, session.card.capability)),
            },
            "findings": [
                {
                    "rule": f.rule,
                    "level": f.level,
                    "title": RULES[f.rule].title,
                    "truth": RULES[f.rule].truth,
                    "message": f.message,
                    "file": f.site.file,
                    "line": f.site.line,
                    "function": f.site.function,
                    "via": f.site.via,
                    "operator": f.op,
                    "arguments": list(f.arguments),
                    "fix": f.fix,
                    "count": session.recorder.counts[(f.rule, f.site.file, f.site.line, f.site.via)],
                }
                for f in self.findings
            ],
            "by_rule": dict(sorted(Counter(f.rule for f in self.findings).items())),
            "synchronisations": {
                "total": sum(session.syncs.values()),
                "steps": session.steps,
                "per_step": per_step,
                "mean_per_step": sum(per_step) / len(per_step) if steps else 0.0,
                "sites": [
                    {"kind": kind, "site": site, "count": count} for (kind, site), count in session.syncs.most_common()
                ],
            },
            "transfers": {
                "to_device": session.transfer.to_device,
                "to_device_bytes": session.transfer.to_device_bytes,
                "to_host": session.transfer.to_host,
                "to_host_bytes": session.transfer.to_host_bytes,
                "sites": [
                    {"kind": kind, "site": site, "count": count}
                    for (kind, site), count in session.slow_transfers.most_common()
                ],
            },
            "share": {
                "device_operations": session.device_ops,
                "host_operations": session.host_ops,
                "operations_on_device": session.device_ops / ops if ops else 0.0,
                "device_flops": session.device_flops,
                "host_flops": session.host_flops,
                "flops_on_device": session.device_flops / flops if flops else 0.0,
            },
            "memory": {
                "peak": meter.run_peak,
                "live": meter.live,
                "reserve": RESERVE,
                "budget": meter.budget,
                "fits": meter.run_peak <= meter.budget,
                "largest_at_peak": [
                    {"bytes": t.nbytes, "operator": t.op, "site": t.site} for t in meter.largest_at_peak()
                ],
                "batches": [{"batch": batch, "peak": peak} for batch, peak in session.batch_peaks],
                "largest_batch": self.largest_batch(),
            },
            "nondeterministic": [
                {"operator": op, "site": site, "count": count}
                for (op, site), count in session.nondeterministic.most_common()
            ],
            "emulated": dict(session.emulated),
            "not_rehearsed": [*session.notes, *LIMITS],
        }

    def write_json(self, path: str | Path) -> None:
        """Write the summary as JSON.

        Raises:
            UserError: the file cannot be written.
        """
        _write(path, json.dumps(self.summary, indent=2) + "\n")

    def write_html(self, path: str | Path) -> None:
        """Write the summary as one self-contained HTML page (everything escaped).

        Raises:
            UserError: the file cannot be written.
        """
        from jinja2 import Environment

        page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_PAGE)
        page.globals.update(mib=lambda nbytes: f"{nbytes / MIB:.1f} MiB", percent=lambda share: f"{share:.1%}")
        _write(path, page.render(s=self.summary))

    def print_table(self, file: Any = None) -> None:
        """Print the summary as tables (to standard error unless ``file`` is given)."""
        import sys

        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        s = self.summary
        console = Console(file=file or sys.stderr, width=None if file is None else 120)
        card = s["card"]
        console.print(Text(f"Rehearsal on a virtual {card['title']} ({card['memory'] / 2**30:.1f} GiB)", style="bold"))
        for entry in s["findings"]:
            console.print()
            console.print(Text(f"{entry['rule']}  {entry['message']}", style="red"))
            where = f"  at {entry['file']}:{entry['line']} ({entry['function']})"
            where += f" via {entry['via']}" if entry["via"] else ""
            console.print(Text(where), soft_wrap=True)  # one line, so that a terminal can open it
            if entry["operator"]:
                console.print(Text(f"  operator: {entry['operator']}({', '.join(entry['arguments'])})"))
            console.print(Text(f"  fix: {entry['fix']}", style="green"))
            if entry["count"] > 1:
                console.print(Text(f"  met {entry['count']} times"))
        if not s["findings"]:
            console.print(Text("No findings.", style="green"))
        console.print()
        overview = Table(show_header=False, box=None)
        sync, memory, share = s["synchronisations"], s["memory"], s["share"]
        for label, value in (
            ("findings", ", ".join(f"{rule} {count}" for rule, count in s["by_rule"].items()) or "none"),
            ("host waits", f"{sync['total']} ({sync['mean_per_step']:.1f} an optimiser step, {sync['steps']} steps)"),
            (
                "on the device",
                f"{share['operations_on_device']:.1%} of operators, {share['flops_on_device']:.1%} of matrix FLOPs",
            ),
            (
                "peak memory",
                f"{memory['peak'] / MIB:.1f} MiB of {memory['budget'] / MIB:.0f} MiB "
                f"({'fits' if memory['fits'] else 'does not fit'})",
            ),
            ("copies", f"{s['transfers']['to_device']} to the device, {s['transfers']['to_host']} to the host"),
            ("nondeterministic", ", ".join(sorted({e["operator"] for e in s["nondeterministic"]})) or "none met"),
            ("emulated", ", ".join(s["emulated"]) or "none"),
        ):
            overview.add_row(label, Text(value))
        if memory["largest_batch"] is not None:
            overview.add_row("largest batch", Text(str(memory["largest_batch"])))
        console.print(overview)
        self._print_sites(console, Table, Text)
        console.print(Text("Not rehearsed: " + "; ".join(s["not_rehearsed"]) + ".", style="dim"))

    def _print_sites(self, console: Any, table: Any, text: Any) -> None:
        s = self.summary
        for title, rows, columns in (
            ("Host waits by line", s["synchronisations"]["sites"][:10], ("count", "kind", "site")),
            ("Copies worth a look", s["transfers"]["sites"][:10], ("count", "kind", "site")),
        ):
            if rows:
                grid = table(title=title, title_justify="left")
                for column in columns:
                    grid.add_column(column, overflow="fold")
                for row in rows:
                    grid.add_row(*(text(str(row[column])) for column in columns))
                console.print(grid)
        largest = s["memory"]["largest_at_peak"]
        if largest:
            grid = table(title="Largest tensors at the peak", title_justify="left")
            for column in ("MiB", "operator", "site"):
                grid.add_column(column, overflow="fold")
            for row in largest[:10]:
                grid.add_row(f"{row['bytes'] / MIB:.2f}", text(row["operator"]), text(row["site"]))
            console.print(grid)


def _write(path: str | Path, text: str) -> None:
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        partial.write_text(text)
        partial.replace(target)
    except OSError as error:
        raise UserError(f"The report cannot be written to '{path}': {error.strerror}.") from error


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Rehearsal</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1b1f24 }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .25rem .6rem; vertical-align: top;
border-bottom: 1px solid #d8dee4 } code { font-size: .86em; overflow-wrap: anywhere }
.finding { border-left: 4px solid #cf222e; padding: .2rem 1rem; margin: 1rem 0; background: #fff5f5 }
.fix { color: #116329 } .clean { color: #116329; font-weight: 600 } .number { text-align: right }
@media (prefers-color-scheme: dark) { body { background: #0d1117; color: #e6edf3 } .finding { background: #2a1416 }
td, th { border-color: #30363d } .fix, .clean { color: #56d364 } }
</style></head><body>
<h1>Rehearsal on a virtual {{ s.card.title }}</h1>
{% if not s.findings %}<p class="clean">No findings.</p>{% endif %}
{% for f in s.findings %}
<div class="finding"><p><strong>{{ f.rule }}</strong> {{ f.title }}
{% if f.count > 1 %} ({{ f.count }} times){% endif %}</p>
<p><code>{{ f.message }}</code></p>
<p>at <code>{{ f.file }}:{{ f.line }}</code> ({{ f.function }})
{% if f.via %} via <code>{{ f.via }}</code>{% endif %}</p>
{% if f.operator %}<p><code>{{ f.operator }}({{ f.arguments | join(', ') }})</code></p>{% endif %}
<p class="fix">{{ f.fix }}</p></div>
{% endfor %}
<h2>Summary</h2>
<table>
<tr><th>Host waits</th><td>{{ s.synchronisations.total }} in {{ s.synchronisations.steps }} optimiser steps
({{ '%.1f' % s.synchronisations.mean_per_step }} a step)</td></tr>
<tr><th>On the device</th><td>{{ percent(s.share.operations_on_device) }} of operators,
{{ percent(s.share.flops_on_device) }} of matrix FLOPs</td></tr>
<tr><th>Peak memory</th><td>{{ mib(s.memory.peak) }} of {{ mib(s.memory.budget) }}
(card {{ mib(s.card.memory) }}, reserve {{ mib(s.memory.reserve) }})</td></tr>
{% for b in s.memory.batches %}<tr><th>Peak at batch {{ b.batch }}</th><td>{{ mib(b.peak) }}</td></tr>{% endfor %}
{% if s.memory.largest_batch is not none %}
<tr><th>Largest batch</th><td>{{ s.memory.largest_batch }}</td></tr>{% endif %}
<tr><th>Copies</th><td>{{ s.transfers.to_device }} to the device ({{ mib(s.transfers.to_device_bytes) }}),
{{ s.transfers.to_host }} to the host ({{ mib(s.transfers.to_host_bytes) }})</td></tr>
<tr><th>Emulated kernels</th><td>{{ s.emulated | join(', ') or 'none' }}</td></tr>
</table>
{% macro sites(title, rows) %}{% if rows %}<h2>{{ title }}</h2><table><tr><th>Count</th><th>Kind</th><th>Line</th></tr>
{% for r in rows %}<tr><td class="number">{{ r.count }}</td><td>{{ r.kind or r.operator }}</td>
<td><code>{{ r.site }}</code></td></tr>{% endfor %}</table>{% endif %}{% endmacro %}
{{ sites('Host waits by line', s.synchronisations.sites) }}
{{ sites('Copies worth a look', s.transfers.sites) }}
{{ sites('Nondeterministic operators', s.nondeterministic) }}
{% if s.memory.largest_at_peak %}<h2>Largest tensors at the peak</h2>
<table><tr><th>Size</th><th>Operator</th><th>Line</th></tr>
{% for t in s.memory.largest_at_peak %}<tr><td class="number">{{ mib(t.bytes) }}</td><td>{{ t.operator }}</td>
<td><code>{{ t.site }}</code></td></tr>{% endfor %}</table>{% endif %}
<h2>Not rehearsed</h2><ul>{% for note in s.not_rehearsed %}<li>{{ note }}</li>{% endfor %}</ul>
</body></html>
"""
