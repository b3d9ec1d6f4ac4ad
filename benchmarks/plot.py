"""Bars of a figure, a group a work and a bar a peer, one side above the other."""

from __future__ import annotations

import textwrap

from benchmarks.measure import Line


def draw(
    lines: dict[str, Line], path: str, title: str, unit: str = "TFLOP/s", sides: tuple = ("forward", "backward")
) -> str:
    """Saved at `path`; what was done, or why not. Needs matplotlib."""
    lines = {name: line for name, line in lines.items() if line.bars}
    if not lines:
        return "nothing to plot"
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for line in lines.values() for name in line.bars))
    figure, panels = plt.subplots(2, 1, figsize=(max(8, 2 + 1.2 * len(lines)), 8), sharex=True, layout="constrained")
    for side, (panel, label) in enumerate(zip(panels, sides)):
        for k, name in enumerate(names):
            at = [x + (k - (len(names) - 1) / 2) * 0.8 / len(names) for x in range(len(lines))]
            heights = [line.bars.get(name, (0.0, 0.0))[side] for line in lines.values()]
            panel.bar(at, heights, 0.8 / len(names), label=name, color=f"C{k}")
        panel.set_ylabel(f"{unit}, {label}")
        panel.grid(axis="y", alpha=0.3)
    figure.suptitle(title, fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names), frameon=False)
    panels[1].set_xticks(range(len(lines)), [textwrap.fill(name, 16) for name in lines], fontsize=8)
    figure.savefig(path)
    plt.close(figure)
    return f"plot: {path}"
