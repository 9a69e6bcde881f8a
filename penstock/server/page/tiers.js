// The tiers as vessels with pipes between them. Redrawn when the set of tiers changes; levels and
// rates are updated in place, so that they move smoothly.

import { bytes, number, percent, rate } from "./format.js";
import { svg } from "./dom.js";

const TITLES = { device: "Device", host: "DRAM", disk: "Disk", remote: "Remote" };
const MAX_PIPE = 9;

export class Tiers {
  constructor(place) {
    this.place = place;
    this.shape = "";
  }

  draw(view) {
    const width = Math.max(300, Math.floor(this.place.clientWidth));
    const names = view.tiers.map((tier) => tier.name);
    const isTall = width < 640;
    const shape = `${names} ${isTall} ${width}`;
    if (shape !== this.shape) {
      this.shape = shape;
      this.build(names, width, isTall);
    }
    for (const tier of view.tiers) this.fill(tier);
    for (const pipe of this.pipes) this.run(pipe, view.flows);
    this.root.setAttribute("aria-label", view.tiers.map(inWords).join("; "));
  }

  build(names, width, isTall) {
    const layout = isTall ? tall(names, width) : wide(names, width);
    this.vessels = {};
    this.pipes = [];
    this.root = svg("svg", { viewBox: `0 0 ${width} ${layout.height}`, width, height: layout.height, role: "img" });
    for (const pipe of layout.pipes) this.root.append(this.pipe(pipe));
    for (const [name, box] of Object.entries(layout.boxes)) this.root.append(this.vessel(name, box));
    this.place.replaceChildren(this.root);
  }

  vessel(name, box) {
    const { x, y, w, h } = box;
    const clip = `clip-${name}`;
    const text = (dy, kind) => svg("text", { x: x + w / 2, y: y + dy, "text-anchor": "middle", class: kind });
    const parts = {
      box,
      water: svg("rect", { x, y: y + h, width: w, height: 0, class: `water ${name}`, "clip-path": `url(#${clip})` }),
      share: text(h / 2 + 12, "big"),
      size: text(h - 12, ""),
      below: text(h + 17, "small"),
      alarm: text(h + 33, "small bad"),
      title: svg("title"),
    };
    const title = text(-9, "name");
    title.textContent = TITLES[name];
    this.vessels[name] = parts;
    return svg("g", {},
      parts.title,
      svg("clipPath", { id: clip }, svg("rect", { x, y, width: w, height: h, rx: 12 })),
      svg("rect", { x, y, width: w, height: h, rx: 12, class: "vessel" }),
      parts.water, title, parts.share, parts.size, parts.below, parts.alarm);
  }

  fill(tier) {
    const parts = this.vessels[tier.name];
    const { y, h } = parts.box;
    const hasSize = tier.capacity_blocks > 0;
    const share = hasSize ? Math.min(1, tier.used_blocks / tier.capacity_blocks) : 0;
    parts.water.setAttribute("y", y + h * (1 - share));
    parts.water.setAttribute("height", h * share);
    parts.share.textContent = hasSize ? `${percent(share)} full` : "shared";
    parts.size.textContent = sizeOf(tier, hasSize);
    const packed = tier.codec && tier.codec !== "raw" ? `, ${tier.codec}` : "";
    parts.below.textContent = tier.name === "device" ? "" : `gives ${percent(tier.hit_share)} of lookups${packed}`;
    parts.title.textContent = inWords(tier);
    const alarms = tier.resting.map((direction) => `fails to ${direction}: resting`);
    if (tier.recovered_share !== null && tier.recovered_share < 1) alarms.push(`index ${percent(tier.recovered_share)} read`);
    parts.alarm.textContent = alarms.join("; ");
  }

  pipe({ upper, lower, points, labels }) {
    const line = points.map(([x, y], n) => `${n ? "L" : "M"}${x} ${y}`).join(" ");
    const back = [...points].reverse().map(([x, y], n) => `${n ? "L" : "M"}${x} ${y}`).join(" ");
    const isUpright = points[0][0] === points[1][0];
    const shift = (d) => (isUpright ? `translate(${d} 0)` : `translate(0 ${d})`);
    const way = (name, path, d, label) => {
      const flow = svg("path", { d: path, class: `flow ${name}`, "stroke-width": 0 });
      const text = svg("text", { x: label[0], y: label[1], "text-anchor": label[2], class: "small" });
      const end = name === "load" ? points[0] : points[points.length - 1];
      const arrow = svg("path", { d: arrowAt(end, points, name), class: `arrow ${name}`, visibility: "hidden" });
      this.pipes.push({ name, source: name === "load" ? lower : upper, target: name === "load" ? upper : lower, flow, text, arrow });
      return svg("g", { transform: shift(d) }, svg("path", { d: line, class: "pipe", "stroke-width": 2 }), flow, arrow,
        svg("g", { transform: shift(-d) }, text));
    };
    return svg("g", {}, way("load", back, -9, labels.load), way("save", line, 9, labels.save));
  }

