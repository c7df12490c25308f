// Numbers as text, with units.

function significant(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return value.toLocaleString("en", size >= 100 ? { maximumFractionDigits: 0 } : {
    minimumFractionDigits: size >= 10 ? 1 : 2, maximumFractionDigits: size >= 10 ? 1 : 2,
  });
}

function scaled(value, base, units) {
  let place = 0;
  let size = Math.abs(value);
  while (size >= base * 0.9995 && place < units.length - 1) {
    size /= base;
    place += 1;
  }
  const shown = value / base ** place;
  return (place === 0 && Number.isInteger(shown) ? String(shown) : significant(shown)) + " " + units[place];
}

const bytesText = (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
const flopsText = (value) => scaled(value, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"]);
const rateText = (flops, seconds) => (seconds > 0 ? flopsText(flops / seconds) + "/s" : "–");
const countText = (value) => value.toLocaleString("en");

function secondsText(value) {
  if (value === 0) return "0 s";
  const size = Math.abs(value);
  if (size >= 0.9995) return significant(value) + " s";
  if (size >= 0.9995e-3) return significant(value * 1e3) + " ms";
  if (size >= 0.9995e-6) return significant(value * 1e6) + " µs";
  return significant(value * 1e9) + " ns";
}

function percentText(part) {
  if (part > 0 && part < 0.005) return "<1%";
  return Math.round(part * 100) + "%";
}

const capital = (text) => text.slice(0, 1).toUpperCase() + text.slice(1);
const plural = (count, noun) => countText(count) + " " + noun + (count === 1 ? "" : "s");

const rankCount = (runs) => runs.reduce((sum, [first, last]) => sum + last - first + 1, 0);

// Ranks as runs of [first, last]: "rank 3", "ranks 0–3, 6"
function ranksText(runs, most = 4) {
  const shown = runs.slice(0, most).map(([first, last]) => (first === last ? String(first) : `${first}–${last}`));
  const one = runs.length === 1 && runs[0][0] === runs[0][1];
  return (one ? "rank " : "ranks ") + shown.join(", ") + (runs.length > most ? " …" : "");
}

// Runs of ranks in order, neighbours as one run.
function joinedRuns(runs) {
  const found = [];
  for (const [first, last] of [...runs].sort((a, b) => a[0] - b[0])) {
    if (found.length && first <= found.at(-1)[1] + 1) found.at(-1)[1] = Math.max(last, found.at(-1)[1]);
    else found.push([first, last]);
  }
  return found;
}

// Round values from 0 up to the end, about as many as asked for: 1, 2 or 5 times a power of ten, in the unit of the end.
function roundSteps(begin, end, about, unit = 1) {
  const raw = (end - begin) / unit / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((times) => times * power >= raw) * power * unit;
  const found = [];
  for (let k = Math.ceil(begin / step); k * step <= end * (1 + 1e-9); k += 1) found.push(k * step);
  return found;
}

function byteUnit(value) {
  let unit = 1;
  while (value / unit >= 1024) unit *= 1024;
  return unit;
}
