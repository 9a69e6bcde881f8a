// Charts of the last minutes.

import { make, svg } from "./dom.js";
import { duration, NONE, number, percent, rate, short } from "./format.js";

const WIDTH = 220;
const HEIGHT = 84;
const SPAN_SECONDS = 300;

const CHARTS = [
  { title: "Reused", show: percent, top: 1, lines: [
    ["of prompt tokens", (p) => p.reused_share],
    ["of lookups below the device", (p) => p.hit_rate]] },
  { title: "First token, median", show: duration, lines: [
    ["loaded", (p) => p.first_token_seconds.loaded],
    ["computed", (p) => p.first_token_seconds.computed],
    ["on the device", (p) => p.first_token_seconds.resident],
    ["all", (p) => p.first_token_seconds.all]] },
  { title: "KV transfers", show: rate, lines: [["loads", (p) => p.load], ["saves", (p) => p.save]] },
  { title: "Tokens computed", show: (v) => `${short(v)}/s`, lines: [["tokens", (p) => p.tokens_per_second]] },
  { title: "Cold reads per token", show: (v) => number(v, 1), lines: [["blocks", (p) => p.cold_reads_per_token]] },
];

export class Charts {
  constructor(place) {
    this.points = [];
    this.drawn = CHARTS.map((chart) => build(chart));
    place.replaceChildren(...this.drawn.map(({ element }) => element));
  }

  start(points) { this.points = points; }

  add(point) {
    if (point.at !== this.points.at(-1)?.at) this.points.push(point);
    while (this.points.length > 1 && point.at - this.points[0].at > SPAN_SECONDS) this.points.shift();
    CHARTS.forEach((chart, n) => draw(chart, this.drawn[n], this.points, point.at));
  }
}

function build(chart) {
  const paths = chart.lines.map((_, n) => svg("path", { class: `line-${n}` }));
  const most = svg("text", { x: WIDTH - 2, y: 12, "text-anchor": "end", class: "small" });
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" },
    svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT - 1, y2: HEIGHT - 1, class: "grid" }),
    svg("line", { x1: 0, x2: WIDTH, y1: 16, y2: 16, class: "grid", "stroke-dasharray": "2 4" }), ...paths, most);
  const now = chart.lines.map(() => make("span"));
  const key = chart.lines.map((_, n) => make("span", {},
    svg("svg", { width: 22, height: 8 }, svg("path", { d: "M0 4H22", class: `line-${n}`, "stroke-width": 2 })), now[n]));
  const element = make("div", { class: "chart" }, make("h3", {}, chart.title), make("p", { class: "legend" }, key), picture);
  return { element, paths, most, now, picture };
}

function draw(chart, drawn, points, at) {
  const values = chart.lines.map(([, read]) => points.map((point) => read(point) ?? null));
  const highest = Math.max(0, ...values.flat().filter((value) => value !== null));
  const top = chart.top ?? (highest || 1);
  drawn.most.textContent = chart.top || highest ? chart.show(top) : "";
  const words = [];
  chart.lines.forEach(([name], n) => {
    let path = "";
    let isDown = false;
    values[n].forEach((value, index) => {
      if (value === null) { isDown = false; return; }
      const x = WIDTH * (1 - (at - points[index].at) / SPAN_SECONDS);
      const y = HEIGHT - 2 - (HEIGHT - 18) * Math.min(1, value / top);
      path += `${isDown ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      isDown = true;
    });
    drawn.paths[n].setAttribute("d", path);
    const last = values[n][values[n].length - 1] ?? null;
    const shown = last === null ? NONE : chart.show(last);
    const isKnown = chart.lines.length === 1 || values[n].some((value) => value !== null);
    drawn.now[n].parentElement.hidden = !isKnown;
    drawn.now[n].textContent = `${name} ${shown}`;
    if (isKnown) words.push(`${name} ${shown}`);
  });
  drawn.picture.setAttribute("aria-label", `${chart.title}: ${words.join(", ")}`);
}