  run(pipe, flows) {
    const flow = flows.find((each) => each.source === pipe.source && each.target === pipe.target);
    const speed = flow ? flow.bytes_per_second : 0;
    const thick = speed > 0 ? Math.min(MAX_PIPE, 2 + Math.log10(1 + speed / 1e6) * 1.8) : 0;
    pipe.flow.setAttribute("stroke-width", thick);
    pipe.arrow.setAttribute("visibility", speed > 0 ? "visible" : "hidden");
    pipe.text.textContent = `${pipe.name} ${rate(speed)}`;
  }
}

function sizeOf(tier, hasSize) {
  if (!hasSize) return tier.used_blocks ? `${number(tier.used_blocks)} blocks` : "";
  if (tier.capacity_bytes === null) return `${number(tier.used_blocks)} of ${number(tier.capacity_blocks)}`;
  return `${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}`;
}

function inWords(tier) {
  const share = tier.capacity_blocks ? percent(tier.used_blocks / tier.capacity_blocks) : "unknown";
  const rest = tier.resting.length ? `, fails to ${tier.resting.join(" and ")}` : "";
  const room = tier.capacity_tokens ? `, ${number(tier.used_tokens)} of ${number(tier.capacity_tokens)} tokens in ${number(tier.used_blocks)} of ${number(tier.capacity_blocks)} blocks` : "";
  const codec = tier.codec ? `, codec ${tier.codec}` : "";
  return `${TITLES[tier.name]} ${share} full${room}${codec}${rest}`;
}

// Side by side: the device, DRAM, and the tiers below it, stacked.
function wide(names, width) {
  const w = Math.min(190, Math.floor(width * 0.2));
  const below = names.filter((name) => name === "disk" || name === "remote");
  const columns = [["device"], ["host"], below].filter((column) => column.some((name) => names.includes(name)));
  const gap = columns.length > 1 ? (width - w * columns.length) / (columns.length - 1) : 0;
  const boxes = {};
  columns.forEach((column, n) => column.forEach((name, row) => {
    const h = column.length > 1 ? 92 : 186;
    boxes[name] = { x: n * (w + gap), y: 30 + row * 156, w, h: column.length > 1 ? h : below.length > 1 ? 248 : h };
  }));
  const pipes = [];
  const join = (upper, lower) => {
    if (!boxes[upper] || !boxes[lower]) return;
    const [a, b] = [boxes[upper], boxes[lower]];
    const y = b.y + b.h / 2;
    const middle = (a.x + a.w + b.x) / 2;
    pipes.push({ upper, lower, points: [[a.x + a.w + 5, y], [b.x - 5, y]],
      labels: { load: [middle, y - 18, "middle"], save: [middle, y + 27, "middle"] } });
  };
  join("device", "host");
  for (const name of below) join("host", name);
  return { boxes, pipes, height: below.length > 1 ? 320 : 256 };
}

// Stacked, for a narrow screen; disk and remote share the last line.
function tall(names, width) {
  const h = 84;
  const rows = [["device"], ["host"], names.filter((name) => name === "disk" || name === "remote")]
    .map((row) => row.filter((name) => names.includes(name))).filter((row) => row.length);
  const boxes = {};
  rows.forEach((row, n) => {
    const w = row.length > 1 ? (width - 24) / 2 : Math.min(230, width - 20);
    row.forEach((name, column) => {
      const x = row.length > 1 ? column * (w + 24) : (width - w) / 2;
      boxes[name] = { x, y: 28 + n * 196, w, h };
    });
  });
  const pipes = [];
  const join = (upper, lower) => {
    if (!boxes[upper] || !boxes[lower]) return;
    const [a, b] = [boxes[upper], boxes[lower]];
    const x = Math.min(Math.max(b.x + b.w / 2, a.x + 24), a.x + a.w - 24);
    const y = (a.y + a.h + b.y) / 2 + 4;
    pipes.push({ upper, lower, points: [[x, a.y + a.h + 38], [x, b.y - 36]],
      labels: { load: [x - 20, y, "end"], save: [x + 20, y, "start"] } });
  };
  join("device", "host");
  join("host", "disk");
  join("host", "remote");
  return { boxes, pipes, height: 28 + (rows.length - 1) * 196 + h + 42 };
}

function arrowAt([x, y], points, name) {
  const isUpright = points[0][0] === points[1][0];
  const way = name === "load" ? -1 : 1;
  return isUpright
    ? `M${x} ${y + 6 * way} l-6 ${-10 * way} h12 z`
    : `M${x + 6 * way} ${y} l${-10 * way} -6 v12 z`;
}
