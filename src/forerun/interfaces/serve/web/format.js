// @ts-check
// Numbers as people read them, as the reports write them.

/** @param {number} value */
export function three(value) {
  const size = Math.abs(value);
  return size < 10 ? value.toFixed(2) : size < 100 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

/** @param {number | null | undefined} time_s */
export function seconds(time_s) {
  if (time_s === null || time_s === undefined) return "";
  if (time_s === 0) return "0 s";
  const [unit, size] = time_s >= 1 ? ["s", 1] : time_s >= 1e-3 ? ["ms", 1e-3] : ["us", 1e-6];
  return `${three(time_s / Number(size))} ${unit}`;
}

/** @param {number | null | undefined} share */
export function percent(share) {
  return share === null || share === undefined ? "" : `${(100 * share).toFixed(1)}%`;
}

/** @param {number | null | undefined} rate */
export function rate(rate) {
  return rate === null || rate === undefined ? "" : Math.round(rate).toLocaleString("en");
}

/** @param {number | null | undefined} gib */
export function gib(gib) {
  return gib === null || gib === undefined ? "" : gib.toFixed(1);
}

/** @param {number | null | undefined} amount */
export function dollars(amount) {
  return amount === null || amount === undefined
    ? ""
    : amount.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
}
