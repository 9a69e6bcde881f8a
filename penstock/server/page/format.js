// Formats numbers. Nothing here touches the page.

export const NONE = "–";

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${number(value, unit === 0 ? 0 : 1)} ${units[unit]}`;
}

export function rate(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 1e8) return `${number(value / 1e9, 2)} GB/s`;
  if (value >= 1e5) return `${number(value / 1e6, 1)} MB/s`;
  return value > 0 ? `${number(value / 1e3, 1)} kB/s` : "0";
}

export function number(value, digits = 0) {
  if (value === null || value === undefined) return NONE;
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: 0 });
}

export function short(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 1e9) return `${number(value / 1e9, 1)} G`;
  if (value >= 1e6) return `${number(value / 1e6, 1)} M`;
  if (value >= 1e4) return `${number(value / 1e3, 1)} k`;
  return number(value, value < 10 ? 1 : 0);
}

export function percent(share, digits = 0) {
  return share === null || share === undefined ? NONE : `${number(share * 100, digits)}%`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 0.0095) return `${number(seconds * 1e3, 1)} ms`;
  if (seconds < 1) return `${number(seconds * 1e3)} ms`;
  if (seconds < 100) return `${number(seconds, seconds < 10 ? 2 : 1)} s`;
  if (seconds < 6000) return `${number(seconds / 60)} min`;
  return `${number(seconds / 3600, 1)} h`;
}

export function plural(count, one, many = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : many}`;
}
