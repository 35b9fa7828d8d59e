/* Formatting of numbers, and creation of elements. */

const KINDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };

/** Format a number with so many significant digits, never as 1e-7. */
function digits(value, count) {
  if (value === 0) return "0";
  const places = Math.max(0, count - 1 - Math.floor(Math.log10(Math.abs(value))));
  return value.toLocaleString("en-US", {
    minimumFractionDigits: Math.min(places, 12),
    maximumFractionDigits: Math.min(places, 12),
  });
}

const UNITS = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];

/** Return the unit in which a time is short. */
const unitOf = (seconds) => UNITS.find(([, size]) => seconds >= size) ?? UNITS[3];

/** Format a time in its own unit. */
function time(seconds) {
  if (!seconds) return "0";
  const [name, size] = unitOf(seconds);
  return `${digits(seconds / size, 4)} ${name}`;
}

/** Format a time in the unit of a schedule, with a fixed number of digits. */
function clock(seconds, total) {
  const [name, size] = unitOf(total);
  const places = Math.max(0, 5 - Math.ceil(Math.log10(total / size)));
  return `${(seconds / size).toFixed(places)} ${name}`;
}

/** Format bytes of a rank in the planner's unit. */
function memory(bytes, unit) {
  return `${inUnit(bytes, unit)} ${unit.name}`;
}

/** Format bytes without the unit's name; ties round to even, as in the planner's output. */
function inUnit(bytes, unit) {
  const places = { minimumFractionDigits: 1, maximumFractionDigits: 1, roundingMode: "halfEven" };
  return (bytes / unit.size).toLocaleString("en-US", places);
}

/** Format bytes in a unit of their own. */
function bytes(count) {
  const found = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]].find(([, size]) => count >= size);
  return found ? `${digits(count / found[1], 3)} ${found[0]}` : `${count} bytes`;
}

const share = (part) => `${(100 * part).toFixed(1)}%`;
const count = (number, noun) => `${number.toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;
const find = (id) => document.getElementById(id);

/** Create an HTML element with attributes and children; a string is text. */
function h(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** Create an SVG element. */
function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}
