"""Pages drawn from a `StudyRecord`: Markdown for a terminal or a repository, one self-contained HTML file to look at.

Plots are inline SVG, so that a page opens without a network and weighs kilobytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from auto_research.study.execute import StudyRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND_COLOURS = {
    "baseline": "#5b6b7b",
    "method": "#0b7285",
    "ablation": "#b08900",
    "control": "#9c36b5",
    "floor": "#adb5bd",
}


def number(value: float | None) -> str:
    """Four significant digits, or a dash for a value that does not exist."""
    return "–" if value is None else f"{value:.4g}" if abs(value) >= 0.1 or value == 0 else f"{value:.4f}"


def verdict_sentence(record: StudyRecord) -> str:
    """The first line of every page."""
    verdict = record.comparison.verdict
    if verdict == "smoke: no conclusion":
        return "Smoke run: every stage works; its numbers conclude nothing."
    data = ", ".join(record.data) or "its data"
    return f"{verdict.capitalize()} on {data} at {record.budget} budget with {len(record.seeds)} seeds."


def _svg(figure: Figure) -> str:
    import matplotlib.pyplot as plt

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _style() -> dict[str, object]:
    return {
        "font.size": 10,
        "font.family": "sans-serif",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#868e96",
        "svg.fonttype": "none",
        "svg.hashsalt": "auto-research",
    }


def plot_variants(record: StudyRecord) -> str:
    """Primary metric on test: one dot a seed, a bar at the mean, one row a variant. SVG text."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    comparison = record.comparison
    variants = list(reversed(comparison.variants))
    with plt.rc_context(_style()):
        figure, axes = plt.subplots(figsize=(7.2, 0.6 + 0.34 * len(variants)))
        for row, variant in enumerate(variants):
            colour = KIND_COLOURS[variant.kind]
            values = [v for t in variant.trials if (v := t.test[comparison.primary]) is not None]
            if not values:
                continue
            axes.plot(values, [row] * len(values), "o", color=colour, alpha=0.45, markersize=5, mew=0)
            axes.plot([sum(values) / len(values)], [row], "|", color=colour, markersize=16, markeredgewidth=2.5)
        axes.set_yticks(range(len(variants)), [v.name for v in variants])
        axes.set_xlabel(f"test {comparison.primary} (dots: seeds, bar: mean)")
        axes.grid(axis="x", color="#e9ecef")
        axes.set_axisbelow(True)
        return _svg(figure)


def plot_differences(record: StudyRecord) -> str:
    """Each variant against the baseline with its 95 % interval. SVG text, empty without differences."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = list(reversed(record.comparison.differences))
    if not rows:
        return ""
    kinds = {v.name: v.kind for v in record.comparison.variants}
    with plt.rc_context(_style()):
        figure, axes = plt.subplots(figsize=(7.2, 0.6 + 0.34 * len(rows)))
        for row, d in enumerate(rows):
            colour = KIND_COLOURS[kinds[d.method]]
            axes.plot([d.low, d.high], [row, row], "-", color=colour, linewidth=2)
            axes.plot([d.mean], [row], "o", color=colour, markersize=6)
        axes.axvline(0, color="#868e96", linewidth=1)
        axes.set_yticks(range(len(rows)), [d.method for d in rows])
        axes.set_xlabel(f"{record.comparison.primary}: gain over {record.comparison.baseline} (95 % interval)")
        axes.grid(axis="x", color="#e9ecef")
        axes.set_axisbelow(True)
        return _svg(figure)


def plot_validation(record: StudyRecord) -> str:
    """Validation metric over steps, first seed of each trained variant. SVG text, empty without curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = [(v, v.trials[0].history) for v in record.comparison.variants if v.trials[0].history]
    if not curves:
        return ""
    with plt.rc_context(_style()):
        figure, axes = plt.subplots(figsize=(7.2, 3.2))
        for index, (variant, history) in enumerate(curves):
            steps, values = zip(*history, strict=True)
            axes.plot(steps, values, marker="o", markersize=3, label=variant.name, color=f"C{index % 10}")
        axes.set_xlabel("optimiser step")
        axes.set_ylabel(f"validation {record.comparison.primary}")
        axes.grid(color="#e9ecef")
        axes.legend(frameon=False, fontsize=8, bbox_to_anchor=(1.01, 1), loc="upper left")
        return _svg(figure)


