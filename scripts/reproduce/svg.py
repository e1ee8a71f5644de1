"""Plots as inline SVG, without scripts. Text has the page's own colours, so that both schemes are readable; a
drawing is 400 units wide, so that its letters keep their size on a phone."""

import math
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 400, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 36, 22, 40


@dataclass
class Series:
    """A line: points (x, y) or, with whiskers, (x, y, low, high). `css` names its colour."""

    name: str
    css: str
    points: list
    faint: bool = False
    dots: bool = False


@dataclass
class Axes:
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False
    y_format: str = "{:g}"
    x_marks: list = field(default_factory=list)  # (x, text): a vertical line
    y_marks: list = field(default_factory=list)  # (y, text): a horizontal line
    y_range: tuple = ()


def nice_ticks(low, high, wanted=5):
    """Round numbers between low and high."""
    span = high - low or 1.0
    step = 10 ** math.floor(math.log10(span / wanted))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= wanted)
    first = math.ceil(low / step - 1e-9)
    return [(first + i) * step for i in range(int((high - first * step) / step + 1e-9) + 1)]


def log_ticks(low, high):
    ticks = [
        factor * 10**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for factor in (1, 2, 5)
    ]
    return [tick for tick in ticks if low <= tick * 1.0001 and tick <= high * 1.0001]


def short(number):
    """20000 -> 20k."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:g}{unit}"
    return f"{number:g}"


class Scale:
    def __init__(self, low, high, start, end, log):
        self.log, self.start, self.end = log, start, end
        self.low, self.high = (math.log(low), math.log(high)) if log else (low, high)
        if self.high == self.low:
            self.high += 1

    def __call__(self, value):
        value = math.log(value) if self.log else value
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def text(x, y, words, anchor="middle", css="", extra=""):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}" {extra}>{escape(words)}</text>'
    )


def line(x1, y1, x2, y2, css):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def drawing(parts, title, height=HEIGHT):
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
        + "".join(parts)
        + "</svg>"
    )


def limits(series, axes):
    points = [point for one in series for point in one.points]
    xs = [point[0] for point in points] + [mark[0] for mark in axes.x_marks]
    ys = [value for point in points for value in point[1:]] + [mark[0] for mark in axes.y_marks]
    y_low, y_high = axes.y_range or (min(ys), max(ys))
    if axes.log_x:
        return min(xs) / 1.15, max(xs) * 1.15, y_low, y_high
    pad = 0 if axes.y_range else 0.05 * (y_high - y_low)
    return min(xs), max(xs), y_low - pad, y_high + pad


def frame(x, y, axes, x_low, x_high, y_low, y_high):
    parts = []
    for tick in nice_ticks(y_low, y_high):
        parts.append(line(LEFT, y(tick), WIDTH - RIGHT, y(tick), "grid"))
        parts.append(text(LEFT - 5, y(tick) + 4, axes.y_format.format(tick), "end"))
    for tick in log_ticks(x_low, x_high) if axes.log_x else nice_ticks(x_low, x_high):
        parts.append(line(x(tick), HEIGHT - BOTTOM, x(tick), HEIGHT - BOTTOM + 4, "axis"))
        parts.append(text(x(tick), HEIGHT - BOTTOM + 16, short(tick)))
    parts.append(line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "axis"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, axes.x_label))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(text(12, middle, axes.y_label, extra=f'transform="rotate(-90 12 {middle:.1f})"'))
    return parts


def marks(x, y, axes):
    parts = []
    for value, words in axes.x_marks:
        parts.append(line(x(value), TOP - 4, x(value), HEIGHT - BOTTOM, "mark"))
        parts.append(text(min(max(x(value), LEFT + 30), WIDTH - 60), TOP - 9, words))
    for value, words in axes.y_marks:
        parts.append(line(LEFT, y(value), WIDTH - RIGHT, y(value), "mark"))
        parts.append(text(WIDTH - RIGHT + 4, y(value) + 4, words, "start"))
    return parts


def curves(title, series, axes):
    series = [one for one in series if one.points]
    if not series:
        return ""
    x_low, x_high, y_low, y_high = limits(series, axes)
    x = Scale(x_low, x_high, LEFT, WIDTH - RIGHT, axes.log_x)
    y = Scale(y_low, y_high, HEIGHT - BOTTOM, TOP, False)
    parts = frame(x, y, axes, x_low, x_high, y_low, y_high) + marks(x, y, axes)
    for number, one in enumerate(series):
        aside = 3 * (number - (len(series) - 1) / 2)  # so that whiskers at one place do not hide each other
        path = " ".join(
            f"{x(point[0]):.1f},{y(min(max(point[1], y_low), y_high)):.1f}" for point in one.points
        )
        parts.append(f'<polyline points="{path}" class="line {one.css}{" faint" if one.faint else ""}"/>')
        for point in one.points if one.dots else []:
            if len(point) == 4:
                at = x(point[0]) + aside
                parts.append(line(at, y(point[2]), at, y(point[3]), f"whisker {one.css}"))
            parts.append(
                f'<circle cx="{x(point[0]):.1f}" cy="{y(point[1]):.1f}" r="3.5" class="dot {one.css}"/>'
            )
    return drawing(parts, title)


def bars(title, groups, unit):
    """Horizontal bars: groups (name, [(name, css, value, text)])."""
    row, gap, top = 18, 12, 4
    most = max((value for _, members in groups for _, _, value, _ in members), default=1) or 1
    left, room = 62, 200
    parts, at = [], top
    for name, members in groups:
        parts.append(text(left - 6, at + row * len(members) / 2 + 4, name, "end"))
        for _, css, value, words in members:
            length = max(1.0, room * value / most)
            parts.append(
                f'<rect x="{left}" y="{at + 2}" width="{length:.1f}" height="{row - 4}" class="bar {css}"/>'
            )
            parts.append(text(left + length + 5, at + row - 5, words, "start"))
            at += row
        at += gap
    parts.append(text(left, at + 8, unit, "start"))
    return drawing(parts, title, at + 14)