def shown_metrics(record: StudyRecord, most: int = 6) -> list[str]:
    """The primary metric first, then the others, as many as a table can hold."""
    comparison = record.comparison
    others = [m for m in comparison.variants[0].mean if m != comparison.primary]
    return [comparison.primary, *others][:most]


def results_table(record: StudyRecord, metrics: Sequence[str] | None = None) -> list[list[str]]:
    """Rows of the result table, header first: variant, kind, parameters, mean ± deviation of each metric."""
    metrics = metrics or shown_metrics(record)
    rows = [["variant", "kind", "parameters", *metrics]]
    for v in record.comparison.variants:
        cells = [
            number(v.mean.get(m)) + (f" ± {number(v.deviation.get(m))}" if v.deviation.get(m) is not None else "")
            for m in metrics
        ]
        rows.append([v.name, v.kind, f"{v.parameters:,}", *cells])
    return rows


def _markdown_table(rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"

    return "\n".join([line(rows[0]), "|" + " --- |" * len(rows[0]), *(line(r) for r in rows[1:])])


def _served(record: StudyRecord) -> str:
    return ", ".join(f"{role}: {c['name']} from {c['source']}" for role, c in record.checkpoints.items())


def results_section(record: StudyRecord) -> str:
    """The "Results" section of a card: verdict, table, decision rule and where it was measured, as Markdown."""
    c = record.comparison
    data = ", ".join(record.data) or "no data set"
    seeds = f"seeds {', '.join(map(str, record.seeds))}"
    parts = [
        "## Results",
        f"**{verdict_sentence(record)}** Measured on {data}, {seeds}; mean ± deviation over seeds on test. The whole "
        f"record is `docs/results/{record.key}.json`.",
        _markdown_table(results_table(record, shown_metrics(record, most=4))),
    ]
    if c.clauses:
        parts.append(_clauses(record))
    return "\n\n".join(parts)


def _clauses(record: StudyRecord) -> str:
    rows = [["decision rule", "state", "numbers"]]
    rows += [
        [r.clause + ("" if r.required else " (reported only)"), r.state, r.detail] for r in record.comparison.clauses
    ]
    return _markdown_table(rows)


def facts(record: StudyRecord) -> str:
    """Data, checkpoints, budget, settings and notes of a run, as a Markdown list."""
    data = ", ".join(f"{name} ({digest[:12] or 'no digest'})" for name, digest in record.data.items())
    return "\n".join(
        [
            f"- data: {data or 'none'}",
            f"- checkpoints: {_served(record) or 'none'}",
            f"- budget {record.budget}, seeds {record.seeds}, device {record.device}, {record.seconds:.0f} s in all",
            f"- settings: {', '.join(f'{k} {v}' for k, v in record.settings.items()) or 'none'}",
            f"- fidelity: {record.fidelity}",
            *(f"- note: {n}" for n in record.notes),
        ]
    )


def markdown(record: StudyRecord) -> str:
    """The run as Markdown."""
    c = record.comparison
    parts = [
        f"# {record.key}: {record.title}",
        f"**{verdict_sentence(record)}**",
        f"Claim under test: {record.claim}",
        _markdown_table(results_table(record)),
    ]
    if c.differences:
        rows = [["against " + c.baseline, c.primary, "95 % interval", "relative", "seeds better"]]
        rows += [
            [
                d.method,
                f"{d.mean:+.5f}",
                f"[{d.low:+.5f}, {d.high:+.5f}]",
                "–" if d.relative is None else f"{d.relative:+.2%}",
                f"{d.wins} of {d.seeds}",
            ]
            for d in c.differences
        ]
        parts.append(_markdown_table(rows))
    if c.clauses:
        parts.append(_clauses(record))
    parts.append(facts(record))
    return "\n\n".join(parts) + "\n"


def html(record: StudyRecord) -> str:
    """The run as one HTML page; every text is escaped."""
    from jinja2 import Environment

    source = (files("auto_research.study") / "templates" / "run.html.j2").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    return template.render(
        record=record,
        sentence=verdict_sentence(record),
        table=results_table(record),
        plots={
            "Test results": plot_variants(record),
            "Against the baseline": plot_differences(record),
            "Learning curves": plot_validation(record),
        },
    )
